"""Several processes that train one model: the numbers of all of them, written by one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live.monitor.tally import Tallies, merged


def number() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def writes() -> bool:
    """Whether this one writes."""
    return number() == 1 or dist.get_rank() == 0


def joined(own: Tallies) -> Tallies:
    """The tallies of all ranks as one, merged in their order: the same on every rank."""
    if number() == 1:
        return own
    here = own.to(_device())
    parts = [torch.empty_like(here) for _ in range(number())]
    dist.all_gather(parts, here)
    whole, *others = (part.cpu() for part in parts)
    for other in others:
        whole = merged(whole, other)
    return whole


def agree(what: str, mine: Any) -> None:
    """Every rank must say the same; each is told who does not."""
    if number() == 1:
        return
    said = each(mine)
    other = next((rank for rank, each in enumerate(said) if each != said[0]), None)
    if other is not None:
        raise MonitorError(
            f"all ranks must be given the same {what}; rank 0 has {said[0]!r} and rank {other} has "
            f"{said[other]!r}: build the monitor alike on every rank"
        )


def each(mine: Any) -> list[Any]:
    """What every rank has, in their order."""
    if number() == 1:
        return [mine]
    said: list[Any] = [None] * number()
    dist.all_gather_object(said, mine)
    return said


def shared(mine: Any) -> Any:
    """What rank 0 has."""
    if number() == 1:
        return mine
    said = [mine]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def inner(model: nn.Module) -> nn.Module:
    """The model itself: without what wraps it to compile it or to keep its copies alike."""
    while True:
        for name in ("_orig_mod", "module"):
            found = getattr(model, name, None)
            if isinstance(found, nn.Module) and len(list(model.children())) == 1:
                model = found
                break
        else:
            return model


def spread(model: nn.Module) -> bool:
    """Whether no rank has all of its weights, as under FSDP or ZeRO-3."""
    wrapped = any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules())
    return wrapped or any(
        hasattr(weight, "full_tensor") or hasattr(weight, "ds_id") for weight in model.parameters()
    )


def _device() -> torch.device:
    """Where numbers are gathered: NCCL wants them on the GPU."""
    if number() > 1 and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def whole(part: Tensor) -> Tensor:
    """A number of a tensor that is spread over ranks, as every rank has it."""
    full = getattr(part, "full_tensor", None)
    return part if full is None else full()
