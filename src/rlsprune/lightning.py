"""Pruning in a Lightning training, by a callback. Needs the extra `rlsprune[lightning]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from rlsprune.model.arguments import check_argument
from rlsprune.model.calls import ExampleInputs
from rlsprune.prune.event import PruneEvent
from rlsprune.prune.pruner import Pruner
from rlsprune.prune.snapshot import Snapshot

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_info
except ImportError as error:
    raise ImportError(
        f"rlsprune.lightning needs {error.name}: pip install 'rlsprune[lightning]'", name=error.name
    ) from error

__all__ = ["LoadsPruned", "PruneCallback"]

_KEY = "rlsprune"
_PART = "rlsprune_submodule"


def _take_shape(pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Gives a module the shape of a checkpoint, which may be of a pruned network, before it takes its weights."""
    if _KEY in checkpoint:
        shape = Snapshot(pl_module.get_submodule(checkpoint[_PART]), copy=True)
        shape.load_state_dict(checkpoint[_KEY])
        shape.restore()


class LoadsPruned:
    """Lets `load_from_checkpoint` of a module take checkpoints of its pruned network. Stands before `LightningModule`.

    Lightning gives a checkpoint to the module alone there, and to no callback. A module that has an
    `on_load_checkpoint` of its own calls ``super().on_load_checkpoint(checkpoint)`` in it.

    Examples:
        >>> class Classifier(LoadsPruned, LightningModule):
        ...     pass  # the rest as usual; then Classifier.load_from_checkpoint(path)
    """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the checkpoint's shape."""
        assert isinstance(self, LightningModule)
        _take_shape(self, checkpoint)
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]


