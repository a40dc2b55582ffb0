"""How many paths there are, exactly, and how to number them.

A path takes one head, or goes past the heads, in every layer: `(3, None, 11, ...)`. Its length is the number
of heads in it: `C(L, k) H^k` paths of length k, `(1 + H)^L` in all. Python's whole numbers have no end.
"""

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from math import comb

from rankscope.errors import PathError

Path = tuple[int | None, ...]


def path_counts(layers: int, heads: int) -> list[int]:
    """The number of paths of each length 0..layers.

    >>> path_counts(layers=12, heads=12)[:3], sum(path_counts(12, 12)) == 13**12
    ([1, 144, 9504], True)
    """
    if layers < 0 or heads < 0:
        raise PathError(f"layers and heads must be whole numbers >= 0; got {layers} and {heads}")
    return [comb(layers, k) * heads**k for k in range(layers + 1)]


def path_shares(layers: int, heads: int) -> list[float]:
    """The share of paths of each length: a binomial distribution with chance H / (1 + H)."""
    total = (1 + heads) ** layers
    return [float(Fraction(count, total)) for count in path_counts(layers, heads)]


def all_paths(layers: int, heads: int, length: int | None = None) -> Iterator[Path]:
    """Every path, or every path of one length."""
    for path in product((None, *range(heads)), repeat=layers):
        if length is None or length_of(path) == length:
            yield path


def length_of(path: Path) -> int:
    """The heads in a path."""
    return sum(head is not None for head in path)


def sampled_paths(layers: int, heads: int, length: int, count: int, seed: int) -> list[Path]:
    """Paths of one length, drawn uniformly without repetition."""
    if not 0 <= length <= layers:
        raise PathError(f"lengths run from 0 to {layers}; got {length}")
    total = path_counts(layers, heads)[length]
    if not 0 <= count <= total:
        raise PathError(f"there are {total} paths of length {length}; {count} were asked for")
    draw = random.Random(seed)
    chosen: dict[int, None] = {}
    if total <= 4 * count:
        chosen = dict.fromkeys(draw.sample(range(total), count))
    while len(chosen) < count:
        chosen[draw.randrange(total)] = None
    return [path_number(layers, heads, length, index) for index in chosen]


def path_number(layers: int, heads: int, length: int, index: int) -> Path:
    """The index-th path of a length: layers in the combinatorial number system, heads as digits."""
    where, digits = divmod(index, heads**length) if heads else (index, 0)
    path: list[int | None] = [None] * layers
    left = length
    for layer in reversed(range(layers)):
        if left and where >= comb(layer, left):
            where -= comb(layer, left)
            left -= 1
            digits, path[layer] = divmod(digits, heads)
    return tuple(path)


def checked(path: Path, layers: int, heads: int) -> Path:
    """The path itself, if it is one of this network."""
    path = tuple(path)
    if len(path) != layers:
        raise PathError(f"a path names a head or None for each of {layers} layers; got {len(path)}: {path}")
    for head in path:
        if head is not None and not (type(head) is int and 0 <= head < heads):
            raise PathError(f"heads are numbered 0..{heads - 1}, None goes past them; got {head!r} in {path}")
    return path
