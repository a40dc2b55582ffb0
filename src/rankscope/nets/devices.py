"""The machine that a network runs on: dtypes and devices that torch has there, its memory, and torch's modes.

`measure`, `decompose`, `certify`, `depth`, `load`, `Transformer.random` and `forecast` compute inside `usual_modes`, so
that they give the same digits under `no_grad`, `inference_mode`, autocast and another default device as without.
"""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets.architecture import Architecture
from rankscope.nets.tensors import layer_shapes

FLOAT64_BYTES = 8
LAYER_OVERHEAD_BYTES = 5_000  # What a layer takes beside its tensors, at least
CPU = torch.device("cpu")
CASTING = ("cpu", "cuda", "mps", "xpu")  # Kinds of devices that autocast is asked about


@dataclass(frozen=True)
class Conversion:
    """Converts tensors to another dtype or device. Equal conversions of streamed layers share one source."""

    dtype: torch.dtype | None
    device: torch.device | str | None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor in that dtype, on that device."""
        return tensor.to(device=self.device, dtype=self.dtype)


@contextmanager
def usual_modes(device: torch.device = CPU) -> Iterator[None]:
    """Inside, autocast and `inference_mode` are off, and tensors without a device are made on this one. Gradients are
    off where they were; what needs them switches them on, which `inference_mode` alone would not let it.

    >>> with torch.inference_mode(), torch.device("meta"), usual_modes():
    ...     x = torch.ones(2)
    >>> x.device.type, x.is_inference()
    ('cpu', False)
    """
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        for kind in CASTING:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != device:
            modes.enter_context(device)
        yield


def check_dtype(dtype: object) -> None:
    """Raise `ArchitectureError` unless a network can have this dtype."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArchitectureError(f"a network's dtype must be a floating torch.dtype; got {dtype!r}", subject="dtype")


def check_device(device: torch.device | str, dtype: torch.dtype = torch.float64) -> None:
    """Raise `ArchitectureError` unless this machine has the device, and the device has the dtype."""
    if str(device).partition(":")[0] == "mps" and dtype == torch.float64:
        sentence = "device must have float64; mps has none: take 'cpu', or net.to(torch.float32, 'mps') and float32"
        raise ArchitectureError(sentence, subject="device")
    try:
        torch.zeros(1, device=device).item()  # a tensor on "meta" has no numbers to read
    except (AssertionError, RuntimeError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        sentence = f"device must be one that torch has on this machine, as 'cpu'; got {str(device)!r} ({reason})"
        raise ArchitectureError(sentence, subject="device") from error


def machine_memory() -> int:
    """Bytes of this machine's memory; 2^63 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**63


def free_memory(device: torch.device) -> int | None:
    """Bytes of memory that are free on a device; None where the system does not tell. On a GPU what torch holds of
    tensors that are gone counts as free: it gives it to the next ones."""
    if device.type == "cuda":
        bytes_of = torch.cuda.memory_stats_as_nested_dict(device)
        reserved, allocated = (bytes_of.get(f"{name}_bytes", {}) for name in ("reserved", "allocated"))
        held = [part["all"]["current"] if part else 0 for part in (reserved, allocated)]
        return int(torch.cuda.mem_get_info(device)[0]) + held[0] - held[1]
    if device.type != "cpu":
        return None
    limits = [_meminfo(), _cgroup()]
    return min((limit for limit in limits if limit is not None), default=None)


def _meminfo() -> int | None:
    """The memory that Linux reports as available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _cgroup() -> int | None:
    """What is left of a container's limit; what can be dropped from its cache counts as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = ((root / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - int(used) + int(cached.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


def check_memory(arch: Architecture) -> None:
    """Raise `ArchitectureError` if the weights alone do not fit into memory in float64."""
    layer = sum(math.prod(shape) for shape in layer_shapes(arch, 0).values())
    needed = (1 if arch.shared else arch.layers) * (layer * FLOAT64_BYTES + LAYER_OVERHEAD_BYTES)
    if needed > machine_memory():
        got = f"{arch.layers} layers of width {arch.width} take {format_bytes(needed)} in float64"
        sentence = f"a network must fit into the memory of this machine, {format_bytes(machine_memory())}; {got}"
        raise ArchitectureError(f"{sentence}: take fewer layers or a smaller width", subject="layers")


def format_bytes(count: int) -> str:
    """Write a number of bytes in MB or GB.

    >>> format_bytes(3 * 10**12)
    '3,000 GB'
    """
    return f"{count / 1e9:,.0f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"
