"""Measures scaling: state per rank, steps, events and `shrink` on 1 and 2 ranks, and the bytes that they send.

    python -m benchmarks.speed.scaling [--network fnn|mini-vgg] [--batch 128] [--steps 20] [--ranks 1,2]

Every rank is a process with one thread on this machine, and communicates through the loopback interface (gloo). Times
are processor time of rank 0, so that they can be compared on a busy machine; waiting for others is not counted. Bytes
are those that one rank hands to all-reduce, before the backend's own algorithm multiplies them (by about 2 for a ring),
and for `shrink` to all-gather (times the other ranks).

The first table has steps, each rank with its share of the same batch, as multiples of momentum SGD's under plain DDP
on as many ranks, in the same processes one after the other; the bytes of the gradients are plain DDP's. The second has
an event on a network that ``fully_shard`` divides (on one rank it is whole), trained by AdamW: the largest growth of
the process during the event, beside the rank's part of the network, the largest tensor that is cut, and the largest
group of channels with all layers that make and read it. The third has `rlsprune.shrink`, each rank with its share of
1,024 images; the difference compares the weights with those of one rank.
"""

import argparse
import gc
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import rlsprune
from benchmarks.common import CLASSES
from benchmarks.networks import mini_vgg
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.models import FNN
from rlsprune.distributed.ranks import Ranks

IMAGES = 1024  # number of images with which shrink calibrates

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "fnn": (FNN, (784,)),
    "mini-vgg": (mini_vgg, (3, 32, 32)),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD momentum": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
    "RLS": lambda model: rlsprune.RLS(model, lr=0.1),
    "RLS, P whole": lambda model: rlsprune.RLS(model, lr=0.1, rank=None),
}


