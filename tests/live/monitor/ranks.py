"""One of several processes that train together under a monitor: `python -m tests.live.monitor.ranks ...`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope import Monitor
from rankscope.errors import RankscopeError
from tests.live.monitor.training import batch, gpt2, loss_of

METRICS = ["relative_mu", "mu", "entropy"]
SAMPLES = 4


def part(whole: Tensor, rank: int, number: int) -> Tensor:
    return whole[rank * len(whole) // number : (rank + 1) * len(whole) // number]


def main(way: str, rank: int, number: int, folder: Path) -> None:
    """`way`: ddp or fsdp with a probe, ddp-inline, or one that disagrees."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=number)
    model: nn.Module = gpt2(dropout=0.0).double()
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (number,))
        for block in model.transformer.h:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    given: dict[str, Any] = {"metrics": METRICS, "every": 2, "run": folder / "run"}
    if way == "disagrees":
        given["metrics"] = METRICS[: 3 - rank]
    if way == "ddp-inline":
        given["metrics"] = METRICS[:2]
    else:
        given["probe"] = {"input_ids": part(batch(99, SAMPLES), rank, number)}
    try:
        monitor = Monitor(model, **given)
    except RankscopeError as error:
        print(error)
        dist.destroy_process_group()
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        ids = part(batch(step, SAMPLES), rank, number)
        loss = loss_of(model(input_ids=ids).logits, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
