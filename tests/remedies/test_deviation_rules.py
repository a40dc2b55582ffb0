"""Remedies that act on attention, in deviation arithmetic, against hundreds of digits."""

import math
from typing import Any

import mpmath as mp
import pytest

from rankscope.deviation import propagate
from rankscope.nets import Architecture, Transformer, mask_matrix
from rankscope.profiles import measure
from rankscope.remedies import remedy
from tests.builders import awake, normal, thinned
from tests.deviation.reference import Network, Rows, dot, log10_residual, log10_size, times

DIGITS = 400
PURE: dict[str, Any] = {
    "layers": 4, "width": 4, "heads": 2, "head_width": 2, "norm": "none", "mlp": "none",
    "attention_skip": 0.0, "biases": False,
}  # fmt: skip
MASKS = ["complete", "causal", "window:1"]


def compare(
    arch: Architecture, reference: type[Network], *, seed: int = 1, size: float = 1.0, sure: bool = True
) -> float:
    """log10 of the residual and of the largest entry after every layer, within 1e-10, or 1e-12 of the log
    where that is more; where the comparison is `sure`, nothing is marked as beyond what is known. Answers
    with the smallest log10 of a residual."""
    net, X = awake(arch, seed), size * normal(1, 5, arch.width, seed=seed + 1)
    with mp.workdps(DIGITS):
        states = reference(net).states(X[0])
        exact = [(float(log10_residual(state)), float(log10_size(state))) for state in states]
    profile = measure(net, X, metrics="residual")
    logs, marks = (profile.curve("residual", each)[0].tolist() for each in ("log10", "below_floor"))
    assert not (sure and any(marks))
    for step, log10, (residual, largest) in zip(propagate(net, X), logs, exact, strict=True):
        assert abs(log10 - residual) < 1e-10 * max(1.0, abs(residual) / 100), (step.layer, log10, residual)
        state = step.state
        mine = float(state.scaled_tokens.abs().max().log() + state.log[0]) / float(mp.log(10))
        assert abs(mine - largest) < 1e-10 * max(1.0, abs(largest) / 100), (step.layer, mine, largest)
    return min(residual for residual, _ in exact)


class ShapedNetwork(Network):
    """`alpha I + beta P - gamma C`, entry by entry."""

    def matrices(self, index: int, here: int, X: Rows) -> list[Rows]:
        """Shaped."""
        found, n = super().matrices(index, here, X), len(X)
        mask, (part,) = mask_matrix(self.arch.mask_of(index), n).tolist(), self.arch.parts
        for h, P in enumerate(found):
            alpha, beta, gamma = self.numbers(f"layers.{here}.parts.{part.name}", part.name, h)
            for i in range(n):
                for j in range(n):
                    c = mp.mpf(mask[i][j]) / sum(mask[i])
                    P[i][j] = alpha * (i == j) + beta * P[i][j] - gamma * c
        return found

    def numbers(self, prefix: str, name: str, h: int) -> tuple[Any, Any, Any]:
        """alpha, beta and gamma of a head."""
        if name == "centred":
            return 0, 1, 1
        if name == "attnscale":
            w = self.tensors[f"{prefix}.w"][h]
            return 0, 1 + w, w
        return tuple(self.tensors[f"{prefix}.{each}"][h] for each in ("alpha", "beta", "gamma"))


SHAPED = [
    ("centred", True),
    ("shaped:alpha=0.3,beta=1.2,gamma=0.7", False),
    ("attnscale:w=0.5", True),
    ("shaped:alpha=0.0,beta=0.7,gamma=0.7", True),
    ("shaped", False),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("case", "mask"), thinned(SHAPED, MASKS))
def test_shaped_pure_attention(case: tuple[str, bool], mask: str) -> None:
    spec, collapses = case
    sure = mask != "causal" or not collapses  # a first token that becomes exactly zero is marked
    lowest = compare(remedy(spec).applied(Architecture(**PURE, mask=mask)), ShapedNetwork, sure=sure)
    assert lowest < -10 or not collapses or (mask != "complete" and "attnscale" in spec)


