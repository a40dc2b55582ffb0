"""The numbers of each sample that `Scaled.normalised` needs, on a GPU: one kernel in place of ten.

`scaled.py` calls `rescaling`. A layer normalises some thirty tensors, and for each of them computes a few numbers per
sample or head by some ten operations: kernels for these take longer to start than to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SAMPLES = 256


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(SIZE, LOG, KEPT, MOVED, HALF, NEAR, n, widest: tl.constexpr, lowest: tl.constexpr, SAMPLES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logs of samples as they are and with the size in them, `1 / sqrt(size)`, and whether values may stay."""
    at = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    inside = at < n
    size = tl.load(SIZE + at, mask=inside, other=1.0)
    log = tl.load(LOG + at, mask=inside, other=0.0)
    zero = size == 0
    step = tl.log(tl.where(zero, 1.0, size))
    step = tl.where(tl.abs(step) == float("inf"), float("nan"), step)
    tl.store(HALF + at, tl.exp(step * -0.5), mask=inside)
    tl.store(NEAR + at, (tl.abs(step) <= widest).to(tl.int8), mask=inside)
    moved = tl.where(zero, lowest, log + step)
    log = tl.where(zero, lowest, log)
    tl.store(MOVED + at, _within(moved, lowest), mask=inside)
    tl.store(KEPT + at, _within(log, lowest), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _within(log, lowest: tl.constexpr):  # type: ignore[no-untyped-def]
    """A log cut at `lowest` and at its negative; NaN stays NaN."""
    log = tl.where(log < lowest, lowest, log)
    return tl.where(log > -lowest, -lowest, log)


def rescaling(size: Tensor, log: Tensor, widest: float, lowest: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the log as it is, the log with the size in it, `size^(-1/2)`, whether the log of the size is at most `widest`).

    Args:
        size: The largest |entry| of each sample, or of each sample and head.
        log: The log of its scale.
        widest: The log of a size up to which values may stay as they are.
        lowest: The log of zero.
    """
    size, log = size.contiguous(), log.contiguous()
    kept, moved, half = (torch.empty_like(log) for _ in range(3))
    near = torch.empty_like(log, dtype=torch.int8)
    with torch.cuda.device_of(size):  # type: ignore[no-untyped-call]
        _kernel[(triton.cdiv(size.numel(), SAMPLES),)](
            size, log, kept, moved, half, near, size.numel(), widest, lowest, SAMPLES=SAMPLES
        )
    return kept, moved, half, near.view(torch.bool)
