"""Exported files compute what the model computes, at any batch size, and exporting leaves the model alone."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import rlsprune.io.export
from rlsprune.graph import find_groups
from rlsprune.io.export import ExportError, export_onnx, export_program
from rlsprune.model.selector import select_inputs
from zoo import ZOO, remove, some_units


def pruned_fnn() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(12, 8)
    select_inputs(first, [0, 3, 4, 11])
    first.weight.data, first.in_features = first.weight.data[:, [0, 3, 4, 11]], 4
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Dropout(), nn.Linear(8, 3))


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    model(torch.randn(4, 3, 8, 8))
    return model


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor, scale: Tensor) -> dict[str, Tensor]:
        total = self.left(left) + self.right(right)
        return {"total": total * scale, "size": total.norm(dim=1)}


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "fnn": (pruned_fnn, (3, 4)),
    "conv": (conv_net, (3, 8, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8)),
}


def run_onnx(path: Path, **inputs: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    values = inputs.values() if len(names) == 1 else [inputs[name] for name in names]
    return [
        torch.as_tensor(out) for out in session.run(None, dict(zip(names, (v.numpy() for v in values), strict=True)))
    ]


@pytest.mark.parametrize(("name", "batch"), [("fnn", 1), ("fnn", 3), ("conv", 1), ("attention", 3)])
def test_program_equals_model_at_every_batch_size(name: str, batch: int, tmp_path: Path) -> None:
    make, shape = MODELS[name]
    model = make()
    export_program(model, torch.randn(batch, *shape), tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2").module()
    for size in (1, 2, 7):
        x = torch.randn(size, *shape)
        torch.testing.assert_close(program(x), model.eval()(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["fnn", "conv", pytest.param("attention", marks=pytest.mark.slow)])
def test_onnx_equals_model_at_every_batch_size(name: str, tmp_path: Path) -> None:
    make, shape = MODELS[name]
    model = make()
    export_onnx(model, torch.randn(1, *shape), tmp_path / "m.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]
    for size in (1, 2, 7):
        x = torch.randn(size, *shape)
        torch.testing.assert_close(run_onnx(tmp_path / "m.onnx", x=x)[0], model.eval()(x), atol=1e-5, rtol=1e-5)


def test_several_inputs_by_position_and_by_name(tmp_path: Path) -> None:
    model = TwoInputs()
    inputs = {"left": torch.randn(4, 4), "right": torch.randn(4, 3), "scale": torch.tensor(2.0)}
    other = {"left": torch.randn(9, 4), "right": torch.randn(9, 3), "scale": torch.tensor(0.5)}
    for example in (inputs, tuple(inputs.values())):
        export_program(model, example, tmp_path / "m.pt2")
        program = torch.export.load(tmp_path / "m.pt2").module()
        found = program(**other) if isinstance(example, dict) else program(*other.values())
        torch.testing.assert_close(found, model(**other))
    export_onnx(model, inputs, tmp_path / "m.onnx")
    total, size = run_onnx(tmp_path / "m.onnx", **other)
    torch.testing.assert_close({"total": total, "size": size}, model(**other), atol=1e-5, rtol=1e-5)


class AnyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, *xs: Tensor, **named: Tensor) -> Tensor:
        return self.layer(sum([*xs, *named.values()]))


def test_any_number_of_inputs(tmp_path: Path) -> None:
    model, inputs, other = AnyInputs(), torch.randn(2, 3, 4), torch.randn(2, 9, 4)
    export_program(model, tuple(inputs), tmp_path / "m.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(*other), model(*other))
    export_onnx(model, tuple(inputs), tmp_path / "m.onnx")
    names = [node.name for node in onnxruntime.InferenceSession(tmp_path / "m.onnx").get_inputs()]
    (found,) = run_onnx(tmp_path / "m.onnx", **dict(zip(names, other, strict=True)))
    torch.testing.assert_close(found, model(*other), atol=1e-5, rtol=1e-5)


class NamedInputs(nn.Module):
    """Some of its inputs have no names in the signature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor, **named: Tensor) -> Tensor:
        return self.first(x) - self.second(named["z"]) + named["a"]


