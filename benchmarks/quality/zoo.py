"""Measures how much of other projects' networks can be pruned, and which layers are left alone and why.

There is one small network per family of torchvision and of timm, and the common architectures of transformers from
their configurations, all with random weights. A Pruner prunes each network once, by 30 % of every layer, without
compensation. Each network runs in its own process, with limits on time and memory; a network that is in the record is
not run again. An error that is not the package's own counts as foreign.

    python -m benchmarks.quality.zoo run                    # all networks, into docs/results/zoo
    python -m benchmarks.quality.zoo run timm/convnext      # some networks; timm: all of one library
    python -m benchmarks.quality.zoo draw                   # the table

torchvision and timm must be on the path. With a CPU build of torch, install them into a separate folder:
``pip install --no-deps --target FOLDER torchvision timm`` and ``PYTHONPATH=FOLDER``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsprune import Pruner
from rlsprune.model.calls import output_tensors

RECORD = Path("docs/results/zoo")
RATIO = 0.3
Maker = Callable[[], tuple[nn.Module, Any]]
"""Function that makes a network and an example of its input."""
SECONDS, GIGABYTES = 150, 8
"""Limits of one network's processor time and memory."""
# Words in names, the smallest networks first.
_SMALL = (
    *("test", "atto", "femto", "pico", "xxsmall", "nano", "xxtiny", "xxt", "xxs", "xx", "xtiny", "xt", "xs", "minimal"),
    *("tiny", "mini", "ti", "t0", "s0", "m0", "b0", "a0", "small", "050", "t", "128s", "s", "s12", "s18", "12", "18"),
    *("121", "26", "100", "b", "base"),
)
_IMAGE, _MEDIUM = 64, 112
"""Side of the images in pixels, and that for networks which need larger images."""


def torchvision_families() -> dict[str, Maker]:
    """Returns a small network per family of torchvision."""
    names = (
        *("alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "densenet121", "googlenet", "inception_v3"),
        *("squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5", "shufflenet_v2_x0_5"),
        *("efficientnet_b0", "efficientnet_v2_s", "regnet_y_400mf", "convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t"),
        *("maxvit_t", "fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "r3d_18", "s3d"),
        *("mvit_v1_b", "swin3d_t", "raft_small"),
    )

    def make(name: str) -> tuple[nn.Module, Any]:
        models = importlib.import_module("torchvision.models")
        given = {} if name in ("raft_small",) else {"weights": None}
        if "resnet50" in name or name.startswith(("deeplab", "lraspp")):
            given["weights_backbone"] = None
        model = models.get_model(name, **given)
        if name in ("r3d_18", "s3d", "mvit_v1_b", "swin3d_t"):
            frames, size = (16, 224) if name != "r3d_18" else (8, 64)
            return model, torch.randn(1, 3, frames, size, size)
        if name == "raft_small":
            return model, (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128))
        size = 224 if name.startswith(("vit", "swin", "maxvit", "alexnet")) else 128 if name != "inception_v3" else 299
        return model, torch.randn(2 if name == "googlenet" else 1, 3, size, size)

    return {f"torchvision/{name}": lambda name=name: make(name) for name in names}


def timm_families() -> dict[str, Maker]:
    """Returns a small network per family of timm."""
    timm = importlib.import_module("timm")
    found = {}
    for family in timm.list_modules():
        names = timm.list_models(module=family)
        if names:
            name = min(names, key=_size)
            found[f"timm/{family}"] = lambda name=name: _timm(name)
    return found


def _size(name: str) -> tuple[int, int, str]:
    words = re.split("_|(?<=[a-z])(?=[0-9])", name)
    return next((place for place, word in enumerate(_SMALL) if word in words), len(_SMALL)), len(name), name


def _timm(name: str) -> tuple[nn.Module, Any]:
    create = importlib.import_module("timm").create_model
    for options in ({"img_size": _IMAGE}, {}):
        with contextlib.suppress(Exception):
            model = create(name, **options).eval()
            channels, *sizes = model.default_cfg["input_size"]
            medium = [[_MEDIUM, _MEDIUM]] if max(sizes) > 512 else []
            for image in ([_IMAGE, _IMAGE], *medium, sizes):
                with contextlib.suppress(Exception), torch.no_grad():
                    example = torch.randn(1, channels, *image)
                    model(example)
                    return model, example
    raise RuntimeError(f"{name} does not run by itself")


def _each(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names, options)


_TEXT = {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072,
         "vocab_size": 1000}  # fmt: skip
_LLAMA = {**_TEXT, "num_key_value_heads": 4, "head_dim": 64}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    **_each(("Bert", "Roberta", "Electra", "MPNet", "Deberta", "DebertaV2", "Albert"), _TEXT),
    "DistilBert": {"dim": 768, "n_layers": 2, "n_heads": 12, "vocab_size": 1000},
    "GPT2": {"n_layer": 2, "vocab_size": 1000},
    "GPTNeo": {
        **{"hidden_size": 768, "num_layers": 2, "num_heads": 12, "vocab_size": 1000},
        "attention_types": [[["global", "local"], 1]],
    },
    **_each(("GPTNeoX", "Phi"), _TEXT),
    "StableLm": {**_TEXT, "num_key_value_heads": 12},
    "OPT": {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 1000},
    **_each(("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Olmo", "Cohere"), _LLAMA),
    "Mixtral": {**_LLAMA, "num_local_experts": 4},
    "Bloom": {"hidden_size": 768, "n_layer": 2, "n_head": 12, "vocab_size": 1000},
    "Falcon": _TEXT,
    "T5": {"d_model": 768, "d_ff": 3072, "num_layers": 2, "num_heads": 12, "vocab_size": 1000},
    "Bart": {
        **{"d_model": 768, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 1000},
        **{"encoder_attention_heads": 12, "decoder_attention_heads": 12},
    },
    **_each(("ViT", "DeiT", "Beit", "Dinov2", "Data2VecVision"), {**_TEXT, "image_size": 64, "patch_size": 16}),
    "Swin": {"image_size": 224, "depths": [1, 1, 2, 1]},
    "ConvNext": {"depths": [1, 1, 2, 1]},
    "Segformer": {"depths": [1, 1, 1, 1]},
    "ResNet": {"depths": [1, 1, 1, 1]},
    "CLIPVision": {**_TEXT, "image_size": 64, "patch_size": 16},
    "CLIPText": _TEXT,
    "Wav2Vec2": {**_TEXT},
    "Whisper": {"d_model": 768, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 12,
                "decoder_attention_heads": 12},
    "Mamba": {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 1000},
}  # fmt: skip
_IMAGES = {"ViT", "DeiT", "Beit", "Dinov2", "Data2VecVision", "Swin", "ConvNext", "Segformer", "ResNet", "CLIPVision"}


