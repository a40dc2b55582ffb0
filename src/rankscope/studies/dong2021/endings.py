"""Where a pair of tokens goes that is fed back to its network: the endings that figure 3 tells apart.

- fell together: their distance comes below a twentieth of the diameter;
- ran away: a token is ten times as far out as the circle is, and not near the other;
- drifted off: the same, but both went together, between half and twice the diameter apart;
- on the circle: all along within half a radius of where they should be;
- apart: none of these.
"""

import polars as pl
import torch
from torch import Tensor

from rankscope.shapes import Float
from rankscope.studies.dong2021.circle import RADIUS, circle

TOGETHER = 0.05
"""The share of the diameter below which tokens have fallen together."""
ENDS = ("fell together", "ran away", "drifted off", "apart", "on the circle")
Path = Float[Tensor, "step 2 2"]
"""Of both tokens, up to where one has run away."""


def path_of(rows: pl.DataFrame) -> Path:
    """The path of one seed, from its rows of the table of trajectories."""
    return torch.tensor(rows.sort("step", "token").select("x", "y").to_numpy()).view(-1, 2, 2)


def distance(path: Path) -> Float[Tensor, " step"]:
    """Between the tokens, as a share of the diameter."""
    return (path[:, 0] - path[:, 1]).norm(dim=-1) / (2 * RADIUS)


def ending(path: Path, steps: int) -> str:
    """Where a pair goes that was followed for so many steps, or until it ran away."""
    apart = distance(path)
    if bool((apart < TOGETHER).any()):
        return "fell together"
    if len(path) <= steps:
        return "drifted off" if 0.5 <= float(apart[-1]) <= 2 else "ran away"
    gap = (path - circle()[: len(path)]).norm(dim=-1)
    return "on the circle" if float(gap.max()) < RADIUS / 2 else "apart"


def left(path: Path, steps: int) -> int | None:
    """The first step at which the distance is below half or above twice the diameter, or a token has run
    away; None if that never comes."""
    apart = distance(path)
    out = ((apart < 0.5) | (apart > 2)).nonzero()
    if len(out):
        return int(out[0])
    return len(path) if len(path) <= steps else None
