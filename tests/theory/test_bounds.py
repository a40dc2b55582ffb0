"""Random networks that try to break every bound, the ladder of bounds, and bounds at any depth."""

import math
from collections import Counter
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.deviation.scaled import LOWEST
from rankscope.nets import Transformer
from rankscope.nets.norms import NormWeights, normalise
from rankscope.theory import THEOREMS, certify
from rankscope.theory.dong2021 import cubed
from tests.builders import normal
from tests.theory.families import FAMILIES, PURE, SAN, SPHERE, Case, net_of, orthogonal
from tests.theory.plain import columns, rows


@pytest.mark.parametrize("family", FAMILIES)
def test_no_random_network_breaks_a_bound(family: str) -> None:
    """All theorems on every family; those that it is made for are met, and say something, in a good share of
    the draws."""
    strategy, theorems = FAMILIES[family]
    seen: Counter[str] = Counter()

    @settings(max_examples=12, derandomize=True)  # shares of a dozen draws would come and go by chance
    @given(strategy)
    def attempt(case: Case) -> None:
        found = certify(*case)
        assert found.broken().is_empty(), found.broken()
        unmet = found.table.filter(~found.table["met"])
        assert unmet["log10_bound"].is_null().all() and unmet["slack"].is_null().all()
        assert unmet["why"].is_not_null().all()
        seen["cases"] += 1
        seen.update(found.guarantees()["theorem"].unique().to_list())

    attempt()
    for theorem in theorems:
        assert seen[theorem] >= 0.1 * seen["cases"], f"{theorem} says too little: {dict(seen)}"


def test_every_theorem_is_strained_by_some_family() -> None:
    assert set(THEOREMS) == {name for _, theorems in FAMILIES.values() for name in theorems}


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kernel", ["softmax", "gaussian", "uniform", "sigmoid", "linear", "linformer:3"])
def test_kernels_and_scales_with_all_theorems(kernel: str, scale: float) -> None:
    net = net_of(width=6, kernel=kernel, length=16, **SAN)
    X = scale * normal(2, 7, 6, seed=1)
    assert certify(net, X).broken().is_empty()
    with_skip = certify(net.variant(skip=1.0), X)
    assert with_skip.broken().is_empty()
    assert {"aligned-skip", "elementary-skip"} <= set(with_skip.table.filter("met")["theorem"])


@pytest.mark.parametrize("mask", ["complete", "causal", "window:2", "longformer:1:1"])
@pytest.mark.parametrize("variant", ["san", "skip", "sphere"])
def test_a_hundred_tokens(mask: str, variant: str) -> None:
    """Bounds hold among many tokens, where column sums of attention part from its row sums."""
    sphere = variant == "sphere"
    fields = SPHERE if sphere else {**SAN, "attention_skip": float(variant == "skip"), "biases": False}
    net = net_of("orthogonal" if sphere else "xavier", 3, width=8, mask=mask, **fields)
    X = normal(1, 100, 8, seed=4)
    found = certify(net, X.abs() if sphere else X)
    assert found.broken().is_empty()
    met = set(found.table.filter("met")["theorem"])
    assert met >= {"san": {"attention-factors", "wu2024-1"}, "skip": {"aligned-skip", "dobrushin"},
                   "sphere": {"norm-rank", "hemisphere", "wu2024-cor1"}}[variant]  # fmt: skip


def test_close_tokens_among_many_on_a_sphere() -> None:
    """Tokens that differ by 1e-10 among forty: distances must not be taken by products of lengths."""
    net = net_of("orthogonal", width=3, mask="unidirectional", **SPHERE)
    for close in (1e-4, 1e-8, 1e-10, 1e-14):
        X = 1 + close * normal(1, 40, 3)
        found = certify(net, X, theorems=["hemisphere", "wu2024-cor1"])
        assert found.table["met"].all() and found.broken().is_empty()
        assert float(found.of("hemisphere")["slack"].max()) < 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind",
    ["san", "transformer", "sphere"]
    + [pytest.param(kind, marks=pytest.mark.slow) for kind in ("san + MLP", "san + skip", "lambda")],
)
def test_forty_layers(kind: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "san": SAN,
        "san + MLP": {**SAN, "mlp": "plain"},
        "san + skip": {**SAN, "attention_skip": 1.0},
        "transformer": {"layers": 12},
        "sphere": {**SPHERE, "mask": "causal"},
        "lambda": {**SAN, "norm": "rms", "attention_skip": 20.0},
    }
    net = net_of("orthogonal", 1, **{"layers": 40, "norm_eps": 0.0, "biases": False, **kinds[kind]})
    X = 0.1 * normal(1, 5, 4, seed=5)
    found = certify(net, X.abs() if kind == "sphere" else X)
    assert found.broken().is_empty()
    assert not found.guarantees().filter(layer=net.arch.layers).is_empty()


