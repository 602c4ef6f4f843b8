"""What each of several processes takes of a batch."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rlsprune.app.run.share import Share
from rlsprune.distributed.ranks import DisagreementError, Ranks


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("images", [2, 3, 5, 6, 7, 16, 67])
def test_no_rank_gets_a_batch_of_one_and_the_weights_make_the_mean(size: int, images: int) -> None:
    inputs = torch.arange(2.0 * images).view(images, 2)
    shares = [Share(cast(Ranks, SimpleNamespace(rank=rank, size=size))) for rank in range(size)]
    parts = [share.of_batch(inputs, torch.zeros(images)) for share in shares]
    assert all(len(part) == len(labels) >= 2 for part, labels, _ in parts)
    means = [weight * part.mean(0) for part, _, weight in parts]
    torch.testing.assert_close(torch.stack(means).mean(0), inputs.mean(0))


class Memory:
    """Stands for the other ranks: what was said under a name the first time is what they have."""

    def __init__(self) -> None:
        self.said: dict[str, object] = {}

    def agree(self, what: str, value: object) -> None:
        if self.said.setdefault(what, value) != value:
            raise DisagreementError(what)


@pytest.mark.parametrize("spoilt", ["nothing", "the network", "the average of the network", "velocity"])
def test_ranks_that_differ_in_anything_they_keep_stop(spoilt: str) -> None:
    torch.manual_seed(0)
    model, average = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    share = Share(cast(Ranks, Memory()))
    share.verify(model, average, optimizer)
    changed = {
        "the network": model.weight,
        "the average of the network": average.bias,
        "velocity": optimizer.state[model.weight]["momentum_buffer"],
    }.get(spoilt)
    if changed is None:
        share.verify(model, average, optimizer)
        return
    with torch.no_grad():
        changed[0].add_(1)
    with pytest.raises(DisagreementError, match=spoilt if "network" in spoilt else "the network"):
        share.verify(model, average, optimizer)
