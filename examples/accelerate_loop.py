"""Pruning in a training loop with Hugging Face accelerate.

    pip install "rlsprune[onnx]" accelerate
    python examples/accelerate_loop.py --out small

Trains on synthetic data in a few seconds on any machine, and writes small.safetensors and small.onnx. Pruning changes
the shapes of parameters, so it runs in one process: `accelerate launch --num_processes 1`.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rlsprune


def build_model() -> nn.Module:
    """Builds a small fully-connected network."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))


def make_data(seed: int) -> TensorDataset:
    """Makes twenty features, two of which determine the class."""
    inputs = torch.rand(512, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, 0] > inputs[:, 1]).long())


def train(out: str, epochs: int = 12) -> nn.Module:
    """Trains and prunes the network, and writes both files."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = build_model()
    # RLS and the pruner take the module itself and find its layers; accelerate then prepares both as usual.
    optimizer = rlsprune.RLS(model, lr=0.3)
    batches = DataLoader(make_data(0), batch_size=64, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    # The pruner cuts the state of the optimizer inside accelerate's wrapper.
    example = torch.rand(1, 20, device=accelerator.device)
    bare = accelerator.unwrap_model(model)
    settings = {"ratio": 0.25, "criterion": "obs", "warmup_epochs": 3, "tolerance": 0.05, "target": {"params": 0.2}}
    pruner = rlsprune.Pruner(bare, optimizer.optimizer, example, **settings, on_prune=accelerator.print)

    for _ in range(epochs):
        total = 0.0
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.item()
        pruner.step(total / len(batches))
    pruner.finish()

    pruner.save(f"{out}.safetensors")
    rlsprune.export_onnx(bare, example, f"{out}.onnx")
    return bare


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="small", help="The files' name, without its ending.")
    train(parser.parse_args().out)
