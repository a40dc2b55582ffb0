"""Above: cubing to any depth, the closed form of skips, gamma. Below: skips under a norm, ranks under norms."""

import math
from dataclasses import replace

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.deviation import LOWEST
from rankscope.nets import NormWeights, Transformer, normalise
from rankscope.theory import certify
from rankscope.theory.bounds import cubed
from tests.builders import normal
from tests.theory.attack.climb import under_a_norm
from tests.theory.families import PURE, SAN, Case, net_of, orthogonal
from tests.theory.plain import Plain, closed, columns, gamma, lambda_skip, rows, run, with_skip


@pytest.mark.sampled(2)
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


@pytest.mark.parametrize(("theorem", "heads", "skip"), [
    ("dong2021-2.2", 1, 0.0), ("dong2021-2.3", 2, 0.0), ("dong2021-skip", 2, -0.5),
])  # fmt: skip
def test_wide_scores_pay_for_it_with_gamma(theorem: str, heads: int, skip: float) -> None:
    """Where scores differ by more than 1.2564, (e^o - 1) / 2o is above one: bounds as their formulas have them."""
    plain = Plain.random(0, heads=heads, layers=1)
    plain = replace(plain, query=4 * plain.query, skip=skip)
    assert float(gamma(run(plain)[0])) > 2
    row = certify(plain.net, plain.X[None], theorems=theorem).table.row(-1, named=True)
    bound, measured = (float(log) / math.log(10) for log in (with_skip if skip else closed)(plain))
    assert row["met"] and row["log10_measured"] == pytest.approx(measured, abs=1e-9)
    assert row["log10_bound"] == pytest.approx(bound, rel=1e-9)


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


@pytest.mark.slow
@pytest.mark.parametrize("layers", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_layers_are_certified(layers: int) -> None:
    """Means at 1e-400 and residuals whose logs end: neither NaN nor a bound that is passed."""
    net = net_of("bert", layers=layers, width=2, heads=1, shared=True, **SAN)
    found = certify(net, normal(1, 3, 2), theorems=["dong2021-2.3", "dong2021-skip"])
    rows = found.of("dong2021-2.3")
    assert rows["met"].all() and found.broken().is_empty()
    if layers == 1000:
        assert rows["log10_bound"][-1] == pytest.approx(LOWEST / math.log(10))
    assert rows["log10_measured"].is_finite().all()


@pytest.mark.slow
@settings(max_examples=4)
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


@pytest.mark.parametrize("seed", [0, 1])
def test_a_skip_under_a_norm_is_bounded_as_its_formula_has_it(seed: int) -> None:
    plain = under_a_norm(seed)  # a skip of 2: w^2, 1 / w and w are told apart
    row = certify(plain.net, plain.X[None], theorems="lambda-skip").table.row(-1, named=True)
    bound, measured = (float(log) / math.log(10) for log in lambda_skip(plain))
    assert row["met"] and row["log10_measured"] == pytest.approx(measured, abs=1e-9)
    assert math.isfinite(bound) and row["log10_bound"] == pytest.approx(bound, abs=1e-9)


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
