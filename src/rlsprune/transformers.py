"""Pruning in a training by Hugging Face's Trainer, and pruned models in folders of `save_pretrained`.

Needs the extra `rlsprune[transformers]`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from rlsprune.io.atomic import FileError
from rlsprune.io.compatibility import sized_layers
from rlsprune.io.state import load_state, save_state
from rlsprune.model.arguments import quoted
from rlsprune.model.calls import ExampleInputs
from rlsprune.model.selector import kept_features, set_kept_inputs
from rlsprune.model.sizes import check_sizes, implied_shapes, read_sizes, write_sizes
from rlsprune.prune.driven import DrivenPruner
from rlsprune.prune.event import PruneEvent
from rlsprune.prune.pruner import Pruner

try:
    import transformers
    from transformers import (
        AutoConfig,
        PreTrainedModel,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError(
        f"rlsprune.transformers needs {error.name}: pip install 'rlsprune[transformers]'", name=error.name
    ) from error

__all__ = ["PruneCallback", "from_pretrained", "save_pretrained"]

_KEY = "rlsprune"
"""Key in config.json of the sizes of layers that differ from the configuration, and of the inputs that layers keep."""
_WHERE = (
    *("cache_dir", "code_revision", "force_download", "local_files_only", "proxies"),
    *("revision", "subfolder", "token", "trust_remote_code"),
)
"""Options of `from_pretrained` that locate the files; the configuration is loaded with them, too."""
_PRUNER = "pruner.safetensors"


# --- folders ----------------------------------------------------------------------------------------------------------


def save_pretrained(model: PreTrainedModel, folder: str | os.PathLike[str], **options: Any) -> None:
    """Writes a pruned model as `model.save_pretrained` does, and its shape into the configuration.

    A model that `PruneCallback` prunes always has its shape in its configuration: `model.save_pretrained` and
    `Trainer.save_model` are enough for it.

    Args:
        model: The model, pruned or not.
        folder: The folder to write, which `from_pretrained` reads.
        **options: Options of `model.save_pretrained`.

    Examples:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        >>> save_pretrained(BertForSequenceClassification(BertConfig(**sizes)), "small")
        >>> type(from_pretrained("small")).__name__
        'BertForSequenceClassification'
    """
    _note_shape(model)
    model.save_pretrained(folder, **options)


def from_pretrained(
    folder: str | os.PathLike[str], *, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> Any:
    """Loads a pruned model from a folder of `save_pretrained` or a checkpoint of the Trainer, or from the hub.

    Args:
        folder: The folder or hub name, as in the class's own `from_pretrained`.
        model_class: The model's class; None for the class in `transformers` that the configuration names.
        **options: Options of the class's own `from_pretrained`.

    Returns:
        The model, an instance of exactly that class, in evaluation mode; with `output_loading_info=True` also Hugging
        Face's report about the loading.

    Raises:
        FileError: The model cannot take the shape in the configuration.
        ValueError: The configuration names no class of `transformers`.

    Examples:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=20, **small))
        >>> save_pretrained(model, "small-bert")
        >>> type(from_pretrained("small-bert")).__name__
        'BertForSequenceClassification'
    """
    where = {name: options[name] for name in _WHERE if name in options}
    config = options.pop("config", None) or AutoConfig.from_pretrained(folder, **where)
    made = _class_of(config, folder) if model_class is None else model_class
    shape = getattr(config, _KEY, None)

    class Pruned(made):  # type: ignore[misc, valid-type]
        """A model that takes its pruned shape on construction: Hugging Face loads the weights right after."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            try:
                _take_shape(self, {} if shape is None else shape)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                problem = f"the shape in its {_KEY!r} does not fit {made.__name__} ({error})"
                raise FileError(Path(folder) / "config.json", problem, "give a folder that was saved whole") from error

    Pruned.__name__, Pruned.__qualname__, Pruned.__module__ = made.__name__, made.__qualname__, made.__module__
    loaded = Pruned.from_pretrained(folder, config=config, **options)
    model = loaded[0] if options.get("output_loading_info") else loaded
    model.__class__ = made
    return loaded


def _class_of(config: Any, folder: str | os.PathLike[str]) -> type[PreTrainedModel]:
    names = getattr(config, "architectures", None) or ()
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if found is None:
        named = quoted(names) or "none"
        raise ValueError(f"{os.fspath(folder)} names {named}, a class that is not in transformers: give model_class=")
    return found  # type: ignore[no-any-return]


def _note_shape(model: Any) -> None:
    """Records in the model's configuration the layer sizes that it does not imply, and the inputs that layers keep."""
    with torch.device("meta"):
        plain = sized_layers(type(model)(model.config))
    layers = sized_layers(model)
    sizes = {name: read_sizes(layer) for name, layer in layers.items()}
    kept = kept_features(model)
    content = {
        "sizes": {name: size for name, size in sizes.items() if size != read_sizes(plain[name])},
        "inputs": {name: [layers[name].full_in_features, indices] for name, indices in kept.items()},
    }
    setattr(model.config, _KEY, content)


def _take_shape(model: nn.Module, shape: Mapping[str, Any]) -> None:
    """Gives the layers of a fresh model the sizes that `_note_shape` recorded."""
    layers = sized_layers(model)
    for name, sizes in shape.get("sizes", {}).items():
        layer = layers[name]
        write_sizes(layer, check_sizes(layer, sizes))
        shapes = implied_shapes(layer, sizes)
        for own, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
            if tensor is not None and own in shapes:
                tensor.data = torch.empty(shapes[own], dtype=tensor.dtype, device=tensor.device)
    for name, (width, kept) in shape.get("inputs", {}).items():
        layer = layers[name]
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name!r} is no Linear layer, and only those select their inputs")
        with torch.device("cpu"):
            set_kept_inputs(layer, kept, width)


