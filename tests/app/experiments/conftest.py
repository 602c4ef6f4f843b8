"""Tiny runs on the embedded digits, small enough to be run for every method."""

import pytest

TINY = {"train_images": 300, "test_images": 100, "threads": 1}


@pytest.fixture
def tiny() -> dict[str, int]:
    return dict(TINY)