class LinearNetwork(Network):
    """Weights `(elu(q) + 1) . (elu(k) + 1)`."""

    def score(self, index: int, here: int, h: int, i: int, j: int, q: list[Any], k: list[Any]) -> Any:
        """The log of a weight."""
        if self.arch.positions == "rotary":
            q, k = self.turned(index, q, i), self.turned(index, k, j)
        phi = [[1 + u if u >= 0 else mp.exp(u) for u in each] for each in (q, k)]
        return mp.log(mp.fsum(a * b for a, b in zip(*phi, strict=True)))


@pytest.mark.parametrize(
    ("mask", "fields"), thinned(MASKS, [{}, {"biases": True, "query_norm": True}, {"head_width": 4}])
)
def test_linear_pure_attention(mask: str, fields: dict[str, Any]) -> None:
    lowest = compare(Architecture(**PURE | fields, kernel="linear", mask=mask), LinearNetwork)
    assert lowest < -40 or mask != "complete"


@pytest.mark.parametrize(("positions", "size"), [("absolute", 1e6), ("rotary", 1e-3)])
def test_linear_blocks(positions: Any, size: float) -> None:
    """With a norm, an MLP and a skip, of small tokens and of large ones."""
    arch = Architecture(layers=2, width=4, heads=2, mlp_width=8, kernel="linear", positions=positions, length=8)
    compare(arch, LinearNetwork, size=size)


def test_linear_attention_of_one_entry_a_head_makes_all_tokens_equal() -> None:
    """Weights are then products of a number of i and one of j, and rows are alike."""
    arch = Architecture(**PURE | {"head_width": 1, "layers": 1}, kernel="linear")
    *_, last = propagate(awake(arch), normal(1, 5, 4, seed=2))
    assert bool((last.state.residual.value == 0).all())


class SinkhornNetwork(Network):
    """Columns and rows divided by their sums in turn, as often as said."""

    def matrices(self, index: int, here: int, X: Rows) -> list[Rows]:
        """Balanced."""
        return [self.balanced(P) for P in super().matrices(index, here, X)]

    def balanced(self, P: Rows) -> Rows:
        """Of one head."""
        for _ in range(int(str(self.arch.kernel).split(":")[1])):
            sums = [mp.fsum(column) for column in zip(*P, strict=True)]
            P = [[u / total for u, total in zip(row, sums, strict=True)] for row in P]
            P = [[u / mp.fsum(row) for u in row] for row in P]
        return P


@pytest.mark.parametrize(
    ("mask", "rounds", "fields"), thinned(MASKS, [3, 1], [{}, {"biases": True, "positions": "alibi"}])
)
def test_sinkhorn_pure_attention(mask: str, rounds: int, fields: dict[str, Any]) -> None:
    arch = Architecture(**PURE | fields, kernel=f"sinkhorn:{rounds}", mask=mask)
    lowest = compare(arch, SinkhornNetwork, size=0.3)
    assert lowest < -20 or mask != "complete" or fields


@pytest.mark.slow
def test_sinkhorn_attention_collapses_doubly_exponentially_and_no_slower_than_softmax() -> None:
    """Three seeds of pure attention: each layer triples what the layer before took off the log, as under a
    softmax, and by the last layer the residual is no larger than a softmax's, a tenth of its log to spare."""
    for seed in range(3):
        net = Transformer.random(Architecture(layers=7, width=16, heads=4), seed=seed, init="xavier")
        san, X, last = net.variant("san"), normal(1, 8, 16, seed=seed + 100), []
        for kernel in ("softmax", "sinkhorn:3", "sinkhorn:10"):
            log10 = measure(san.variant(kernel=kernel), X, metrics="residual").curve("residual", "log10")[0]
            dropped = log10.diff()
            assert (dropped[-3:] / dropped[-4:-1] - 3).abs().max() < 0.05
            last.append(float(log10[-1]))
        assert last[0] < -100 and max(last[1:]) < 0.9 * last[0]


@pytest.mark.parametrize(
    ("fields", "mask"),
    thinned([{}, {"positions": "alibi", "score_cap": 2.0}, {"kernel": "gaussian"}], ["complete", "causal"]),
)
def test_tempered_pure_attention(mask: str, fields: dict[str, Any]) -> None:
    lowest = compare(Architecture(**PURE | fields, log_gain=0.7, mask=mask), Network, size=0.3)
    assert lowest < -20 or mask != "complete" or "positions" in fields


