"""Shrinks networks that others trained, and measures accuracy right after the cut, without any training.

The networks are those of `benchmarks.quality.trained`. Every method gets the same network and the same training images,
with labels only for Taylor. Rivals remove the same share of every inner layer of the blocks, as torch-pruning does by
default, until the target for FLOPs is met. Each row uses all 10,000 test images once. With a zip file of photographs in
place of weights, the network is EfficientNet-Lite0, each seed takes another fifth of them as test images, and accuracy
is agreement with the given network.

    python -m benchmarks.quality.shrink table --weights resnet56.safetensors --data-dir DATA --seeds 0,1,2
    python -m benchmarks.quality.shrink parts --weights resnet20.safetensors --data-dir DATA --flops 0.5
    python -m benchmarks.quality.shrink table --weights photographs.zip --flops 0.75 --seeds 0,1,2,3,4
    python -m benchmarks.quality.shrink front --weights resnet56.safetensors --data-dir DATA --out docs/images/front.png
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch_pruning
from torch import nn
from torch.nn import functional
from torch_pruning.pruner import importance

import rlsprune
from benchmarks.quality.trained import CALIBRATION, Case, load_case, load_photographs
from rlsprune.model.modes import evaluating
from rlsprune.prune.choice import find_curves
from rlsprune.prune.criteria import l1
from rlsprune.prune.elimination import Curve
from rlsprune.reconstruction.calibration import Calibration
from rlsprune.reconstruction.norms import make_consistent
from rlsprune.reconstruction.rebuild import rebuild
from rlsprune.shrinking.closed_form import ClosedForm, CutPlan

INNER = (".conv1", "._expand_conv", "._depthwise_conv")
"""Name endings of the layers whose channels no residual sum reads."""
FRONT = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def ours(case: Case, flops: float) -> nn.Module:
    """Shrinks a copy as a user does."""
    model = copy.deepcopy(case.model)
    rlsprune.shrink(model, case.images, target={"flops": flops})
    return model


class Sizes:
    """Our method at several sizes from one analysis of the network, as in `shrink` with `max_drop`."""

    def __init__(self) -> None:
        self._case: Case | None = None

    def __call__(self, case: Case, flops: float) -> nn.Module:
        """Shrinks a copy to one of the sizes."""
        if case is not self._case:
            calibration = Calibration(case.images, [len(images) for images in case.images])
            self._model = copy.deepcopy(case.model)
            self._case, self._form = case, ClosedForm(self._model, case.example, calibration)
        self._form.apply(self._form.plan({"flops": flops}))
        return copy.deepcopy(self._model)


def rival(
    make: Callable[[], Any], gradients: bool = False, everywhere: bool = False
) -> Callable[[Case, float], nn.Module]:
    """Makes torch-pruning's method with one of its importances, for the inner layers of the blocks.

    Args:
        make: Function that makes the importance.
        gradients: Whether the importance needs gradients of the loss.
        everywhere: Whether channels of all layers are ranked together, instead of the same share of each being removed.
    """

    def pruned(case: Case, flops: float) -> nn.Module:
        low, high = 0.0, 1.0
        best = copy.deepcopy(case.model)
        taught = copy.deepcopy(case.model)
        if gradients:
            for images, labels in zip(case.images, case.labels, strict=True):
                functional.cross_entropy(taught(images), labels).backward()
        for _ in range(7):
            ratio = (low + high) / 2
            torch.manual_seed(0)
            model = copy.deepcopy(case.model)
            for own, other in zip(model.parameters(), taught.parameters(), strict=True):
                own.grad = None if other.grad is None else other.grad.clone()
            inner = {module for name, module in model.named_modules() if name.endswith(INNER)}
            kept = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear) and m not in inner]
            pruner = torch_pruning.pruner.BasePruner(
                model,
                case.example,
                importance=make(),
                pruning_ratio=ratio,
                ignored_layers=kept,
                global_pruning=everywhere,
            )
            pruner.step()
            if case.share(model) <= flops:
                high, best = ratio, model
            else:
                low = ratio
        return best

    return pruned


RIVALS = {
    "random": rival(importance.RandomImportance),
    "L1": rival(lambda: importance.MagnitudeImportance(p=1)),
    "L2": rival(lambda: importance.MagnitudeImportance(p=2)),
    "L2, layers ranked together": rival(lambda: importance.MagnitudeImportance(p=2), everywhere=True),
    "Taylor": rival(importance.TaylorImportance, gradients=True),
    "BN scale": rival(importance.BNScaleImportance),
}


def parts(case: Case, flops: float) -> dict[str, Callable[[], nn.Module]]:
    """Returns our method, and our method without each of its parts."""
    model = copy.deepcopy(case.model)
    batches = Calibration(case.images, [len(x) for x in case.images])
    form = ClosedForm(model, case.example, batches)
    curves, sites, plan = dict(form.curves), dict(form.sites), form.plan({"flops": flops})
    groups = form.graph.groups

    def taken() -> nn.Module:
        result = copy.deepcopy(model)
        form.restore()
        form.curves, form.sites = curves, sites
        return result

    def run(
        change: Mapping[str, Any] | None = None,
        orders: Mapping[str, list[int]] | None = None,
        widths: CutPlan = plan,
        only: Callable[[str], bool] = lambda name: True,
    ) -> nn.Module:
        form.curves = {n: Curve((orders or {}).get(n, c.order), c.costs) for n, c in curves.items()}
        form.sites = {key: replace(site, **(change or {})) for key, site in sites.items() if only(site.layer)}
        form.apply(widths)
        return taken()

    def largest(planned: Callable[[float], CutPlan]) -> CutPlan:
        """Finds the plan for the largest share between 0 and 1 that meets the target."""
        low, high, found = 0.0, 1.0, planned(0.0)
        for _ in range(10):
            share = (low + high) / 2
            form.cut(planned(share))
            if case.share(model) <= flops:
                low, found = share, planned(share)
            else:
                high = share
            form.restore()
        return found

    def uniform(share: float) -> CutPlan:
        return CutPlan({group.name: math.floor((1 - share) * group.size) for group in groups}, 0.0)

    def cut_only() -> nn.Module:
        form.cut(plan)
        return taken()

    def to_own_outputs() -> nn.Module:
        """Refits layers that lose inputs to their own outputs in the whole network."""
        apart = {key: replace(site, shared=True) for key, site in sites.items()}
        form.shared = find_curves(form.whole, form.graph, apart, batches, {}).shared
        form.cut(plan)
        form.shared = {}
        return taken()

    @cache
    def refitted() -> nn.Module:
        kept = form.cut(plan)
        with evaluating(model):
            rebuild(form.whole, model, sites, kept, batches)
        return taken()

    def consistent() -> nn.Module:
        result = copy.deepcopy(refitted())
        make_consistent(result, case.images)
        return result

    generator = torch.Generator().manual_seed(0)
    random = {g.name: torch.randperm(g.size, generator=generator).tolist() for g in groups}
    by_norm = {g.name: torch.argsort(l1(g)[0]).tolist() for g in groups}
    readers = {member.name for group in groups for member in group.consumers}
    last = list(sites.values())[-1].layer
    return {
        "all of it": run,
        "same share of every layer": lambda: run(widths=largest(uniform)),
        "widths by parameters": lambda: run(widths=largest(lambda share: form.plan_share("params", share))),
        "channels by L1": lambda: run(orders=by_norm),
        "channels at random": lambda: run(orders=random),
        "refitted to each layer's own outputs": to_own_outputs,
        "only layers that lose inputs refitted": lambda: run(only=lambda name: name in readers),
        "classifier not refitted": lambda: run(only=lambda name: name != last),
        "sums not made up for": lambda: run({"sums": False, "low": -math.inf, "high": math.inf}),
        "ReLU not looked at": lambda: run({"low": -math.inf, "high": math.inf}),
        "no refit": cut_only,
        "all of it, statistics taken anew": lambda: with_new_statistics(case, consistent()),
        "the same, batch norms not consistent": lambda: with_new_statistics(case, refitted()),
    }


def with_new_statistics(case: Case, model: nn.Module) -> nn.Module:
    """Copies the network with the means and variances that training mode would compute."""
    result = copy.deepcopy(model)
    for module in result.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean over the batches
    result.train()
    with torch.no_grad():
        for images in case.images:
            result(images)
    return result.eval()


def measured(case: Case, make: Callable[[], nn.Module]) -> dict[str, float]:
    """Makes a network and measures its accuracy, its size, and the time in passes over the images."""
    forward = case.forward_seconds()
    start = time.process_time()
    model = make()
    spent = time.process_time() - start
    forward = (forward + case.forward_seconds()) / 2
    return {"accuracy": case.accuracy(model), "flops": case.share(model), "forwards": spent / forward}


class Record:
    """The rows so far, written to a file after each, so that a run that was stopped can continue.

    Args:
        path: A JSON file; None to keep the rows in memory.
        settings: The common settings of the rows; a file with other settings is refused.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            known = json.loads(path.read_text())
            if known["settings"] != self._settings:
                raise SystemExit(f"{path} is for {known['settings']}, not {self._settings}: name another --record")
            self.rows = known["rows"]

    def has(self, key: dict[str, Any]) -> bool:
        """Returns whether there is a row with these entries."""
        return any(key.items() <= row.items() for row in self.rows)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Adds a row, and returns it."""
        self.rows.append(row)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"settings": self._settings, "rows": self.rows}, indent=1) + "\n")
        return row


def main() -> None:
    """Prints a table, and records the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "parts", "front"))
    parser.add_argument("--weights", type=Path, required=True, help="a safetensors file, or a zip file of photographs")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--flops", default="0.5", help="fractions, separated by commas")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--methods", help="names, separated by commas; default: all")
    parser.add_argument("--test-images", type=int, help="number of test images, for a quick look")
    parser.add_argument("--record", type=Path, help="a JSON file for the numbers; its rows are not measured again")
    parser.add_argument("--out", type=Path, help="a PNG file for the front")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shares = FRONT if options.what == "front" else [float(share) for share in options.flops.split(",")]
    wanted = options.methods.split(",") if options.methods else None
    sizes = Sizes()
    record = Record(
        options.record,
        {"weights": options.weights.name, "test_images": options.test_images, "calibration": CALIBRATION},
    )
    rows = record.rows
    for seed in map(int, options.seeds.split(",")):
        if options.weights.suffix == ".zip":
            case = load_photographs(options.weights, seed)
        else:
            case = load_case(options.weights, options.data_dir, seed, options.test_images)
        whole = rows[0]["whole"] if rows else case.accuracy(case.model)
        print(f"seed {seed}: the given network {whole:.2f} %", flush=True)
        for share in shares:
            if options.what == "parts":
                methods = parts(case, share)
            else:
                every = {"rlsprune.shrink": sizes if options.what == "front" else ours, **RIVALS}
                methods = {name: partial(make, case, share) for name, make in every.items()}
            for name, make in methods.items():
                key = {"seed": seed, "target": share, "method": name}
                if (wanted is not None and name not in wanted) or record.has(key):
                    continue
                last = record.add({**key, "whole": whole, **measured(case, make)})
                print(
                    f"{name:<40} {100 * last['flops']:5.1f} % of the FLOPs  {last['accuracy']:6.2f} %  "
                    f"{last['forwards']:5.1f} passes",
                    flush=True,
                )
    print(_table(rows))
    if options.out is not None:
        _draw(rows, options.weights.stem, options.out)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    targets = sorted({row["target"] for row in rows}, reverse=True)
    lines = ["| method | " + " | ".join(f"{100 * target:g} % of the FLOPs" for target in targets) + " | passes |"]
    lines.append("|---|" + "---:|" * (len(targets) + 1))
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for target in targets:
            found = [row["accuracy"] for row in rows if row["method"] == method and row["target"] == target]
            spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.2f}{spread}" if found else "")
        passes = statistics.mean(row["forwards"] for row in rows if row["method"] == method)
        lines.append(f"| {method} | {' | '.join(cells)} | {passes:.1f} |")
    return "\n".join(lines)


def _draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        line = sorted(((100 * row["flops"], row["accuracy"]) for row in own), reverse=True)
        line = [(100.0, own[0]["whole"]), *line]
        wide = 2.5 if method.startswith("rlsprune") else 1.2
        axes.plot(*zip(*line, strict=True), marker="o", markersize=3, linewidth=wide, label=method)
    axes.set(xlabel="FLOPs left (%)", ylabel="test accuracy right after the cut (%)", title=title)
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
