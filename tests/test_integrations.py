"""Lightning: training ends in a smaller network that onnxruntime runs."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import onnxruntime
import pytest
import torch
import wandb
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import rlsprune
from app.run.test_loggers import history_of
from rlsprune.lightning import LoadsPruned, PruneCallback


def data() -> TensorDataset:
    inputs = torch.rand(128, 10, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > inputs[:, 1]).long())


def batches() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=32)


class Classifier(pl.LightningModule):
    """As a user writes it."""

    def __init__(self, optimizer: str = "rls") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
        self.optimizer = optimizer
        self.example_input_array = torch.rand(2, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Optimizer:
        return rlsprune.RLS(self, lr=0.1) if self.optimizer == "rls" else AdamW(self.parameters(), lr=1e-2)


SETTINGS: dict[str, Any] = {"warmup_epochs": 1, "ratio": 0.25, "criterion": "obs", "tolerance": 0.2}


def trainer(folder: Path, epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=any(isinstance(callback, pl.callbacks.ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*does not have many workers")


@pytest.mark.parametrize(("optimizer", "monitor"), [("rls", None), ("adamw", "val_loss")])
def test_lightning_ends_in_a_smaller_network_that_onnxruntime_runs(
    optimizer: str, monitor: str | None, tmp_path: Path
) -> None:
    module, seen = Classifier(optimizer), []
    callback = PruneCallback(monitor=monitor, on_prune=seen.append, **SETTINGS)
    used = trainer(tmp_path, 5, callback)
    used.fit(module, batches(), batches())
    assert seen == callback.pruner.history
    assert seen
    assert sum(p.numel() for p in module.parameters()) < sum(p.numel() for p in Classifier().parameters())
    last = [event for event in seen if event.kind == "prune"][-1]
    assert float(used.callback_metrics["rlsprune_parameters"]) == last.params_after
    callback.pruner.save(tmp_path / "small.safetensors")
    small = rlsprune.load(tmp_path / "small.safetensors", into=Classifier()).eval()
    rlsprune.export_onnx(small.net, torch.rand(2, 10), tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    inputs = data().tensors[0]
    outputs = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
    with torch.no_grad():
        assert np.allclose(outputs, module.eval()(inputs).numpy(), atol=1e-5)


def of_csv(folder: Path) -> tuple[Any, Callable[[], list[float]]]:
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)

    def logged() -> list[float]:
        with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
            return [float(row["rlsprune_parameters"]) for row in csv.DictReader(file) if row["rlsprune_parameters"]]

    return logger, logged


def of_mlflow(folder: Path) -> tuple[Any, Callable[[], list[float]]]:
    logger = MLFlowLogger(tracking_uri=folder.as_uri())

    def logged() -> list[float]:
        history = logger.experiment.get_metric_history(str(logger.run_id), "rlsprune_parameters")
        return [point.value for point in history]

    return logger, logged


def of_wandb(folder: Path) -> tuple[Any, Callable[[], list[float]]]:
    logger = WandbLogger(save_dir=folder, offline=True)

    def logged() -> list[float]:
        logger.experiment.finish()
        wandb.teardown()  # its own process has then written everything
        (file,) = folder.glob("wandb/offline-run-*/*.wandb")
        return [row["rlsprune_parameters"] for row in history_of(file) if "rlsprune_parameters" in row]

    return logger, logged


@pytest.mark.parametrize("make", [of_csv, of_mlflow, of_wandb])
def test_the_loggers_of_lightning_show_the_size(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    used = trainer(tmp_path, 4, PruneCallback(**SETTINGS))
    used.logger, logged = make(tmp_path)
    used.fit(Classifier(), batches())
    sizes = logged()
    assert len(sizes) == 4
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_gate_is_the_mean_training_loss(tmp_path: Path) -> None:
    """A step with a closure trains as one without: the losses of a loop by hand open the same gate."""
    module = Classifier()
    callback = PruneCallback(**SETTINGS)
    trainer(tmp_path, 3, callback).fit(module, batches())
    by_hand = Classifier()
    optimizer = rlsprune.RLS(by_hand, lr=0.1)
    pruner = rlsprune.Pruner(by_hand, optimizer, torch.rand(2, 10), **SETTINGS)
    for epoch in range(3):
        losses = []
        for inputs, labels in batches():
            loss = nn.functional.cross_entropy(by_hand(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if epoch == 2:
            pruner.stop()  # nothing could recover from a prune after the last epoch
        pruner.step(torch.stack(losses).mean())
    pruner.finish()
    assert callback.pruner.history
    for event, other in zip(callback.pruner.history, pruner.history, strict=True):
        assert event.removed == other.removed
        assert (event.loss or 0) == pytest.approx(other.loss or 0, rel=1e-6)  # None for the roll-back at the end
    for ours, theirs in zip(module.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Loading(LoadsPruned, Classifier):
    """As a user writes it."""


@pytest.mark.parametrize("submodule", ["", "net"])
def test_load_from_checkpoint_takes_the_shape(submodule: str, tmp_path: Path) -> None:
    module, callback = Loading(), PruneCallback(submodule=submodule, example_inputs=torch.rand(2, 10), **SETTINGS)
    used = trainer(tmp_path, 5, callback)
    used.fit(module, batches())
    used.save_checkpoint(tmp_path / "best.ckpt")
    assert rlsprune.kept_features(module), "inputs are pruned too"
    loaded = Loading.load_from_checkpoint(tmp_path / "best.ckpt").eval()
    inputs = data().tensors[0]
    with torch.no_grad():
        assert torch.equal(loaded(inputs), module.eval()(inputs))


def test_the_best_checkpoint_of_a_training_loads(tmp_path: Path) -> None:
    best = pl.callbacks.ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=1)
    trainer(tmp_path, 5, PruneCallback(monitor="val_loss", **SETTINGS), best).fit(Loading(), batches(), batches())
    loaded = Loading.load_from_checkpoint(best.best_model_path).eval()
    inputs, labels = data().tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(loaded(inputs), labels)
    assert float(loss) == pytest.approx(float(best.best_model_score or 0), abs=1e-5)


def test_checkpoint_of_a_pruned_module_goes_into_a_fresh_one(tmp_path: Path) -> None:
    first = PruneCallback(**SETTINGS)
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "kept", save_top_k=-1, save_on_train_epoch_end=True)
    trainer(tmp_path, 3, first, saver).fit(Classifier(), batches())
    path = sorted((tmp_path / "kept").glob("epoch=2*.ckpt"))[0]
    shapes = [tuple(tensor.shape) for tensor in torch.load(path, weights_only=True)["state_dict"].values()]
    assert shapes != [tuple(tensor.shape) for tensor in Classifier().state_dict().values()], "nothing was pruned"

    resumed, second = Classifier(), PruneCallback(**SETTINGS)
    trainer(tmp_path, 6, second).fit(resumed, batches(), ckpt_path=path)
    known, now = ([event.to_dict() for event in callback.pruner.history] for callback in (first, second))
    assert now[: len(known)] == known
    assert sum(parameter.numel() for parameter in resumed.parameters()) < known[-1]["params_after"]
    assert "on_load_checkpoint" not in vars(resumed)


def test_a_metric_of_which_more_is_better_has_to_get_up_again(tmp_path: Path) -> None:
    class Scored(Classifier):
        def on_validation_epoch_end(self) -> None:
            self.log("val_accuracy", [0.5, 0.9, 0.6, 0.85, 0.95][self.current_epoch])

    callback = PruneCallback(monitor="val_accuracy", mode="max", **{**SETTINGS, "tolerance": 0.1})
    trainer(tmp_path, 5, callback).fit(Scored(), batches(), batches())
    assert [(event.epoch, round(event.loss, 2)) for event in callback.pruner.history] == [(2, -0.9), (4, -0.85)]
    with pytest.raises(ValueError, match="mode='up' is not valid"):
        PruneCallback(monitor="val_accuracy", mode="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give monitor="):
        PruneCallback(mode="max")


@pytest.mark.parametrize(
    ("options", "said"),
    [({"monitor": "val_los"}, "monitor='val_los' was not logged"), ({"ratio": 2.0}, "ratio=2.0 is not valid")],
)
def test_mistakes_are_told(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    callback = PruneCallback(**{**SETTINGS, **options})
    with pytest.raises(RuntimeError, match="no pruner before"):
        _ = callback.pruner
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, 1, callback).fit(Classifier(), batches(), batches())


def test_module_without_example_is_told_what_to_give(tmp_path: Path) -> None:
    module = Classifier()
    module.example_input_array = None
    with pytest.raises(ValueError, match="give example_inputs"):
        trainer(tmp_path, 1, PruneCallback(**SETTINGS)).fit(module, batches())
