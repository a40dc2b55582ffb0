"""One of two processes that train a module under DDP, forecast in the middle of an accumulation; run by
`test_live_module.py`."""

import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope import forecast
from rankscope.errors import LabError
from rankscope.forecasts import ModuleInputs
from tests.forecasts.test_live_module import TOKENS, batches, cross_entropy, own_gpt


def main(rank: int, number: int, folder: Path, ways: list[str]) -> None:
    meet, limit = f"file://{folder}/meet", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=number, timeout=limit)
    try:
        bare, wrapped, inside, first_alone = (trained(way, rank) for way in ("", "wrapped", "inside", "rank 0"))
        mine = torch.cat([weight.flatten() for weight in bare])
        theirs = [torch.empty_like(mine) for _ in range(number)]
        dist.all_gather(theirs, mine)
        assert torch.equal(theirs[0], theirs[1])
        for weights in (wrapped, inside, first_alone):
            assert all(map(torch.equal, weights, bare))
        try:
            forecast(fully_shard(own_gpt()), module=ModuleInputs(batches(), cross_entropy))
        except LabError as error:
            sys.stdout.write(str(error))
    finally:
        dist.destroy_process_group()


def trained(way: str, rank: int) -> list[Tensor]:
    """The weights after a few steps of two batches each, which differ between processes."""
    module = own_gpt()
    module.statistics.requires_grad_(False)  # no part of the loss
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    draw = torch.Generator().manual_seed(rank)
    for step in range(3):
        for part in range(2):
            ids = torch.randint(17, (2, TOKENS + 1), generator=draw)
            with model.no_sync() if part == 0 else nullcontext():
                cross_entropy(model(ids[:, :-1]), {"following": ids[:, 1:]}).backward()
            if step == 1 and part == 0 and way and (rank == 0 or way != "rank 0"):
                forecast(module if way == "inside" else model, module=ModuleInputs(batches(), cross_entropy))
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in module.parameters()]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
