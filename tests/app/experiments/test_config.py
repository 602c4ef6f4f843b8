import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsprune.app.config.base import OPTIMIZERS
from rlsprune.app.config.experiment import PAPER, RunConfig, make_config
from rlsprune.app.config.recipes import RECIPES
from rlsprune.app.config.settings import TrainingSettings
from rlsprune.app.experiments.methods import build_method, build_model
from rlsprune.app.experiments.paper import TABLES
from rlsprune.app.experiments.queue import COMPARED, comparison, sweep, twin_of
from rlsprune.app.experiments.registry import BASELINES, EXPERIMENTS, METHODS, experiment
from rlsprune.app.run.build import build_optimizer


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("method", METHODS)
def test_config_survives_json(name: str, method: str) -> None:
    config = make_config(name, method, preset="paper")
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.differences(config) == []


def test_paper_preset_is_the_paper_s() -> None:
    for name in EXPERIMENTS:
        config = make_config(name, "rls-paper", preset="paper")
        assert (config.epochs, config.warmup_epochs, config.batch_size) == (200, 30, 128)
        assert (config.train_images, config.test_images) == (None, None)
        assert config.pruning == PAPER
        assert config.gate == "batch"
        assert make_config(name, "l1-norm", preset="paper").prune_epoch == 31
    augments = {name: make_config(name, "rls-paper", preset="paper").augment for name in ("cifar10-vgg", "svhn-vgg")}
    assert augments == {"cifar10-vgg": "crop+flip", "svhn-vgg": None}


def test_ours_and_scratch_move_the_images_unless_told_not_to() -> None:
    words = {method: make_config("mnist-fnn", method).augment for method in METHODS}
    assert {method for method, word in words.items() if word} == {"rls", "scratch"}
    assert words["rls"] == "crop1"
    assert make_config("mnist-fnn", "rls", augment=False).augment is None
    assert make_config("svhn-vgg", "l1-norm", augment=True).augment == "crop2"
    for asked, expected in ((None, "crop1"), (True, "crop1"), (False, None)):
        runs = comparison("mnist-fnn", ["rls"], [0], Path("out"), augment=asked)
        assert {run.label: run.config.augment for run in runs} == {"rls-unpruned": expected, "rls": expected}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_method_recipe_and_optimizer_can_be_crossed(method: str, recipe: str, optimizer: str) -> None:
    if method == "rls-paper" and optimizer != "rls":
        return  # it prunes by the P of RLS
    config = make_config("mnist-fnn", method, recipe=recipe, optimizer=optimizer)
    assert (config.method, config.recipe, config.optimizer) == (method, recipe, optimizer)
    alike = make_config("mnist-fnn", "none", recipe=recipe)
    for name in ("augment", "loss", "epochs", "warmup_epochs"):
        assert getattr(config, name) == getattr(alike, name), "the recipe, not the method, decides on it"
    assert replace(config.training, rank=None) == replace(alike.training, rank=None)


def test_a_method_s_own_recipe_is_what_it_was_before_recipes_had_names() -> None:
    assert {method for method in METHODS if make_config("mnist-fnn", method).recipe == "ours"} == {"rls", "scratch"}
    rates = {method: make_config("cifar10-resnet20", method).rate for method in ("rls", "none", "l1-norm")}
    assert rates == {"rls": 0.1, "none": 0.1, "l1-norm": 0.1}
    assert make_config("mnist-fnn").rate == 1.0
    assert make_config("mnist-fnn", optimizer="adamw").rate == 1e-3
    assert make_config("mnist-fnn", lr=0.5).rate == 0.5


def test_config_without_recipe_and_rate_is_that_of_an_earlier_version() -> None:
    config = make_config("mnist-fnn", "l1-norm")
    new = ("recipe", "lr", "cpu_seconds", "rival_target", "rival_target_of", "test_on", "bfloat16")
    old = RunConfig.from_dict({name: value for name, value in config.to_dict().items() if name not in new})
    assert config.differences(old) == []
    assert old.rate == 0.1


def test_training_settings_outside_their_range_are_named() -> None:
    with pytest.raises(ValueError, match=r"lr_decay=1\.0"):
        TrainingSettings(lr_decay=1.0)


