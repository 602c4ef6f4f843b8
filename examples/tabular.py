"""Feature selection: a network finds out, while it trains, which columns of a table it needs.

    python examples/tabular.py
    python examples/tabular.py --columns 5

Without a number, columns are removed until the held-out loss no longer recovers. `rlsprune.sklearn.FeatureSelector`
does the same for a pipeline of scikit-learn, with several networks.

The table is made up: five of its forty columns determine the class, five are noisy copies of these, thirty are noise.
The network ends with few columns and few units, and is saved in our format and for ONNX Runtime.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rlsprune

COLUMNS, TRUE, COPIES = 40, (3, 11, 17, 22, 38), (5, 14, 20, 29, 33)


def make_table(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Makes the columns, and one of three classes for each row, which no single column determines."""
    generator = torch.Generator().manual_seed(seed)
    table, noise = torch.rand(2, rows, COLUMNS, generator=generator)
    a, b, c, d, e = table[:, list(TRUE)].unbind(1)
    table[:, list(COPIES)] = 0.6 * table[:, list(TRUE)] + 0.4 * noise[:, list(COPIES)]
    return table, (a + b > c + d).long() + (e > 0.6).long()


def build_model() -> nn.Sequential:
    """Builds a fully-connected network on all columns."""
    return nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))


@torch.no_grad()
def evaluate(model: nn.Module, table: Tensor, labels: Tensor) -> tuple[float, float]:
    """Computes loss, and accuracy in %."""
    outputs = model(table)
    return cross_entropy(outputs, labels).item(), 100 * (outputs.argmax(1) == labels).float().mean().item()


def train(table: Tensor, labels: Tensor, epochs: int, columns: int | None) -> rlsprune.Pruner:
    """Trains and prunes down to a number of columns, or to those without which the held-out loss does not recover."""
    torch.manual_seed(0)
    model = build_model()
    # Cross-entropy needs less than the paper's rate of 1; the decay removes weights that the loss does not need.
    optimizer = rlsprune.RLS(model, lr=0.3, weight_decay=1e-4)
    held_table, held_labels, table, labels = table[:500], labels[:500], table[500:], labels[500:]
    pruner = rlsprune.Pruner(
        model,
        optimizer,
        table[:1],
        ratio=0.2,
        input_ratio=0.2,  # columns are removed as fast as hidden units
        warmup_epochs=5,
        target={} if columns is None else {"inputs": columns},
        tolerance=0.1,
        patience=5,  # epochs without recovery after which the last prune is undone
        on_prune=lambda event: print(f"epoch {event.epoch}: {event.kind}, {event.params_after:,} parameters"),
    )
    for _ in range(epochs):
        for batch in torch.randperm(len(table)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(table[batch]), labels[batch]).backward()
            optimizer.step()
        pruner.step(evaluate(model, held_table, held_labels)[0])
    pruner.finish()
    return pruner


def main(arguments: list[str] | None = None) -> nn.Module:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--columns", type=int, help="how many columns to keep; nothing else is pruned then")
    parser.add_argument("--out", type=Path, default=Path("tabular"), help="the files' name, without its ending")
    options = parser.parse_args(arguments)
    pruner = train(*make_table(3000, seed=0), options.epochs, options.columns)
    kept = pruner.kept_inputs
    print(f"needs the columns {kept.tolist()}; true are {list(TRUE)}")
    print(f"when each went, the last ones first: {pruner.input_ranking.tolist()}")

    # The file also holds the indices of the columns, so the loaded network still takes whole rows.
    pruner.save(options.out.with_suffix(".safetensors"))
    model = rlsprune.load(options.out.with_suffix(".safetensors"), into=build_model())
    table, labels = make_table(2000, seed=1)
    print(f"test accuracy {evaluate(model, table, labels)[1]:.2f} %")

    # For serving, the same network takes only the needed columns, so that the others need not be collected.
    stripped = rlsprune.strip_inputs(model)
    rlsprune.export_onnx(stripped, table[:2, kept], options.out.with_suffix(".onnx"))
    return model


if __name__ == "__main__":
    main()
