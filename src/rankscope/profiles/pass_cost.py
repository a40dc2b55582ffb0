"""Estimates the memory and the time of a pass before it starts.

Called by `measuring.py`, which refuses a pass that does not fit into memory (`check_memory`) and asks how many
batches fit side by side (`batches_beside`), and by `measuring.py` and the command line, which say how long the pass
will take (`seconds`).

**Memory.** Attention takes most of it: P of one layer is `[sample, head, token, token]`, and beside it stand its
scores, what its rows differ by, and what a metric makes of it. `MATRICES` says how many like P are alive at the peak.
Where deviation arithmetic goes by blocks of rows, what is needed grows with the tokens alone: `STATES` are alive, and
some blocks.

**Time.** A pass of n tokens through a layer multiplies and adds

    n (numbers in its weight matrices) + 2 n^2 heads head_width

times in products of matrices; operations other than products go over `n^2 heads + n (4 width + mlp_width)` entries, of
attention and of the outputs of its parts; and every layer of every batch takes some time to start, however small it is.
How much of each an arithmetic needs is its `Cost`; how fast this machine multiplies is timed (`rate`). The sum of the
three is the estimate, mostly within a factor of two of the time taken; time for reading files is not in it. `python -m
benchmarks.growth` prints estimates beside the times taken.
"""

import math
import time
from functools import cache
from typing import NamedTuple

import torch

from rankscope.deviation import AT_ONCE
from rankscope.errors import TooLargeError
from rankscope.nets import Architecture, free_memory, layer_shapes, size_of_attention

MATRICES = {"deviation": 12.5, "confirm": 70.0, "float": 6.0}
"""As measured at 1,024 tokens, the second pass included: at most so many matrices of float64."""
STATES = 12.0  # by rows, the second pass included: so many numbers of each token, for each of its width and the MLP's
BLOCKS = 20  # and so many blocks of rows
OF_HEADS = 4.0  # and where heads are read, so many like what all of them add
UNNOTICED = 2**28  # bytes that are not worth a question


