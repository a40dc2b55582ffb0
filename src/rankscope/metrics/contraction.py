"""Dobrushin's coefficient of a large matrix, exact, by blocks of rows: the largest distance

    d(i, i') = 1/2 sum_j |P_ij - P_i'j|

of any two rows. A pair is looked at only where no bound says that it is nearer than one already found:

- `d <= r_i + r_i'`, with r the distance from the mean row;
- `d <= 1/2 sum_{j in S} |P_ij - P_i'j| + 1/2 (mass of both outside S)`, with S some columns, the heaviest
  among them: under a causal mask the first column alone settles it, `d = 1 - min_i P_i1`;
- `d^2 <= 1/4 (sum_j w_j) sum_j (P_ij - P_i'j)^2 / w_j` (Cauchy and Schwarz), w the columns' spread: a product
  of matrices.

Rows that are all about as far from each other are pruned by none: the time is then that of all pairs, and
goes with the third power of the tokens.
"""

import torch
from torch import Tensor

from rankscope.metrics.rows import HeadRows, PatternRows
from rankscope.shapes import Bool, Float

COLUMNS = 64
"""How many columns S has."""
WALKS = 6
"""From a row to the one farthest from it, so often, before pairs are looked at."""
CACHE = 2**17
"""Numbers of float32 that a core holds near."""
COARSE = 1e-5
"""How far a sum of float32 weights may be off, of the sum."""
EPS = torch.finfo(torch.float64).eps


def by_head(P: PatternRows) -> Float[Tensor, "batch head"]:
    """The coefficient of every head; NaN where a weight is not finite."""
    return P.map_heads(coefficient)


def coefficient(P: HeadRows) -> float:
    """The coefficient of one head."""
    survey = _Survey(P)
    if not survey.finite:
        return float("nan")
    best = survey.walked()
    if best >= survey.most * (1 - 8 * EPS) or not survey.open(best).any():
        return best
    for first in range(0, len(P), P.block):
        left_rows = slice(first, min(len(P), first + P.block))
        A = None
        for second in range(first, len(P), P.block):
            right_rows = slice(second, min(len(P), second + P.block))
            left = survey.near(left_rows, right_rows, best)
            if not left.any():
                continue
            A = P.rows(left_rows.start, left_rows.stop) if A is None else A
            B = A if right_rows == left_rows else P.rows(right_rows.start, right_rows.stop)
            best = survey.explored(A, B, left, best)
    return best


class _Survey:
    """What one sweep over the rows tells of all of them."""

    def __init__(self, P: HeadRows) -> None:
        self.P = P
        parts = [(block.abs().sum(-1), block.sum(0), block.square().sum(0)) for _, block in P.blocks()]
        sums, columns, squares = zip(*parts, strict=True)
        self.sums = torch.cat(sums)
        self.mean = torch.stack(columns).sum(0) / len(P)
        spread = (torch.stack(squares).sum(0) / len(P) - self.mean.square()).clamp(min=0.0).sqrt()
        self.weight = spread + 1e-8 * self.mean.abs() + 1e-200
        self.finite = bool(self.sums.isfinite().all())
        two = self.sums.topk(min(2, len(P))).values
        self.most = float(two.sum() / 2) if len(two) == 2 else 0.0
        first = self.mean.new_zeros(len(self.mean), dtype=torch.bool)
        first[0] = True  # whatever its weight
        self.columns = first.index_fill(0, self.mean.topk(min(COLUMNS, len(first))).indices, True).nonzero()[
            :, 0
        ]

    def from_row(self, row: Float[Tensor, " token"]) -> Float[Tensor, " row"]:
        """How far all rows are from one."""
        return torch.cat([(block - row).abs().sum(-1) / 2 for _, block in self.P.blocks()])

    def walked(self) -> float:
        """A first distance: from the mean row to the farthest, from there to the farthest, and so on."""
        chosen = []
        self.radius = torch.empty_like(self.sums)
        for start, block in self.P.blocks():
            self.radius[start : start + len(block)] = (block - self.mean).abs().sum(-1) / 2
            chosen.append(block[:, self.columns])
        self.chosen = torch.cat(chosen)
        self.rest = (self.sums - self.chosen.abs().sum(-1)).clamp(min=0.0)
        best, row = 0.0, int(self.radius.argmax())
        for _ in range(WALKS):
            distance = self.from_row(self.P.rows(row, row + 1)[0])
            farthest = float(distance.max())
            if farthest <= best:
                break
            best, row = farthest, int(distance.argmax())
        return best

    def open(self, best: float) -> Bool[Tensor, " row"]:
        """Rows that may be one of a farther pair."""
        return (self.radius + self.radius.max()) * (1 + 8 * EPS) > best

    def near(self, left_rows: slice, right_rows: slice, best: float) -> Bool[Tensor, "row other"]:
        """Pairs, each once, that the bounds without products leave."""
        left = (self.radius[left_rows, None] + self.radius[right_rows]) * (1 + 8 * EPS) > best
        if left_rows == right_rows:
            left = left.triu(1)
        if best > 0.01 and left.any():  # below, what is outside S says nothing
            seen = torch.cdist(self.chosen[left_rows], self.chosen[right_rows], p=1.0)
            left &= (
                seen + self.rest[left_rows, None] + self.rest[right_rows]
            ) / 2 > best + 16 * EPS * self.most
        return left

    def explored(
        self, A: Float[Tensor, "row token"], B: Float[Tensor, "other token"], left: Tensor, best: float
    ) -> float:
        """The largest distance of those pairs and of those before."""
        scale = self.weight.rsqrt()
        a, b = (A - self.mean) * scale, (B - self.mean) * scale
        sizes = a.square().sum(-1)[:, None] + b.square().sum(-1)
        rounding = A.shape[-1] * EPS * sizes
        bound = (((sizes - 2 * a @ b.mT).clamp(min=0.0) + rounding) * self.weight.sum()).sqrt() / 2
        bound = bound.masked_fill(~left, 0.0)
        coarse, sums = B.float(), B.sum(-1)
        for row in bound.amax(1).argsort(descending=True).tolist():
            candidates = (bound[row] > best).nonzero()[:, 0]
            if not len(candidates):
                break
            best = max(best, self._farthest(A[row], B, coarse, sums, candidates, best))
        return best

    def _farthest(
        self, row: Tensor, B: Tensor, coarse: Tensor, sums: Tensor, candidates: Tensor, best: float
    ) -> float:
        """The largest distance of a row from some candidates, where it may be larger than `best`: sums of the
        smaller weights in float32 say which may."""
        if best > 0.01:
            near, first, last = row.float(), int(candidates[0]), int(candidates[-1]) + 1
            many = 2 * len(candidates) > last - first  # all between: no copies
            room = torch.empty(max(1, CACHE // len(row)), len(row), device=row.device)
            chunks = torch.split(coarse[first:last] if many else candidates, len(room))
            parts = (chunk if many else coarse[chunk] for chunk in chunks)
            common = [torch.minimum(part, near, out=room[: len(part)]).sum(-1) for part in parts]
            distances = (
                row.sum() + sums[first:last] if many else row.sum() + sums[candidates]
            ) / 2 - torch.cat(common)
            left = distances > best - COARSE * self.most
            candidates = candidates[left[candidates - first]] if many else candidates[left]
        if not len(candidates):
            return best
        return float(torch.cdist(row[None], B[candidates], p=1.0).max() / 2)
