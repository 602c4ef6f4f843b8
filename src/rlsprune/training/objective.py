"""Losses and scores that compare a smaller network with the targets, or with the given network's own outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from rlsprune.distributed.ranks import Ranks
from rlsprune.model.arguments import shown
from rlsprune.model.calls import as_call, batch_size, explained_run, output_tensors
from rlsprune.model.modes import evaluating
from rlsprune.training.batches import Pair
from rlsprune.training.loop import Loss

__all__ = ["Objective", "taught"]

# Without labels, outputs are taken for class scores if the likeliest class has at least this probability on average.
_CONFIDENT = 0.2
_TEACHER = 0.8  # weight of the given network's outputs in the loss, beside labels
_TEMPERATURE = 4.0  # a trained network is sure of its training images: at 1 its scores add little to the labels


def taught(output: Tensor, labels: Tensor, given: Tensor) -> Tensor:
    """Returns the loss with class labels: their cross-entropy plus the divergence from the given network's scores.

    Args:
        output: Class scores of the smaller network.
        labels: Class labels; −100 marks places that count in neither of the two.
        given: Class scores of the given network.
    """
    counted = labels >= 0
    # Zeros in both have no divergence; selecting the others would make the host wait for an accelerator.
    ours, theirs = (_classes_last(scores, labels) * counted.unsqueeze(-1) for scores in (output, given))
    apart = _divergence([ours], [theirs], classes=True) * (counted.numel() / counted.sum())
    return (1 - _TEACHER) * _entropy(output, labels) + _TEACHER * apart


def _divergence(outputs: list[Tensor], given: list[Tensor], classes: bool) -> Tensor:
    """Returns the distance of outputs from those of the given network.

    For class scores it is the Kullback-Leibler divergence of their probabilities at a temperature, averaged over the
    inputs, times the temperature, so that its gradient is no steeper than that of a cross-entropy. For other outputs it
    is the squared difference over the variance of the given network's outputs, summed over the tensors.

    Args:
        outputs: Outputs of the smaller network.
        given: Outputs of the given network.
        classes: Whether they are class scores.
    """
    if classes:
        scores = (value.float().flatten(0, -2) / _TEMPERATURE for value in (outputs[0], given[0]))
        ours, theirs = (value.log_softmax(-1) for value in scores)
        return _TEMPERATURE * F.kl_div(ours, theirs, log_target=True, reduction="batchmean")
    total = torch.zeros((), device=given[0].device)
    for one, other in zip(outputs, given, strict=True):
        variance = other.float().var(correction=0).clamp_min(torch.finfo(torch.float32).tiny)
        total = total + F.mse_loss(one.float(), other.float()) / variance
    return total


class Objective:
    """Losses and scores of networks that replace a given one.

    Args:
        given: The network as it was given, in evaluation mode.
        example: A batch that shows the kinds of targets and outputs.
        loss: The user's loss, from outputs and targets; None for the rules of `rlsprune.shrink`.
        named: Whether targets are the ``labels`` of a mapping. A network that takes them returns its own loss.
        ranks: The processes that score batches of their own each, or None.
    """

    def __init__(
        self,
        given: nn.Module,
        example: Pair,
        loss: Loss | None = None,
        named: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._given, self._loss, self._ranks = given, loss, ranks
        self._known_batches: list[Pair] | None = None
        self._known_classes: list[Tensor] = []
        inputs, targets = example
        with evaluating(given):
            outputs = _predictions(_call(given, inputs))
        if not outputs:
            raise ValueError("the network returns no floating-point tensor: there is nothing to compare")
        if any(output.layout is not torch.strided or output.is_nested for output in outputs):
            raise ValueError("the network returns a sparse or nested tensor, which cannot be compared: make it dense")
        if not all(bool(output.isfinite().all()) for output in outputs):
            raise ValueError("the network's outputs on the first batch are not finite: check its weights and the batch")
        self.labelled = isinstance(targets, Tensor)
        whole = self.labelled and not targets.is_floating_point() and targets.dtype != torch.bool
        self.class_labels = whole and len(outputs) == 1 and _class_dim(outputs[0], targets) is not None
        self._own_loss = False
        if named and self.class_labels:
            own = self._loss_beside_entropy(outputs[0], inputs, targets)
            self._own_loss = own and loss is None
            self.class_labels = not own
        confident = (
            len(outputs) == 1
            and outputs[0].dim() > 1
            and outputs[0].shape[-1] > 1
            and float(outputs[0].float().softmax(-1).amax(-1).mean()) >= _CONFIDENT
        )
        self.classes = self.class_labels or (not self.labelled and confident)
        """Whether the outputs are class scores."""
        if ranks is not None:  # ranks see different inputs, and all follow rank 0
            kinds = (self.labelled, self.class_labels, self._own_loss, self.classes)
            self.labelled, self.class_labels, self._own_loss, self.classes = ranks.first(kinds)
        if loss is not None and not self.labelled:
            raise ValueError("loss needs targets, and the batches have none: give (inputs, targets), or leave loss out")

    def loss(self, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        """Returns the loss that recovery minimises, on one batch."""
        if self._own_loss:
            own = _own_loss(model, inputs, targets)
            assert own is not None, "the given network told one"
            return own
        output = _call(model, inputs)
        if self._loss is not None:
            return _checked_loss(self._loss(output, targets))
        outputs = _predictions(output)
        if self.labelled and not self.class_labels:
            return _regression(outputs, targets)
        with torch.no_grad():
            given = _predictions(_call(self._given, inputs))
        if self.class_labels:
            return taught(outputs[0], targets, given[0])
        return _divergence(outputs, given, self.classes)

    def _loss_beside_entropy(self, outputs: Tensor, inputs: Any, targets: Tensor) -> bool:
        """Whether the network's loss is not the cross-entropy of outputs and labels, place by place.

        Causal language models compare each output with the label of the next place.

        Raises:
            ValueError: Labels are the inputs themselves, and neither the network nor the user gives the loss.
        """
        if "labels" in inspect.signature(self._given.forward).parameters:
            with evaluating(self._given):
                own = _own_loss(self._given, inputs, targets)
            if own is not None:
                return not torch.isclose(own.float(), _entropy(outputs.float(), targets), rtol=1e-4)
        counted, ids = targets >= 0, inputs.get("input_ids")
        copied = isinstance(ids, Tensor) and ids.shape == targets.shape and torch.equal(ids[counted], targets[counted])
        if copied and self._loss is None:
            raise ValueError(
                "labels are the input_ids, as for a model that shifts them itself, but the network returns no loss for "
                "them: leave labels out, or give loss="
            )
        return copied

    @property
    def own_score(self) -> float | None:
        """Returns the score of the given network if it is known without running it, else None."""
        if self.labelled:
            return None
        return 100.0 if self.classes else 0.0

    def score(self, model: nn.Module, batches: Iterable[Pair]) -> float:
        """Returns accuracy, agreement with the given network, or minus the loss, whichever fits; higher is better."""
        with evaluating(model, self._given):
            if self.class_labels:
                values = [self._right(model, *pair) for pair in batches]
            elif self.classes and self._loss is None:
                values = self._agreeing(model, batches)
            else:
                values = [self._minus_loss(model, *pair) for pair in batches]
        sums = (sum(value for value, _ in values), sum(count for _, count in values))
        everyone = [sums] if self._ranks is None else self._ranks.gather(sums)
        return sum(value for value, _ in everyone) / max(sum(count for _, count in everyone), 1)

    @property
    def unit(self) -> str:
        """Returns the name of the quantity that `score` measures."""
        if self.class_labels:
            return "accuracy"
        return "agreement" if self.classes and self._loss is None else "minus loss"

    def _right(self, model: nn.Module, inputs: Any, targets: Tensor) -> tuple[float, float]:
        output = _predictions(_call(model, inputs))[0]
        dim = _class_dim(output, targets)
        assert dim is not None
        counted = targets >= 0  # −100 marks places that do not count
        right = (output.argmax(dim) == targets) & counted
        return 100.0 * int(right.sum()), int(counted.sum())

    def _agreeing(self, model: nn.Module, batches: Iterable[Pair]) -> list[tuple[float, float]]:
        # A list holds the same batches in the same order every time, so the given network's classes are kept.
        if batches is not self._known_batches:
            self._known_batches, self._known_classes = batches if isinstance(batches, list) else None, []
        known = list(self._known_classes)
        values: list[tuple[float, float]] = []
        for number, (inputs, _) in enumerate(batches):
            if number == len(known):
                known.append(_classes(self._given, inputs))
            ours = _classes(model, inputs)
            values.append((100.0 * int((ours == known[number]).sum()), ours.numel()))
        if self._known_batches is not None:
            self._known_classes = known
        return values

    def _minus_loss(self, model: nn.Module, inputs: Any, targets: Any) -> tuple[float, float]:
        count = batch_size(inputs)
        return -float(self.loss(model, inputs, targets)) * count, count


def _checked_loss(loss: object) -> Tensor:
    """Returns the result of the user's loss if it is usable.

    Raises:
        TypeError: The result is not a tensor of one number, or it has no gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"loss gave {shown(loss)}: it must return a tensor of one number")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TypeError("loss gave a tensor without a gradient: compute it from the outputs, without detach()")
    return loss