class PruneCallback(Callback):
    """Prunes the module a little whenever its loss has recovered from the last time.

    Works with automatic optimization by one optimizer, `rlsprune.RLS` or any other, on one device. Checkpoints
    carry the pruner's state and the network's shape: `Trainer.fit(…, ckpt_path=…)` and `Trainer.test(…, ckpt_path=…)`
    take a checkpoint of a pruned network into a fresh module; for `load_from_checkpoint` see `LoadsPruned`.

    Examples:
        >>> callback = PruneCallback(monitor="val_loss", warmup_epochs=3, criterion="obs", ratio=0.25)
        >>> trainer = Trainer(max_epochs=30, callbacks=[callback])  # then trainer.fit, then callback.pruner.save
    """

    def __init__(
        self,
        example_inputs: ExampleInputs | None = None,
        monitor: str | None = None,
        submodule: str = "",
        on_prune: Callable[[PruneEvent], object] | None = None,
        mode: Literal["min", "max"] = "min",
        **settings: Any,
    ) -> None:
        """Keeps the settings; the pruner is made when training starts.

        Args:
            example_inputs: What the network is called with; None for the module's `example_input_array`.
            monitor: The logged metric that has to recover, "val_loss" say; None for the epoch's mean training loss.
            submodule: The name of the part to prune; the whole module by default, called by its `forward`.
            on_prune: Called with the event after each prune and each roll-back.
            mode: "max" for a monitored metric of which more is better, an accuracy say; the pruner's loss is its
                negative then.
            **settings: Others of `rlsprune.Pruner`: `ratio`, `warmup_epochs`, `criterion`, `target`, ….
        """
        self.example_inputs, self.monitor, self.submodule = example_inputs, monitor, submodule
        check_argument("mode", mode, mode in ("min", "max"), '"min" or "max"')
        if mode == "max" and monitor is None:
            raise ValueError('mode="max" is for a metric, and a training loss is minimised: give monitor=')
        self._sign = 1 if mode == "min" else -1
        self._on_prune, self._settings = on_prune, settings
        self._pruner: Pruner | None = None
        self._saved: dict[str, Any] | None = None
        """The pruner's state in the checkpoint that training resumes from, until there is a pruner to load it."""
        self._loss: Tensor | float = 0.0
        self._batches = 0
        self._last_loss: float | None = None
        """Of the epoch that is over, until the next one begins: checkpoints between the two are of the network that
        was evaluated, and not of a smaller one. They have no statistics of its inputs, so a resumed training may prune
        after its first epoch and not before."""

    @property
    def pruner(self) -> Pruner:
        """The pruner, from the start of the training on."""
        if self._pruner is None:
            raise RuntimeError("there is no pruner before Trainer.fit has started training")
        return self._pruner

    # --- one training -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the pruner: now the optimizer is there, and the module has the shape of the checkpoint, if any."""
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise ValueError(
                f"PruneCallback needs automatic optimization by one optimizer, not {len(trainer.optimizers)}: use "
                "rlsprune.Pruner in a loop of your own"
            )
        if trainer.world_size > 1:
            raise ValueError(f"PruneCallback runs on one device, not on {trainer.world_size}: use Trainer(devices=1)")
        example = self.example_inputs
        if example is None:
            example = pl_module.example_input_array
        if example is None:
            raise ValueError("PruneCallback does not know the inputs: give example_inputs, or set example_input_array")
        example = trainer.strategy.batch_to_device(example, pl_module.device)
        model = self._model(pl_module)
        self._pruner = Pruner(model, trainer.optimizers[0], example, on_prune=self._announce, **self._settings)
        if self._saved is not None:
            self._pruner.load_state_dict(self._saved)
            self._saved = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prunes if the loss of the epoch before has recovered."""
        if self._last_loss is not None:
            self.pruner.step(self._last_loss)
            self._last_loss = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the batch's loss to the epoch's."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._loss = self._loss + loss.detach()
            self._batches += 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the loss."""
        self._last_loss = self._gate_loss(trainer)
        self._loss, self._batches = 0.0, 0
        parameters = sum(parameter.numel() for parameter in self.pruner.model.parameters())
        pl_module.log("rlsprune_parameters", float(parameters))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Goes back to the last network that had recovered, if this one has not."""
        self.pruner.stop()  # a prune now could not recover any more
        self.on_train_epoch_start(trainer, pl_module)
        self.pruner.finish()

    def _gate_loss(self, trainer: Trainer) -> float:
        if self.monitor is not None:
            if self.monitor not in trainer.callback_metrics:
                known = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
                raise ValueError(
                    f"monitor={self.monitor!r} was not logged by the end of the epoch; there is {known}. Log it in a "
                    "step with self.log, or leave monitor out"
                )
            return self._sign * float(trainer.callback_metrics[self.monitor])
        if not self._batches:
            raise ValueError("training_step returned no loss in this epoch: return it, or give monitor=")
        return float(self._loss) / self._batches

    def _announce(self, event: PruneEvent) -> None:
        rank_zero_info(str(event))
        if self._on_prune is not None:
            self._on_prune(event)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sees to it that a module takes the shape of a checkpoint before it takes its weights."""
        original = pl_module.on_load_checkpoint

        def resize_first(checkpoint: dict[str, Any]) -> None:
            _take_shape(pl_module, checkpoint)
            original(checkpoint)

        # Lightning loads the weights before it tells callbacks of the checkpoint, but after it told the module.
        pl_module.on_load_checkpoint = resize_first  # type: ignore[method-assign]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the module as `setup` found it."""
        vars(pl_module).pop("on_load_checkpoint", None)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the shape. Its tensors are those of the weights, which are in the file once."""
        checkpoint[_KEY] = Snapshot(self._model(pl_module)).state_dict()
        checkpoint[_PART] = self.submodule

    def state_dict(self) -> dict[str, Any]:
        """The pruner's state and the epoch's loss so far."""
        pruner = self._saved if self._pruner is None else self._pruner.state_dict()
        return {"pruner": pruner, "loss": float(self._loss), "batches": self._batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there when training starts."""
        self._saved, self._pruner = state_dict["pruner"], None
        self._loss, self._batches = state_dict["loss"], state_dict["batches"]

    def _model(self, pl_module: LightningModule) -> nn.Module:
        return pl_module.get_submodule(self.submodule)
