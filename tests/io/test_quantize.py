"""Networks in 8-bit integers: smaller files that onnxruntime runs, and that say nearly the same."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import rlsprune
from rlsprune.app.models import MiniVGG

NETWORKS = {
    "fnn": (lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)), (256,)),
    "vgg": (lambda: MiniVGG(batch_norm=True), (3, 32, 32)),
}


def outputs(path: Path, inputs: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NETWORKS)
def test_int8_file_is_small_and_nearly_the_same(tmp_path: Path, name: str) -> None:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = build().eval()
    inputs = torch.rand(48, *shape)
    exact, small = tmp_path / "exact.onnx", tmp_path / "small.onnx"
    rlsprune.export_onnx(model, inputs[:2], exact)
    rlsprune.quantize_onnx(exact, small, [(part, None) for part in inputs.split(16)])
    assert small.stat().st_size < 0.45 * exact.stat().st_size
    wanted, got = outputs(exact, inputs), outputs(small, inputs)
    assert 0 < np.abs(wanted - got).max() < 0.05 * np.abs(wanted).max()
    assert outputs(small, inputs[:5]).shape == (5, 10), "any batch size"


def test_bad_arguments_leave_the_old_file(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    exact, small = tmp_path / "exact.onnx", tmp_path / "small.onnx"
    small.write_text("kept")
    with pytest.raises(FileNotFoundError, match="export_onnx first"):
        rlsprune.quantize_onnx(exact, small, [torch.rand(2, 4)])
    rlsprune.export_onnx(model, torch.rand(2, 4), exact)
    with pytest.raises(ValueError, match="batches is empty"):
        rlsprune.quantize_onnx(exact, small, [])
    for batches, said in [
        ([torch.rand(2, 5)], r"of shape \(2, 5\), the network takes \(.*4\)"),
        ([torch.rand(4)], r"of shape \(4,\)"),
        ([torch.rand(2, 4).double()], r"type tensor\(double\), the network takes tensor\(float\)"),
        ([torch.full((2, 4), torch.nan)], "not finite"),
        (torch.rand(2, 4), "batches is a tensor: give an iterable"),
    ]:
        with pytest.raises(ValueError, match=said):
            rlsprune.quantize_onnx(exact, small, batches)
    assert small.read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"exact.onnx", "small.onnx"}


def test_columns_of_very_different_ranges_keep_their_say(tmp_path: Path) -> None:
    """One scale for all columns would round the small ones, which decide here, to nothing."""
    torch.manual_seed(0)
    scales = torch.tensor([4000.0, 1.0, 0.01, 0.5])
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    with torch.no_grad():
        model[0].weight /= scales
    inputs = torch.rand(256, 4) * scales
    exact, small = tmp_path / "exact.onnx", tmp_path / "small.onnx"
    rlsprune.export_onnx(model, inputs[:2], exact)
    rlsprune.quantize_onnx(exact, small, inputs.split(64))
    wanted, got = outputs(exact, inputs), outputs(small, inputs)
    assert 0 < np.abs(wanted - got).max() < 0.05 * np.abs(wanted).max()
