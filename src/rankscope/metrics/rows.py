"""An attention matrix by its rows, which may be made as they are asked for, and metrics of large ones.

A metric that needs rows more than once takes a block at a time, as often as it likes; P is never held whole. Of rows
that nobody makes, `RowStatistics` are known.

**Singular values** (`two_largest`). Block bidiagonalisation (Golub, Kahan 1965) with full
reorthogonalisation: from orthonormal columns Q, `P Q = U B` and `P^T U = Q B^T + Q' R`. A singular triple (s,
u, v) of B gives `P v = s u` and misses `P^T u = s v` by the **residual** `|R u|` of its last block: P has a
singular value within that of s, and s errs by about the square of it over the gap to the next. Values are
given where the residuals are below `RESIDUAL` of them (and of rounding); else NaN.

**Dobrushin's coefficient** (`dobrushin_by_head`), exact: the largest distance

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.shapes import Bool, Float

AT_ONCE = 2**25  # bytes of a block of rows


@dataclass(frozen=True)
class RowStatistics:
    """What attention does, row by row, in five numbers of every query that need no pattern.

    Of the scores `s_ij` of query i over the keys j that the query sees, and of their softmax P:

    | number    | what it is                  | what it is for                                                         |
    |-----------|-----------------------------|------------------------------------------------------------------------|
    | `log_sum` | `log sum_j e^{s_ij}`        | the log-sum-exp that flash attention keeps for its backward pass       |
    | `mean`    | `sum_j P_ij s_ij`           | the entropy is `log_sum - mean`: `-sum P log P = sum P (log_sum - s)`  |
    | `largest` | `max_j s_ij`                | the largest logit                                                      |
    | `first`   | `P_ij` of the first key     | the attention sink                                                     |
    | `square`  | `sum_j P_ij^2`              | `1 / square` is the effective number of keys                           |

    A head with a sink (gpt-oss) has one more score in each row, which leads to no value. In `log_sum`, `mean` and
    `square` the sink counts as one more key; in `largest` it does not.

    All are NaN, and `largest` minus infinity, of a query that sees no key. Made by `live/attention/row_statistics.py`;
    read by metrics with a rule `from_scores` (`attention.py`).
    """

    log_sum: Float[Tensor, "batch head query"]
    mean: Float[Tensor, "batch head query"]
    largest: Float[Tensor, "batch head query"]
    first: Float[Tensor, "batch head query"]
    square: Float[Tensor, "batch head query"]

    @property
    def entropy(self) -> Float[Tensor, "batch head query"]:
        """The entropy of each row in nats."""
        return (self.log_sum - self.mean).clamp(min=0.0)

    @property
    def effective_keys(self) -> Float[Tensor, "batch head query"]:
        """The effective number of keys of each row, `1 / sum_j P_ij^2`."""
        return 1 / self.square

    @property
    def blind(self) -> Bool[Tensor, "batch head query"]:
        """True at queries that see no key."""
        return self.largest == -float("inf")


@dataclass(frozen=True)
class PatternRows:
    """The rows of P of several samples and heads, held or made on demand."""

    batch: int
    heads: int
    make: Callable[[int, int, int, int], Float[Tensor, "row token"]]
    """Of a sample and a head, rows `start` to `stop`, float64, zero at padding."""
    valid: Bool[Tensor, "batch token"]  # rows that count
    at_once: int = AT_ONCE

    @classmethod
    def of(
        cls, P: Float[Tensor, "*batch head token token"], valid: Bool[Tensor, "*batch 1 token"], at_once: int = AT_ONCE
    ) -> "PatternRows":
        """The rows of a matrix that is held."""
        held = P.reshape(-1, *P.shape[-3:])
        counts = valid.expand(*P.shape[:-3], 1, P.shape[-1]).reshape(-1, P.shape[-1])
        unpadded = bool(counts.all())

        def make(sample: int, head: int, start: int, stop: int) -> Tensor:
            rows = held[sample, head, start:stop].to(torch.float64)
            return rows if unpadded else rows.masked_fill(~counts[sample], 0.0)

        return cls(len(held), P.shape[-3], make, counts, at_once)

    def map_heads(self, number: Callable[["HeadRows"], float | Tensor]) -> Float[Tensor, "batch head"]:
        """A number of every head; NaN of a sample without tokens."""
        values = torch.full((self.batch, self.heads), torch.nan, dtype=torch.float64, device=self.valid.device)
        for sample in range(self.batch):
            which = self.valid[sample].nonzero()[:, 0]
            for head in range(self.heads if len(which) else 0):
                values[sample, head] = number(HeadRows(self, sample, head, which))
        return values


@dataclass(frozen=True)
class HeadRows:
    """The rows of P of one head of one sample."""

    of: PatternRows
    sample: int
    head: int
    which: Tensor  # the rows that count

    def __len__(self) -> int:
        return len(self.which)

    @property
    def block(self) -> int:
        """How many rows are made at once."""
        return max(1, self.of.at_once // (8 * self.of.valid.shape[1]))

    def rows(self, start: int, stop: int) -> Float[Tensor, "row token"]:
        """Rows `start` to `stop` of those that count."""
        which = self.which[start:stop]
        first, last = int(which[0]), int(which[-1]) + 1
        rows = self.of.make(self.sample, self.head, first, last)
        return rows if last - first == len(which) else rows[which - first]

    def blocks(self) -> Iterator[tuple[int, Float[Tensor, "row token"]]]:
        """Every row that counts, a block at a time, with the number of its first."""
        for start in range(0, len(self), self.block):
            yield start, self.rows(start, min(len(self), start + self.block))


RESIDUAL = 1e-8
TOGETHER = 16  # columns of Q at a time
AT_MOST = 40  # times that Q grows
DENSE = 512  # rows, or columns, up to which P is taken as it is
ROUNDING = 16 * torch.finfo(torch.float64).eps


def second_by_head(P: PatternRows) -> Float[Tensor, "batch head"]:
    """The second singular value s_2 of every head."""
    return P.map_heads(lambda head: two_largest(head)[1])


def gap_by_head(P: PatternRows) -> Float[Tensor, "batch head"]:
    """The gap s_1 - s_2 of every head."""
    return P.map_heads(lambda head: two_largest(head).flip(0).diff()[0])


def two_largest(P: HeadRows, at_most: int = AT_MOST) -> Float[Tensor, "2"]:
    """s_1 and s_2 of one head; s_2 of one row is 0. NaN where `at_most` growths of Q do not converge."""
    if len(P) <= DENSE:
        matrix = torch.cat([block for _, block in P.blocks()])
        if not bool(matrix.isfinite().all()):
            return matrix.new_full((2,), torch.nan)
        return torch.cat([torch.linalg.svdvals(matrix), matrix.new_zeros(2)])[:2]
    first = P.rows(0, 1)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(first.shape[-1], TOGETHER, generator=generator, dtype=torch.float64).to(first.device)
    start[:, 0] = 1.0  # what a matrix whose rows sum to one keeps
    Q, _, _ = _added(start, start[:, :0])
    Qs, Us, B = Q, first.new_zeros(len(P), 0), first.new_zeros(0, 0)
    for _ in range(min(at_most, len(P) // TOGETHER - 1)):
        Y = torch.cat([block @ Q for _, block in P.blocks()])
        U, known, new = _added(Y, Us)
        B = torch.cat([torch.nn.functional.pad(B, (0, 0, 0, TOGETHER)), torch.cat([known, new])], 1)
        Us = torch.cat([Us, U], 1)
        Z = sum(block.mT @ U[at : at + len(block)] for at, block in P.blocks())
        assert isinstance(Z, Tensor)
        if not bool(Z.isfinite().all()):
            break
        Q, _, R = _added(Z, Qs)
        Qs = torch.cat([Qs, Q], 1)
        left, s, _ = torch.linalg.svd(B)
        residual = torch.linalg.vector_norm(R @ left[-TOGETHER:, :2], dim=0)
        if bool((residual <= RESIDUAL * s[:2] + ROUNDING * s[0]).all()):
            return s[:2]
    return first.new_full((2,), torch.nan)


def _added(X: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(new, of_known, of_new) with `X = known @ of_known + new @ of_new`, the columns of both orthonormal."""
    of_known = known.mT @ X
    rest = X - known @ of_known
    new, R = torch.linalg.qr(rest)
    gone = R.diagonal().abs() <= 1e-12 * torch.linalg.vector_norm(X, dim=0)  # X has fewer directions
    generator = torch.Generator().manual_seed(known.shape[1])
    random = torch.randn(new.shape, generator=generator, dtype=new.dtype).to(new.device)
    new = torch.where(gone, random / len(X) ** 0.5, new)
    for _ in range(2):  # what rounding left of the known ones
        new, _ = torch.linalg.qr(new - known @ (known.mT @ new))
    return new, of_known, new.mT @ X


