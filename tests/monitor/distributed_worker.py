"""One of several processes that train together under a monitor, run by `test_distributed.py`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rankscope import Monitor
from rankscope.errors import RankscopeError
from rankscope.live import processes
from tests.monitor.small import encoder, loss_of, tokens

METRICS = ["relative_mu", "mu", "entropy"]


def main(rank: int, number: int, folder: Path, ways: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=number)
    for way in ways:
        try:
            work = paths if way.startswith("paths") else jacobians if way.startswith("jacobians") else train
            work(way, rank, number, folder / way)
        except RankscopeError as error:
            sys.stdout.write(f"{type(error).__name__} about {error.subject}\n")
    dist.destroy_process_group()


def train(way: str, rank: int, number: int, folder: Path) -> None:
    """`way`: ddp or fsdp with a probe, inline, embeddings of each layer or of the output, ranks that disagree in what
    they measure or say, or one rank alone."""

    def part(whole: Tensor) -> Tensor:
        return whole[rank * len(whole) // number : (rank + 1) * len(whole) // number]

    model: nn.Module = encoder()
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (number,))
        for block in model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    given: dict[str, Any] = {"metrics": METRICS, "every": 2, "run": folder}
    if way == "disagree":
        given["metrics"] = METRICS[: 3 - rank]
    if way == "inline":
        given["metrics"] = METRICS[:2]
    else:
        given["probe"] = X = part(tokens(99))
        given["loss"] = lambda output: (output[:, 1:] - X[:, :-1]).square().mean()
    if way.startswith("embeddings"):
        given["probe"] = part(tokens(99, samples=39))  # uneven: ranks have 19 and 20 samples
        del given["loss"]
        pairs = way == "embeddings of views" or (way == "embeddings that disagree" and rank)
        given["embeddings"] = (lambda y: torch.stack([y.mean(1), y[:, 0]], 1)) if pairs else "mean"
    if way == "embeddings of other widths":
        given["embeddings"] = lambda y: y.mean(1)[:, : 16 - rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if way.startswith("alone"):
        processes.PATIENCE = 3.0
    if way == "alone from the start" and rank:
        return
    monitor = Monitor(model, optimizer=optimizer, **given)
    if way == "fsdp":  # after a measurement each rank has its share again
        assert all(isinstance(each, DTensor) for each in model.parameters())
    for step in range(4):
        loss = loss_of(model, part(tokens(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if way != "alone" or rank == 0:
            monitor.step(loss=None if way == "silent" and rank else loss)
    monitor.close()


def paths(way: str, rank: int, number: int, folder: Path) -> None:
    """A GPT-2 whose paths are read; of weights that are spread over ranks they cannot be."""
    options: dict[str, Any] = {"metrics": "mu", "every": 1, "paths_every": 1, "run": folder}
    if way == "paths_fsdp":
        model: nn.Module = encoder()
        fully_shard(model, mesh=init_device_mesh("cpu", (number,)))
        Monitor(model, probe=tokens(99), **options)
        return
    from tests.monitor.training import batch, gpt2

    ids = batch(99)[rank * 4 // number : (rank + 1) * 4 // number]
    Monitor(DistributedDataParallel(gpt2()), probe={"input_ids": ids}, **options).close()


def jacobians(way: str, rank: int, number: int, folder: Path) -> None:
    """An encoder whose blocks' Jacobians are measured; of weights that are spread over ranks they cannot be."""
    model: nn.Module = encoder()
    if way == "jacobians_fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (number,)))
    else:
        model = DistributedDataParallel(model)
    X = tokens(99)[rank * 4 // number : (rank + 1) * 4 // number]
    with Monitor(model, "mu", every=1, probe=X, run=folder, jacobians=True) as monitor:
        monitor.step()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