def test_inputs_without_names_in_the_signature(tmp_path: Path) -> None:
    def inputs(batch: int) -> dict[str, Tensor]:
        return {"z": torch.randn(batch, 5), "x": torch.randn(batch, 4), "a": torch.randn(batch, 1)}

    model = NamedInputs()
    forward, other = model.forward, inputs(7)
    export_program(model, inputs(3), tmp_path / "m.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(**other), model(**other))
    export_onnx(model, inputs(3), tmp_path / "m.onnx")
    (found,) = run_onnx(tmp_path / "m.onnx", **other)
    torch.testing.assert_close(found, model(**other), atol=1e-5, rtol=1e-5)
    assert model.forward == forward


def test_the_program_runs_without_this_package(tmp_path: Path) -> None:
    export_program(pruned_fnn(), torch.randn(2, 3, 4), tmp_path / "m.pt2")
    script = (
        "import sys, torch\n"
        "sys.modules['rlsprune'] = None\n"
        "out = torch.export.load(sys.argv[1]).module()(torch.ones(5, 3, 4))\n"
        "print(out.sum().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "m.pt2")], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(pruned_fnn().eval()(torch.ones(5, 3, 4)).sum().item(), abs=1e-4)


@pytest.mark.parametrize("export", [export_program, pytest.param(export_onnx, marks=pytest.mark.slow)])
def test_the_model_its_hooks_and_the_generator_stay(export: Callable[..., None], tmp_path: Path) -> None:
    model = conv_net()
    model[1].eval()  # type: ignore[index]
    calls: list[Any] = []

    class Watcher:
        """As an optimizer would: a bound method that cannot be copied and does what no tracer can follow."""

        def watch(self, _: nn.Module, args: tuple[Tensor], __: Tensor) -> None:
            calls.append(args[0].detach().numpy().mean().item())

        def watch_gradient(self, *_: Any) -> None:
            calls.append("gradient")

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    Watcher.watch.__module__ = "rlsprune.optim.recorder"
    model[0].register_forward_hook(Watcher().watch)  # type: ignore[index]
    model[0].register_full_backward_hook(Watcher().watch_gradient)  # type: ignore[index]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    state = torch.get_rng_state()
    export(model, torch.ones(2, 3, 8, 8), tmp_path / "m.pt2")
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    assert [module.training for module in model.modules()] == modes
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model(torch.ones(2, 3, 8, 8))
    assert len(calls) == 1  # it still watches


def test_hooks_of_the_user_are_part_of_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_forward_hook(lambda _, __, out: out * 10)
    export_program(model, torch.randn(2, 3), tmp_path / "m.pt2")
    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(x), model(x))


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, -1)


class BatchByLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(("export", "file"), [(export_program, "m.pt2"), (export_onnx, "m.onnx")])
def test_a_model_that_cannot_be_exported_leaves_the_old_file(
    export: Callable[..., None], file: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.write_bytes(b"old")
    with pytest.raises(ExportError, match=r"FixedBatch .* batch of variable size"):
        export(FixedBatch(), torch.randn(4, 3), path)
    with pytest.raises(ExportError, match=r"BatchByLength .* x\.shape\[0\]"):
        export(BatchByLength(), torch.randn(4, 3, 2), path)
    example, state = torch.randn(4, 3), torch.get_rng_state()
    with pytest.raises(ExportError, match=r"differs .* nothing was written"):
        export(Random(), example, path)
    assert torch.equal(torch.get_rng_state(), state)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("export", "file"), [(export_program, "m.pt2"), pytest.param(export_onnx, "m.onnx", marks=pytest.mark.slow)]
)
def test_a_full_disk_leaves_the_old_file(
    export: Callable[..., None], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / file
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        export(nn.Linear(3, 2), torch.randn(4, 3), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"onnxscript: pip install 'rlsprune\[onnx\]'"):
        export_onnx(nn.Linear(3, 2), torch.randn(4, 3), tmp_path / "m.onnx")


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"end in \.pt2"):
        export_program(nn.Linear(3, 2), torch.randn(4, 3), tmp_path / "m.bin")
    with pytest.raises(ValueError, match="batch dimension"):
        export_program(nn.Linear(3, 2), torch.tensor(1.0), tmp_path / "m.pt2")


@pytest.mark.parametrize(
    ("ours", "theirs", "equal"),
    [
        ([1.0, 2.0], [1.0, 2.000009], True),
        ([1.0, 2.0], [1.0, 2.0001], False),
        ([1000.0], [1000.005], True),
        ([float("nan"), float("inf")], [float("nan"), float("inf")], True),
        ([float("nan")], [1.0], False),
        ([1.0], [float("nan")], False),
        ([float("inf")], [-float("inf")], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_what_counts_as_equal(ours: list[float], theirs: list[float], equal: bool) -> None:
    error, allowed = rlsprune.io.export._difference(torch.tensor(ours), torch.tensor(theirs))
    assert (error <= allowed) is equal


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "shufflenet",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("convnext", "mixer", "repvgg", "super-resolution")),
    ],
)
def test_a_pruned_network_of_the_zoo_exports(name: str, tmp_path: Path) -> None:
    """Written only if onnxruntime gives what the model gives, at two batch sizes."""
    model, x = ZOO[name].model(), ZOO[name].inputs()
    graph = find_groups(model, x)
    remove(model, graph, some_units(graph))
    export_onnx(model, x, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").exists()
