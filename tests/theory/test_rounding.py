"""Outward: nothing nearly zero counts as zero, and what starts from rounding is refused or marked."""

import math
from typing import Any

import mpmath as mp
import polars as pl
import pytest
import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.theory import THEOREMS, Certificates, certify
from rankscope.theory.rounding import _decided
from rankscope.theory.theorem import above, at_most
from tests.builders import normal, one_head
from tests.deviation.reference import Network, log10_residual
from tests.theory.attack.climb import ATTACKS, TOWARDS_ROUNDING
from tests.theory.attack.draw import AIMED, drawn
from tests.theory.attack.truth import MOST, judged
from tests.theory.families import SAN, SPHERE, net_of, orthogonal

ROUNDING = "its inputs are rounding"


def certified(net: Transformer, X: Tensor, **options: Any) -> Certificates:
    """Of one sample, once every guarantee is found true in hundreds of digits."""
    found = certify(net, X[None], **options)
    verdict = judged(net, X, found)
    assert not verdict.false and not verdict.misread
    assert all(row["log10_measured"] < -MOST / 4 for row in verdict.unchecked)  # beyond the most digits
    assert found.broken().is_empty()
    return found


# The attack


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(5))
def test_no_drawn_guarantee_is_false(number: int) -> None:
    _, (net, X) = drawn(15, number)
    certified(net, X)


@pytest.mark.slow
def test_no_guarantee_of_many_is_false() -> None:
    for number in range(500):
        _, (net, X) = drawn(16, number)
        certified(net, X)


def test_every_theorem_is_attacked() -> None:
    assert {name for names in AIMED.values() for name in names} == set(THEOREMS)
    assert {attack.theorem for attack in (*ATTACKS, *TOWARDS_ROUNDING)} == set(THEOREMS)


# Hypotheses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("skip", [1e-9, -1e-12, 1e-80])
def test_a_skip_of_next_to_nothing_is_a_skip(skip: float) -> None:
    """Four layers of skips of 1e-9 leave 1e-36 of the tokens' differences; cubing would leave far less."""
    net, X = net_of("bert", layers=4, biases=False, **{**SAN, "attention_skip": skip}), 1e-3 * normal(5, 4)
    found = certified(net, X)
    for theorem in ("dong2021-2.3", "oscillation", "attention-factors", "exact-factors", "wu2024-1"):
        rows = found.of(theorem)
        assert not rows["met"].any() and "weight of the skip" in rows["why"][0]
    assert found.of("dong2021-skip")["met"].all()


def test_a_measured_number_must_keep_off_its_limit() -> None:
    """By a hundred times what passes differ by; an exact one may touch it."""

    def met(*numbers: float, measured: bool) -> bool:
        return _decided(tuple(at_most("size", number, 1.0, measured) for number in numbers)).met

    assert met(1.0, 1.0, measured=False) and not met(1.0, 1.0, measured=True)
    assert met(0.5, 0.501, measured=True) and not met(0.99, 0.9901, measured=True)
    assert not met(0.5, 1.5, measured=False)
    assert above("weight", 1e-300, 0.0, measured=True).room == 1e-300


# What starts from rounding


def test_equal_tokens_that_rounding_chooses_between() -> None:
    """Two tokens looked at the same one: after that they differ by a skip of 1e-80. Which of them is seen
    next is rounding; what they differ by, which float64 has lost, is then all that is left of the others."""
    _, (net, X) = drawn(15, 742)
    assert set(certified(net, X).of("aligned-skip").filter(~pl.col("below_floor"))["layer"]) == {1}
    marked = measure(net, X[None], metrics="mu").table["below_floor"].to_list()
    assert marked == [False, False, True, True, True]


def test_a_bound_of_zero_needs_zero_that_is_exact() -> None:
    """Values that see a direction in which tokens do not differ, but for rounding."""
    X = normal(1, 4) * (1 + torch.tensor([[0.0], [2.0**-40], [-(2.0**-41)], [2.0**-42]], dtype=torch.float64))
    away = torch.linalg.svd(X - X.mean(0)).Vh[:1]
    arch = Architecture(layers=2, width=4, heads=1, biases=False, **SAN)
    net = one_head(arch, value=torch.eye(4).double() - away.mT @ away)
    found = certified(net, X)
    rows = found.of("exact-factors").filter("met")
    assert len(rows) and rows["log10_bound"].is_finite().all()
    with mp.workdps(300):
        truth = [float(log10_residual(state)) for state in Network(net).states(X)]
    assert all(row["log10_bound"] >= truth[row["layer"]] for row in rows.iter_rows(named=True))
    equal = certified(one_head(arch), X[:1].expand(3, 4))
    assert set(equal.of("exact-factors")["log10_bound"]) == {-math.inf}


def test_exact_factors_of_cancelling_outputs_are_refused() -> None:
    """Heads whose outputs cancel, but for 1e-17: what is left is rounding."""
    arch = Architecture(layers=1, width=4, heads=2, head_width=4, kernel="softmax", biases=False, **SAN)
    tensors = Transformer.random(arch, 0, "xavier").state_dict()
    for name, tensor in tensors.items():
        tensor[:, 1] = tensor[:, 0] if name.endswith(("query.weight", "key.weight", "value.weight")) else tensor[:, 1]
        if name.endswith("output.weight"):
            tensor[1] = -tensor[0] * (1 + 1e-16)
    found = certified(Transformer.from_weights(arch, tensors), normal(5, 4))
    row = found.of("exact-factors").row(0, named=True)
    assert row["below_floor"] and (row["met"] is False or row["log10_bound"] > -20)
    assert found.guarantees().filter(theorem="exact-factors").is_empty()