# --- training ---------------------------------------------------------------------------------------------------------


class PruneCallback(TrainerCallback):
    """Prunes the model of a Trainer a little whenever its loss has recovered from the last prune.

    Works on one device. With `monitor` every evaluation is a step of the pruner, and `warmup_epochs` counts
    evaluations; without it every epoch is a step. The configuration always has the model's shape, so
    `rlsprune.transformers.from_pretrained` loads the folders of `save_pretrained` and `Trainer.save_model` and the
    Trainer's checkpoints. A training resumes with
    ``Trainer(model=from_pretrained(checkpoint), …).train(resume_from_checkpoint=checkpoint)``. If `checkpoint` is not
    in the Trainer's `output_dir`, ``PruneCallback(resume_from_checkpoint=checkpoint)`` needs it, too.

    Examples:
        >>> callback = PruneCallback(monitor="eval_loss", warmup_epochs=1, target={"params": 0.5})
        >>> # trainer = Trainer(model, arguments, …, callbacks=[callback]); trainer.train(); trainer.save_model("small")
    """

    def __init__(
        self,
        example_inputs: ExampleInputs | None = None,
        monitor: str | None = None,
        on_prune: Callable[[PruneEvent], object] | None = None,
        mode: Literal["min", "max"] | None = None,
        resume_from_checkpoint: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        """Keeps the settings; the pruner is made when training starts.

        Args:
            example_inputs: Inputs of the model; None for the first two examples of the training data.
            monitor: The metric that must recover, such as "eval_loss"; None for the epoch's mean training loss.
            on_prune: Called with the event after each prune and each roll-back.
            mode: "max" if higher values of the metric are better, as of an accuracy; the pruner's loss is then the
                negative metric. None means "min"; a metric whose name suggests "max" is then refused.
            resume_from_checkpoint: The checkpoint that `Trainer.train` resumes from; None for one in its `output_dir`.
            **settings: Other settings of `rlsprune.Pruner`: `ratio`, `warmup_epochs`, `criterion`, `target`, ….
        """
        self.example_inputs, self.monitor = example_inputs, monitor
        self._driven, self._on_prune = DrivenPruner(monitor, mode, settings), on_prune
        self._resumed = resume_from_checkpoint
        self._hook: RemovableHandle | None = None

    @property
    def pruner(self) -> Pruner:
        """Returns the pruner, which exists once training has started."""
        return self._driven.pruner

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes the pruner, as the optimizer exists by now. A resumed training loads the state in its checkpoint."""
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True would load weights of another shape: leave it out. The pruner itself ends "
                "with the last model that had recovered"
            )
        if self.monitor is not None and args.eval_strategy == "no":
            raise ValueError(f'monitor={self.monitor!r} needs evaluations: TrainingArguments(eval_strategy="epoch")')
        devices = max(args.world_size, args.n_gpu)
        if devices > 1:
            raise ValueError(f"PruneCallback runs on one device, not on {devices}: set CUDA_VISIBLE_DEVICES=0")
        saved = (_checkpoint(args, state) if self._resumed is None else Path(self._resumed)) / _PRUNER
        if state.global_step and not saved.is_file():
            problem = f"the training resumes after step {state.global_step}, and the pruner's state is not there"
            raise FileError(saved, problem, "give PruneCallback(resume_from_checkpoint=…) the checkpoint's folder")
        self._close()
        self._driven.restart_epoch()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # out of accelerate's wrapper
        example = self.example_inputs
        if example is None:
            example = _first_examples(kwargs["train_dataloader"])
        example = tree_map(lambda leaf: leaf.to(model.device) if isinstance(leaf, Tensor) else leaf, example)
        self._driven.start(model, optimizer, example, self._announce, load_state(saved) if state.global_step else None)
        _note_shape(model)
        self._hook = model.register_forward_hook(self._record)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prunes if the loss has recovered."""
        self._driven.step()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes the epoch's mean training loss, unless a metric is monitored."""
        if self.monitor is None:
            self._driven.note_mean('let the model return a "loss", or give monitor="eval_loss"')
        self._driven.restart_epoch()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Notes the monitored metric. Evaluations outside of a training change nothing."""
        if self.monitor is None or self._hook is None:
            return
        metrics = kwargs["metrics"]
        if self.monitor not in metrics:
            raise ValueError(f"monitor={self.monitor!r} is not among the evaluation's metrics: {quoted(metrics)}")
        self._driven.note_metric(float(metrics[self.monitor]))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Adds the pruner's state to the checkpoint."""
        save_state(_checkpoint(args, state) / _PRUNER, self.pruner.state_dict())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Rolls back to the last model that had recovered, if the present one has not."""
        self._driven.finish()
        self._close()

    def _close(self) -> None:
        """Removes the hooks of a previous training, which may have failed, from the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self.pruner.close()

    def _record(self, module: nn.Module, inputs: object, output: Any) -> None:
        """Adds the loss of a training batch to that of the epoch."""
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if module.training:
            self._driven.add_batch(loss)

    def _announce(self, event: PruneEvent) -> None:
        _note_shape(self.pruner.model)
        if self._on_prune is not None:
            self._on_prune(event)


def _first_examples(loader: Any) -> ExampleInputs:
    """Returns a batch of two examples from the Trainer's collator, without drawing from the loader's random numbers."""
    try:
        batch = loader.collate_fn([loader.dataset[0], loader.dataset[min(1, len(loader.dataset) - 1)]])
        return dict(batch)
    except (TypeError, KeyError, IndexError, NotImplementedError) as error:
        raise ValueError(
            "PruneCallback cannot look at the first examples of this training data: give example_inputs"
        ) from error


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
