"""The processes (ranks) that run one model together: how they meet before what only all of them can do, say the same,
fail together, and which of a network's blocks each has.

The monitor and `tensor_parallel.py` call these functions on every rank alike; without `torch.distributed`, or with one
process, each returns at once.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.sources import first_line

PATIENCE = 300.0  # seconds that ranks wait for one another; torch itself gives up after ten minutes or more
TRIAL = "_forward_metadata_inference"  # the function of torch that calls a stage so; earlier ones compute no gradients
_missed: list[str] = []  # the last meetings, if not all ranks came


def world_size() -> int:
    """How many processes train the model."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(value: Any, group: Any = None) -> list[Any]:
    """The value of every rank, or of those in a group, in the order of ranks."""
    size = world_size() if group is None else dist.get_world_size(group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def in_trial_of_stage() -> bool:
    """True while torch's pipeline schedule calls a stage with made-up tokens, to learn the shapes that it gives."""
    if (stage := sys.modules.get("torch.distributed.pipelining.stage")) is None:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == TRIAL and frame.f_code.co_filename == stage.__file__:
            return True
        frame = frame.f_back
    return False


def next_number(kind: str) -> int:
    """How many things of a kind this rank has made with this call, since the ranks have known one another: those that
    make the same ones count alike."""
    store = dist.distributed_c10d._get_default_store() if world_size() > 1 else None
    return 0 if store is None else store.add(f"rankscope/{kind}/made by {dist.get_rank()}", 1)


def require_all_ranks(where: str, meeting: str, ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank is here, before anything that only all ranks together can do; if some do not come, raise.
    All ranks decide alike, also if one comes just when the others give up.

    Args:
        where: What the ranks call, for the sentence.
        meeting: A name that all ranks know and no other meeting has.
        ranks: Those that meet; all if left out.
    """
    size = world_size() if ranks is None else len(ranks)
    store = dist.distributed_c10d._get_default_store() if size > 1 else None
    if store is None:  # one process, or MPI, which has none
        return
    among = "" if ranks is None else "/" + "-".join(map(str, ranks))
    came, verdict = (f"rankscope{among}/{meeting}/{what}" for what in ("came", "verdict"))
    seconds = PATIENCE / 30 if _missed else PATIENCE  # who did not come once will hardly come again
    if store.add(came, 1) == size:
        store.compare_set(verdict, "", "all")
    else:
        try:
            store.wait([verdict], timedelta(seconds=seconds))
        except RuntimeError:  # none is there in time; the first to write it decides for all
            store.compare_set(verdict, "", "not all")
    if store.get(verdict) == b"all":
        _missed.clear()
        return
    _missed.append(meeting)
    missing = f"{size - store.add(came, 0)} of {size} ranks did not come within {seconds:g} s"
    sentence = f"every rank must call {where}; {missing}: call it on all of them, not inside of `if rank == 0`"
    raise MonitorError(sentence, subject="ranks")


def is_writer() -> bool:
    """True on the one process that writes the run, rank 0."""
    return world_size() == 1 or dist.get_rank() == 0


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
