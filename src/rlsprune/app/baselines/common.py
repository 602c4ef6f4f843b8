"""The common parts of the rivals: the interface to a run, the time of pruning, and the removal of whole units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.app.run.counting import count_retained
from rlsprune.app.run.method import Retained
from rlsprune.app.run.unpruned import NoPruning
from rlsprune.graph import find_groups, plan_cuts
from rlsprune.graph.cuts import Cuts
from rlsprune.model.calls import bare_copy
from rlsprune.model.counts import count
from rlsprune.prune.event import LayerChange, PruneEvent
from rlsprune.prune.refit import cut_inverses
from rlsprune.prune.select import cut_size
from rlsprune.prune.surgery import apply_cuts

_SEARCH_STEPS = 24  # bisections of the ratio towards a target


class Rival(NoPruning):
    """A base class that does not prune yet; ``rlsprune.app.run.method.Method`` describes its interface.

    Args:
        model: The network, which the method changes in place.
        example_inputs: A batch of its input; only its shape matters.
        ratio: The share to prune, between 0 and 1.
    """

    def __init__(self, model: nn.Module, example_inputs: Tensor, ratio: float) -> None:
        if not 0 < ratio < 1:
            raise ValueError(f"ratio={ratio} is not valid: it is the share to prune, so give a number between 0 and 1")
        super().__init__(model, example_inputs)
        self.ratio = ratio
        self.copies: list[nn.Module] = []
        """Moving averages of the network, which are pruned with it."""

    def follow(self, copy: nn.Module) -> None:
        """Prunes the copy with the network from now on."""
        self.copies.append(copy)

    def retained(self) -> Mapping[str, Retained]:
        """Counts the nodes and weights that are left, per layer; weights that are zero do not count."""
        return count_retained(self.model, self.example_inputs, zeros=False)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that ``state_dict`` returned.

        Raises:
            ValueError: if the state is not one of this method's.
        """
        missing, unexpected = set(self.state_dict()) - set(state), set(state) - set(self.state_dict())
        if missing or unexpected:
            raise ValueError(
                f"the state is not one of {type(self).__name__}: missing {sorted(missing)}, unexpected "
                f"{sorted(unexpected)}; resume with the method that the run was started with"
            )