def _call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_call(inputs)
    with explained_run(args, kwargs, "a batch"):
        return model(*args, **kwargs)


def _classes(model: nn.Module, inputs: Any) -> Tensor:
    return _predictions(_call(model, inputs))[0].argmax(-1)


def _predictions(output: Any) -> list[Tensor]:
    """Returns the floating-point tensors of an output; if it has ``logits``, only these."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    found = [logits] if isinstance(logits, Tensor) else output_tensors(output)
    return [tensor for tensor in found if tensor.is_floating_point()]


def _class_dim(outputs: Tensor, targets: Tensor) -> int | None:
    """Returns the dimension of the classes if targets can be class labels, else None."""
    if outputs.dim() > 1 and outputs.shape[-1] > 1 and targets.shape == outputs.shape[:-1]:
        return -1
    if outputs.dim() > 2 and outputs.shape[1] > 1 and targets.shape == (*outputs.shape[:1], *outputs.shape[2:]):
        return 1
    return None


def _entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    if _class_dim(outputs, targets) == 1:
        return F.cross_entropy(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _own_loss(model: nn.Module, inputs: Any, targets: Any) -> Tensor | None:
    """Returns the loss that the network computes from labels, or None if it computes none."""
    output = model(**inputs, labels=targets)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _classes_last(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.movedim(1, -1) if _class_dim(outputs, labels) == 1 else outputs


def _regression(outputs: list[Tensor], targets: Tensor) -> Tensor:
    if len(outputs) != 1 or outputs[0].numel() != targets.numel():
        shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
        raise ValueError(
            f"outputs of shape {shapes} cannot be compared with targets of shape {tuple(targets.shape)}: give loss="
        )
    return F.mse_loss(outputs[0].view_as(targets), targets.to(outputs[0]))
