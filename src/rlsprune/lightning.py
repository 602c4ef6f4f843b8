"""Pruning in a Lightning training, by a callback. Needs the extra `rlsprune[lightning]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from rlsprune.model.calls import ExampleInputs
from rlsprune.prune.driven import DrivenPruner
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
    """Gives a module the shape of a checkpoint, perhaps of a pruned network, before Lightning loads the weights."""
    if _KEY in checkpoint:
        shape = Snapshot(pl_module.get_submodule(checkpoint[_PART]), copy=True)
        shape.load_state_dict(checkpoint[_KEY])
        shape.restore()


class LoadsPruned:
    """Lets `load_from_checkpoint` load a pruned network. Put it before `LightningModule` among the bases.

    `load_from_checkpoint` passes the checkpoint to the module and to no callback. A module with its own
    `on_load_checkpoint` must call ``super().on_load_checkpoint(checkpoint)`` in it.

    Examples:
        >>> class Classifier(LoadsPruned, LightningModule):
        ...     pass  # the rest as usual; then Classifier.load_from_checkpoint(path)
    """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Gives the module the checkpoint's shape."""
        assert isinstance(self, LightningModule)
        _take_shape(self, checkpoint)
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]


class PruneCallback(Callback):
    """Prunes the module a little whenever its loss has recovered from the last prune.

    Works with automatic optimization by one optimizer, `rlsprune.RLS` or any other, on one device. Checkpoints
    contain the pruner's state and the network's shape: `Trainer.fit(…, ckpt_path=…)` and `Trainer.test(…, ckpt_path=…)`
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
        mode: Literal["min", "max"] | None = None,
        **settings: Any,
    ) -> None:
        """Keeps the settings; the pruner is made when training starts.

        Args:
            example_inputs: Inputs of the network; None for the module's `example_input_array`.
            monitor: The logged metric that must recover, such as "val_loss"; None for the epoch's mean training loss.
            submodule: The name of the part to prune; the whole module by default, called by its `forward`.
            on_prune: Called with the event after each prune and each roll-back.
            mode: "max" if higher values of the metric are better, as of an accuracy; the pruner's loss is then the
                negative metric. None means "min"; a metric whose name suggests "max" is then refused.
            **settings: Other settings of `rlsprune.Pruner`: `ratio`, `warmup_epochs`, `criterion`, `target`, ….
        """
        self.example_inputs, self.monitor, self.submodule = example_inputs, monitor, submodule
        self._driven, self._on_prune = DrivenPruner(monitor, mode, settings), on_prune
        self._saved: dict[str, Any] | None = None
        """The pruner's state from the checkpoint that training resumes from, until a pruner has loaded it."""

    @property
    def pruner(self) -> Pruner:
        """Returns the pruner, which exists once training has started."""
        return self._driven.pruner

    # --- one training -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the pruner. By now the optimizer exists and the module has the shape of the checkpoint, if any."""
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
        self._driven.start(model, trainer.optimizers[0], example, self._announce, self._saved)
        self._saved = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prunes if the loss of the previous epoch has recovered."""
        self._driven.step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the loss of the batch to that of the epoch."""
        self._driven.add_batch(outputs.get("loss") if isinstance(outputs, dict) else outputs)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the epoch's loss for the next step of the pruner."""
        if self.monitor is None:
            self._driven.note_mean("return it from training_step, or give monitor=")
        else:
            self._driven.note_metric(self._monitored(self.monitor, trainer))
        self._driven.restart_epoch()
        parameters = sum(parameter.numel() for parameter in self.pruner.model.parameters())
        pl_module.log("rlsprune_parameters", float(parameters))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rolls back to the last network that had recovered, if the present one has not."""
        self._driven.finish()

    def _monitored(self, name: str, trainer: Trainer) -> float:
        if name not in trainer.callback_metrics:
            known = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise ValueError(
                f"monitor={name!r} was not logged by the end of the epoch; there is {known}. Log it in a step with "
                "self.log, or leave monitor out"
            )
        return float(trainer.callback_metrics[name])

    def _announce(self, event: PruneEvent) -> None:
        rank_zero_info(str(event))
        if self._on_prune is not None:
            self._on_prune(event)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Makes the module take the shape of a checkpoint before Lightning loads the weights."""
        original = pl_module.on_load_checkpoint

        def resize_first(checkpoint: dict[str, Any]) -> None:
            _take_shape(pl_module, checkpoint)
            original(checkpoint)

        # Lightning passes the checkpoint first to the module, then loads the weights, and then tells callbacks.
        pl_module.on_load_checkpoint = resize_first  # type: ignore[method-assign]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the module as `setup` found it."""
        vars(pl_module).pop("on_load_checkpoint", None)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the shape. Its tensors are the weights themselves, so the file stores them only once."""
        checkpoint[_KEY] = Snapshot(self._model(pl_module)).state_dict()
        checkpoint[_PART] = self.submodule

    def state_dict(self) -> dict[str, Any]:
        """Returns the pruner's state and the epoch's loss so far."""
        pruner = self.pruner.state_dict() if self._saved is None and self._driven.started else self._saved
        return {"pruner": pruner, **self._driven.epoch_so_far()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps a state, from which training continues when it starts."""
        self._saved = state_dict["pruner"]
        self._driven.restart_epoch(state_dict["loss"], state_dict["batches"])

    def _model(self, pl_module: LightningModule) -> nn.Module:
        return pl_module.get_submodule(self.submodule)
