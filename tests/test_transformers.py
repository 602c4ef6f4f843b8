"""Hugging Face's Trainer: training ends in a smaller model, which `save_pretrained` writes and which loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import rlsprune
from rlsprune.io.atomic import FileError
from rlsprune.transformers import PruneCallback, from_pretrained, save_pretrained

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 20,
}
SETTINGS: dict[str, Any] = {"warmup_epochs": 1, "ratio": 0.25, "tolerance": 0.5}


class Tokens(Dataset[dict[str, Tensor]]):
    """Whether token 1 stands in a row of tokens."""

    def __init__(self) -> None:
        self.ids = torch.randint(2, 20, (64, 6), generator=torch.Generator().manual_seed(0))
        self.ids[::2, 3] = 1

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": torch.tensor(1 - index % 2)}


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SMALL, max_position_embeddings=8))


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "num_train_epochs": 4,
            "per_device_train_batch_size": 16,
            "learning_rate": 5e-3,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "logging_strategy": "no",
            "seed": 0,
            **changes,
        }
    )


def train(
    model: PreTrainedModel, callback: PruneCallback, options: TrainingArguments, resume: Path | None = None
) -> Trainer:
    trainer = Trainer(model, options, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def same_outputs(one: nn.Module, other: nn.Module, **inputs: Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(one.eval()(**inputs).logits, other.eval()(**inputs).logits)


@pytest.mark.parametrize("monitor", [None, "eval_loss"])
def test_training_ends_in_a_smaller_model_that_loads_again(monitor: str | None, tmp_path: Path) -> None:
    model, seen = bert(), []
    callback = PruneCallback(monitor=monitor, on_prune=seen.append, **SETTINGS)
    trainer = train(model, callback, arguments(tmp_path, eval_strategy="no" if monitor is None else "epoch"))
    assert seen == callback.pruner.history
    assert [event.kind for event in seen].count("prune") >= 2
    assert size(model) < size(bert())
    ids = Tokens().ids
    trainer.save_model(str(tmp_path / "by the trainer"))
    model.save_pretrained(tmp_path / "by the model")
    for folder in ("by the trainer", "by the model"):
        loaded = from_pretrained(tmp_path / folder)
        assert type(loaded) is BertForSequenceClassification
        assert size(loaded) == size(model)
        assert same_outputs(loaded, model, input_ids=ids)


def test_gate_is_the_mean_training_loss(tmp_path: Path) -> None:
    """As the Trainer itself logs it."""
    callback = PruneCallback(**SETTINGS)
    trainer = train(bert(), callback, arguments(tmp_path, num_train_epochs=3, logging_strategy="epoch"))
    event = next(event for event in callback.pruner.history if event.kind == "prune")
    assert event.loss == pytest.approx(trainer.state.log_history[1]["loss"], rel=1e-5)


def test_a_metric_of_which_more_is_better_has_to_get_up_again(tmp_path: Path) -> None:
    """Not down: the first prune's accuracy is the gate."""
    accuracies = iter([0.5, 0.9, 0.6, 0.8, 0.95])
    callback = PruneCallback(monitor="eval_accuracy", mode="max", warmup_epochs=1, ratio=0.25, tolerance=0.1)
    trainer = Trainer(
        bert(),
        arguments(tmp_path, num_train_epochs=5, eval_strategy="epoch"),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[callback],
        compute_metrics=lambda _: {"accuracy": next(accuracies)},
    )
    trainer.train()
    # Neither 0.6 nor 0.8 is within a tenth of 0.9, and no prune comes after the last epoch.
    assert [(event.epoch, event.loss) for event in callback.pruner.history] == [(2, -0.9)]


def test_resumed_training_goes_on_in_the_shape_of_its_checkpoint(tmp_path: Path) -> None:
    first = PruneCallback(**SETTINGS)
    options = {"num_train_epochs": 6, "save_strategy": "epoch"}
    train(bert(), first, arguments(tmp_path, **options))
    checkpoint = tmp_path / "checkpoint-12"  # after three of six epochs, each of four batches
    model = from_pretrained(checkpoint)
    assert size(model) == first.pruner.history[0].params_after < size(bert())
    resumed = PruneCallback(**SETTINGS)
    train(model, resumed, arguments(tmp_path, **options), resume=checkpoint)
    prunes = [event for event in resumed.pruner.history if event.kind == "prune"]
    assert prunes[0].to_dict() == first.pruner.history[0].to_dict(), "the history goes on"
    assert prunes[1].params_before == prunes[0].params_after
    assert size(model) < size(from_pretrained(checkpoint))


