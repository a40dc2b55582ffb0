"""What is true of a guarantee: the same quantity in hundreds of digits, compared with the bound."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mpmath as mp
import torch
from torch import Tensor

from rankscope.nets import Transformer
from rankscope.theory import Certificates
from tests.deviation.reference import Network, Rows, composite, dot, exact, sigmoid, times

FEWEST, MOST = 250, 8000
"""Digits: twice what the measurement says tokens are alike to, and as many again while that is not enough."""
READ = 1e-6
"""A measured log10 may be off by this."""


class Exact(Network):
    """The reference network with every kernel, active heads and padding, noting what each norm was given and gave; a
    zero token stays zero."""

    def __init__(self, net: Transformer, padded: int = 0) -> None:
        super().__init__(net)
        self.padded = padded
        self.normed: list[tuple[Rows, Rows]] = []

    def content(self, q: list[Any], k: list[Any]) -> Any:
        if self.arch.kernel != "linear":
            return super().content(q, k)
        a, b = ([u + 1 if u > 0 else mp.exp(u) for u in part] for part in (q, k))
        return mp.log(dot(a, b))

    def score(self, index: int, here: int, h: int, i: int, j: int, q: list[Any], k: list[Any]) -> Any:
        arch = self.arch
        if arch.positions != "bias" or arch.bias_ahead or arch.kernel == "uniform":
            return super().score(index, here, h, i, j, q, k)
        # T5's decoder: what lies ahead is at distance 0, and half of the buckets are exact.
        back, half = max(i - j, 0), arch.bias_buckets // 2
        if back >= half:
            grown = mp.log(mp.mpf(back) / half) / mp.log(mp.mpf(arch.bias_reach) / half)
            back = min(arch.bias_buckets - 1, half + int(grown * (arch.bias_buckets - half)))
        return self.content(q, k) + self.tensors["bias_table"][back][h]

    def matrices(self, index: int, here: int, X: Rows) -> list[Rows]:
        """The pattern of each kernel, zero of a head that is not active."""
        name, _, number = str(self.arch.kernel).partition(":")
        of = {"sigmoid": self.weighed, "sink": self.weighed, "linformer": self.projected}.get(name, super().matrices)
        found = of(index, here, X)
        for _ in range(int(number) if name == "sinkhorn" else 0):
            found = [shares(turned(shares(turned(P)))) for P in found]
        kept = self.arch.kept_heads
        zero = [[mp.mpf(0)] * len(X) for _ in X]
        return [P if kept is None or h in kept[index] else zero for h, P in enumerate(found)]

    def weighed(self, index: int, here: int, X: Rows) -> list[Rows]:
        """Kernels whose rows do not sum to one, row by row of scores."""
        arch, n = self.arch, len(X)
        (q, k), seen = (self.parts(here, part, X) for part in ("query", "key")), self.sees(index, n)

        def row(h: int, i: int) -> list[Any]:
            g = h // (arch.heads // arch.key_heads)
            at = [j for j in range(n) if seen[i][j]]
            scores = [self.capped(self.score(index, here, h, i, j, q[h][i], k[g][j])) for j in at]
            if arch.kernel == "sigmoid":  # less the log of how many tokens are seen, each on its own
                weights = [sigmoid(score - mp.log(len(at))) for score in scores]
            else:  # one more score, for seeing nothing
                sink = self.tensors[f"layers.{here}.attention.sink"][h]
                total = mp.fsum(mp.exp(score - sink) for score in scores) + 1
                weights = [mp.exp(score - sink) / total for score in scores]
            found = dict(zip(at, weights, strict=True))
            return [found.get(j, mp.mpf(0)) for j in range(n)]

        return [[row(h, i) for i in range(n)] for h in range(arch.heads)]

    def projected(self, index: int, here: int, X: Rows) -> list[Rows]:
        """Linformer: softmax of scores against mixtures of keys, times the mixtures of values."""
        arch, n, name = self.arch, len(X), f"layers.{here}.attention"
        q, k = (self.parts(here, part, X) for part in ("query", "key"))
        E, F = ([row[:n] for row in self.tensors[f"{name}.{mixer}"]] for mixer in ("mix_keys", "mix_values"))

        def row(h: int, asked: list[Any]) -> list[Any]:
            mixed = times(E, k[h // (arch.heads // arch.key_heads)])
            scores = [dot(asked, key) / mp.mpf(arch.divisor) for key in mixed]
            weights = [mp.exp(score - max(scores)) for score in scores]
            return times([[weight / mp.fsum(weights) for weight in weights]], F)[0]

        return [[row(h, asked) for asked in q[h]] for h in range(arch.heads)]

    def parts(self, here: int, part: str, X: Rows) -> list[Rows]:
        """Queries or keys, through their norm if they have one."""
        heads = self.heads(here, part, X)
        return self.scaled(f"layers.{here}.attention.{part}_norm", heads) if self.arch.query_norm else heads

    def first(self, X: Tensor) -> Rows:
        """Layer 0."""
        rows: Rows = exact(X)
        if self.arch.positions != "absolute":
            return rows
        table = self.tensors["positions"]
        return [[u + v for u, v in zip(row, place, strict=True)] for row, place in zip(rows, table, strict=False)]

    def norm(self, name: str, X: Rows) -> Rows:
        if self.arch.norm == "none":
            return X
        zero = [self.arch.norm_eps == 0 and not any(_centred_row(self.arch.norm, row)) for row in X]
        safe = [[mp.mpf(j) for j in range(1, len(row) + 1)] if none else row for row, none in zip(X, zero, strict=True)]
        found = super().norm(name, safe)
        bias = self.tensors.get(f"{name}.bias")
        for place, none in enumerate(zero):
            if none:
                found[place] = list(bias) if bias else [mp.mpf(0)] * len(X[0])
        self.normed.append((X, found))
        return found

    def blind(self, size: Any, digits: int) -> bool:
        """Whether a norm was given a row that may be what is left of zero."""
        least = size * mp.mpf(10) ** (-digits // 2)
        rows = [_centred_row(self.arch.norm, row) for given, _ in self.normed for row in given]
        return any(0 < max(map(abs, row)) < least for row in rows)


def turned(A: Rows) -> Rows:
    return [list(column) for column in zip(*A, strict=True)]


def shares(A: Rows) -> Rows:
    """Each row divided by its sum, if there is any."""
    sums = [mp.fsum(row) for row in A]
    return [[u / total for u in row] if total else row for row, total in zip(A, sums, strict=True)]


def _centred_row(kind: Any, row: list[Any]) -> list[Any]:
    mean = mp.fsum(row) / len(row) if kind == "layer" else 0
    return [u - mean for u in row]


def centred(X: Rows) -> Rows:
    mean = [mp.fsum(column) / len(X) for column in zip(*X, strict=True)]
    return [[u - m for u, m in zip(row, mean, strict=True)] for row in X]


def frobenius(A: Rows) -> Any:
    return mp.sqrt(mp.fsum(dot(row, row) for row in A))


def diameter(X: Rows) -> Any:
    gaps = ([u - v for u, v in zip(a, b, strict=True)] for a in X for b in X)
    return mp.sqrt(max(dot(gap, gap) for gap in gaps))


QUANTITIES = {"residual": lambda X: composite(centred(X)), "mu": lambda X: frobenius(centred(X)), "diameter": diameter}


@dataclass(frozen=True)
class Layer:
    """One layer: its quantities as they are, and of each norm (exact rank after, numerical rank after)."""

    logs: dict[str, Any]
    """log10 of each quantity; None at zero."""
    ranks: list[tuple[int, int]]
    resolved: bool
    """Whether the digits that were used see what tokens differ by, and what norms without eps divide by."""


def layers(net: Transformer, X: Tensor, digits: int, padded: int = 0) -> Iterator[Layer]:
    """Layer by layer, from 1 on, of the tokens X of one sample with so many padded positions; within
    `mp.workdps(digits)`."""
    network = Exact(net, padded)
    rows = network.first(X)
    resolved = True
    for index in range(net.arch.layers):
        network.normed = []
        rows = network.layer(index, rows)
        size = max(abs(u) for row in rows for u in row)
        logs = {}
        for name, of in QUANTITIES.items():
            value = of(rows)
            seen = value > size * mp.mpf(10) ** (-digits // 2)
            resolved = resolved and bool(seen or not value)
            logs[name] = mp.log10(value) if value > 0 else None
        resolved = resolved and not (net.arch.norm_eps == 0 and network.blind(size, digits))
        ranks = [_ranks(after, digits) for _, after in network.normed]
        yield Layer(logs, ranks, resolved)


def _ranks(X: Rows, digits: int) -> tuple[int, int]:
    """(rank of X - 1 mean^T by elimination, the number of its singular values above float64's tolerance)."""
    A = centred(X)
    size = max(abs(u) for row in A for u in row)
    if size == 0:
        return 0, 0
    A = [[u / size for u in row] for row in A]
    s = torch.linalg.svdvals(torch.tensor([[float(u) for u in row] for row in A], dtype=torch.float64))
    counted = int((s > max(len(A), len(A[0])) * torch.finfo(torch.float64).eps * s[0]).sum())
    rank, left = 0, [list(row) for row in A]
    while left and left[0]:
        value, i, j = max((abs(u), i, j) for i, row in enumerate(left) for j, u in enumerate(row))
        if value < mp.mpf(10) ** (-digits // 2):
            break
        rank, pivot = rank + 1, left.pop(i)
        left = [[u - row[j] * v / pivot[j] for u, v in zip(row, pivot, strict=True)] for row in left]
    return rank, counted


@dataclass
class Verdict:
    """What came of the guarantees of one sample."""

    false: list[dict[str, Any]]
    misread: list[dict[str, Any]]
    unchecked: list[dict[str, Any]]
    """Beyond the most digits."""


def judged(net: Transformer, X: Tensor, found: Certificates, padding: Tensor | None = None) -> Verdict:
    """Every guarantee of one sample `[token, width]` against the exact network; what is found wrong is
    looked at again in many more digits."""
    padded, X = (0, X) if padding is None else (int(padding.sum()), X[~padding])
    rows = found.guarantees().to_dicts()
    for row in rows:
        row["digits"] = _needed(row)
    most = max((row["digits"] or FEWEST for row in rows), default=FEWEST)
    for row in rows:
        row["digits"] = row["digits"] or min(most, MOST)
    verdict = _at(net, X, rows, FEWEST, padded)
    if verdict.false or verdict.misread:
        return _at(net, X, rows, 4 * most + 600, padded)
    return verdict


def _needed(row: dict[str, Any]) -> int | None:
    """Digits at which what is measured would be seen; None of a zero or a rank, which are looked at where
    everything else would be."""
    alike = row["log10_size"] - row["log10_measured"]
    if row["quantity"] == "affine_rank" or not math.isfinite(alike):
        return None
    return FEWEST + 2 * int(max(0.0, alike))


def _at(net: Transformer, X: Tensor, rows: list[dict[str, Any]], digits: int, padded: int) -> Verdict:
    verdict = Verdict([], [], [])
    while rows and digits <= MOST:
        again = [row for row in rows if row["digits"] > digits]
        ready = [row for row in rows if row["digits"] <= digits]
        deepest = max((row["layer"] for row in ready), default=0)
        with mp.workdps(digits):
            for number, layer in zip(range(1, deepest + 1), layers(net, X, digits, padded), strict=False):
                here = [row for row in ready if row["layer"] == number]
                if not layer.resolved:
                    again += here
                    continue
                for row in here:
                    _judge(row, layer, verdict)
        rows, digits = again, MOST if digits < MOST < 3 * digits else 3 * digits
    verdict.unchecked = rows
    return verdict


def _judge(row: dict[str, Any], layer: Layer, verdict: Verdict) -> None:
    bound, measured = row["log10_bound"], row["log10_measured"]
    told = {name: row[name] for name in ("theorem", "layer", "log10_bound", "log10_measured")}
    if row["quantity"] == "affine_rank":
        like = [exact for exact, counted in layer.ranks if counted == round(10**measured)]
        if not like:
            verdict.misread.append(told | {"true": str(layer.ranks)})
        if round(10**bound) > max(like, default=max((exact for exact, _ in layer.ranks), default=0)):
            verdict.false.append(told | {"true": str(layer.ranks)})
        return
    true = layer.logs[row["quantity"]]
    if true is None:
        wrong, off = row["kind"] == "lower" and bound > -math.inf, measured > -math.inf
    else:
        wrong = true > mp.mpf(bound) if row["kind"] == "upper" else true < mp.mpf(bound)
        off = measured == -math.inf or abs(true - mp.mpf(measured)) > READ * max(1.0, abs(measured) * 1e-3)
    told["true"] = "-inf" if true is None else mp.nstr(true, 15)
    if wrong:
        verdict.false.append(told)
    if off:
        verdict.misread.append(told)
