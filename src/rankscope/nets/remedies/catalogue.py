"""The remedies by name."""

import math
from dataclasses import fields
from typing import Any

from rankscope.errors import ArchitectureError, one_of
from rankscope.nets.remedies.branches import (
    DeepNorm,
    LambdaSkip,
    LayerNormScaling,
    ReZero,
    SkipInit,
    SqrtDepth,
)
from rankscope.nets.remedies.contranorm import ContraNorm
from rankscope.nets.remedies.differential import Differential, Differential2, HeadNorm
from rankscope.nets.remedies.featscale import FeatScale
from rankscope.nets.remedies.gates import Gate, HeadGate
from rankscope.nets.remedies.remedy import Built
from rankscope.nets.remedies.scores import LogN, Sinkhorn
from rankscope.nets.remedies.shaping import AttnScale, Centred, Shaped
from rankscope.nets.remedies.values import Neutreno, ValueResidual

KINDS: tuple[type[Built], ...] = (
    *(Shaped, AttnScale, Centred),
    *(Sinkhorn, LogN, Differential, Differential2),
    *(ReZero, SkipInit, SqrtDepth, LayerNormScaling, DeepNorm, LambdaSkip),
    *(ValueResidual, Neutreno, FeatScale, ContraNorm, Gate, HeadGate),
)
REMEDIES: dict[str, type[Built]] = {each.name: each for each in KINDS}
PIECES: dict[str, type[Built]] = {HeadNorm.name: HeadNorm}
"""Parts that a remedy brings beside its own, known to files."""


def remedy(spec: str, **numbers: Any) -> Built:
    """The remedy that a line as `contranorm:s=0.1` describes, or a name and numbers.

    >>> remedy("attnscale:w=0.5")
    AttnScale(w=0.5)
    """
    name, _, said = spec.partition(":")
    if name not in REMEDIES and name not in PIECES:
        raise ArchitectureError(one_of("remedy", name, REMEDIES))
    kind = (REMEDIES | PIECES)[name]
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    given = dict(numbers)
    for part in filter(None, said.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not _is_number(value):
            raise ArchitectureError(
                f"the numbers of a remedy must be NAME=NUMBER, as attnscale:w=0.5; got {part!r} in {spec!r}"
            )
        given[key] = float(value)
    for key, value in given.items():
        if key not in known:
            said = ", ".join(known) or "none"
            raise ArchitectureError(f"{name} has no number {key!r}; it has {said}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArchitectureError(f"{key} of {name} must be a number; got {value!r}")
        kind_of = type(known[key].default)
        if not math.isfinite(value) or (kind_of is int and value != int(value)):
            wanted = "a whole number" if kind_of is int else "a finite number"
            raise ArchitectureError(f"{key} of {name} must be {wanted}; got {value!r}")
        given[key] = kind_of(value)
    return kind(**given)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