def test_training_resumed_into_another_folder_has_its_pruner_or_is_refused(tmp_path: Path) -> None:
    options = {"num_train_epochs": 4, "save_strategy": "epoch"}
    first = PruneCallback(**SETTINGS)
    train(bert(), first, arguments(tmp_path / "first", **options))
    checkpoint, second = tmp_path / "first" / "checkpoint-12", arguments(tmp_path / "second", **options)
    with pytest.raises(FileError, match=r"resumes after step 12.*PruneCallback\(resume_from_checkpoint"):
        train(from_pretrained(checkpoint), PruneCallback(**SETTINGS), second, resume=checkpoint)
    resumed = PruneCallback(resume_from_checkpoint=checkpoint, **SETTINGS)
    train(from_pretrained(checkpoint), resumed, second, resume=checkpoint)
    assert resumed.pruner.history[0].to_dict() == first.pruner.history[0].to_dict()


def test_checkpoints_have_the_model_that_was_evaluated(tmp_path: Path) -> None:
    changes = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}
    trainer = train(bert(), PruneCallback(monitor="eval_loss", **SETTINGS), arguments(tmp_path, **changes))
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    for line in evaluations:
        model = from_pretrained(tmp_path / f"checkpoint-{line['step']}")
        again = Trainer(model, arguments(tmp_path), eval_dataset=Tokens()).evaluate()
        assert again["eval_loss"] == pytest.approx(line["eval_loss"], abs=1e-6)


def test_a_model_that_shrink_made_smaller_is_saved_with_its_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4)).eval()
    inputs, before = {"pixel_values": torch.rand(4, 3, 8, 8)}, size(model)
    small = rlsprune.shrink(model, [inputs] * 2, target={"params": 0.9}).model
    assert size(small) < before
    save_pretrained(small, tmp_path)
    assert same_outputs(from_pretrained(tmp_path), small, **inputs)
    assert same_outputs(from_pretrained(tmp_path, model_class=type(small)), small, **inputs)


LANGUAGE_MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=20, n_positions=8, bos_token_id=1, eos_token_id=2)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL | {"num_attention_heads": 4}, num_key_value_heads=2)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=1,
            num_heads=4,
            vocab_size=20,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    ),
}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_are_loaded_with_fewer_heads_and_narrower_layers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = LANGUAGE_MODELS[name](), torch.randint(3, 20, (4, 5))
    before = size(model)
    inputs = {"input_ids": ids, "labels": ids}
    pruner = rlsprune.Pruner(model, torch.optim.AdamW(model.parameters()), inputs, ratio=0.3)
    pruner.calibrate([inputs])
    pruner.prune()
    assert size(model) < before
    save_pretrained(model, tmp_path)
    assert same_outputs(from_pretrained(tmp_path), model, **inputs)


def test_an_unpruned_model_loads_either_way(tmp_path: Path) -> None:
    model = bert()
    save_pretrained(model, tmp_path)
    assert same_outputs(from_pretrained(tmp_path), model, input_ids=Tokens().ids)
    assert same_outputs(BertForSequenceClassification.from_pretrained(tmp_path), model, input_ids=Tokens().ids)


class TableConfig(PreTrainedConfig):
    """A model of one's own, on rows of a table."""

    model_type = "table"


class TableModel(PreTrainedModel):
    """Its inputs are pruned as well."""

    config_class = TableConfig

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        self.net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
        self.post_init()

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(rows)


def test_options_that_say_where_reach_the_configuration_and_loading_info_comes_back(tmp_path: Path) -> None:
    save_pretrained(bert(), tmp_path / "inner")
    model, told = from_pretrained(tmp_path, subfolder="inner", local_files_only=True, output_loading_info=True)
    assert type(model) is BertForSequenceClassification
    assert not told["missing_keys"]
    assert same_outputs(model, bert(), input_ids=Tokens().ids)


def test_inputs_that_are_left_are_loaded_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rows = TableModel(TableConfig()), torch.rand(32, 10)
    pruner = rlsprune.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), rows, ratio=0.5)
    pruner.calibrate([rows])
    pruner.prune()
    assert rlsprune.kept_features(model)
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path, model_class=TableModel, config=TableConfig.from_pretrained(tmp_path))
    assert rlsprune.kept_features(loaded) == rlsprune.kept_features(model)
    with torch.no_grad():
        assert torch.equal(loaded(rows), model(rows))


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({}, {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}, "leave it out"),
        ({"monitor": "eval_loss"}, {}, "eval_strategy"),
        ({"monitor": "eval_f1", "mode": "max"}, {"eval_strategy": "epoch"}, "eval_f1.*eval_loss"),
        ({"monitor": "eval_f1"}, {"eval_strategy": "epoch"}, "higher is better"),
        ({"mode": "up"}, {}, "mode='up' is not valid"),
        ({"mode": "max"}, {}, "give monitor="),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        train(bert(), PruneCallback(**options), arguments(tmp_path, **changes))


def test_a_shape_that_does_not_fit_is_told(tmp_path: Path) -> None:
    save_pretrained(bert(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rlsprune"]["sizes"] = {"classifier": {"in_features": 99, "out_features": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match=r"config\.json.*in_features"):
        from_pretrained(tmp_path)


def test_there_is_no_pruner_before_the_training() -> None:
    with pytest.raises(RuntimeError, match="before"):
        _ = PruneCallback().pruner