def test_rivals_are_trained_by_momentum_and_ours_by_rls() -> None:
    assert {make_config("mnist-fnn", method).optimizer for method in BASELINES} == {"sgd"}
    assert {make_config("mnist-fnn", method).optimizer for method in set(METHODS) - set(BASELINES)} == {"rls"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "imagenet"}, "choose one of digits-fnn"),
        ({"method": "magic"}, "choose one of rls"),
        ({"preset": "long"}, "short, paper"),
        ({"epochs": 0}, "--epochs 0"),
        ({"gate": "test"}, "train, batch, valid"),
        ({"ratio": 1.0}, r"--ratio 1\.0"),
        ({"ratio": 0.5, "method": "l1-norm"}, "--ratio is for rls.* its --rival-ratio"),
        ({"ratio": 0.5, "method": "none"}, "not for none: leave it out"),
        ({"rival_ratio": 0.5}, "--rival-ratio is for l1-norm.* not for rls"),
        ({"rival_ratio": 1.5, "method": "l1-norm"}, r"--rival-ratio 1\.5"),
        ({"optimizer": "adamw", "method": "rls-paper"}, "prunes by the P of RLS"),
        ({"optimizer": "lion", "method": "l1-norm"}, "choose one of rls, sgd, adamw"),
        ({"recipe": "theirs"}, "choose one of paper, ours"),
        ({"lr": 0.0}, r"--lr 0\.0"),
        ({"cpu_seconds": 0.0}, r"--cpu-seconds 0\.0"),
        ({"cpu_seconds": 9.0, "epochs": 3}, "give one of them"),
        ({"target": 0.1, "rival_ratio": 0.5, "method": "l1-norm"}, "--rival-ratio follows from --target"),
        ({"target": 0.1, "target_of": "flops", "method": "weight-level"}, "does not change the FLOPs"),
        ({"target": 0.1, "target_of": "time"}, "--target-of time"),
        ({"test_on": "train"}, "--test-on train"),
        ({"prune_epoch": 0}, "--prune-epoch 0"),
        ({"train_images": 0}, "--train-images 0"),
    ],
)
def test_settings_that_are_not_valid_are_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_config(**{"name": "digits-fnn", **arguments})  # type: ignore[arg-type]


def test_config_of_another_version_is_refused() -> None:
    values = make_config("digits-fnn").to_dict()
    with pytest.raises(ValueError, match="seed"):
        RunConfig.from_dict({key: value for key, value in values.items() if key != "seed"})


def test_comparison_has_a_twin_for_every_method_and_scratch_waits_for_rls(tmp_path: Path) -> None:
    runs = comparison("mnist-fnn", COMPARED, [0, 1], tmp_path)
    for seed in (0, 1):
        labels = [run.label for run in runs if run.config.seed == seed]
        twins = {twin_of(make_config("mnist-fnn", method))[0] for method in COMPARED}
        assert twins == {"rls-unpruned", "none-rls", "none-sgd", "net-slimming-unpruned"}
        assert set(labels) == {*COMPARED, *twins}
        assert len(labels) == len(set(labels))
    assert len({run.folder for run in runs}) == len(runs)
    waiting = [run for run in runs if run.after is not None]
    assert [run.label for run in waiting] == ["scratch", "scratch"]
    assert {run.after for run in waiting} == {run.folder for run in runs if run.label == "rls"}


def test_rivals_alone_get_the_rivals_ratio(tmp_path: Path) -> None:
    runs = comparison("mnist-fnn", COMPARED, [0], tmp_path, rival_ratio=0.8, ratio=0.3)
    assert {run.label for run in runs if run.config.rival_ratio == 0.8} == set(BASELINES)
    assert {run.label for run in runs if run.config.pruning and run.config.pruning.ratio == 0.3} == {"rls", "rls-paper"}


@pytest.mark.parametrize("method", BASELINES)
def test_a_rival_removes_what_it_is_told_to(method: str) -> None:
    config = make_config("digits-fnn", method, rival_ratio=0.45)
    model = build_model(config)
    assert build_method(config, model, build_optimizer(config, model, 0.1), torch.rand(1, 784)).ratio == 0.45  # type: ignore[attr-defined]


def test_target_is_for_the_rivals_too(tmp_path: Path) -> None:
    runs = comparison("mnist-fnn", COMPARED, [0], tmp_path, target=0.05, target_of="params")
    assert {run.label for run in runs if run.config.rival_target == 0.05} == set(BASELINES)
    assert {run.label for run in runs if run.config.pruning and run.config.pruning.target == 0.05} == {"rls"}


