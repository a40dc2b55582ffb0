"""Products of matrices of pairs, by float64 products that make no rounding error (Ozaki et al. 2012).

Rows of A and columns of B are scaled by powers of two to entries below one and cut into slices of b bits, `A = A0 + A1
+ A2 + A3`. With `2b + log2(1.25 k) <= 53` the products of slices are sums of integers below 2^53 in some unit: exact in
whatever order a library adds them. With the parts `B>=j` that slices before j leave,

    A B = [A0 B0] + [A0 B1 + A1 B0] + [A0 B2 + A1 B1 + A2 B0] + [A0 B>=3 + A1 B>=2 + A2 B>=1 + A3 B],

the brackets but the last are exact, and the last is below 2^-3b, so that its rounding is below 2^-3b-53: ten
float64 products, or fewer where slices are zero. The error is a share 2^-103 or less of
`max_j |A_ij| max_i |B_ij|` times the square root of k. An entry of A that is far below the largest of its row would
keep few digits, and be all there is where the largest meets a row of zeros in B: where rows of B differ much in size,
their sizes go into the columns of A first (`_balanced`).
"""

import math
from itertools import product as combinations

import torch
from torch import Tensor

from rankscope.doubled.pairs import Pair, add, power_of_two, two_sum

DEEPEST, WIDEST, TALLEST = 1024, 4096, 256  # most inner entries, columns and rows that are taken at a time
UNEVEN = 20  # by how many bits rows of B may differ in size before that is evened out
ENTRIES = 1 << 18  # most entries of the results of a batch of small products that are taken at a time


def product(A: Pair, B: Pair) -> Pair:
    """A B of matrices, or of as many in a batch."""
    A, B = _balanced(A, B)
    *batch, rows, inner = A.hi.shape
    columns = B.hi.shape[-1]
    shape = (*batch, rows, columns)
    hi, lo = A.hi.new_zeros(shape), A.hi.new_zeros(shape)
    largest = max(rows, inner) * max(columns, inner)
    batches = _runs(batch[0], max(1, ENTRIES // max(1, largest))) if batch else [slice(None)]
    for some, wide, deep in combinations(batches, _runs(columns, WIDEST), _runs(inner, DEEPEST)):
        of_batch = (some,) if batch else ()
        right = _Slices(B.mapped(lambda t, i=(*of_batch, deep, wide): t[i]), -2)
        for tall in _runs(rows, TALLEST):
            left = _Slices(A.mapped(lambda t, i=(*of_batch, tall, deep): t[i]), -1)
            part, index = _product(left, right), (*of_batch, tall, wide)
            if deep.start:
                part = add(Pair(hi[index], lo[index]), part)
            hi[index], lo[index] = part.hi, part.low
    return Pair(hi, lo)


def _balanced(A: Pair, B: Pair) -> tuple[Pair, Pair]:
    """Factors of the same product, the rows of B of like size where they were not: powers of two go over to the columns
    of A, and columns that meet a row of zeros become zero."""
    if not B.hi.numel() or not A.hi.numel():
        return A, B
    size = B.hi.abs().amax(-1)  # [..., inner]
    exponent = torch.frexp(size.masked_fill(~size.isfinite(), 1.0))[1].long()
    largest = exponent.masked_fill(size == 0, -2000).amax(-1, keepdim=True)
    below = (largest - exponent).clamp(0, 900)
    if not bool(((below > UNEVEN) | (size == 0)).any()) or not bool(size.isfinite().all()):
        return A, B
    less, more = power_of_two(-below).masked_fill(size == 0, 0.0), power_of_two(below)
    return A.mapped(lambda t: t * less[..., None, :]), B.mapped(lambda t: t * more[..., None])


def _runs(size: int, most: int) -> list[slice]:
    """Slices of at most `most` that cover `size` entries."""
    return [slice(i, min(size, i + most)) for i in range(0, size, most)]


class _Slices:
    """A factor cut along its inner axis: slices 0, 1, 2 and what all before each of 0 .. 3 leave."""

    def __init__(self, x: Pair, inner: int) -> None:
        top = x.hi.abs().amax(inner, keepdim=True)
        exponent = torch.frexp(top.masked_fill(~top.isfinite(), 1.0))[1].long().clamp(-1022, 1022)
        self.scale, back = power_of_two(exponent), power_of_two(-exponent)
        hi, lo = x.hi * back, None if x.lo is None else x.lo * back
        bits = (53 - math.ceil(math.log2(1.25 * x.hi.shape[inner]))) // 2
        self.slices: list[Tensor | None] = []
        self.left: list[Tensor | None] = [_unless_zero(hi)]
        for n in (1, 2, 3):
            rounder = 1.5 * 2.0 ** (52 - n * bits)  # its last bit is the slice's
            piece = (hi + rounder).sub_(rounder)
            hi = hi - piece
            if lo is not None:
                hi, lo = two_sum(hi, lo)
            self.slices.append(_unless_zero(piece))
            self.left.append(_unless_zero(hi))


def _unless_zero(x: Tensor) -> Tensor | None:
    """The tensor, or None if all its entries are zero."""
    return x if bool(x.any()) else None


def _product(A: _Slices, B: _Slices) -> Pair:
    """The four brackets of the module's formula, added from the largest to the smallest."""
    (a0, a1, a2), a3 = A.slices, A.left[3]
    b0, b1, b2 = B.slices
    levels = [
        [(a0, b0)],
        [(a0, b1), (a1, b0)],
        [(a0, b2), (a1, b1), (a2, b0)],
        [(a0, B.left[3]), (a1, B.left[2]), (a2, B.left[1]), (a3, B.left[0])],
    ]
    first, second, third, last = (_sum_of_products(level) for level in levels)
    total = Pair(torch.zeros_like(A.scale * B.scale) if first is None else first)
    for part in (second, third, last):
        total = total if part is None else add(total, Pair(part))
    return total.mapped(lambda t: t * A.scale * B.scale)


def _sum_of_products(pairs: list[tuple[Tensor | None, Tensor | None]]) -> Tensor | None:
    """The sum of float64 products of slices; None if every product has a slice of zeros."""
    total: Tensor | None = None
    for a, b in pairs:
        if a is None or b is None:
            continue
        if total is None:
            total = a.new_zeros(*a.shape[:-1], b.shape[-1])
        total = total.addmm_(a, b) if a.ndim == 2 else total.baddbmm_(a, b)
    return total