class OneShot(Rival, ABC):
    """Prunes once, at the end of one epoch.

    Args:
        model: The network, which the method changes in place.
        example_inputs: A batch of its input; only its shape matters.
        ratio: The share to prune, between 0 and 1.
        prune_epoch: The epoch, from 1, after which to prune; None for the unpruned twin of the method.
    """

    def __init__(self, model: nn.Module, example_inputs: Tensor, ratio: float, prune_epoch: int | None) -> None:
        super().__init__(model, example_inputs, ratio)
        if prune_epoch is not None and prune_epoch < 1:
            raise ValueError(f"prune_epoch={prune_epoch} is not valid: epochs count from 1; None: never prune")
        self.prune_epoch = prune_epoch
        self.prune_share: float | None = None
        """Share of the run's processor time after which to prune instead; None for `prune_epoch`."""
        self.pruned = False
        self._spent = 0.0

    def spent(self, share: float) -> None:
        """Notes the share of its time that the run has used."""
        self._spent = share

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent | None:
        """Prunes if the epoch or the share of time for it is reached."""
        if self.pruned or self.prune_epoch is None:
            return None
        if epoch < self.prune_epoch if self.prune_share is None else self._spent < self.prune_share:
            return None
        event = self.prune(epoch, loss)
        self.pruned = True
        return event

    @abstractmethod
    def prune(self, epoch: int, loss: float) -> PruneEvent:
        """Prunes now."""

    def state_dict(self) -> dict[str, Any]:
        """Returns whether the network has been pruned."""
        return {"pruned": self.pruned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that ``state_dict`` returned."""
        super().load_state_dict(state)
        self.pruned = bool(state["pruned"])


class Structured(OneShot):
    """Removes whole channels and nodes of the hidden layers, physically; network inputs and outputs stay.

    Args:
        model: The network, which the method changes in place.
        optimizer: The optimizer whose state is cut with the network.
        example_inputs: A batch with which the network is traced.
        ratio: The share of the units to prune, between 0 and 1.
        prune_epoch: The epoch, from 1, after which to prune; None for the unpruned twin of the method.
        target: The share of the present network to keep, as in `rlsprune.Pruner`: ``{"params": 0.1}`` or
            ``{"flops": 0.1}``. The least ratio that reaches it is then found when the network is pruned.
        inverse: The update of P in an optimizer that keeps one, as in `rlsprune.Pruner`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Tensor,
        *,
        ratio: float,
        prune_epoch: int | None,
        target: Mapping[str, float] | None = None,
        inverse: str = "schur",
    ) -> None:
        super().__init__(model, example_inputs, ratio, prune_epoch)
        self.optimizer, self.target, self.inverse = optimizer, target, inverse
        # The groups are found here, so that a network that cannot be pruned fails before it is trained.
        graph = find_groups(model, example_inputs)
        self.groups = [group for group in graph if not group.is_input]
        if not self.groups:
            why = "; ".join(f"{name or 'model'}: {reason}" for name, reason in graph.skipped.items())
            raise ValueError(f"the network has no hidden layer that can be pruned ({why or 'it has no layers'})")

    @abstractmethod
    def scores(self) -> list[Tensor]:
        """Returns a vector over the units of each of ``groups``; the lowest are pruned first."""

    def choose(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Chooses the units of each group to prune: the same share of every layer, so that ⌊(1−ratio)·n⌋ stay."""
        return [torch.argsort(score, stable=True)[: len(score) - stays(len(score), self.ratio)] for score in scores]

    def retained(self) -> Mapping[str, Retained]:
        """Counts the nodes and weights that are left, per layer."""
        return count_retained(self.model, self.example_inputs)

    def prune(self, epoch: int, loss: float) -> PruneEvent:
        """Prunes now.

        Raises:
            FloatingPointError: if a score is not finite, because the training diverged.
        """
        scores = [score.detach().cpu() for score in self.scores()]
        for group, score in zip(self.groups, scores, strict=True):
            weights = [p for member in group.producers for p in member.module.parameters(recurse=False)]
            if not all(bool(tensor.isfinite().all()) for tensor in (score, *weights)):
                raise FloatingPointError(f"the weights of {group.name!r} are not finite: train with a lower step size")
        params, flops = count(self.model, self.example_inputs)
        if self.target is not None:
            self.ratio = self._least_ratio(scores, {"params": params, "flops": flops})
        units = [chosen.sort().values for chosen in self.choose(scores)]
        cuts = self._plan(units)
        cut_inverses(self.model, self.optimizer, cuts, self.inverse, {})
        apply_cuts(self.model, cuts, self.optimizer, self.copies)
        params_after, flops_after = count(self.model, self.example_inputs)
        chosen = [(group.name, group.size, gone.tolist()) for group, gone in zip(self.groups, units, strict=True)]
        return PruneEvent(
            epoch=epoch,
            loss=loss,
            params_before=params,
            params_after=params_after,
            flops_before=flops,
            flops_after=flops_after,
            layers=tuple(LayerChange(name, size, size - len(gone)) for name, size, gone in chosen),
            removed={name: gone for name, _, gone in chosen if gone},
        )

    def _plan(self, units: Sequence[Tensor]) -> Cuts:
        return plan_cuts(list(zip(self.groups, units, strict=True)))

    def _least_ratio(self, scores: Sequence[Tensor], full: Mapping[str, int]) -> float:
        """Finds the least ratio that reaches the target, by bisection.

        Raises:
            ValueError: Even one unit per layer exceeds the target.
        """
        assert self.target is not None
        too_little, enough = 0.0, 1.0 - 2.0**-_SEARCH_STEPS
        if not self._reaches(enough, scores, full):
            raise ValueError(
                f"target={dict(self.target)} cannot be reached: even one unit per layer is more than that. Raise it"
            )
        for _ in range(_SEARCH_STEPS):
            ratio = (too_little + enough) / 2
            reached = self._reaches(ratio, scores, full)
            too_little, enough = (too_little, ratio) if reached else (ratio, enough)
        return enough

    def _reaches(self, ratio: float, scores: Sequence[Tensor], full: Mapping[str, int]) -> bool:
        """Returns whether a copy of the network that is cut at this ratio is within the target."""
        assert self.target is not None
        self.ratio = ratio
        trial = bare_copy(self.model)
        apply_cuts(trial, self._plan([chosen.sort().values for chosen in self.choose(scores)]))
        left = dict(zip(("params", "flops"), count(trial, self.example_inputs), strict=True))
        return all(left[what] <= share * full[what] for what, share in self.target.items())


def stays(number: int, ratio: float) -> int:
    """Computes ⌊(1−ratio)·number⌋, but at least one."""
    return max(1, cut_size(1 - ratio, number))


def lowest_overall(scores: Sequence[Tensor], number: int) -> list[Tensor]:
    """Chooses the lowest ``number`` units of all vectors together; at least one of each vector stays."""
    sizes = [len(score) for score in scores]
    goes = torch.zeros(sum(sizes), dtype=torch.bool)
    goes[torch.argsort(torch.cat(list(scores)), stable=True)[:number]] = True
    chosen = torch.split(goes, sizes)
    for score, own in zip(scores, chosen, strict=True):
        if bool(own.all()):
            own[score.argmax()] = False
    return [own.nonzero().flatten() for own in chosen]