def test_every_twin_is_trained_like_its_method(tmp_path: Path) -> None:
    runs = comparison("mnist-fnn", ["l1-norm", "net-slimming", "rls"], [0], tmp_path, recipe="ours", optimizer="adamw")
    by_label = {run.label: run.config for run in runs}
    assert {run.twin for run in runs} == {None, "none-adamw-ours", "net-slimming-unpruned-ours"}
    for run in runs:
        if run.twin is not None:
            twin = by_label[run.twin]
            for name in ("recipe", "optimizer", "lr", "epochs", "augment", "training"):
                assert getattr(twin, name) == getattr(run.config, name)


@pytest.mark.parametrize(("option", "method"), [("ratio", "l1-norm"), ("rival_ratio", "rls"), ("target", "rls-paper")])
def test_an_option_that_no_method_takes_is_refused(tmp_path: Path, option: str, method: str) -> None:
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} is for .*, not for {method}"):
        comparison("mnist-fnn", [method], [0], tmp_path, **{option: 0.3})


def test_scratch_alone_brings_rls_along(tmp_path: Path) -> None:
    labels = [run.label for run in comparison("mnist-fnn", ["scratch"], [0], tmp_path)]
    assert labels == ["rls-unpruned", "rls", "scratch"]


def test_unpruned_twin_of_rls_is_trained_like_it_and_that_of_the_paper_like_the_paper(tmp_path: Path) -> None:
    runs = {run.label: run.config for run in comparison("mnist-fnn", ["rls", "rls-paper", "scratch"], [0], tmp_path)}
    ours = EXPERIMENTS["mnist-fnn"].training
    assert runs["rls-unpruned"].training == runs["rls"].training == runs["scratch"].training == ours
    assert runs["none-rls"].training == runs["rls-paper"].training == TrainingSettings()


def test_slimming_s_twin_keeps_its_batch_norm_and_never_prunes(tmp_path: Path) -> None:
    runs = {run.label: run.config for run in comparison("mnist-fnn", ["net-slimming"], [0], tmp_path)}
    assert runs["net-slimming-unpruned"].method == "net-slimming"
    assert runs["net-slimming-unpruned"].prune_epoch is None
    assert runs["net-slimming"].prune_epoch is not None


def test_sweep_varies_the_ratio_alone(tmp_path: Path) -> None:
    runs = sweep("mnist-fnn", "rls-paper", [0.2, 0.5], [0], tmp_path)
    assert [run.config.pruning.ratio for run in runs if run.config.pruning] == [0.2, 0.5]
    assert len(runs[0].config.differences(runs[1].config)) == 1


@pytest.mark.parametrize(("table", "nodes"), [(1, (784, 1024, 512, 10)), (2, None), (3, None)])
def test_paper_s_columns_agree_with_themselves(table: int, nodes: tuple[int, ...] | None) -> None:
    """The totals follow from the layers, so a figure that was copied wrongly shows."""
    nodes = nodes or (3072, 65536, 65536, 32768, 32768, 16384, 1024, 10)
    weights = {1: (802816, 524288, 5120)}.get(table, (1728, 36864, 73728, 147456, 294912, 4194304, 10240))
    for method, column in TABLES[table].items():
        for full, shares in ((nodes, column.nodes), (weights, column.weights)):
            share = sum(n * s for n, s in zip(full, shares[:-1], strict=True)) / sum(full)
            # Layers and total are printed to 0.1 each, some of them cut rather than rounded.
            assert share == pytest.approx(shares[-1], abs=0.11), (method, full)


def test_target_is_the_experiment_s_unless_another_is_asked_for(tmp_path: Path) -> None:
    runs = {run.label: run.config for run in comparison("svhn-vgg", COMPARED, [0], tmp_path, target=0.02)}
    assert runs["rls"].pruning is not None
    assert runs["rls"].pruning.target == 0.02
    assert runs["rls-paper"].pruning == PAPER
    assert make_config("svhn-vgg").pruning == EXPERIMENTS["svhn-vgg"].pruning


@pytest.mark.parametrize(
    ("method", "target"), [("rls", 0.0), ("rls", 1.0), ("rls-paper", 0.1), ("l1-norm", 1.0), ("none", 0.1)]
)
def test_targets_that_make_no_sense(method: str, target: float) -> None:
    with pytest.raises(ValueError, match="--target"):
        make_config("digits-fnn", method, target=target)


def test_a_config_without_all_pruning_settings_is_refused() -> None:
    values = make_config("digits-fnn", "rls-paper").to_dict()
    del values["pruning"]["criterion"]
    with pytest.raises(ValueError, match="criterion"):
        RunConfig.from_dict(values)


