"""Colours, markers and dashes of lines, the same in figures, on pages and in notebooks."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's colours, told apart by colour-blind readers and in grey print by their markers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # Of lines in matplotlib, in their order
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
INK, FAINT = "#222222", "#8a8a8a"  # Colours of text and axes, and of what stands back
POSITIVE, NEGATIVE = PALETTE[0], PALETTE[1]  # Shares that add to a whole, and those that take away from it
ALARM = "#d55e00"
"""The palette's vermilion: told from viridis by everyone."""
VIRIDIS = ("#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b")
"""An order that survives grey print and every kind of colour blindness."""

Item = TypeVar("Item")


class LineStyle(NamedTuple):
    """How the line of a number is told from others."""

    colour: str
    marker: int  # Its place among the markers, and on a page among the dashes
    turn: int  # How often the colours have come again


def line_style(number: int, colours: Sequence[str] = PALETTE) -> LineStyle:
    """Colours come again after the last, each time with another marker and dash.

    >>> line_style(1), line_style(9)
    (LineStyle(colour='#D55E00', marker=1, turn=0), LineStyle(colour='#D55E00', marker=2, turn=1))
    """
    turn = number // len(colours)
    return LineStyle(colours[number % len(colours)], (number + turn) % len(MARKERS), turn)


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items, evenly spaced, the first and the last among them.

    >>> evenly("abcdefg", 4)
    ['a', 'c', 'e', 'g']
    """
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def numbered(names: Iterable[str]) -> dict[str, int]:
    """The number of each line's style. A variant that is often drawn has its own, whatever stands beside it;
    others take those that are left.

    >>> numbered(["san", "mine", "transformer", "yours"])
    {'san': 5, 'mine': 1, 'transformer': 0, 'yours': 2}
    """
    numbers = {name: VARIANTS.index(name) if name in VARIANTS else -1 for name in names}
    left = (index for index in range(len(numbers)) if index not in set(numbers.values()))
    return {name: next(left) if index < 0 else index for name, index in numbers.items()}


NUMBER = re.compile(r"\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?")
ORDERED = 4  # Lines from which on those of a sequence have the colours of an order
LISTED = 10  # Lines that a legend lists, at most; of more in a sequence, a scale says which is which


def in_sequence(names: Sequence[str]) -> list[float] | None:
    """The numbers of names that differ in one number alone, as steps of a training do; None of others, and of
    fewer than `ORDERED`. Lines of these are coloured in their order, dark to light.

    >>> in_sequence(["step 0", "step 500", "step 1,000", "step 2,000"])
    [0.0, 500.0, 1000.0, 2000.0]
    >>> in_sequence(["san", "san+skip", "san+mlp", "transformer"])
    """
    parts = [[float(part.replace(",", "").replace("_", "")) for part in NUMBER.findall(name)] for name in names]
    if len(names) < ORDERED or len({NUMBER.sub("#", name) for name in names}) > 1:
        return None
    varied = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    return list(varied[0]) if len(varied) == 1 and len(set(varied[0])) == len(names) else None
