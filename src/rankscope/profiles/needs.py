"""What a pass needs of memory, told before it starts; more than there is, is refused in a sentence.

Attention takes most of it: P of one layer is `[sample, head, token, token]`, and beside it stand its scores,
what its rows differ by, and what a metric makes of it. `MATRICES` says how many like P are alive at the peak.
Where deviation arithmetic goes by blocks of rows, what is needed grows with the tokens alone: `STATES` are
alive, and some blocks.
"""

import math

import torch

from rankscope.deviation.by_rows import AT_ONCE
from rankscope.errors import TooLargeError
from rankscope.nets.architecture import Architecture
from rankscope.nets.devices import free_memory
from rankscope.nets.streaming import size_of_attention

MATRICES = {"deviation": 12.5, "confirm": 30.0, "float": 6.0}
"""As measured at 1,024 tokens, the second pass included: at most so many matrices of float64."""
STATES = 12.0
"""By rows, the second pass included: so many numbers of each token, for each of its width and the MLP's."""
BLOCKS = 20
"""And so many blocks of rows."""
OF_HEADS = 4.0
"""And where heads are read, so many like what all of them add."""
UNNOTICED = 2**28
"""Bytes that are not worth a question."""


def check_memory(
    arch: Architecture,
    samples: int,
    tokens: int,
    batch: int,
    kind: str,
    device: torch.device,
    streams: bool,
    heads: bool = False,
) -> None:
    """Refuse a pass over so many samples and tokens, `batch` at once, that cannot fit. `kind` is one of
    `MATRICES`, or "rows": deviation arithmetic by rows; `streams` says whether another kind would read it a
    block of rows at a time, `heads` whether what heads add is read."""
    together = min(samples, batch)
    one = (
        MATRICES[kind] * size_of_attention(arch, 1, tokens)
        if kind in MATRICES
        else by_rows(arch, tokens, heads)
    )
    if one * together <= UNNOTICED:
        return
    free = free_memory(device)
    if free is None or one * together <= free:
        return
    fits = int(free // one)
    if kind in MATRICES:
        most = int(math.sqrt(free / (MATRICES[kind] * arch.heads * 8)))
    else:
        most = int(tokens * free / one)
    if fits:
        remedy = f"batch={fits} fits"
    elif kind == "confirm" and streams:
        remedy = f"confirm=False reads long contexts a block of rows at a time; or {most:,} tokens fit"
    else:
        remedy = f"{most:,} tokens fit"
    what = {"confirm": "doubled precision", "float": "attention"}.get(kind, "deviation arithmetic")
    raise TooLargeError(
        f"{what} of {together} x {tokens:,} tokens in {arch.heads} heads needs about "
        f"{_size(one * together)}; there are {_size(free)} of memory free: {remedy}"
    )


def batches_beside(arch: Architecture, tokens: int, batch: int, kind: str, device: torch.device) -> int:
    """So many batches of a pass can be held at a time, at least one. `kind` as in `check_memory`."""
    free = free_memory(device)
    rows = kind not in MATRICES
    one = batch * by_rows(arch, tokens) if rows else MATRICES[kind] * size_of_attention(arch, batch, tokens)
    return max(1, int((UNNOTICED if free is None else free / 2) // max(one, 1)))


def by_rows(arch: Architecture, tokens: int, heads: bool = False) -> float:
    """Bytes that deviation arithmetic of one sample needs by rows."""
    numbers = STATES * (arch.width + arch.mlp_width) + OF_HEADS * heads * arch.heads * arch.width
    return 8 * tokens * numbers + BLOCKS * max(AT_ONCE["cpu"], 8 * arch.heads * tokens)


def _size(size: int | float) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / 2**20:.0f} MB"