def test_tolerance_is_ours_unless_another_is_asked_for(tmp_path: Path) -> None:
    runs = {run.label: run.config for run in comparison("mnist-fnn", COMPARED, [0], tmp_path, tolerance=0.2)}
    assert runs["rls"].pruning is not None
    assert runs["rls"].pruning.tolerance == 0.2
    assert runs["rls-paper"].pruning == PAPER
    with pytest.raises(ValueError, match=r"--tolerance -0\.1 is not valid: it must be a number, at least 0"):
        make_config("mnist-fnn", tolerance=-0.1)
    with pytest.raises(ValueError, match="--tolerance is for rls, not for l1-norm"):
        comparison("mnist-fnn", ["l1-norm"], [0], tmp_path, tolerance=0.2)
    with pytest.raises(ValueError, match="--tolerance is for rls: l1-norm"):
        make_config("mnist-fnn", "l1-norm", tolerance=0.1)


def test_events_are_allocated_on_the_vggs_unless_there_is_nothing_to_measure_by(tmp_path: Path) -> None:
    def allocates(name: str, **options: Any) -> bool:
        config = make_config(name, **options)
        assert config.pruning is not None
        return config.pruning.allocate

    assert allocates("cifar10-vgg")
    assert not allocates("cifar10-vgg", allocate=False)
    assert not allocates("cifar10-vgg", gate="train")
    assert allocates("mnist-fnn", allocate=True)
    assert not allocates("mnist-fnn")
    with pytest.raises(ValueError, match="--gate train is not valid: it must be valid with --allocate"):
        make_config("cifar10-vgg", allocate=True, gate="train")
    with pytest.raises(ValueError, match="--allocate is for rls: rls-paper"):
        make_config("cifar10-vgg", "rls-paper", allocate=True)
    runs = {run.label: run.config for run in comparison("mnist-fnn", COMPARED, [0], tmp_path, allocate=True)}
    assert runs["rls"].pruning == replace(experiment("mnist-fnn").pruning, allocate=True)
    assert runs["rls-paper"].pruning == PAPER


def test_our_recipe_trains_for_longer(tmp_path: Path) -> None:
    runs = {run.label: run.config.epochs for run in comparison("svhn-vgg", COMPARED, [0], tmp_path)}
    preset = experiment("svhn-vgg").presets["short"]
    assert preset.small_epochs is not None
    assert preset.small_epochs > preset.epochs
    ours = {"rls", "scratch", "rls-unpruned"}
    assert {label for label, epochs in runs.items() if epochs == preset.small_epochs} == ours
    assert {epochs for label, epochs in runs.items() if label not in ours} == {preset.epochs}
    assert make_config("svhn-vgg", epochs=3).epochs == 3


def test_ours_prunes_earlier_on_mnist_and_keeps_its_steps_large(tmp_path: Path) -> None:
    runs = {run.label: run.config for run in comparison("mnist-fnn", COMPARED, [0], tmp_path)}
    lengths = {label: (config.epochs, config.warmup_epochs) for label, config in runs.items()}
    ours = {"rls", "scratch", "rls-unpruned"}
    assert {label for label, length in lengths.items() if length == (28, 1)} == ours
    assert {length for label, length in lengths.items() if label not in ours} == {(20, 3)}
    scales = {
        label: build_optimizer(config, build_model(config), config.rate).param_groups[0]["mean_scale"]
        for label, config in runs.items()
        if config.optimizer == "rls"
    }
    assert {label for label, k in scales.items() if k == 0.01} == {"rls", "scratch", "rls-unpruned"}
    assert {label for label, k in scales.items() if k == 0.1} == {"rls-paper", "none-rls"}
    assert make_config("mnist-fnn", warmup_epochs=5).warmup_epochs == 5


@pytest.mark.parametrize(("epochs", "patience"), [(10, 3), (39, 3), (40, 4), (200, 20)])
def test_a_long_run_waits_longer_for_a_network_to_recover(epochs: int, patience: int) -> None:
    """On MNIST three epochs of 200 were not enough: the loss was still falling when the prune was undone."""
    ours = make_config("mnist-fnn", epochs=epochs).pruning
    assert ours is not None
    assert ours.patience == patience
    paper = make_config("mnist-fnn", "rls-paper", epochs=epochs).pruning
    assert paper == PAPER
    assert make_config("mnist-fnn", "l1-norm", epochs=epochs).pruning is None
