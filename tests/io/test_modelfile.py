"""Round trips through files, faults while writing, and files from strangers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlsprune.io.atomic import FileError
from rlsprune.io.modelfile import load, read_metadata, save
from rlsprune.io.tensorfile import digest
from rlsprune.model.selector import kept_inputs, select_inputs


def shrink(module: nn.Module, attributes: dict[str, Any], **shapes: tuple[int, ...]) -> None:
    """Cuts the leading part out of each tensor: surgery by hand."""
    for name, value in attributes.items():
        setattr(module, name, value)
    for name, shape in shapes.items():
        tensor = getattr(module, name)
        tensor.data = tensor.data[tuple(slice(size) for size in shape)].clone()


def fnn() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.PReLU(8), nn.LayerNorm(8), nn.Linear(8, 3))


def small_fnn() -> nn.Module:
    model = fnn()
    linear, prelu, norm, last = (model.get_submodule(name) for name in "0123")
    assert isinstance(linear, nn.Linear)
    select_inputs(linear, [1, 4, 5, 9])
    shrink(linear, {"in_features": 4, "out_features": 5}, weight=(5, 4), bias=(5,))
    shrink(prelu, {"num_parameters": 5}, weight=(5,))
    shrink(norm, {"normalized_shape": (5,)}, weight=(5,), bias=(5,))
    shrink(last, {"in_features": 5}, weight=(3, 5))
    return model


class ConvNet(nn.Module):
    """Plain, grouped, depthwise and transposed convolutions, four norms, a bare parameter and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.batch = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4)
        self.instance = nn.InstanceNorm2d(8, affine=False)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.group = nn.GroupNorm(4, 8)
        self.up = nn.ConvTranspose2d(8, 6, 2, groups=2)
        self.scale = nn.Parameter(torch.rand(6, 1, 1))
        self.head = nn.Conv2d(6, 6, 1, bias=False)
        self.tied = nn.Conv2d(6, 6, 1, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.grouped(self.batch(self.conv(x)).relu()))
        x = self.up(self.group(self.depthwise(x))) * self.scale
        out: Tensor = self.tied(self.head(x).relu())
        return out


def small_conv() -> nn.Module:
    model = ConvNet()
    shrink(model.conv, {"out_channels": 4}, weight=(4,), bias=(4,))
    norm = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (4,))
    shrink(model.batch, {"num_features": 4}, **norm)
    shrink(model.grouped, {"in_channels": 4, "out_channels": 4, "groups": 2}, weight=(4,), bias=(4,))
    shrink(model.instance, {"num_features": 4})
    shrink(model.depthwise, {"in_channels": 4, "out_channels": 4, "groups": 4}, weight=(4,))
    shrink(model.group, {"num_groups": 2, "num_channels": 4}, weight=(4,), bias=(4,))
    shrink(model.up, {"in_channels": 4, "out_channels": 4}, weight=(4, 2), bias=(4,))
    shrink(model, {}, scale=(4,))
    shrink(model.head, {"in_channels": 4, "out_channels": 4}, weight=(4, 4))
    shrink(model.tied, {"in_channels": 4, "out_channels": 4})
    return model


class Sequence1d3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=0)
        self.conv1 = nn.Conv1d(8, 6, 3)
        self.norm1 = nn.BatchNorm1d(6, track_running_stats=False)
        self.conv3 = nn.Conv3d(1, 4, (1, 1, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm1(self.conv1(self.embed(tokens).transpose(1, 2)))
        out: Tensor = self.conv3(x[:, None, None])
        return out


def small_sequence() -> nn.Module:
    model = Sequence1d3d()
    shrink(model.embed, {"embedding_dim": 5}, weight=(10, 5))
    shrink(model.conv1, {"in_channels": 5, "out_channels": 2}, weight=(2, 5), bias=(2,))
    shrink(model.norm1, {"num_features": 2}, weight=(2,), bias=(2,))
    shrink(model.conv3, {"out_channels": 3}, weight=(3,), bias=(3,))
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Tensor]] = {
    "fnn": (fnn, small_fnn, torch.randn(5, 12)),
    "conv": (ConvNet, small_conv, torch.randn(2, 3, 9, 9)),
    "sequence": (Sequence1d3d, small_sequence, torch.randint(0, 10, (3, 7))),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.safetensors"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pruned", [False, True])
