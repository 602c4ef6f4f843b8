"""A network in training, all that a user could notice of it, and what can be done with it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import rlsprune
from rlsprune.io.checkpoint import load_checkpoint, save_checkpoint

EXAMPLE = torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(96, 10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 3)),
    )
    model[6].eval()  # a mode of its own
    model[7].bias.requires_grad_(False)
    return model


def plain(value: Any) -> Any:
    """Comparable by value, bit for bit."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@dataclass
class Scene:
    """A network in training."""

    folder: Path
    model: nn.Module = field(default_factory=network)
    optimizer: Any = None
    pruner: Any = None
    average: Any = None

    def trained(self) -> Scene:
        self.optimizer = rlsprune.RLS(self.model)
        self.pruner = rlsprune.Pruner(
            self.model, self.optimizer, EXAMPLE, ratio=0.5, warmup_epochs=0, patience=1, held_out_loss=self.loss
        )
        self.average = AveragedModel(self.model)
        self.pruner.follow(self.average)
        self.backward()
        self.optimizer.step()
        self.average.update_parameters(self.model)
        self.backward()
        return self

    def pruned(self) -> Scene:
        self.trained().pruner.step(1.0)
        self.backward()
        self.optimizer.step()
        return self

    def inputs(self) -> Tensor:
        return torch.rand(32, 2, 6, 6, generator=torch.Generator().manual_seed(1))

    def loss(self) -> float:
        return float(self.model(self.inputs()).square().mean())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs()).square().mean().backward()

    def facts(self) -> Any:
        """All that a user could notice."""
        model, optimizer, pruner = self.model, self.optimizer, self.pruner
        return plain(
            {
                "state": dict(model.state_dict()),
                "average": None if self.average is None else dict(self.average.state_dict()),
                "layers": [str(module) for module in model.modules()],
                "modes": [module.training for module in model.modules()],
                "hooks": [
                    [len(hooks) for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
                    for m in model.modules()
                ],
                "gradients": [(p.requires_grad, p.grad) for p in model.parameters()],
                "optimizer": None if optimizer is None else optimizer.state_dict(),
                "recorded": None if optimizer is None else [r.mean for r in optimizer._recorders.values()],
                "pruner": None if pruner is None else pruner.state_dict(),
                "groups": None if pruner is None else [(group.name, group.size) for group in pruner.groups],
                "sampling": None if pruner is None else pruner._operation.evidence.sample.active,
                "torch": [torch.is_grad_enabled(), torch.get_rng_state()],
                "files": {path.name: path.read_bytes() for path in self.folder.iterdir()},
                "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            }
        )

    def undone(self, before: Any, after: Any, what: str) -> bool:
        """Whether everything is as before an action; it fails unless it is that, or as after the action."""
        facts = self.facts()
        wrong = {key for key in facts if facts[key] not in (before[key], after[key])}
        assert facts in (before, after), f"{what}: {wrong or 'some of each'}"
        return bool(facts == before)


def optimizer_made(scene: Scene) -> None:
    scene.optimizer = rlsprune.RLS(scene.model)


def pruner_made(scene: Scene) -> None:
    scene.pruner = rlsprune.Pruner(scene.model, torch.optim.SGD(scene.model.parameters(), lr=0.1), EXAMPLE)


def saved(scene: Scene) -> Scene:
    """A fresh network, and the file of a pruned one."""
    rlsprune.save(scene.pruned().model, scene.folder / "model.safetensors")
    return Scene(scene.folder)


@cache
def saved_states() -> tuple[Any, Any, Any]:
    scene = Scene(Path(os.devnull)).pruned()
    return scene.model.state_dict(), scene.optimizer.state_dict(), scene.pruner.state_dict()


def unloaded(scene: Scene) -> Scene:
    """The network of a checkpoint, with its optimizer and pruner still to be loaded."""
    scene.pruned()
    scene.pruner.close()
    scene.optimizer.close()
    scene.optimizer, scene.average = rlsprune.RLS(scene.model), AveragedModel(scene.model)
    scene.pruner = rlsprune.Pruner(scene.model, scene.optimizer, EXAMPLE)
    scene.pruner.follow(scene.average)
    return scene


def without_average(scene: Scene) -> Scene:
    """A fresh network with its optimizer and pruner."""
    scene.optimizer = rlsprune.RLS(scene.model)
    scene.pruner = rlsprune.Pruner(scene.model, scene.optimizer, EXAMPLE, ratio=0.5, warmup_epochs=0)
    return scene


@cache
def saved_checkpoint() -> Path:
    scene = without_average(Scene(Path(os.devnull)))
    scene.backward()
    scene.optimizer.step()
    assert scene.pruner.step(1.0) is not None
    folder = Path(tempfile.mkdtemp())
    save_checkpoint(folder, scene.model, scene.optimizer, scene.pruner)
    return folder


Make, Act = Callable[[Scene], Scene], Callable[[Scene], Any]
ACTIONS: dict[str, tuple[Make, Act]] = {
    "step of RLS": (Scene.trained, lambda scene: scene.optimizer.step()),
    "step that prunes": (Scene.trained, lambda scene: scene.pruner.step(1.0)),
    "prune": (Scene.trained, lambda scene: scene.pruner.prune()),
    "preview": (Scene.trained, lambda scene: scene.pruner.preview()),
    "roll-back": (Scene.pruned, lambda scene: scene.pruner.step(9.0)),
    "finish": (Scene.pruned, lambda scene: scene.pruner.finish()),
    "save": (Scene.trained, lambda scene: scene.pruner.save(scene.folder / "model.safetensors")),
    "load": (saved, lambda scene: rlsprune.load(scene.folder / "model.safetensors", scene.model)),
    "load of RLS": (unloaded, lambda scene: scene.optimizer.load_state_dict(saved_states()[1])),
    "load of Pruner": (unloaded, lambda scene: scene.pruner.load_state_dict(saved_states()[2])),
    "load_checkpoint": (
        without_average,
        lambda scene: load_checkpoint(saved_checkpoint(), scene.model, scene.optimizer, scene.pruner),
    ),
    "RLS": (lambda scene: scene, optimizer_made),
    "Pruner": (lambda scene: scene, pruner_made),
}


def made(name: str, folder: Path) -> Scene:
    """What an action starts from."""
    folder.mkdir()
    return ACTIONS[name][0](Scene(folder))