def check_memory(
    arch: Architecture,
    samples: int,
    tokens: int,
    batch_size: int,
    kind: str,
    device: torch.device,
    streams: bool,
    heads: bool = False,
) -> None:
    """Refuse a pass that cannot fit into the memory of a device: `TooLargeError`, with what would fit.

    Of `samples` with so many `tokens` each, `batch_size` run together. The `kind` is one of `MATRICES`, or "rows":
    deviation arithmetic by rows. `streams` says whether another kind would read attention a block of rows at a time,
    `heads` whether what heads add is read.
    """
    count = min(samples, batch_size)
    needed = pass_bytes(arch, count, tokens, kind, device, heads)
    if needed <= UNNOTICED:
        return
    free = free_memory(device)
    if free is None or needed <= free:
        return
    size = needed / count
    fits = int(free // size)
    most = int(math.sqrt(free / (MATRICES[kind] * arch.heads * 8))) if kind in MATRICES else int(tokens * free / size)
    if fits:
        remedy = f"batch_size={fits} fits"
    elif kind == "confirm" and streams:
        remedy = f"confirm=False reads long contexts a block of rows at a time; or {most:,} tokens fit"
    else:
        remedy = f"{most:,} tokens fit"
    what = {"confirm": "doubled precision", "float": "attention"}.get(kind, "deviation arithmetic")
    sentence = f"{what} of {count} x {tokens:,} tokens in {arch.heads} heads needs about {_in_bytes(needed)}"
    got = f"there are {_in_bytes(free)} of memory free"
    raise TooLargeError(f"{sentence}; {got}: {remedy}", subject="batch_size" if fits else "tokens")


def batches_beside(arch: Architecture, tokens: int, batch_size: int, kind: str, device: torch.device) -> int:
    """The number of batches of a pass that memory holds at a time, at least one; `kind` as in `check_memory`."""
    free = free_memory(device)
    size = pass_bytes(arch, batch_size, tokens, kind, device)
    return max(1, int((UNNOTICED if free is None else free / 2) // max(size, 1)))


def pass_bytes(
    arch: Architecture, samples: int, tokens: int, kind: str, device: torch.device, heads: bool = False
) -> float:
    """The bytes that a pass needs; the arguments are those of `check_memory`, but `samples` those that run together."""
    if kind in MATRICES:
        return MATRICES[kind] * size_of_attention(arch, samples, tokens)
    numbers = STATES * (arch.width + arch.mlp_width) + OF_HEADS * heads * arch.heads * arch.width
    block = max(AT_ONCE.get(device.type, AT_ONCE["cuda"]), 8 * samples * arch.heads * tokens)
    return 8 * samples * tokens * numbers + BLOCKS * block


def _in_bytes(size: int | float) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / 2**20:.0f} MB"


class Cost(NamedTuple):
    """What a kind of pass takes, on one kind of device."""

    products: float  # times the products of matrices of a plain pass
    entries: float  # time of the operations on an entry beside products, in multiplications and additions
    start: float  # seconds that a layer of a batch takes at least


COSTS = {
    "cpu": {
        "float": Cost(1.3, 150.0, 0.001),
        "deviation": Cost(1.4, 450.0, 0.012),
        "checked": Cost(2.6, 1400.0, 0.03),
        "confirm": Cost(80.0, 24000.0, 0.1),
    },
    "cuda": {
        "float": Cost(1.2, 360.0, 0.001),
        "deviation": Cost(2.0, 2500.0, 0.006),
        "checked": Cost(3.5, 5000.0, 0.012),
        "confirm": Cost(80.0, 50000.0, 0.1),
    },
}
"""With metrics of tokens, by device and kind of pass; "checked" has the second pass beside deviation. Any other device
counts as "cuda"."""
LOOKED_AT = 1000  # layers of which the cost is taken, at most: a million would take longer than to begin
SIDE = {"cpu": 384}  # of the matrices whose product is timed; elsewhere 4,096: less is done before the next is due


def seconds(
    arch: Architecture,
    samples: int,
    tokens: int,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    batch_size: int = 16,
) -> float:
    """The time that a pass over `samples` of so many `tokens` each will take, `batch_size` at a time. The `kind` is
    "float", "deviation", "checked" (deviation with its second pass) or "confirm"."""
    cost = COSTS.get(device.type, COSTS["cuda"])[kind]
    # Products of narrow numbers may be many times as fast; what goes over entries is not.
    slow = min(rate(narrow, device) for narrow in {dtype, torch.promote_types(dtype, torch.float32)})
    products = cost.products * multiply_adds(arch, samples, tokens) / rate(dtype, device)
    beside = cost.entries * entries(arch, samples, tokens) / slow
    return products + beside + cost.start * arch.layers * math.ceil(samples / batch_size)


def entries(arch: Architecture, samples: int, tokens: int) -> float:
    """The entries of attention, and of what the parts of layers give, that a plain pass goes over."""
    mlp = 0 if arch.mlp == "none" else arch.mlp_width
    return samples * arch.layers * (tokens**2 * arch.heads + tokens * (4 * arch.width + mlp))


def multiply_adds(arch: Architecture, samples: int, tokens: int) -> float:
    """Multiplications and additions in the products of a plain pass, from at most `LOOKED_AT` of its layers."""
    attention = tokens**2 * arch.heads * (arch.head_width + arch.value_width)
    some = range(0, arch.layers, -(-arch.layers // LOOKED_AT))
    numbers = sum(_numbers(arch, index) for index in some) * arch.layers / len(some)
    return samples * (tokens * numbers + arch.layers * attention)


def _numbers(arch: Architecture, index: int) -> float:
    """Numbers in the matrices of a layer that a token meets: of experts, those it is sent to."""
    shapes, experts = layer_shapes(arch, index), arch.experts
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if name.endswith(".weight")}
    if experts is None:
        return sum(sizes.values())
    routed = sum(sizes.get(f"experts.{name}.weight", 0) for name in ("up", "gate", "down"))
    return sum(sizes.values()) - routed * (1 - experts.chosen / experts.number)


@cache
def rate(dtype: torch.dtype, device: torch.device) -> float:
    """Multiplications and additions of a product of matrices that this machine does in a second, as timed."""
    side = SIDE.get(device.type, 4096)
    A = torch.ones(side, side, dtype=dtype, device=device)
    took = math.inf
    for _ in range(4):  # the first may have to wake something
        start = time.perf_counter()
        float((A @ A)[0, 0])
        took = min(took, time.perf_counter() - start)
    return side**3 / max(took, 1e-9)


def in_words(duration: float) -> str:
    """A duration as people say it.

    >>> in_words(170), in_words(40), in_words(9000)
    ('about 3 minutes', 'about 40 seconds', 'about 2.5 hours')
    """
    if duration < 90:
        return f"about {duration:.0f} seconds"
    if duration < 90 * 60:
        return f"about {duration / 60:.0f} minutes"
    hours = duration / 3600
    return f"about {hours:.2g} hours" if hours < 48 else f"about {hours / 24:,.0f} days"