COLUMNS = 64  # how many columns S has
WALKS = 6  # from a row to the one farthest from it, so often, before pairs are looked at
CACHE = 2**17  # numbers of float32 that a core holds near
COARSE = 1e-5  # how far a sum of float32 weights may be off, of the sum
EPS = torch.finfo(torch.float64).eps


def dobrushin_by_head(P: PatternRows) -> Float[Tensor, "batch head"]:
    """The coefficient of every head; NaN where a weight is not finite."""
    return P.map_heads(dobrushin_of_head)


def dobrushin_of_head(P: HeadRows) -> float:
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
        self.columns = first.index_fill(0, self.mean.topk(min(COLUMNS, len(first))).indices, True).nonzero()[:, 0]

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
            left &= (seen + self.rest[left_rows, None] + self.rest[right_rows]) / 2 > best + 16 * EPS * self.most
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

    def _farthest(self, row: Tensor, B: Tensor, coarse: Tensor, sums: Tensor, candidates: Tensor, best: float) -> float:
        """The largest distance of a row from candidates where it may exceed `best`: sums in float32 say which may."""
        if best > 0.01:
            near, first, last = row.float(), int(candidates[0]), int(candidates[-1]) + 1
            many = 2 * len(candidates) > last - first  # all between: no copies
            room = torch.empty(max(1, CACHE // len(row)), len(row), device=row.device)
            chunks = torch.split(coarse[first:last] if many else candidates, len(room))
            parts = (chunk if many else coarse[chunk] for chunk in chunks)
            common = [torch.minimum(part, near, out=room[: len(part)]).sum(-1) for part in parts]
            distances = (row.sum() + sums[first:last] if many else row.sum() + sums[candidates]) / 2 - torch.cat(common)
            left = distances > best - COARSE * self.most
            candidates = candidates[left[candidates - first]] if many else candidates[left]
        if not len(candidates):
            return best
        return float(torch.cdist(row[None], B[candidates], p=1.0).max() / 2)
