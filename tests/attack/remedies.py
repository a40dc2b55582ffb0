"""Remedies as their papers have them, in thousands of digits: plain loops, from the formulas.

The formulas are the papers', for the complete mask; under another one an average is over what a token sees, a
token of length zero stays zero, and first values are those of layer 1, as `src/rankscope/remedies` says.
Numbers that a paper gives as formulas (`1/sqrt(L)`, `0.8 - 0.6 e^{-0.3 l}`) are taken as float64 has them: they
are part of the network, not of its arithmetic.
"""

import math
from typing import Any

import mpmath as mp

from rankscope.nets import Transformer
from tests.deviation.reference import Network, Rows, dot, sigmoid, times


class RemediedNetwork(Network):
    """The reference network with whatever remedies its architecture has."""

    def __init__(self, net: Transformer) -> None:
        super().__init__(net)
        self.remedies: dict[str, Any] = {part.name: part for part in self.arch.parts}
        self.index = 0  # of the layer that runs
        self.values: list[list[Rows]] = []  # by layer, V of every head of keys

    def number(self, here: int, remedy: str, name: str) -> Any:
        """A tensor that a remedy trains; None where there is none."""
        return self.tensors.get(f"layers.{here}.parts.{remedy}.{name}")

    def layer(self, index: int, X: Rows) -> Rows:
        self.index = index
        return super().layer(index, X)

    # ---- attention --------------------

    def matrices(self, index: int, here: int, X: Rows) -> list[Rows]:
        """The pattern after whatever changes it: Sinkhorn, differential attention, shaping."""
        found = self.averaging(index, here, X)
        for name in self.remedies:
            if name in ("differential", "differential2"):
                found = self.differential(name, index, here, X, found)
            elif name in ("shaped", "attnscale", "centred"):
                found = [self.shaped(name, index, here, h, P) for h, P in enumerate(found)]
        return found

    def averaging(self, index: int, here: int, X: Rows) -> list[Rows]:
        """Softmax attention, or Sinkhorn's (Sander et al. 2022): rows, then columns and rows, each divided by sums."""
        found = super().matrices(index, here, X)
        kernel, _, rounds = str(self.arch.kernel).partition(":")
        for _ in range(int(rounds) if kernel == "sinkhorn" else 0):
            found = [_by_rows(_turned(_by_rows(_turned(P)))) for P in found]
        return found

    def shaped(self, name: str, index: int, here: int, h: int, P: Rows) -> Rows:
        """Shaped (Noci et al. 2023): alpha I + beta P - gamma C. AttnScale (Wang et al. 2022): C + (1 + w)(P - C).
        Centred (Ali et al. 2023): P - C. C is what a uniform attention would be."""
        C = [[mp.mpf(seen) / sum(row) for seen in row] for row in self.sees(index, len(P))]

        def entry(i: int, j: int) -> Any:
            if name == "centred":
                return P[i][j] - C[i][j]
            if name == "attnscale":
                return C[i][j] + (1 + self.number(here, name, "w")[h]) * (P[i][j] - C[i][j])
            alpha, beta, gamma = (self.number(here, name, each)[h] for each in ("alpha", "beta", "gamma"))
            return alpha * (i == j) + beta * P[i][j] - gamma * C[i][j]

        return [[entry(i, j) for j in range(len(P))] for i in range(len(P))]

    def differential(self, name: str, index: int, here: int, X: Rows, first: list[Rows]) -> list[Rows]:
        """Ye et al. 2024: P_1 - lambda P_2, lambda = e^{a b} - e^{c d} + lambda_0, P_2 of other queries and keys.
        The second version: of other queries alone, lambda = sigmoid(x w) of the token that asks, head by head."""
        tensors, attention = self.tensors, f"layers.{here}.attention"
        other = {}
        for part in ("query", "key"):
            if self.number(here, name, part) is not None:
                other[f"{attention}.{part}.weight"] = self.number(here, name, part)
                other[f"{attention}.{part}.bias"] = self.number(here, name, f"{part}_bias")
        self.tensors = tensors | other
        second = self.averaging(index, here, X)
        self.tensors = tensors
        if name == "differential":
            a, b, c, d = (
                self.number(here, name, f"lambda_{each}") for each in ("query_1", "key_1", "query_2", "key_2")
            )
            one = mp.exp(dot(a, b)) - mp.exp(dot(c, d)) + mp.mpf(self.start(self.remedies[name], index))
            taken, kept = one, [[mp.mpf(0)] * len(first) for _ in X]
        else:
            # p_1 - w sigmoid(x) p_2 = (p_1 - w p_2) + w p_2 sigmoid(-x): 1 - sigmoid(62000) needs 27,000 digits.
            taken = mp.mpf(self.remedies[name].weight)
            kept = [[taken * sigmoid(-u) for u in row] for row in times(X, self.number(here, name, "share"))]
        return [
            [[u - taken * v + kept[i][h] * v for u, v in zip(P[i], second[h][i], strict=True)] for i in range(len(X))]
            for h, P in enumerate(first)
        ]

    @staticmethod
    def start(remedy: Any, index: int) -> float:
        """lambda_0 = 0.8 - 0.6 e^{-0.3 (l - 1)} of layer l, counted from 1 (Ye et al. 2024)."""
        return float(remedy.peak - remedy.drop * math.exp(-0.3 * index))

    # ---- values and heads --------------------

    def heads(self, here: int, name: str, X: Rows, kind: str = "attention") -> list[Rows]:
        """Value residual (Zhou et al. 2024): from layer 2 on values are a V + b V_1."""
        found = super().heads(here, name, X, kind)
        if name != "value" or kind != "attention":
            return found
        self.values = [*self.values[: self.index], found]
        if "valueresidual" not in self.remedies or self.index == 0:
            return found
        a, b = (self.number(here, "valueresidual", each) for each in "ab")
        return [_sum(a, V, b, V_1) for V, V_1 in zip(found, self.values[0], strict=True)]

    def outputs(self, here: int, X: Rows, said: list[Rows]) -> list[Rows]:
        """The norm of differential heads, NeuTRENO (Nguyen et al. 2023), a gate of each head (Qiu et al. 2025)."""
        group = self.arch.heads // self.arch.key_heads
        for name, remedy in self.remedies.items():
            if name == "head_norm":
                said = [[self.normed(here, remedy, row) for row in each] for each in said]
            elif name == "neutreno" and self.index > 0:
                pull, V, V_1 = mp.mpf(remedy.weight), self.values[self.index], self.values[0]
                apart = [_sum(1, a, -1, b) for a, b in zip(V_1, V, strict=True)]
                said = [_sum(1, each, pull, apart[h // group]) for h, each in enumerate(said)]
            elif name == "headgate":
                gates = times(X, self.number(here, name, "weight"), self.number(here, name, "bias"))
                said = [
                    [[u * sigmoid(gates[i][h]) for u in row] for i, row in enumerate(each)]
                    for h, each in enumerate(said)
                ]
        return said

    def normed(self, here: int, remedy: Any, row: list[Any]) -> list[Any]:
        """(1 - lambda_0) RMSNorm(head), eps 1e-5 (Ye et al. 2024)."""
        factor, gain = mp.mpf(1 - self.start(remedy, self.index)), self.number(here, "head_norm", "gain")
        length = mp.sqrt(dot(row, row) / len(row) + mp.mpf(1e-5))
        return [factor * g * u / length for u, g in zip(row, gain, strict=True)]

    # ---- branches --------------------

    def before(self, index: int, X: Rows) -> Rows:
        """ContraNorm in pre-norm networks: before the norm that a branch reads through."""
        return self.contrasted(index, X) if self.arch.norm_place != "post" else X

    def sums(self, index: int, X: Rows) -> Rows:
        """ContraNorm in post-norm networks: on the sum of attention and its skip."""
        return self.contrasted(index, X) if self.arch.norm_place == "post" else X

    def contrasted(self, index: int, X: Rows) -> Rows:
        """ContraNorm (Guo et al. 2023): (1 + s) X - s softmax(Xh Xh^T) X, Xh the tokens at length one."""
        if "contranorm" not in self.remedies:
            return X
        s, out = mp.mpf(self.remedies["contranorm"].s), []
        lengths = [mp.sqrt(dot(row, row)) for row in X]
        units = [[u / (length or 1) for u in row] for row, length in zip(X, lengths, strict=True)]
        for i, sees in enumerate(self.sees(index, len(X))):
            seen = [j for j, visible in enumerate(sees) if visible]
            weights = [mp.exp(dot(units[i], units[j])) for j in seen]
            total = mp.fsum(weights)
            out.append(
                [
                    (1 + s) * u - s * mp.fsum(w * X[j][k] for w, j in zip(weights, seen, strict=True)) / total
                    for k, u in enumerate(X[i])
                ]
            )
        return out

    def read(self, index: int, X: Rows) -> Rows:
        """LayerNorm scaling (Sun et al. 2025): what norms give is divided by sqrt(l)."""
        if "lnscale" not in self.remedies:
            return X
        factor = mp.mpf((index + 1) ** -self.remedies["lnscale"].power)
        return [[factor * u for u in row] for row in X]

    def adds(self, index: int, kind: str, Y: Rows) -> Rows:
        """ReZero (Bachlechner et al. 2020), SkipInit (De & Smith 2020), 1/sqrt(L) (Noci et al. 2022), FeatScale."""
        here = 0 if self.arch.shared else index
        for name, remedy in self.remedies.items():
            factor: Any = None
            if name == "rezero":
                factor = self.number(here, name, "weight")
            elif name == "skipinit":
                factor = self.number(here, name, kind)
            elif name == "sqrtl":
                factor = mp.mpf(self.arch.layers**-remedy.power)
            elif name == "featscale" and kind == "attention":
                Y = self.featscaled(index, here, Y)
            Y = Y if factor is None else [[factor * u for u in row] for row in Y]
        return Y

    def featscaled(self, index: int, here: int, Y: Rows) -> Rows:
        """FeatScale (Wang et al. 2022): (1 + s) times the mean of tokens, (1 + t) times what departs from it."""
        s, t = (self.number(here, "featscale", each) for each in "st")
        out = []
        for i, sees in enumerate(self.sees(index, len(Y))):
            rows = [Y[j] for j, visible in enumerate(sees) if visible]
            mean = [mp.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
            out.append([(1 + s[k]) * m + (1 + t[k]) * (u - m) for k, (u, m) in enumerate(zip(Y[i], mean, strict=True))])
        return out


def _by_rows(P: Rows) -> Rows:
    """Every row divided by its sum."""
    return [[u / total for u in row] for row in P for total in [mp.fsum(row)]]


def _turned(P: Rows) -> Rows:
    return [list(column) for column in zip(*P, strict=True)]


def _sum(a: Any, X: Rows, b: Any, Y: Rows) -> Rows:
    """a X + b Y."""
    return [[a * u + b * v for u, v in zip(*rows, strict=True)] for rows in zip(X, Y, strict=True)]