class Counter:
    """A counter of the bytes that this rank hands to all-reduce."""

    def __init__(self) -> None:
        self.gradients = self.ours = 0

    def hook(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Counts the bytes of DDP's own all-reduce, and runs it."""
        self.gradients += bucket.buffer().nbytes
        return allreduce_hook(group, bucket)

    def watch(self, optimizer: Optimizer) -> None:
        """Counts the bytes that RLS sends to the other ranks in a step, for the sums of its mean inputs."""
        ranks = getattr(optimizer, "ranks", None)
        if ranks is None:
            return
        sum_ = ranks.sum_

        def counted_sum(tensor: Tensor) -> None:
            self.ours += tensor.nbytes
            sum_(tensor)

        ranks.sum_ = counted_sum


def rank_main(network: str, batch: int, steps: int) -> None:
    """Runs one rank of the steps; rank 0 prints a line per optimizer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    build, shape = NETWORKS[network]
    images = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(0)).chunk(ranks)[rank]
    labels = torch.randint(CLASSES, (batch,), generator=torch.Generator().manual_seed(0)).chunk(ranks)[rank]
    baseline = 0.0
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        counter = Counter()
        model = DistributedDataParallel(build())
        model.register_comm_hook(None, counter.hook)
        optimizer = make(model)
        times = []
        counter.watch(optimizer)
        for _ in range(steps + 2):
            dist.barrier()
            started = time.process_time()
            optimizer.zero_grad()
            mean_squared_error(model(images), labels).backward()
            optimizer.step()
            times.append(time.process_time() - started)
        step = statistics.median(times[2:])
        baseline = baseline or step
        held = sum(t.nbytes for t in tensors(optimizer.state))
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, held)
        if rank == 0:
            state = " + ".join(f"{amount / 2**20:.1f}" for amount in everyone)
            per_step = steps + 2
            print(
                f"{ranks:5} {name:16} {state:>15} {1000 * step:9.1f} {step / baseline:8.2f} "
                f"{counter.gradients / per_step / 2**20:14.2f} {counter.ours / per_step / 2**20:9.3f}",
                flush=True,
            )
    dist.destroy_process_group()


def event_main(width: int, batch: int) -> None:
    """Runs one rank of an event on a divided network; rank 0 prints its costs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(width // 2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))
    )
    whole = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    if ranks > 1:
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.rand(batch, width // 2, generator=torch.Generator().manual_seed(0))
    pruner = rlsprune.Pruner(model, optimizer, inputs[:1], ratio=0.2, warmup_epochs=0, patience=None)
    group = max(
        sum(p.nbytes for m in {member.module for member in group.members} for p in m.parameters(recurse=False))
        for group in pruner.groups
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    with Growth() as growth:
        started = time.process_time()
        event = pruner.step(1.0)
        seconds = time.process_time() - started
    assert event is not None
    if rank == 0:
        part = sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in model.parameters())
        print(
            f"{ranks:5} {seconds:8.2f} {growth.most / 2**20:9.0f} {whole / 2**20:10.0f} {part / 2**20:11.0f} "
            f"{largest / 2**20:12.0f} {group / 2**20:14.0f} {event.params_after / event.params_before:12.2f}",
            flush=True,
        )
    dist.destroy_process_group()


def shrink_main(first: Path) -> None:
    """Runs one rank of `shrink`; rank 0 compares the result with that of the first number of ranks, kept in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = mini_vgg().eval()
    images = torch.rand(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0)).split(64)
    summed, gathered = counted("sum_"), counted("stacked")
    started = time.process_time()
    rlsprune.shrink(model, list(images[rank::ranks]), target={"flops": 0.5})
    seconds = time.process_time() - started
    if rank == 0:
        if not first.exists():
            torch.save((seconds, model.state_dict()), first)
        alone, state = torch.load(first)
        apart = max(float((own - state[name]).abs().max()) for name, own in model.state_dict().items())
        print(
            f"{ranks:5} {seconds:9.1f} {seconds / alone:11.2f} {sum(summed) / 2**20:11.0f} "
            f"{sum(gathered) / 2**20:13.0f} {len(summed) + len(gathered):9} {apart:11.1e}",
            flush=True,
        )
    dist.destroy_process_group()


def counted(name: str) -> list[int]:
    """Records the bytes of each message that this rank sends by a method of `Ranks`, from now on."""
    sent: list[int] = []
    send = getattr(Ranks, name)

    def counting(self: Ranks, tensor: Tensor) -> Any:
        sent.append(tensor.nbytes)
        return send(self, tensor)

    setattr(Ranks, name, counting)
    return sent


class Growth:
    """The largest growth of this process while a block runs."""

    def __enter__(self) -> "Growth":
        gc.collect()
        self.start, self.most, self._over = self._resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, self._resident() - self.start)

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def tensors(state: Any) -> list[Tensor]:
    """Returns all tensors in nested containers."""
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if hasattr(state, "values") else state if isinstance(state, list) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="fnn")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", default="1,2", help="numbers of processes, separated by commas")
    parser.add_argument("--parts", default="step,event,shrink", help="the tables, separated by commas")
    parser.add_argument("--width", type=int, default=4096, help="width of the divided network")
    options = parser.parse_args()
    if "RANK" in os.environ:
        if os.environ["PART"] == "step":
            rank_main(options.network, options.batch, options.steps)
        elif os.environ["PART"] == "event":
            event_main(options.width, options.batch)
        else:
            shrink_main(Path(os.environ["FOLDER"]) / "first.pt")
        return
    parts = options.parts.split(",")
    if "step" in parts:
        print(f"{options.network}, global batch {options.batch}")
        print("ranks optimizer        state/rank MiB   step ms  vs. SGD  gradients MiB  ours MiB")
        start("step", options.ranks)
    if "event" in parts:
        print(f"event, {options.width // 2}-{options.width}-{options.width}-{CLASSES}, MiB")
        print("ranks  event s  grown by  all weights  of this rank  largest cut  largest group  params left")
        start("event", options.ranks)
    if "shrink" in parts:
        print(f"shrink to half of the FLOPs, mini-VGG, {IMAGES} images")
        print("ranks  shrink s  vs. 1 rank  summed MiB  gathered MiB  messages  difference")
        with tempfile.TemporaryDirectory() as folder:
            start("shrink", options.ranks, folder)


def start(part: str, numbers: str, folder: str = "") -> None:
    """Starts one process per rank, for each number of ranks."""
    for ranks in map(int, numbers.split(",")):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PART": part, "FOLDER": folder}
        shared["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # tensors that are freed leave the process at once
        command = [sys.executable, "-m", "benchmarks.speed.scaling", *sys.argv[1:]]
        root = Path(__file__).parents[2]
        processes = [subprocess.Popen(command, cwd=root, env={**shared, "RANK": str(rank)}) for rank in range(ranks)]
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit("a rank failed")


if __name__ == "__main__":
    main()
