"""Tiny runs on the embedded digits, small enough to be run for every method."""

import pytest
import torch

TINY = {"train_images": 300, "test_images": 100, "threads": 1}


@pytest.fixture(autouse=True)
def _keep_threads() -> object:
    """A run sets torch's threads; other tests have their own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> dict[str, int]:
    return dict(TINY)
