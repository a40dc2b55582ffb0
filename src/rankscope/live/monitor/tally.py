"""What is kept of many readings of one number: sums that merge, over samples, micro-batches and ranks.

Of n values with mean m and `M = sum (v - m)^2`, and n', m', M' of others,

    n'' = n + n',    m'' = m + (m' - m) n' / n'',    M'' = M + M' + (m' - m)^2 n n' / n''

(Chan et al. 1979): the same numbers come of the parts, in whatever groups, as of the whole. A value that is
no number, as of tokens that overflowed, is counted apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.profiles.rows import Found
from rankscope.shapes import Float

WIDTH = 7
"""Numbers of one tally: how many, mean, M, least, most, mean of the floors, how many were no numbers."""

NONE = torch.tensor([0.0, 0.0, 0.0, torch.inf, -torch.inf, 0.0, 0.0], dtype=torch.float64)
"""The tally of no value."""

Tallies = Float[Tensor, "number 7"]


class Key(NamedTuple):
    """What a tally is of."""

    layer: int | None
    """None where it is of the whole run, as the loss is."""
    head: int | None
    metric: str


def of_values(
    value: Float[Tensor, "sample number"], floor: Float[Tensor, "sample number"]
) -> Float[Tensor, "number 7"]:
    """Tallies over samples."""
    if not len(value):
        return NONE.to(value.device).expand(value.shape[1], WIDTH)
    bad = ~value.isfinite()
    number = (~bad).sum(0)
    share = number.clamp(min=1)
    kept = value.masked_fill(bad, 0.0)
    mean = kept.sum(0) / share
    about = (kept - mean).square().masked_fill(bad, 0.0).sum(0)
    least = value.masked_fill(bad, torch.inf).amin(0)
    most = value.masked_fill(bad, -torch.inf).amax(0)
    floors = floor.masked_fill(bad, 0.0).sum(0) / share
    return torch.stack([number.double(), mean, about, least, most, floors, bad.sum(0).double()], -1)


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
    """Values by what they are of, in the order they came. They stay where they were made, as they are, until
    `packed`: reducing each by itself would cost an accelerator more than making it."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int | None, str, bool], list[tuple[Tensor, Tensor]]] = {}
        """By (layer, metric, whether by head): values and floors, `[sample]` or `[sample, head]`."""

    def __bool__(self) -> bool:
        return bool(self.parts)

    def add(self, layer: int | None, metric: str, value: Tensor, floor: Tensor | None = None) -> None:
        """One more part: `[sample]`, or `[sample, head]`."""
        floor = torch.zeros_like(value) if floor is None else floor
        self.parts.setdefault((layer, metric, value.ndim == 2), []).append((value, floor))

    def read(self, layer: int, found: Found) -> None:
        """What was read of a layer."""
        for metric, reading in found:
            self.add(layer, metric.name, reading.value, reading.floor)

    def update(self, other: "Tallied") -> None:
        """All parts of another."""
        for key, parts in other.parts.items():
            self.parts.setdefault(key, []).extend(parts)

    def keys(self) -> list[Key]:
        """What each row of `packed` is of."""
        return [
            Key(layer, head if by_head else None, metric)
            for (layer, metric, by_head), parts in self.parts.items()
            for head in range(parts[0][0].shape[1] if by_head else 1)
        ]

    def packed(self) -> Tallies:
        """All of them on the CPU: values of as many samples are reduced together, and brought over at once
        from each device."""
        columns = [tuple(map(_column, zip(*parts, strict=True))) for parts in self.parts.values()]
        alike: dict[tuple[int, torch.device], list[int]] = {}
        for k, (value, _) in enumerate(columns):
            alike.setdefault((len(value), value.device), []).append(k)
        found: dict[int, Tensor] = {}
        for here in alike.values():
            rows = of_values(*(torch.cat([columns[k][part] for k in here], 1) for part in (0, 1))).cpu()
            sizes = [columns[k][0].shape[1] for k in here]
            found |= dict(zip(here, torch.split(rows, sizes), strict=True))
        return torch.cat([NONE.new_zeros(0, WIDTH), *(found[k] for k in range(len(columns)))])


def _column(parts: Sequence[Tensor]) -> Float[Tensor, "sample number"]:
    """In float64, of all micro-batches, on the device of the first."""
    whole = parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device) for part in parts])
    return (whole[:, None] if whole.ndim == 1 else whole).double()