def test_round_trip(case: str, pruned: bool, path: Path) -> None:
    make, make_small, x = CASES[case]
    model = make_small() if pruned else make()
    model(x)  # moves running statistics
    save(model, path, {"history": [{"epoch": 3}]})
    fresh = make()
    parameters = dict(fresh.named_parameters())
    assert load(path, into=fresh) is fresh
    assert str(fresh) == str(model)  # the attributes
    assert {name: id(p) for name, p in fresh.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert fresh.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert torch.equal(fresh.eval()(x), model.eval()(x))
    fresh.train()(x).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in fresh.parameters())
    # and once more, from what was loaded, into a model that already has this size
    save(fresh, path)
    assert torch.equal(load(path, into=model).eval()(x), fresh.eval()(x))


def test_metadata(path: Path) -> None:
    save(small_fnn(), path, {"history": [1.5, None], "note": "ξ"})
    found = read_metadata(path)
    assert found["metadata"] == {"history": [1.5, None], "note": "ξ"}
    assert found["kept_inputs"] == {"0": [1, 4, 5, 9]}
    assert found["shapes"]["0.weight"] == (5, 4)
    assert found["layers"]["2"] == {"normalized_shape": [5]}
    save(small_conv(), path)
    assert read_metadata(path)["aliases"] == {"tied.weight": "head.weight"}
    assert read_metadata(path)["layers"]["depthwise"] == {"in_channels": 4, "out_channels": 4, "groups": 4}