class DifferentialNetwork(Network):
    """`P_1 - lambda P_2`, a norm on each head, and a number of the layer."""

    def matrices(self, index: int, here: int, X: Rows) -> list[Rows]:
        """One attention less another."""
        first, tensors = super().matrices(index, here, X), self.tensors
        mine, theirs = f"layers.{here}.parts.differential", f"layers.{here}.attention"
        second = {f"{theirs}.{name}.weight": tensors[f"{mine}.{name}"] for name in ("query", "key")}
        second |= {f"{theirs}.{name}.bias": tensors.get(f"{mine}.{name}_bias") for name in ("query", "key")}
        self.tensors = tensors | second
        taken = super().matrices(index, here, X)
        self.tensors = tensors
        a, b, c, d = (tensors[f"{mine}.lambda_{name}"] for name in ("query_1", "key_1", "query_2", "key_2"))
        weight = mp.exp(dot(a, b)) - mp.exp(dot(c, d)) + mp.mpf(0.8 - 0.6 * math.exp(-0.3 * index))
        self.index = index
        return [
            [[u - weight * v for u, v in zip(*rows, strict=True)] for rows in zip(*pair, strict=True)]
            for pair in zip(first, taken, strict=True)
        ]

    def spoken(self, here: int, X: Rows, source: Rows, found: list[Rows], kind: str = "attention") -> Rows:
        """What heads add, through their norms."""
        if self.arch.parts[-1].name == "differential":
            return super().spoken(here, X, source, found, kind)
        v, output = self.heads(here, "value", source), self.tensors[f"layers.{here}.attention.output.weight"]
        gain = self.tensors[f"layers.{here}.parts.head_norm.gain"]
        factor = mp.mpf(1 - (0.8 - 0.6 * math.exp(-0.3 * self.index)))
        said = [
            [
                [
                    factor * g * u / mp.sqrt(dot(row, row) / len(row) + mp.mpf(1e-5))
                    for u, g in zip(row, gain, strict=True)
                ]
                for row in times(P, v[h])
            ]
            for h, P in enumerate(found)
        ]
        parts = [times(each, output[h]) for h, each in enumerate(said)]
        return [[mp.fsum(part[i][j] for part in parts) for j in range(self.arch.width)] for i in range(len(X))]


class Differential2Network(Network):
    """`P_1 - lambda_i P_2`, of the same keys."""

    def matrices(self, index: int, here: int, X: Rows) -> list[Rows]:
        """One attention less another, row by row."""
        first, tensors = super().matrices(index, here, X), self.tensors
        mine, theirs = f"layers.{here}.parts.differential2", f"layers.{here}.attention.query"
        second = {"weight": tensors[f"{mine}.query"], "bias": tensors.get(f"{mine}.query_bias")}
        self.tensors = tensors | {f"{theirs}.{name}": each for name, each in second.items()}
        taken = super().matrices(index, here, X)
        self.tensors = tensors
        share = times(X, tensors[f"{mine}.share"])  # [token][head]
        return [
            [
                [u - v / (1 + mp.exp(-share[i][h])) for u, v in zip(P[i], taken[h][i], strict=True)]
                for i in range(len(X))
            ]
            for h, P in enumerate(first)
        ]


@pytest.mark.parametrize(
    ("case", "mask"), thinned([({}, 1e-3), ({"biases": True}, 0.1), ({"key_heads": 1}, 30.0)], MASKS)
)
def test_differential2_pure_attention(case: tuple[dict[str, Any], float], mask: str) -> None:
    """Tokens take shares that differ, so what they have in common reaches what they differ by."""
    fields, size = case
    arch = remedy("differential2").applied(Architecture(**PURE | fields, mask=mask))
    lowest = compare(arch, Differential2Network, size=size)
    assert lowest < -20 or fields or mask != "complete"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("spec", "mask"), thinned(["differential", "differential:norm=0"], MASKS))
def test_differential_pure_attention(spec: str, mask: str) -> None:
    fields = PURE | {"layers": 4 if "norm=0" in spec else 7, "biases": ("query", "key")}
    lowest = compare(remedy(spec).applied(Architecture(**fields, mask=mask)), DifferentialNetwork)
    assert lowest < -18 or mask != "complete"
