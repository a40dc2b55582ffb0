"""How many paths there are, exactly, and how to number them.

A path takes one head, or goes past the heads, in every layer: `(3, None, 11, ...)`. Its length is the number
of heads in it: `C(L, k) H^k` paths of length k, `(1 + H)^L` in all. Python's whole numbers have no end.
"""

import random
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from math import comb
from typing import Any

from rankscope.errors import PathError, require

Path = tuple[int | None, ...]
Ways = tuple[tuple[int | None, ...], ...]  # by layer: the heads that speak, and None where there is a way past them


def path_counts(layers: int, heads: int) -> list[int]:
    """The number of paths of each length 0..layers.

    >>> path_counts(layers=12, heads=12)[:3], sum(path_counts(12, 12)) == 13**12
    ([1, 144, 9504], True)
    """
    sentence = f"layers and heads must be >= 0; got {layers} and {heads}"
    require(layers >= 0 and heads >= 0, sentence, PathError, "layers")
    return [comb(layers, k) * heads**k for k in range(layers + 1)]


def path_shares(layers: int, heads: int) -> list[float]:
    """The share of paths of each length: a binomial distribution with chance H / (1 + H)."""
    total = (1 + heads) ** layers
    return [float(Fraction(count, total)) for count in path_counts(layers, heads)]


def all_paths(layers: int, heads: int, length: int | None = None) -> Iterator[Path]:
    """Every path, or every path of one length."""
    return paths_along(((None, *range(heads)),) * layers, length)


def paths_along(ways: Ways, length: int | None = None) -> Iterator[Path]:
    """Every path, or every path with `length` heads in it, that takes one of the `ways` of each layer."""
    if length is None:
        yield from product(*ways)
        return
    must = [layer for layer, choices in enumerate(ways) if None not in choices]
    may = [layer for layer, choices in enumerate(ways) if None in choices and len(choices) > 1]
    for chosen in combinations(may, length - len(must)) if length >= len(must) else ():
        through = {*must, *chosen}
        yield from product(*(_heads(choices) if layer in through else (None,) for layer, choices in enumerate(ways)))


def length_of(path: Path) -> int:
    """The heads in a path."""
    return sum(head is not None for head in path)


def sampled_paths(ways: Ways, length: int, count: int, seed: int) -> list[Path]:
    """Paths of one length, drawn uniformly without repetition."""
    total = counts_along(ways)[checked_length(length, len(ways))]
    require(0 <= count <= total, f"length {length} has {total} paths; asked for {count}", PathError, "count")
    draw = random.Random(seed)
    chosen = dict.fromkeys(draw.sample(range(total), count) if total <= 4 * count else ())
    while len(chosen) < count:
        chosen[draw.randrange(total)] = None
    return [path_number(ways, length, index) for index in chosen]


def counts_along(ways: Ways) -> list[int]:
    """The number of paths of each length through layers that have these ways."""
    return list(_onward(ways)[0])


def path_number(ways: Ways, length: int, index: int) -> Path:
    """The index-th path of a length: in each layer, those that go past its heads are numbered first."""
    path: list[int | None] = []
    for choices, onward in zip(ways, _onward(ways)[1:], strict=True):
        past = onward[length] if None in choices else 0
        if index < past:
            path.append(None)
            continue
        head, index = divmod(index - past, onward[length - 1])
        path.append(_heads(choices)[head])
        length -= 1
    return tuple(path)


@lru_cache(maxsize=8)
def _onward(ways: Ways) -> tuple[tuple[int, ...], ...]:
    """[layer][k]: how many ways on with k heads there are from before each layer, and after the last."""
    counts_from = [(1, *[0] * len(ways))]
    for choices in reversed(ways):
        later, heads, past = counts_from[-1], len(_heads(choices)), int(None in choices)
        counts_from.append(tuple(past * n + heads * one_less for n, one_less in zip(later, (0, *later), strict=False)))
    return tuple(reversed(counts_from))


def _heads(choices: tuple[int | None, ...]) -> list[int]:
    return [head for head in choices if head is not None]


def checked_length(length: int, layers: int) -> int:
    """The length itself, if paths of this network can have it."""
    known = type(length) is int and 0 <= length <= layers
    require(known, f"lengths run from 0 to {layers}; got {length!r}", PathError, "length")
    return length


def checked(path: Any, ways: Ways, heads: int) -> Path:
    """The path as a tuple, if it is one of a network whose layers have these ways."""
    if isinstance(path, str) or not isinstance(path, Iterable):
        raise PathError(f"a path is a row of heads and None, as in (3, None, 0); got {path!r}", subject="path")
    path = tuple(path)
    if len(path) != len(ways):
        raise PathError(f"a path has a head or None for each of {len(ways)} layers; got {path}", subject="path")
    for layer, (head, choices) in enumerate(zip(path, ways, strict=True), 1):
        if head is not None and not (type(head) is int and 0 <= head < heads):
            raise PathError(f"heads are numbered 0..{heads - 1}; got {head!r} in {path}", subject="head")
        if head not in choices:
            what = "nothing goes past the heads" if head is None else f"head {head} does not speak"
            sentence = f"in layer {layer} of this network {what}, so there is no path {path}"
            listed = ", ".join(map(str, choices)) or "no ways"
            raise PathError(f"{sentence}: name one of {listed} there", subject="path")
    return path