def test_the_smallest_inputs() -> None:
    """One token, equal tokens, zeros: upper bounds are zero or say so, lower bounds are zero."""
    for skip in (0.0, 1.0):
        net = net_of(**{**SAN, "attention_skip": skip}, biases=False)
        for X in (normal(1, 1, 4), normal(1, 1, 4).expand(1, 5, 4), torch.zeros(1, 5, 4).double()):
            found = certify(net, X)
            assert found.broken().is_empty()
            met = found.table.filter("met")
            assert set(met["log10_measured"]) == {-math.inf}
            for quantity in ("residual", "diameter"):
                assert set(met.filter(quantity=quantity)["log10_bound"]) == {-math.inf}
            assert set(met.filter(kind="lower")["log10_bound"]) <= {-math.inf}


def test_weights_whose_products_leave_floating_point() -> None:
    """Weights of 1e-92: the product of four of them is no float64, the residual in logs is."""
    net = net_of("bert", times=1e-90, layers=2, biases=False, **SAN)
    for skip in (0.0, 1.0):
        found = certify(net.variant(skip=skip), normal(1, 5, 4))
        assert found.broken().is_empty()
        assert found.table.filter("met")["log10_bound"].is_finite().all()


# The ladder


@settings(max_examples=8)
@given(PURE, st.sampled_from(["mean", "argmin"]))
def test_exact_below_attention_below_oscillation(case: Case, centre: str) -> None:
    net, X = case
    if centre == "argmin":
        net, X = net.variant(layers=min(2, net.arch.layers)), X[:, :4]
    found = certify(net, X, centre=centre)
    assert found.broken().is_empty()
    one, measured = found.of("dong2021-2.3-gamma1"), found.of("dong2021-2.3")
    exact, attention, oscillation = (found.of(name) for name in ("exact-factors", "attention-factors", "oscillation"))
    kappa = math.log10(max(2 * (1 - 1 / X.shape[1]), 1e-300)) if centre == "mean" else math.log10(2)
    for row in range(len(exact)):
        if not exact["met"][row] or exact["below_floor"][row]:
            continue
        value = exact["log10_measured"][row]
        # Outward by no more than a hundred times the 1e-7 to which passes must agree.
        rounding = 1e-5 * (1 + abs(value)) if math.isfinite(value) else 1e-5
        gap = exact["slack"][row]
        # The argmin is itself found to a tolerance of 1e-5 only, at both ends.
        assert 0 <= gap <= rounding + (centre == "argmin") * 1e-2 * (row + 1)
        if not (attention["met"][row] and oscillation["met"][row]):  # their own inputs are rounding
            continue
        assert exact["log10_bound"][row] <= attention["log10_bound"][row] + rounding + (centre == "argmin") * 1e-2
        # |P - mean row| <= 2 (1 - 1/n) |P - 1p|, which the mean's own kappa pays for.
        assert attention["log10_bound"][row] <= oscillation["log10_bound"][row] + rounding + (
            0 if centre == "mean" else 1e-2 + kappa * (row + 1)
        )
        if one["met"][row] and measured["met"][row]:
            assert one["log10_bound"][row] <= measured["log10_bound"][row]


