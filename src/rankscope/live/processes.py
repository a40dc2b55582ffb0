"""The processes (ranks) that run one model together, and how they meet before what only all of them can do.

`monitor/distributed.py` and `tensor_parallel.py` call these functions on every rank alike; without
`torch.distributed`, or with one process, each returns at once.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from rankscope.errors import MonitorError

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