def transformers_families() -> dict[str, Maker]:
    """Returns common architectures of transformers, with few layers of full width."""

    def make(name: str, options: dict[str, Any]) -> tuple[nn.Module, Any]:
        library = importlib.import_module("transformers")
        config = getattr(library, f"{name}Config")(**options)
        model = getattr(library, f"{name}Model")(config)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if name in _IMAGES:
            return model, {"pixel_values": torch.randn(1, 3, *[options.get("image_size", _IMAGE)] * 2)}
        if name == "Wav2Vec2":
            return model, {"input_values": torch.randn(1, 4000)}
        ids = torch.randint(3, 900, (1, 16))
        if name == "Whisper":
            return model, {"input_features": torch.randn(1, 80, 3000), "decoder_input_ids": ids}
        if name in ("T5", "Bart"):
            return model, {"input_ids": ids, "decoder_input_ids": ids}
        return model, {"input_ids": ids}

    return {
        f"transformers/{name}": lambda name=name, options=options: make(name, options)
        for name, options in _ARCHITECTURES.items()
    }


def families(library: str | None = None) -> dict[str, Maker]:
    """Returns the networks of all installed libraries, or those of one library."""
    warnings.filterwarnings("ignore")
    declare_operators()
    found = {}
    makers = {"transformers": transformers_families, "torchvision": torchvision_families, "timm": timm_families}
    for name, make in makers.items():
        if library in (None, name) and importlib.util.find_spec(name) is not None:
            found.update(make())
    return found


_kept_alive: list[object] = []


