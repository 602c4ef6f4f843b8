"""A transformer that loses attention heads and feed-forward width while it trains.

    python examples/transformer.py

The task is made up: which of two marked tokens in a sequence comes first? Attention has to find them, and the
feed-forward layers are wider than that needs. Whole heads are removed, and dimensions inside of heads too. The width of
the embedding stays, because layer norms and shortcuts tie it together through the whole network.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rlsprune

TOKENS, LENGTH, MARKED = 20, 16, (0, 1)


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Makes sequences of tokens with both marks in them, and labels that say whether the second mark comes first."""
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.randint(2, TOKENS, (count, LENGTH), generator=generator)
    places = torch.rand(count, LENGTH, generator=generator).argsort(1)[:, :2]  # two different places
    sequences.scatter_(1, places, torch.tensor(MARKED).expand(count, 2))
    return sequences, (places[:, 0] > places[:, 1]).long()


class Classifier(nn.Module):
    """Embeds tokens and positions, encodes them, and classifies their mean."""

    def __init__(self, width: int = 32, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, width), nn.Parameter(0.1 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, sequences: Tensor) -> Tensor:
        """Computes class scores."""
        return self.head(self.encoder(self.tokens(sequences) + self.positions).mean(1))


@torch.no_grad()
def evaluate(model: nn.Module, sequences: Tensor, labels: Tensor) -> tuple[float, float]:
    """Computes loss, and accuracy in %."""
    model.eval()
    outputs = model(sequences)
    return cross_entropy(outputs, labels).item(), 100 * (outputs.argmax(1) == labels).float().mean().item()


def train(model: nn.Module, sequences: Tensor, labels: Tensor, epochs: int) -> rlsprune.Pruner:
    """Trains and prunes the model in place."""
    held = 500
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # its moments are cut with the weights
    pruner = rlsprune.Pruner(
        model,
        optimizer,
        sequences[:2],
        ratio=0.3,
        warmup_epochs=6,
        tolerance=0.2,
        min_channels=2,
    )
    print(f"can shrink: {', '.join(group.name for group in pruner.groups)}")
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in torch.randperm(len(sequences) - held).split(64):
            optimizer.zero_grad()
            cross_entropy(model(sequences[held + batch]), labels[held + batch]).backward()
            optimizer.step()
        if epoch > 0.8 * epochs:
            pruner.stop()  # the rest is for recovery
        pruner.step(evaluate(model, sequences[:held], labels[:held])[0])
        print(pruner, flush=True)
    pruner.finish()
    return pruner


def main(arguments: list[str] | None = None) -> nn.Module:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", default="transformer.safetensors")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Classifier()
    pruner = train(model, *make_data(3000, seed=1), options.epochs)
    heads = [layer.self_attn.num_heads for layer in model.encoder.layers]
    widths = [layer.linear1.out_features for layer in model.encoder.layers]
    print(f"heads {heads} instead of 4, feed-forward widths {widths} instead of 128")
    print(f"test accuracy {evaluate(model, *make_data(1000, 2))[1]:.2f} %")
    pruner.save(options.out)  # rlsprune.load(path, into=Classifier()) loads it
    return model


if __name__ == "__main__":
    main()
