"""The examples run as they are, end with a smaller network that works, and their files load again."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import rlsprune

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
ALLOWED = {
    "rlsprune",
    "torch",
    "numpy",
    "argparse",
    "gzip",
    "os",
    "time",
    "urllib",
    "pathlib",
    "accelerate",
    "__future__",
}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def check(small: nn.Module, path: Path, fresh: nn.Module, inputs: Tensor, labels: Tensor, most: float) -> None:
    """It has at most that share of the parameters, finds 19 of 20 classes, and comes back from its file to the bit."""
    assert parameters(small) <= most * parameters(fresh)
    loaded = rlsprune.load(path, into=fresh).eval()
    with torch.no_grad():
        outputs = small.eval()(inputs)
        assert torch.equal(loaded(inputs), outputs)
    assert (outputs.argmax(1) == labels).float().mean() > 0.95


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    return importlib.import_module(f"examples.{request.param}")


def given(name: str) -> Callable[..., object]:
    return pytest.mark.parametrize("example", [name], indirect=True)


@pytest.mark.parametrize("name", NAMES)
def test_public_api_alone(name: str) -> None:
    tree = ast.parse(FOLDER.joinpath(f"{name}.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in modules} <= ALLOWED
    assert not any(module.startswith("rlsprune.") for module in modules)
    uses = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} - {"__init__"}
    assert not [attribute for attribute in uses if attribute.startswith("_")]


@given("mnist")
def test_mnist(example: object, tmp_path: Path) -> None:
    small = example.main(["--made-up", "--epochs", "6", "--out", "small"])
    images, labels = example.made_up(500)
    check(small, tmp_path / "small", example.build_model(), images.flatten(1), labels, most=0.5)


@given("mnist")
def test_mnist_reads_its_files(example: object, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 28, 28), np.uint8)
    for name, header, content in (("images-idx3", 16, images), ("labels-idx1", 8, np.arange(7, dtype=np.uint8))):
        whole = bytes(header) + content.tobytes()
        tmp_path.joinpath(f"t10k-{name}-ubyte").write_bytes(whole)
        tmp_path.joinpath(f"train-{name}-ubyte.gz").write_bytes(example.gzip.compress(whole))
    for part in ("train", "t10k"):
        pixels, labels = example.read(tmp_path, part)
        assert torch.equal((255 * pixels).round(), torch.from_numpy(images).float())
        assert labels.tolist() == list(range(7))


@given("mnist")
def test_mnist_downloads_what_is_missing(example: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, folder = tmp_path / "served", tmp_path / "data" / "mnist"
    served.mkdir()
    served.joinpath("whole.gz").write_bytes(example.gzip.compress(b"content"))
    served.joinpath("cut.gz").write_bytes(example.gzip.compress(b"content")[:-3])
    monkeypatch.setattr(example, "MIRROR", f"{served.as_uri()}/")
    assert example.find(folder, "whole") == b"content"
    with pytest.raises(EOFError):
        example.find(folder, "cut")
    assert [path.name for path in folder.iterdir()] == ["whole.gz"]


@given("mnist")
def test_mnist_moves_by_a_pixel_at_most(example: object) -> None:
    image = torch.zeros(1, 28, 28)
    image[0, 10, 10] = 1
    torch.manual_seed(0)
    places = {tuple(example.moved(image)[0].nonzero()[0].tolist()) for _ in range(200)}
    assert places == {(row, column) for row in (9, 10, 11) for column in (9, 10, 11)}


@given("resnet")
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("rls", marks=pytest.mark.slow)])
def test_resnet(example: object, optimizer: str, tmp_path: Path) -> None:
    small = example.main(["--epochs", "5", "--optimizer", optimizer, "--out", "small"])
    images, labels = example.made_up(500)
    check(small, tmp_path / "small", example.build_model(1), images, labels, most=0.5)


@given("resnet")
def test_resnet_reads_its_files(example: object, tmp_path: Path) -> None:
    records = np.random.default_rng(0).integers(0, 256, (4, 3073), np.uint8)
    records[:, 0] = [3, 1, 4, 1]
    for number, part in enumerate((records[:3], records[3:]), 1):
        part.tofile(tmp_path / f"data_batch_{number}.bin")
    images, labels = example.read(sorted(tmp_path.glob("data_batch_*")))
    assert labels.tolist() == [3, 1, 4, 1]
    assert torch.equal((255 * images).round().flatten(1), torch.from_numpy(records[:, 1:]).float())


@given("tabular")
def test_tabular_finds_the_true_columns(example: object, tmp_path: Path) -> None:
    small = example.main(["--epochs", "24", "--out", "small"])
    table, labels = example.make_table(1000, seed=1)
    check(small, tmp_path / "small.safetensors", example.build_model(), table, labels, most=0.1)
    kept = rlsprune.Pruner(small, torch.optim.SGD(small.parameters()), table[:1]).kept_inputs
    assert set(example.TRUE) <= set(kept.tolist())
    assert len(kept) <= len(example.TRUE) + 2
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: table[:, kept].numpy()})[0]
    with torch.no_grad():
        assert np.allclose(outputs, small(table).numpy(), atol=1e-5)


@given("transformer")
def test_transformer(example: object, tmp_path: Path) -> None:
    small = example.main(["--epochs", "9", "--out", "small"])
    check(small, tmp_path / "small", example.Classifier(), *example.make_data(500, 2), most=0.85)
    widths = [layer.linear1.out_features for layer in small.encoder.layers]
    assert all(width < 128 for width in widths)
    assert widths == [layer.linear2.in_features for layer in small.encoder.layers]


@given("accelerate_loop")
def test_accelerate_loop(example: object, tmp_path: Path) -> None:
    small = example.train("small")
    inputs, labels = example.make_data(1).tensors
    check(small, tmp_path / "small.safetensors", example.build_model(), inputs, labels, most=0.5)
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
    with torch.no_grad():
        assert np.allclose(outputs, small(inputs).numpy(), atol=1e-5)
