"""What the readings of a network are, to as many digits as it takes."""

from typing import Any

import mpmath as mp
from torch import Tensor

from rankscope.nets import Transformer
from tests.deviation.reference import Network, Rows, composite, dot, times

METRICS = ("residual", "relative_residual", "mu", "relative_mu", "mean_cosine_gap", "affine_rank", "entropy",
           "dobrushin", "head_mu")  # fmt: skip
"""Those that are checked."""


class Recorded(Network):
    """Keeps the attention matrices of each layer, and what each head adds."""

    def __init__(self, net: Transformer) -> None:
        super().__init__(net)
        self.seen: list[list[Rows]] = []
        self.added: list[list[Rows]] = []

    def matrices(self, index: int, here: int, X: Rows) -> list[Rows]:
        found = super().matrices(index, here, X)
        self.seen.append(found)
        output = self.tensors[f"layers.{here}.attention.output.weight"]
        v, group = self.heads(here, "value", X), self.arch.heads // self.arch.key_heads
        self.added.append([times(times(P, v[h // group]), output[h]) for h, P in enumerate(found)])
        return found


def readings(net: Transformer, X: Tensor) -> dict[tuple[int, int | None, str], Any]:
    """log10 of every reading of one sample without padding, by (layer, head, metric)."""
    recorded = Recorded(net)
    found: dict[tuple[int, int | None, str], Any] = {}
    for layer, state in enumerate(recorded.states(X)):
        for name, value in _of_tokens(state).items():
            found[layer, None, name] = _log10(value)
        if not layer:
            continue
        for head, P in enumerate(recorded.seen[layer - 1]):
            found[layer, head, "entropy"] = _log10(mp.fsum(-u * mp.log(u) for row in P for u in row if u) / len(P))
            gaps = [mp.fsum(abs(u - v) for u, v in zip(a, b, strict=True)) / 2 for a in P for b in P]
            found[layer, head, "dobrushin"] = _log10(max(gaps))
            found[layer, head, "head_mu"] = _log10(_frobenius(_residual(recorded.added[layer - 1][head])))
    return found


def _of_tokens(X: Rows) -> dict[str, Any]:
    R = _residual(X)
    return {
        "residual": composite(R),
        "relative_residual": composite(R) / composite(X) if composite(X) else mp.mpf(0),
        "mu": _frobenius(R),
        "relative_mu": _frobenius(R) / _frobenius(X) if _frobenius(X) else mp.mpf(0),
        "mean_cosine_gap": _mean_cosine_gap(X),
        "affine_rank": _rank(R, max(abs(u) for row in X for u in row)),
    }


def _residual(X: Rows) -> Rows:
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
    return mp.log10(value) if value else -mp.inf
