"""What the readings of a network are, to as many digits as it takes."""

from typing import Any, NamedTuple

import mpmath as mp
from torch import Tensor

from rankscope.nets import Transformer
from tests.attack.remedies import RemediedNetwork
from tests.deviation.reference import Rows, composite, dot

METRICS = ("residual", "relative_residual", "mu", "relative_mu", "mean_cosine_gap", "affine_rank", "entropy",
           "dobrushin", "head_mu")  # fmt: skip
"""Those that are checked."""
Key = tuple[int, int | None, str]
NARROW = 0.05
"""By how much the weights of a row may miss one in all, to have an entropy."""


class Truth(NamedTuple):
    """log10 of a reading, and of the numbers that it is a difference of: what is far below those may be what is
    left of rounding."""

    log: Any
    size: Any = 0


class Recorded(RemediedNetwork):
    """Keeps the attention matrices of each layer, and what each head adds."""

    def __init__(self, net: Transformer) -> None:
        super().__init__(net)
        self.seen: list[list[Rows]] = []
        self.added: list[list[Rows]] = []

    def matrices(self, index: int, here: int, X: Rows) -> list[Rows]:
        found = super().matrices(index, here, X)
        self.seen.append(found)
        return found

    def contributions(self, said: list[Rows], output: Any, kind: str) -> list[Rows]:
        parts = super().contributions(said, output, kind)
        if kind == "attention":
            self.added.append(parts)
        return parts


def readings(net: Transformer, X: Tensor, padded: int = 0) -> dict[Key, Truth]:
    """Every reading of the tokens of one sample, by (layer, head, metric); `padded` positions are
    beside them. What cannot be told from rounding of the definition itself (the sign of a weight) is left out."""
    recorded = Recorded(net)
    recorded.padded = padded
    found: dict[Key, Truth] = {}
    for layer, state in enumerate(recorded.states(X)):
        for name, value in _of_tokens(state).items():
            found[layer, None, name] = Truth(_log10(value), _size(state) if name in ("residual", "mu") else 0)
        if not layer:
            continue
        for head, P in enumerate(recorded.seen[layer - 1]):
            for name, value in _of_pattern(P).items():
                log = _log10(value)  # an entropy is a sum of positive numbers, however small
                found[layer, head, name] = Truth(log, log if name == "entropy" else 0)
            added = recorded.added[layer - 1][head]
            mu = _frobenius(_residual(added)) if _finite(added) else mp.nan
            found[layer, head, "head_mu"] = Truth(_log10(mu), _size(added))
    return found


def _size(X: Rows) -> Any:
    """log10 of the largest entry; 0 where all are zero, or one is no number."""
    largest = max(abs(u) for row in X for u in row)
    return mp.log10(largest) if largest and _finite(X) else 0


def _of_tokens(X: Rows) -> dict[str, Any]:
    if not _finite(X):
        return dict.fromkeys(METRICS[:6], mp.nan)
    R = _residual(X)
    return {
        "residual": composite(R),
        "relative_residual": composite(R) / composite(X) if composite(X) else mp.mpf(0),
        "mu": _frobenius(R),
        "relative_mu": _frobenius(R) / _frobenius(X) if _frobenius(X) else mp.mpf(0),
        "mean_cosine_gap": _mean_cosine_gap(X),
        "affine_rank": _rank(R, max(abs(u) for row in X for u in row)),
    }


def _of_pattern(P: Rows) -> dict[str, Any]:
    if not _finite(P):
        return {"entropy": mp.nan, "dobrushin": mp.nan}
    gaps = [mp.fsum(abs(u - v) for u, v in zip(a, b, strict=True)) / 2 for a in P for b in P]
    lowest = min(u for row in P for u in row)
    off = max(abs(mp.fsum(row) - 1) for row in P)
    if -1e-12 < lowest < 0 or abs(off - NARROW) < 1e-9:
        return {"dobrushin": max(gaps)}
    averages = lowest >= 0 and off < NARROW
    return {"entropy": mp.fsum(map(_entropy, P)) / len(P) if averages else mp.nan, "dobrushin": max(gaps)}


def _entropy(row: list[Any]) -> Any:
    """`-sum u log u`; of the largest weight of a row that sums to one as `1 - s`, s the sum of the others,
    which may be less than its last digit."""
    first, *others = sorted(row, reverse=True)
    s = mp.fsum(others)
    log = mp.log1p(-s) if abs(first + s - 1) < mp.mpf(10) ** (3 - mp.mp.dps) and s < 0.5 else mp.log(first)
    return mp.fsum([-first * log, *(-u * mp.log(u) for u in others if u)])


def _finite(X: Rows) -> bool:
    return all(mp.isfinite(u) for row in X for u in row)


def _residual(X: Rows) -> Rows:
    if all(row == X[0] for row in X):  # their mean may be rounded
        return [[mp.mpf(0)] * len(row) for row in X]
    mean = [mp.fsum(column) / len(X) for column in zip(*X, strict=True)]
    return [[u - m for u, m in zip(row, mean, strict=True)] for row in X]


def _frobenius(X: Rows) -> Any:
    return mp.sqrt(mp.fsum(u * u for row in X for u in row))


def _mean_cosine_gap(X: Rows) -> Any:
    lengths = [mp.sqrt(dot(row, row)) for row in X]
    units = [[u / length for u in row] if length else None for row, length in zip(X, lengths, strict=True)]
    gaps = []
    for i, a in enumerate(units):
        for b in units[:i]:
            if a is None or b is None:
                gaps.append(mp.mpf(1))
                continue
            gap = [u - v for u, v in zip(a, b, strict=True)]
            gaps.append(dot(gap, gap) / 2)
    return mp.fsum(gaps) / len(gaps) if gaps else mp.mpf(0)


def _rank(R: Rows, whole: Any) -> Any:
    """Singular values above max(n, d) eps of the largest; none of what is rounding of X."""
    size = max(abs(u) for row in R for u in row)
    if size <= whole * mp.mpf(10) ** (-0.8 * mp.mp.dps):
        return mp.mpf(0)
    with mp.workdps(60):
        A = mp.matrix([[u / size for u in row] for row in R])
        values = mp.eigsy(A * A.T if A.rows < A.cols else A.T * A, eigvals_only=True)
        limit = (max(A.rows, A.cols) * mp.mpf(2) ** -52) ** 2 * max(values)
        return mp.mpf(sum(1 for value in values if value > limit))


def _log10(value: Any) -> Any:
    if mp.isnan(value):
        return mp.nan
    return mp.log10(abs(value)) if value else -mp.inf  # an entropy of weights that add up to 1.01 may be negative
