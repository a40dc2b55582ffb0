"""Colours, markers and dashes of lines, the same in figures, on pages and in notebooks."""

import re
from collections.abc import Iterable, Sequence

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's colours, told apart by colour-blind readers and in grey print by their markers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
VARIANTS = (
    "transformer",
    "transformer-attention_skip",
    "transformer-mlp",
    "transformer-norm",
    "transformer-skip",
    "san",
    "san+skip",
    "san+mlp",
    "san+norm",
)
"""Variants that are often drawn: each has its own look, the same in every figure."""
INK, FAINT = "#222222", "#8a8a8a"


def numbered(names: Iterable[str]) -> dict[str, int]:
    """The number of each line's look. A variant that is often drawn has its own, whatever stands beside it;
    others take those that are left.

    >>> numbered(["san", "mine", "transformer", "yours"])
    {'san': 5, 'mine': 1, 'transformer': 0, 'yours': 2}
    """
    found = {name: VARIANTS.index(name) if name in VARIANTS else -1 for name in names}
    left = (number for number in range(len(found)) if number not in set(found.values()))
    return {name: next(left) if number < 0 else number for name, number in found.items()}


NUMBER = re.compile(r"\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?")
ORDERED = 4
"""Lines from which on those of a sequence have the colours of an order."""
LISTED = 10
"""Lines that a legend lists, at most; of more in a sequence, a scale says which is which."""


def in_sequence(names: Sequence[str]) -> list[float] | None:
    """The numbers of names that differ in one number alone, as steps of a training do; None of others, and of
    fewer than `ORDERED`. Lines of these are coloured in their order, dark to light.

    >>> in_sequence(["step 0", "step 500", "step 1,000", "step 2,000"])
    [0.0, 500.0, 1000.0, 2000.0]
    >>> in_sequence(["san", "san+skip", "san+mlp", "transformer"])
    """
    parts = [
        [float(part.replace(",", "").replace("_", "")) for part in NUMBER.findall(name)] for name in names
    ]
    if len(names) < ORDERED or len({NUMBER.sub("#", name) for name in names}) > 1:
        return None
    varied = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    return list(varied[0]) if len(varied) == 1 and len(set(varied[0])) == len(names) else None