@pytest.mark.parametrize("scale", [1e-3, 0.3, 2.0])
@pytest.mark.parametrize("skip", [1.0, -0.5])
def test_layer_by_layer_below_the_closed_form_of_skips(skip: float, scale: float) -> None:
    """`max_l (2 c)^((3^l - 1)/2) 2^(3^l (L - l)) r^(3^l)`, in mpmath, for |w| <= 1."""
    net = net_of(seed=2, layers=4, key_heads=1, **{**SAN, "attention_skip": skip})
    X = scale * normal(1, 5, 4, seed=3)
    found = certify(net, X, theorems="dong2021-skip")
    assert found.table["met"].all() and found.broken().is_empty()
    R = X[0] - X[0].mean(0)
    r, c = float((columns(R) * rows(R)).sqrt()), _largest_cubic(net, X)
    for layer, bound in found.table.select("layer", "log10_bound").iter_rows():
        with mpmath.workdps(50):
            terms = []
            for j in range(layer + 1):
                term = mpmath.mpf(2 * c) ** ((3**j - 1) // 2) * mpmath.mpf(r) ** 3**j
                terms.append(term * mpmath.mpf(2) ** (3**j * (layer - j)))
            closed = float(mpmath.log10(max(terms)))
        assert bound <= closed + 1e-9 * (1 + abs(closed))


def _largest_cubic(net: Transformer, X: Tensor) -> float:
    """c over the layers, from explicit matrices."""
    arch, found = net.arch, 0.0
    group = arch.heads // arch.key_heads
    for index, state in enumerate(net.run(X).states[:-1]):
        R, w = state[0] - state[0].mean(0), net.weights.layers[index].attention
        o, wide = 0.0, 0.0
        for head in range(arch.heads):
            QK = w.query.weight[:, head] @ w.key.weight[:, head // group].mT
            W = w.value.weight[:, head // group] @ w.output.weight[head]
            E = R @ QK @ R.mT / arch.divisor
            o = max(o, float((E.amax(-1) - E.amin(-1)).max()))
            wide = max(wide, float(columns(QK) * max(columns(W), rows(W))))
        growth = max(1.0, math.expm1(o) / (2 * o))
        found = max(found, 4 * 2 * (1 - 1 / len(R)) * growth * wide * arch.heads / arch.divisor)
    return found


@pytest.mark.parametrize(("base", "start"), [(0.3, -0.5), (-1.0, 0.6), (2.0, -1.0), (-3.0, 1.5), (0.0, 0.01)])
def test_cubing_equals_the_closed_form_to_a_thousand_layers(base: float, start: float) -> None:
    found = cubed([base] * 1000, start)
    assert len(found) == 1000
    with mpmath.workdps(600):
        for layer in (1, 2, 3, 10, 50, 500, 600, 1000):
            power = mpmath.mpf(3) ** layer
            exact = (power - 1) / 2 * mpmath.mpf(base) + power * mpmath.mpf(start)
            got = found[layer - 1]
            if exact < LOWEST:
                assert got == LOWEST  # raised: an upper bound stays one
            elif exact > -LOWEST:
                assert got == math.inf
            else:
                # Near the critical start, rounding of the logs grows as their powers do, and upward.
                lost = mpmath.mpf(4e-15) * layer * (abs(exact) + power * (abs(base) + abs(start)))
                assert exact <= got and (got <= exact + lost or exact + lost > -LOWEST)
    assert all(not math.isnan(each) for each in found)


def test_cubing_takes_the_largest_base_so_far() -> None:
    by_hand = [-10.0, 2 + 3 * (2 - 9), 2 + 3 * (2 + 3 * (2 - 9))]
    found = cubed([-1.0, 2.0, 0.0], -3.0)
    assert found == pytest.approx(by_hand, rel=1e-13) and all(a >= b for a, b in zip(found, by_hand, strict=True))
    assert cubed([-math.inf, 1.0], 5.0) == [-math.inf, pytest.approx(1 + 3 * (1 + 15), rel=1e-13)]
    assert cubed([math.inf], -math.inf) == [-math.inf]


@pytest.mark.parametrize("layers", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_layers_are_certified(layers: int) -> None:
    """Means at 1e-400 and residuals whose logs end: neither NaN nor a bound that is passed."""
    net = net_of("bert", layers=layers, width=2, heads=1, shared=True, **SAN)
    found = certify(net, normal(1, 3, 2), theorems=["dong2021-2.3", "dong2021-skip"])
    rows = found.of("dong2021-2.3")
    assert rows["met"].all() and found.broken().is_empty()
    if layers == 1000:
        assert rows["log10_bound"][-1] == pytest.approx(LOWEST / math.log(10))
    assert rows["log10_measured"].is_finite().all()


# Norms and rank


@settings(max_examples=60)
@given(
    st.integers(2, 6), st.integers(2, 6), st.integers(0, 6), st.integers(0, 2**31),
    st.sampled_from(["scale", "rms", "layer"]), st.integers(0, 2), st.sampled_from([0.0, 1e-5]),
)  # fmt: skip
def test_norms_are_neutral_to_affine_rank(
    n: int, d: int, rank: int, seed: int, kind: str, zeros: int, eps: float
) -> None:
    """Exact low-rank integer matrices: rank before by exact elimination, after by singular values far from
    rounding. Down by at most one (LayerNorm two) and one per zero gain; up by at most one."""
    rank = min(rank, n, d)
    g = torch.Generator().manual_seed(seed)
    left, right = (torch.randint(-2, 3, shape, generator=g) for shape in ((n, rank), (rank, d)))
    X = left @ right
    gain = torch.ones(d, dtype=torch.float64)
    gain[: min(zeros, d)] = 0.0
    Y = normalise(X.double(), kind, NormWeights(gain), eps)
    before = int(torch.linalg.matrix_rank((n * X - X.sum(0)).double(), rtol=1e-9))
    after = int(torch.linalg.matrix_rank(Y - Y.mean(0), atol=1e-9, rtol=1e-9))
    exact = mpmath_rank(n * X - X.sum(0))
    assert before == exact
    assert after >= before - (2 if kind == "layer" else 1) - min(zeros, d)
    assert after <= before + 1


def mpmath_rank(A: Tensor) -> int:
    """By elimination in whole numbers."""
    rows, rank = [list(map(int, row)) for row in A], 0
    for column in range(A.shape[1]):
        pivot = next((row for row in range(rank, len(rows)) if rows[row][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for row in range(rank + 1, len(rows)):
            by = rows[row][column]
            rows[row] = [a * rows[rank][column] - b * by for a, b in zip(rows[row], rows[rank], strict=True)]
        rank += 1
    return rank


@pytest.mark.parametrize(("kind", "lost"), [("scale", 1), ("rms", 1), ("layer", 2)])
def test_what_a_norm_may_take_is_sometimes_taken(kind: str, lost: int) -> None:
    """The constants cannot be smaller: points on a line through 0 become one point, and so do tokens that
    differ in a constant as well."""
    line = torch.tensor([[1.0, -1.0, 0.0], [2.0, -2.0, 0.0], [3.0, -3.0, 0.0], [5.0, -5.0, 0.0]]).double()
    X = line + torch.tensor([0.0, 1.0, -2.0, 0.0]).double()[:, None] * (kind == "layer")
    Y = normalise(X, kind, NormWeights(), 0.0)
    before, after = (int(torch.linalg.matrix_rank(A - A.mean(0), atol=1e-9)) for A in (X, Y))
    assert before - after == lost


def test_a_norm_on_a_turned_frame_keeps_many_directions() -> None:
    X = normal(1, 12, 8) @ orthogonal(8, 1)
    found = certify(net_of(layers=2, width=8, norm_place="pre"), X, theorems="norm-rank")
    assert found.guarantees().height == 2 and found.broken().is_empty()
    assert 10 ** found.table["log10_bound"][0] == pytest.approx(6.0)


# Beyond what floating point resolves


@pytest.mark.parametrize("mask", ["complete", "causal", "strided:2"])
def test_attention_whose_scores_are_beyond_rounding(mask: str) -> None:
    """Scores of 1e16 and more pick one token: no weight is above one, and tokens are as large as float64 has
    them (their logs were off by 1e8)."""
    fields = {**SAN, "attention_skip": 1.0, "layers": 2, "heads": 4, "head_width": 3, "biases": False}
    for seed in range(4):
        net, X = net_of(seed=seed, times=1e3, mask=mask, **fields), 1e3 * normal(1, 5, 4, seed=seed)
        found = certify(net, X, theorems=["aligned-skip", "elementary-skip"])
        size = found.of("aligned-skip")["log10_size"][1]
        assert size == pytest.approx(math.log10(float(net.run(X).output.norm())), abs=0.3)
        assert found.broken().is_empty()


def test_gated_networks_that_leave_floating_point_have_no_factor() -> None:
    """Squared by every layer, tokens pass 1e261: what is cut off there must not bound them."""
    net = net_of(seed=7, times=1e3, layers=7, mlp="gated", mlp_width=5, norm="none", biases=False)
    found = certify(net, 1e6 * normal(1, 2, 4, seed=7), theorems="dobrushin")
    assert float(found.table["log10_size"].max()) > 300  # type: ignore[arg-type]
    assert found.broken().is_empty() and found.table["log10_bound"][-1] == math.inf
