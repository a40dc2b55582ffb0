"""Joins the numbers of several processes (ranks) that train one model, so that one of them can write them.

`Monitor` and what it measures with call these functions on every rank alike; without
`torch.distributed`, or with one process, each returns at once.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live.monitor.running_sums import Sums, merge_sums

PATIENCE = 300.0  # seconds that ranks wait for one another; torch itself gives up after ten minutes or more
_missed: list[str] = []  # the last meetings, if not all ranks came


def world_size() -> int:
    """How many processes train the model."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_writer() -> bool:
    """True on the one process that writes the run, rank 0."""
    return world_size() == 1 or dist.get_rank() == 0


def require_all_ranks(where: str, meeting: str) -> None:
    """Wait until every rank is here, before anything that only all ranks together can do; if some do not come, raise.
    All ranks decide alike, also if one comes just when the others give up. `where` is what they call, for the sentence;
    `meeting` is a name that all ranks know and no other meeting has."""
    store = dist.distributed_c10d._get_default_store() if world_size() > 1 else None
    if store is None:  # one process, or MPI, which has none
        return
    came, verdict = f"rankscope/{meeting}/came", f"rankscope/{meeting}/verdict"
    seconds = PATIENCE / 30 if _missed else PATIENCE  # who did not come once will hardly come again
    if store.add(came, 1) == world_size():
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
    missing = f"{world_size() - store.add(came, 0)} of {world_size()} ranks did not come within {seconds:g} s"
    sentence = f"every rank must call {where}; {missing}: call it on all of them, not inside of `if rank == 0`"
    raise MonitorError(sentence, subject="ranks")


def merged_over_ranks(sums: Sums) -> Sums:
    """The running sums of all ranks merged in the order of ranks: the same on every rank."""
    if world_size() == 1:
        return sums
    nccl = dist.get_backend() == "nccl"  # which gathers on the GPU only
    local = sums.to(torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu")
    parts = [torch.empty_like(local) for _ in range(world_size())]
    dist.all_gather(parts, local)
    merged, *rest = (part.cpu() for part in parts)
    for part in rest:
        merged = merge_sums(merged, part)
    return merged


def require_agreement(what: str, value: Any) -> None:
    """Raise on every rank unless all ranks have the same value; `what` names it in the sentence."""
    values = gathered(value)
    rank = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
    if rank is not None:
        came = f"rank 0 has {values[0]!r} and rank {rank} has {values[rank]!r}: build the monitor alike on every rank"
        raise MonitorError(f"all ranks must be given the same {what}; {came}", subject=what)


def gathered(value: Any) -> list[Any]:
    """The value of every rank, in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


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
