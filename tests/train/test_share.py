"""What each of several processes takes of a batch."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rlsprune.distributed.ranks import Ranks
from rlsprune.train.share import Share


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("images", [2, 3, 5, 6, 7, 16, 67])
def test_no_rank_gets_a_batch_of_one_and_the_weights_make_the_mean(size: int, images: int) -> None:
    inputs = torch.arange(2.0 * images).view(images, 2)
    shares = [Share(cast(Ranks, SimpleNamespace(rank=rank, size=size))) for rank in range(size)]
    parts = [share.of_batch(inputs, torch.zeros(images)) for share in shares]
    assert all(len(part) == len(labels) >= 2 for part, labels, _ in parts)
    means = [weight * part.mean(0) for part, _, weight in parts]
    torch.testing.assert_close(torch.stack(means).mean(0), inputs.mean(0))