@pytest.mark.parametrize(
    ("activation", "closed"),
    [("gelu", -12.0), ("silu", -40.0), ("relu", -12.0), ("silu", -800.0), ("tanh", -800.0)]
    + [pytest.param("gelu", closed, marks=pytest.mark.slow) for closed in (-40.0, -800.0)],
)
def test_gates_that_are_all_but_closed_still_let_something_through(activation: str, closed: float) -> None:
    """gelu(-12) is 1e-32 and not the 0 that 1 + erf makes of it: float64's, which is then contradicted."""
    arch = Architecture(layers=1, width=3, heads=1, mlp="gated", mlp_width=2, mlp_skip=0.0, norm="none",
                        activation=activation, biases=True)  # fmt: skip
    tensors = Transformer.random(arch, 0, "xavier").state_dict()
    tensors["layers.0.mlp.gate.bias"] = torch.full((2,), closed, dtype=torch.float64)
    rows = certified(Transformer.from_weights(arch, tensors), 0.1 * normal(4, 3)).of("dobrushin")
    assert rows.filter("met")["log10_bound"].is_finite().all()
    assert rows["met"].all() or (ROUNDING in rows["why"][0] and activation == "gelu")


def test_what_is_untouched_but_for_rounding_is_worth_less() -> None:
    """Outputs that reach a direction by 1e-15 of themselves, of values of 1e15: nothing stays as it was."""
    turn = orthogonal(4, 2)
    arch = Architecture(layers=1, width=4, heads=1, norm="none", mlp="none", biases=False, mask="window:0")
    for size, kept in ((1.0, True), (1e15, False)):
        net = one_head(arch, value=-size * torch.eye(4).double(), output=turn.mT @ torch.diag(
            torch.tensor([1 / size, 1 / size, 1 / size, 1e-15], dtype=torch.float64)) @ turn)  # fmt: skip
        row = certified(net, normal(5, 4), theorems="untouched").table.row(0, named=True)
        assert (row["met"] and row["log10_bound"] > -1) is kept


def test_ranks_that_rounding_makes_are_marked() -> None:
    """Tokens in one plane through zero, to rounding: a norm shows directions that are none."""
    X = (normal(5, 1) @ normal(1, 4, seed=1)) + 1e-14 * normal(5, 4, seed=2)
    found = certified(net_of(layers=1, norm="rms", norm_eps=0.0, norm_place="pre"), X)
    rows = found.of("norm-rank")
    assert rows["below_floor"].all() and found.guarantees().filter(theorem="norm-rank").is_empty()


def test_aligned_skips_that_cancel_are_refused() -> None:
    """Each token sees itself, and its value takes all of it away but for rounding."""
    turn = orthogonal(3, 3)
    arch = Architecture(layers=2, width=3, heads=1, norm="none", mlp="none", biases=False, mask="window:0")
    found = certified(one_head(arch, value=-turn, output=turn.mT.contiguous()), normal(4, 3))
    for theorem in ("aligned-skip", "elementary-skip"):
        row = found.of(theorem).row(0, named=True)
        assert row["below_floor"] and (row["log10_bound"] == -math.inf or ROUNDING in row["why"])
    assert found.guarantees().filter(kind="lower").is_empty()


def test_float64_contradicts_attention_that_was_lost() -> None:
    """Heads as sharp as 1e40, a zero token among three, a skip of 1e-300: were the rows' difference lost, the
    skip's would be all there is."""
    _, (net, X) = drawn(4, 2138)
    rows = certified(net, X).of("dobrushin")
    assert (rows.filter("met")["log10_bound"] > 0).all()


def test_a_token_that_cancels_before_a_norm_is_marked() -> None:
    """Two tokens of width two through LayerNorm are opposite, and the mean of both is zero: of what rounding
    leaves of it the next LayerNorm knows the sign alone, which passes agree on by chance."""
    _, (net, X) = drawn(6, 4051)
    found = certified(net, X)
    assert found.table["below_floor"].all() and found.guarantees().is_empty()


def test_guarantees_have_a_measured_side_above_its_floor() -> None:
    """The first token zero under a causal mask and a norm: the two arithmetics disagree on it."""
    net = net_of("orthogonal", mask="causal", kernel="uniform", layers=6, **SPHERE)
    X = normal(3, 4).abs()
    X[0] = 0.0
    found = certified(net, X)
    assert found.table["below_floor"].any()
    assert not found.guarantees()["below_floor"].any()


@pytest.mark.slow
def test_bounds_of_ordinary_networks_are_not_refused() -> None:
    """Nothing is marked or refused as rounding, and bounds move by less than 1e-9 of a decade."""
    net, X = Transformer.random(Architecture(layers=6, width=32, heads=4)), normal(1, 12, 32)
    for variant in (net, net.variant(norm=False), net.variant(skip=False, mlp=False, norm=False)):
        found = certify(variant, X)
        assert not found.table["below_floor"].any()
        assert not found.table["why"].str.contains(ROUNDING).any()
        exact = found.of("exact-factors").filter("met")
        assert (exact["slack"] < 1e-9 * (1 + exact["log10_bound"].abs())).all()
