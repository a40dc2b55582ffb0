"""Joins the numbers of several processes (ranks) that train one model, so that one of them can write them.

`Monitor` and what it measures with call these functions on every rank alike; without
`torch.distributed`, or with one process, each returns at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live.monitor.running_sums import EMPTY, Key, Sums, merge_sums
from rankscope.live.processes import gathered, world_size
from rankscope.sources import first_line


def is_writer() -> bool:
    """True on the one process that writes the run, rank 0."""
    return world_size() == 1 or dist.get_rank() == 0


def merged_over_ranks(keys: list[Key], sums: Sums) -> tuple[list[Key], Sums]:
    """The keys of all ranks, and the running sums of each merged in the order of ranks: the same on every rank. Ranks
    with other layers, as pipeline stages have them, have other keys."""
    if world_size() == 1:
        return keys, sums
    digests = gathered(sha256(repr(keys).encode()).hexdigest())
    if len({*digests}) > 1:
        lists = []
        for digest in dict.fromkeys(digests):  # each list travels once, however many ranks have it
            theirs = [keys]
            dist.broadcast_object_list(theirs, src=digests.index(digest))
            lists += theirs[0]
        union = sorted(dict.fromkeys(lists), key=lambda key: (key.layer is None, key.layer or 0))
        rows = {key: row for row, key in enumerate(union)}
        local_sums, sums = sums, EMPTY.repeat(len(union), 1)
        sums[[rows[key] for key in keys]] = local_sums
        keys = union
    nccl = dist.get_backend() == "nccl"  # which gathers on the GPU only
    local = sums.to(torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu")
    parts = [torch.empty_like(local) for _ in range(world_size())]
    dist.all_gather(parts, local)
    merged, *rest = (part.cpu() for part in parts)
    for part in rest:
        merged = merge_sums(merged, part)
    return keys, merged


def require_agreement(what: str, value: Any, stage: int = 0) -> None:
    """Raise on every rank unless all ranks of a pipeline stage have the same value. `what` names it in the sentence; a
    stage is known by the number of blocks before it."""
    first: dict[int, tuple[int, Any]] = {}  # of each stage, its first rank and what that has
    for rank, (theirs, came) in enumerate(gathered((stage, value))):
        earlier, expected = first.setdefault(theirs, (rank, came))
        if came != expected:
            differ = f"rank {earlier} has {expected!r} and rank {rank} has {came!r}: build the monitor alike on both"
            raise MonitorError(f"all ranks must be given the same {what}; {differ}", subject=what)


@contextmanager
def failing_together() -> Iterator[None]:
    """An error inside is raised on every rank, so that none waits for one that has failed."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    reasons = [why for why in gathered(None if failure is None else first_line(failure)) if why]
    if reasons:
        raise failure or MonitorError(f"another rank could not measure the model: {reasons[0]}", subject="ranks")


@dataclass(frozen=True)
class Stage:
    """The blocks that this rank has, where each has some of them, as pipeline stages do."""

    first_block: int  # the number of blocks before them
    one_of_several: bool  # other ranks have other blocks
    counts: bool  # this rank is the first of those that have them

    @classmethod
    def of(cls, first_block: int) -> "Stage":
        """The stage with so many blocks before it."""
        stages = gathered(first_block)
        return cls(first_block, any(stages), world_size() == 1 or stages.index(first_block) == dist.get_rank())

    def depth(self, model: nn.Module, blocks: Sequence[nn.Module]) -> int:
        """The number of blocks of the whole network, of which this stage has these.

        Raises:
            MonitorError: Ranks that should have the same blocks have others, or blocks are missing between stages.
        """
        inside = {id(weight) for block in blocks for weight in block.parameters()}
        outside = {name for name, weight in model.named_parameters() if id(weight) not in inside}
        way = "pipeline stages say with first_block= how many blocks come before theirs"
        first: dict[int, tuple[int, set[str]]] = {}  # of each stage: its number of blocks, and the weights beside them
        for rank, (start, count, names) in enumerate(gathered((self.first_block, len(blocks), outside))):
            expected, expected_names = first.setdefault(start, (count, names))
            if count != expected or names != expected_names:
                only = f", and {min(names ^ expected_names)} is in one of them" if names != expected_names else ""
                came = f"rank {rank} has {count}, an earlier one {expected}{only}: {way}"
                raise MonitorError(f"ranks must have the same blocks; {came}", subject="first_block")
        stages = sorted((start, start + count) for start, (count, _) in first.items())
        for (_, end), (start, _) in pairwise(stages):
            if end != start:
                came = f"one that begins after {start} blocks comes after one that ends with block {end}: {way}"
                raise MonitorError(f"pipeline stages must follow one another; {came}", subject="first_block")
        return stages[-1][1]


def from_writer(value: Any) -> Any:
    """The value that rank 0 has, on every rank."""
    return gathered(value)[0]


def is_sharded(model: nn.Module) -> bool:
    """True if no rank holds all weights of the model, as under FSDP or ZeRO-3."""
    wrapped = any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules())
    return wrapped or any(hasattr(weight, "full_tensor") or hasattr(weight, "ds_id") for weight in model.parameters())


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over ranks, whole on every rank."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
