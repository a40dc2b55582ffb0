"""What is kept of many readings of one number: sums that merge, over samples, micro-batches and ranks.

Of n values with mean m and `M = sum (v - m)^2`, and n', m', M' of others,

    n'' = n + n',    m'' = m + (m' - m) n' / n'',    M'' = M + M' + (m' - m)^2 n n' / n''

(Chan et al. 1979): the same numbers come of the parts, in whatever groups, as of the whole. A value that is
no number, as of tokens that overflowed, is counted apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.metrics import Reading

WIDTH = 7
"""Numbers of one tally: how many, mean, M, least, most, mean of the floors, how many were no numbers."""

Tallies = Float[Tensor, "number 7"]


class Key(NamedTuple):
    """What a tally is of."""

    layer: int | None
    """None where it is of the whole run, as the loss is."""
    head: int | None
    metric: str


def tally(reading: Reading) -> Float[Tensor, "*head 7"]:
    """Of one reading `[batch]` or `[batch, head]`, on its device."""
    return of_values(reading.value.double(), reading.floor.double())


def of_values(value: Tensor, floor: Tensor | None = None) -> Float[Tensor, "*head 7"]:
    """Of `[batch]` or `[batch, head]`, over the first axis."""
    good = value.isfinite()
    number = good.sum(0)
    share = number.clamp(min=1)
    kept = value.masked_fill(~good, 0.0)
    mean = kept.sum(0) / share
    about = (kept - mean).square().masked_fill(~good, 0.0).sum(0)
    least = value.masked_fill(~good, torch.inf).amin(0)
    most = value.masked_fill(~good, -torch.inf).amax(0)
    floors = torch.zeros_like(mean) if floor is None else floor.masked_fill(~good, 0.0).sum(0) / share
    return torch.stack([number.double(), mean, about, least, most, floors, (~good).sum(0).double()], -1)


def merged(a: Float[Tensor, "... 7"], b: Float[Tensor, "... 7"]) -> Float[Tensor, "... 7"]:
    """Two tallies of the same numbers, as one."""
    n, m = a[..., 0], b[..., 0]
    whole = (n + m).clamp(min=1)
    apart = b[..., 1] - a[..., 1]
    return torch.stack(
        [
            n + m,
            a[..., 1] + apart * m / whole,
            a[..., 2] + b[..., 2] + apart.square() * n * m / whole,
            torch.minimum(a[..., 3], b[..., 3]),
            torch.maximum(a[..., 4], b[..., 4]),
            a[..., 5] + (b[..., 5] - a[..., 5]) * m / whole,
            a[..., 6] + b[..., 6],
        ],
        -1,
    )


class Tallied:
    """Tallies by what they are of, in the order they came; they stay where they were made until `packed`."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int | None, str, bool], Tensor] = {}
        """By (layer, metric, whether by head): `[7]`, or `[head, 7]`."""

    def __bool__(self) -> bool:
        return bool(self.parts)

    def add(self, layer: int | None, metric: str, part: Float[Tensor, "*head 7"]) -> None:
        """One more part."""
        key = (layer, metric, part.ndim == 2)
        before = self.parts.get(key)
        self.parts[key] = part if before is None else merged(before, part.to(before.device))

    def update(self, other: "Tallied") -> None:
        """All parts of another."""
        for (layer, metric, _), part in other.parts.items():
            self.add(layer, metric, part)

    def keys(self) -> list[Key]:
        """What each row of `packed` is of."""
        return [
            Key(layer, head if by_head else None, metric)
            for (layer, metric, by_head), part in self.parts.items()
            for head in range(len(part) if by_head else 1)
        ]

    def packed(self) -> Tallies:
        """All of them on the CPU, brought over at once from each device."""
        return brought([part.reshape(-1, WIDTH) for part in self.parts.values()])


def brought(parts: Sequence[Tensor]) -> Tallies:
    """Rows on the CPU: one transfer for each device."""
    found: dict[int, Tensor] = {}
    for device in dict.fromkeys(part.device for part in parts):
        here = [k for k, part in enumerate(parts) if part.device == device]
        rows = torch.cat([parts[k] for k in here]).cpu()
        found |= dict(zip(here, torch.split(rows, [len(parts[k]) for k in here]), strict=True))
    none = torch.zeros(0, WIDTH, dtype=torch.float64)
    return torch.cat([none, *(found[k] for k in range(len(parts)))])