def declare_operators() -> None:
    """Declares the compiled operators that torchvision imports; nothing here calls them."""
    with contextlib.suppress(RuntimeError):
        library = torch.library.Library("torchvision", "DEF")
        _kept_alive.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def block_parameters(model: nn.Module) -> int:
    """Counts the parameters of the blocks that a network repeats, without the layers before and after them."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        kinds = collections.Counter(type(child) for child in module.children() if list(child.children()))
        if isinstance(module, nn.ModuleList | nn.Sequential) and kinds and max(kinds.values()) > 1:
            blocks += [child for child in module.children() if kinds[type(child)] > 1]
    return sum(p.numel() for p in {id(p): p for block in blocks for p in block.parameters()}.values())


def measure(name: str, make: Maker) -> dict[str, Any]:
    """Prunes one network once."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"network": name}
    try:
        model, example = make()
        model.eval()
        call = {} if not isinstance(example, dict) else example
        args = () if isinstance(example, dict) else example if isinstance(example, tuple) else (example,)
        with torch.no_grad():
            model(*args, **call)  # the first pass is slower
        start = time.process_time()
        outputs = output_tensors(model(*args, **call))
        sum(output.sum() for output in outputs if output.requires_grad).backward()
        found["pass_seconds"] = round(time.process_time() - start, 3)
        model.zero_grad()
    except Exception as error:
        return {**found, "unavailable": f"{type(error).__name__}: {error}"[:300]}
    before = {"params": sum(p.numel() for p in model.parameters()), "blocks": block_parameters(model)}
    found |= {"class": type(model).__name__, "parameters": before["params"], "block_parameters": before["blocks"]}
    start = time.process_time()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = Pruner(model, optimizer, example, ratio=RATIO, criterion="l1", compensate=False)
        found["making_seconds"] = round(time.process_time() - start, 3)
        found |= {"groups": len(pruner.groups), "skipped": pruner.skipped}
        start = time.process_time()
        if pruner.groups:
            pruner.prune()
        found["pruning_seconds"] = round(time.process_time() - start, 3)
        with torch.no_grad():
            model(*args, **call)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = "rlsprune" in frames[-1].filename and isinstance(error, ValueError | RuntimeError | TypeError)
        found["own_error" if ours else "foreign_error"] = f"{type(error).__name__}: {error}"[:500]
        found["trace"] = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-4:]]
        return found
    found["left"] = sum(p.numel() for p in model.parameters()) / before["params"]
    found["blocks_left"] = block_parameters(model) / before["blocks"] if before["blocks"] else None
    return found


def run(names: list[str], record: Path, part: tuple[int, int] = (0, 1)) -> None:
    """Runs every network that is not in the record yet, each in its own process."""
    record.mkdir(parents=True, exist_ok=True)
    library = names[0] if len(names) == 1 and "/" not in names[0] else None
    made = families(library)
    torch.set_num_threads(1)
    for name in [name for name in made if library or not names or name in names][part[0] :: part[1]]:
        path = record / f"{name.replace('/', '-')}.json"
        if path.exists():
            continue
        # Forked, so that the libraries are imported once.
        process = multiprocessing.get_context("fork").Process(target=_record, args=(name, made[name], path))
        process.start()
        process.join(10 * SECONDS)
        if process.is_alive():
            process.kill()
            _write(path, {"network": name, "too_slow": f"still running after {10 * SECONDS} s"})
        elif process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL) and not path.exists():
            _write(path, {"network": name, "too_slow": f"more than {SECONDS} s of processor time"})
        elif not path.exists():
            _write(path, {"network": name, "foreign_error": f"the process ended with {process.exitcode}"})
        print(_line(json.loads(path.read_text())), flush=True)


def _record(name: str, make: Maker, path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    _write(path, measure(name, make))


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


def _line(found: dict[str, Any]) -> str:
    title = found["network"]
    for kind in ("unavailable", "too_slow", "foreign_error", "own_error"):
        if kind in found:
            return f"| {title} | {kind.replace('_', ' ')}: {found[kind][:150]} | | | | |"
    blocks = f"{100 * found['blocks_left']:.0f}" if found["blocks_left"] else "–"
    reasons = collections.Counter(_reason(why) for why in found["skipped"].values())
    why = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(3))
    passes = f"{found['making_seconds'] / max(found['pass_seconds'], 1e-3):.0f}" if "pass_seconds" in found else "–"
    return (
        f"| {title} | {found['parameters'] / 1e6:.1f} M | {found['groups']} | {100 * found['left']:.0f} | {blocks} "
        f"| {passes} | {why} |"
    )


def _reason(why: str) -> str:
    """Removes the name of the layer from a reason."""
    why = re.sub(r"\(.*", "", why).strip()
    first, _, rest = why.partition(" ")
    return (
        rest
        if "." in first or "_" in first or (first.isidentifier() and first not in ("its", "it", "the", "no"))
        else why
    )


def draw(record: Path) -> None:
    """Prints the table."""
    found = [json.loads(path.read_text()) for path in sorted(record.glob("*.json"))]
    print("| network | parameters | groups | left, % | of the blocks, % | making, passes | left alone |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for one in found:
        print(_line(one))
    foreign = [one["network"] for one in found if "foreign_error" in one]
    print(f"\n{len(found)} networks, {len(foreign)} foreign errors: {', '.join(foreign) or 'none'}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "draw"))
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth from the Ith on"
    )
    args = parser.parse_args()
    if args.what == "run":
        run(args.networks, args.record, tuple(args.part))
    else:
        draw(args.record)


if __name__ == "__main__":
    main()