def test_ties_stay_ties_and_views_of_one_storage_become_separate(path: Path) -> None:
    save(small_conv(), path)
    fresh = load(path, into=ConvNet())
    assert fresh.get_parameter("head.weight") is fresh.get_parameter("tied.weight")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    whole = torch.randn(8, 4)
    model[0].weight.data, model[1].weight.data = whole[:4], whole[4:]
    save(model, path)
    for name, tensor in load(path, into=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    model[0].weight.data, model[1].weight.data = whole[:4], whole[2:6]  # and they may overlap
    save(model, path)
    for name, tensor in load(path, into=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    model[1].weight.data = model[0].weight.data  # one tensor under two parameters
    save(model, path)
    apart = load(path, into=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert torch.equal(apart.get_parameter("0.weight"), apart.get_parameter("1.weight"))
    assert apart.get_parameter("0.weight").data_ptr() != apart.get_parameter("1.weight").data_ptr()


def test_flags_dtype_and_memory_format_stay(path: Path) -> None:
    model = small_conv().bfloat16()
    save(model, path)
    fresh = ConvNet().bfloat16().to(memory_format=torch.channels_last)
    fresh.conv.weight.requires_grad_(False)
    load(path, into=fresh)
    assert not fresh.conv.weight.requires_grad
    assert fresh.conv.weight.dtype == torch.bfloat16
    assert fresh.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(fresh.conv.weight, model.get_parameter("conv.weight"))


def test_gradients_go_and_a_loss_that_is_still_alive_does_no_harm(path: Path) -> None:
    save(small_fnn(), path)
    model = fnn()
    loss = model(torch.ones(2, 12)).sum()
    loss.backward()
    load(path, into=model)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(2, 12)).sum().backward()
    assert loss.grad_fn is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_wrapped_models_have_the_names_of_the_model(path: Path) -> None:
    model = small_fnn()
    save(nn.DataParallel(torch.compile(model)), path)
    assert set(read_metadata(path)["shapes"]) == set(model.state_dict())
    fresh = fnn()
    load(path, into=nn.DataParallel(fresh))
    assert torch.equal(fresh(torch.ones(1, 12)), model(torch.ones(1, 12)))


def test_the_loaded_model_does_not_depend_on_the_file(path: Path) -> None:
    save(small_fnn(), path)
    model = load(path, into=fnn())
    before = model(torch.ones(1, 12))
    path.write_bytes(b"")
    assert torch.equal(model(torch.ones(1, 12)), before)


# --- Faults while writing --------------------------------------------------------------------------------------------


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("broken", ["os.fsync", "pathlib.Path.replace", "rlsprune.io.tensorfile.save_file"])
def test_a_full_disk_leaves_the_old_file_and_no_other(broken: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(small_fnn(), path)
    old = path.read_bytes()
    monkeypatch.setattr(broken, full_disk)
    with pytest.raises(OSError, match="No space"):
        save(fnn(), path)
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_half_way_leaves_the_old_file(path: Path) -> None:
    """A real limit on the size of files, in a process of its own."""
    save(fnn(), path)
    old = path.read_bytes()
    limited = (
        "import resource, sys, torch, rlsprune\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n    rlsprune.save(torch.nn.Linear(100, 100), sys.argv[1])\n"
        "except OSError as error:\n    sys.exit(7 if sys.argv[1] in str(error) else 8)\n"
    )
    assert subprocess.run([sys.executable, "-c", limited, str(path)], check=False).returncode == 7
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


def test_the_file_has_ordinary_rights_and_links_are_followed(path: Path) -> None:
    umask = os.umask(0o022)
    try:
        save(fnn(), path)
        assert path.stat().st_mode & 0o777 == 0o644
        path.chmod(0o640)
        link = path.with_name("link")
        link.symlink_to(path)
        save(small_fnn(), link)
    finally:
        os.umask(umask)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert read_metadata(path)["shapes"]["0.weight"] == (5, 4)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"more": 1}

    for model, message in [
        (nn.Sequential(Extra(2, 2)), "0 keeps extra state"),
        (nn.LazyLinear(3), "'weight' has no data"),
        (nn.Linear(2, 2, device="meta"), "real device"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex64"),
    ]:
        with pytest.raises(ValueError, match=message):
            save(model, path)
    with pytest.raises(ValueError, match="not JSON"):
        save(fnn(), path, {"model": fnn()})
    with pytest.raises(FileNotFoundError, match="make it first"):
        save(fnn(), path / "no" / "folder")
    with pytest.raises(IsADirectoryError, match="file name"):
        save(fnn(), path.parent)
    assert not list(path.parent.iterdir())


# --- Files that do not fit -------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> tuple[str, dict[str, Tensor]]:
    return str(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}


def refuse(path: Path, model: nn.Module, message: str) -> None:
    """Loading raises our error, which names the file, and leaves the model alone."""
    text, tensors = snapshot(model)
    with pytest.raises(FileError, match=message) as caught:
        load(path, into=model)
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    after_text, after = snapshot(model)
    assert after_text == text
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in tensors.items())


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Changes a file's content and signs it again, as someone with bad intent would."""
    with safe_open(path, "pt") as file:
        content = json.loads(file.metadata()["rlsprune"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(content, tensors)
    text = json.dumps(content)
    save_file(tensors, path, {"rlsprune": text, "sha256": digest(text, tensors)})


def put(where: str, key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda content, _: content[where].__setitem__(key, value)


def tensor(name: str, value: Tensor) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda _, tensors: tensors.__setitem__(name, value)


FNN_CHANGES: list[tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = [
    (lambda c, _: c.update(format=2), "format other than 1"),
    (lambda c, _: c.update(format=True), "no format"),
    (lambda c, _: c.update(layers=[]), "'layers' in its metadata"),
    (lambda c, _: c.pop("aliases"), "'aliases' in its metadata"),
    (lambda c, _: c["layers"].pop("3"), "missing layers: '3'"),
    (put("layers", "0", 7), "layer '0'.*file gives int"),
    (put("layers", "0", {"in_features": 4}), "layer '0'.*in_features"),
    (put("layers", "0", {"in_features": 4, "out_features": 0}), "between 1 and the model's 8, not 0"),
    (put("layers", "0", {"in_features": 4, "out_features": 9}), "between 1 and the model's 8, not 9"),
    (put("layers", "0", {"in_features": 4, "out_features": 10**400}), "between 1 and"),
    (put("layers", "0", {"in_features": 4, "out_features": True}), "whole number, not a bool"),
    (put("layers", "0", {"in_features": 4, "out_features": 4}), "'0.weight' has shape"),
    (put("layers", "2", {"normalized_shape": 5}), "list of 1"),
    (put("inputs", "0", 13), "took 12 features in the model, 13 in the file"),
    (put("inputs", "0", "12"), "took 12 features"),
    (put("inputs", "1", 8), "'1', which is not a Linear"),
    (put("inputs", "3", 8), "'3' are not a list"),
    (lambda c, _: c["inputs"].clear(), "unexpected tensors: '0.kept_inputs'"),
    (tensor("0.kept_inputs", torch.tensor([1, 4, 5, 12])), r"0…11"),
    (tensor("0.kept_inputs", torch.tensor([-1, 4, 5, 9])), r"0…11"),
    (tensor("0.kept_inputs", torch.tensor([1, 5, 4, 9])), "ascending"),
    (tensor("0.kept_inputs", torch.tensor([1, 4, 4, 9])), "ascending"),
    (tensor("0.kept_inputs", torch.tensor([1, 4, 5])), "list of 4 indices"),
    (tensor("0.kept_inputs", torch.tensor([1.0, 4.0, 5.0, 9.0])), "list of 4 indices"),
    (tensor("0.weight", torch.zeros(5, 4, dtype=torch.float64)), "F64 in the file"),
    (tensor("0.weight", torch.zeros(20)), "'0.weight' has shape"),
    (tensor("еvil\u202e", torch.zeros(1)), r"unexpected tensors: '\\u0435vil\\u202e'"),
    (lambda _, t: t.pop("0.bias"), "missing tensors: '0.bias'"),
    (put("aliases", "0.bias", "1.weight"), "not another name"),
    (put("aliases", "other", "nowhere"), "not another name"),
    (put("aliases", "other", ["0.bias"]), "not another name"),
    (put("aliases", "other", "0.bias"), "unexpected tensors: 'other'"),
]


@pytest.mark.parametrize(("change", "message"), FNN_CHANGES, ids=[m for _, m in FNN_CHANGES])
def test_changed_files_are_refused(
    change: Callable[[dict[str, Any], dict[str, Tensor]], object], message: str, path: Path
) -> None:
    save(small_fnn(), path)
    rewrite(path, change)
    refuse(path, fnn(), message)


CONV_CHANGES: list[tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = [
    (put("layers", "grouped", {"in_channels": 4, "out_channels": 4, "groups": 3}), "not a multiple of groups=3"),
    (put("layers", "grouped", {"in_channels": 4, "out_channels": 4, "groups": 4}), "'grouped.weight' has shape"),
    (put("layers", "group", {"num_groups": 3, "num_channels": 4}), "not a multiple of num_groups=3"),
    (tensor("scale", torch.zeros(7, 1, 1)), "'scale' is .* does not fit"),
    (tensor("scale", torch.zeros(0, 1, 1)), "does not fit"),
    (tensor("conv.weight", torch.zeros(4, 3, 3, 1)), "'conv.weight' has shape"),
    (lambda c, t: (c["aliases"].clear(), t.update({"tied.weight": torch.zeros(4, 4, 1, 1)})), "one tensor for"),
]


@pytest.mark.parametrize(("change", "message"), CONV_CHANGES, ids=[m for _, m in CONV_CHANGES])
def test_changed_convolutions_are_refused(
    change: Callable[[dict[str, Any], dict[str, Tensor]], object], message: str, path: Path
) -> None:
    save(small_conv(), path)
    rewrite(path, change)
    refuse(path, ConvNet(), message)


def test_other_models_are_refused(path: Path) -> None:
    save(small_fnn(), path)
    refuse(path, nn.Sequential(nn.Linear(12, 8), nn.PReLU(8)), "unexpected layers: '2', '3'")
    refuse(path, fnn().double(), "F32 in the file and torch.float64 in the model")
    save(fnn(), path)
    refuse(path, small_fnn(), "between 1 and the model's")
    save(nn.LSTM(3, 4), path)
    refuse(path, nn.LSTM(3, 3), "hidden_size must be between 1 and the model's 3")
    save(nn.Bilinear(3, 3, 4), path)
    refuse(path, nn.Bilinear(3, 3, 5), "Bilinear cannot be resized")
    save(nn.Embedding(3, 2), path)
    refuse(path, nn.Embedding(5, 2, padding_idx=4), "padding_idx=4")
    with pytest.raises(ValueError, match="real device"):
        load(path, into=nn.Embedding(3, 2, device="meta"))


def test_a_selector_that_the_file_lacks_is_refused(path: Path) -> None:
    model = fnn()
    first = model.get_submodule("0")
    assert isinstance(first, nn.Linear)
    shrink(first, {"in_features": 4}, weight=(8, 4))  # as strip_inputs leaves it
    save(model, path)
    refuse(path, load_selected(), "has an input selector, the file has none")


def load_selected() -> nn.Module:
    model = fnn()
    first = model.get_submodule("0")
    assert isinstance(first, nn.Linear)
    select_inputs(first, [0, 1, 2, 3])
    shrink(first, {"in_features": 4}, weight=(8, 4))
    assert kept_inputs(first) is not None
    return model


# --- Files that are no files of ours ---------------------------------------------------------------------------------


def header(content: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    return (len(content) if length is None else length).to_bytes(8, "little") + content + body


BAD_BYTES = {
    "empty": (b"", "not a whole safetensors file"),
    "short": (b"\x01\x00", "not a whole"),
    "a header of 1 GB": (header(b"{}", length=2**30), "not a whole"),
    "a header of 2^63": (header(b"{}", length=2**63), "not a whole"),
    "text": (b"just some text that is long enough", "not a whole"),
    "no JSON": (header(b"abcdefgh"), "not a sound"),
    "plain": (header(b"{}"), "another program"),
    "beyond the end": (header(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}', b"1234"), "not a sound"),
    "overlap": (
        header(
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
            b"123456",
        ),
        "not a sound",
    ),
    "absurd shape": (
        header(b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,4]}}', b"1234"),
        "not a sound",
    ),
    "deep metadata": (
        header(json.dumps({"__metadata__": {"rlsprune": "[" * 100_000, "sha256": ""}}).encode()),
        "not JSON",
    ),
    "no object": (header(b'{"__metadata__":{"rlsprune":"[1]","sha256":""}}'), "no format"),
    "numbers for text": (header(b'{"__metadata__":{"rlsprune":1,"sha256":""}}'), "not a sound"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_foreign_bytes_are_refused(name: str, path: Path) -> None:
    content, message = BAD_BYTES[name]
    path.write_bytes(content)
    refuse(path, fnn(), message)
    with pytest.raises(FileError, match=message):
        read_metadata(path)


def test_a_header_above_the_limit_is_refused_unread(path: Path) -> None:
    with path.open("wb") as file:
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**30 + 8)  # sparse: takes no space
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuse(path, fnn(), "1,073,741,824 bytes, 67,108,864 are allowed")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_pipe_or_folder_is_refused_and_a_missing_file_is_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(FileError, match="not a regular file"):
            load(tmp_path / name, into=fnn())
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing", into=fnn())


def test_a_flipped_bit_in_the_data_is_noticed(path: Path) -> None:
    save(small_fnn(), path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    refuse(path, fnn(), "checksum")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "good.safetensors"
    save(small_fnn(), path, {"history": [1, 2, 3]})
    return path


EDIT = st.tuples(st.integers(0, 10**6), st.integers(0, 40), st.binary(max_size=40))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(EDIT, min_size=1, max_size=4))
def test_mutated_files_load_or_are_refused(edits: list[tuple[int, int, bytes]], good: Path) -> None:
    """Bytes replaced, inserted and cut anywhere: the same model or our error, nothing else."""
    data = good.read_bytes()
    for position, cut, insert in edits:
        at = position % (len(data) + 1)
        data = data[:at] + insert + data[at + cut :]
    mutant = good.with_name("mutant.safetensors")
    mutant.write_bytes(data)
    model, original = fnn(), load(good, into=fnn())
    try:
        load(mutant, into=model)
    except FileError:
        assert str(model) == str(fnn())
    else:
        for name, value in original.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
    with contextlib.suppress(FileError):
        read_metadata(mutant)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["0", "0.bias", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "1", "in_features", "a"]), inner),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(
        ["format", "layers", "inputs", "aliases", "layers.0", "layers.2", "inputs.0", "aliases.0.bias"]
    ),
    value=JSON,
)
def test_metadata_of_any_form_loads_or_is_refused(field: str, value: Any, good: Path) -> None:
    mutant = good.with_name("metadata.safetensors")
    mutant.write_bytes(good.read_bytes())
    where, _, key = field.partition(".")
    change: Callable[[dict[str, Any], dict[str, Tensor]], object] = (
        put(where, key, value) if key else lambda content, _: content.update({where: value})
    )
    rewrite(mutant, change)
    for read in (lambda: load(mutant, into=fnn()), lambda: read_metadata(mutant)):
        with contextlib.suppress(FileError):
            read()


def test_inference_mode_is_refused_and_the_model_is_as_it_was(path: Path) -> None:
    model = fnn()
    save(model, path)
    other = fnn()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode.*no_grad"):
        load(path, into=other)
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
    other(torch.rand(2, 12)).sum().backward()


def test_equal_models_give_equal_files(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(3, 5).to(torch.bfloat16)
            self.wide = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
            self.register_buffer("flags", torch.tensor([True, False, True]))
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("nothing", torch.empty(0, 4))

    files = [tmp_path / f"{number}.safetensors" for number in range(8)]
    for file in files:
        save(Odd(), file, {"note": "äöü \ud800", "numbers": [1, 2, 3]})
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], framework="pt") as file:  # as the package that defines the format reads it
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    own = Odd().state_dict()
    assert read.keys() == own.keys()
    assert all(torch.equal(read[name], own[name]) and read[name].dtype == own[name].dtype for name in own)


def test_a_name_that_no_system_takes_is_refused() -> None:
    with pytest.raises(FileError, match=r"'a\\x00b': there is a NUL character in it"):
        save(fnn(), "a\0b")
    with pytest.raises(FileError, match="NUL character"):
        load("a\0b", fnn())
    with pytest.raises(FileError, match="NUL character"):
        read_metadata("a\0b")
