"""What a second pass says of a reading: by itself, and no more than it has to."""

from dataclasses import replace
from typing import Any

import mpmath as mp
import numpy as np
import polars as pl
import pytest
import torch

from rankscope.deviation import State
from rankscope.metrics import METRICS
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.profiles.agreement import _miscounted
from tests.builders import normal, one_head
from tests.deviation.reference import Network, log10_residual

BESIDE = ["mu", "entropy", "numerical_rank", "second_singular_value", "mean_cosine_gap", "head_mu"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variant", ["transformer", "san", "san+mlp"])
def test_digits_do_not_hang_on_what_else_is_asked(variant: str) -> None:
    """Layers and rules are shaken by noise of their own, whatever was looked at before."""
    arch = Architecture(layers=5, width=16, heads=2, mlp_width=32, norm="layer")
    net, X = Transformer.random(arch, seed=2).variant(variant), normal(2, 5, 16, seed=1)
    alone = measure(net, X, metrics=["dobrushin", "relative_mu"]).table
    among = measure(net, X, metrics=[*BESIDE, "dobrushin", "relative_mu"]).table
    among = among.filter(pl.col("metric").is_in(["dobrushin", "relative_mu"]))
    assert alone["digits"].drop_nulls().len() > 20 and alone.equals(among)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "seed"),
    [("none", 0), pytest.param("alibi", 3, marks=pytest.mark.slow), pytest.param("rotary", 0, marks=pytest.mark.slow)],
)
def test_attention_among_two_tokens_is_not_marked(positions: Any, seed: int) -> None:
    """Each is as far from the mean as the other: passes may write attention about one or the other, and what
    its rows differ by is the same. In 32 digits it is what was read."""
    arch = Architecture(
        layers=3, width=8, heads=1, head_width=4, positions=positions, norm="layer", attention_skip=0.0,
        mlp_skip=0.0,
    )  # fmt: skip
    net, X = Transformer.random(arch, seed=seed, init="xavier"), normal(2, 2, 8, seed=seed)
    found, sure = (measure(net, X, metrics=["dobrushin"], confirm=confirm) for confirm in (False, True))
    torch.testing.assert_close(found.curve("dobrushin"), sure.curve("dobrushin"), rtol=1e-9, atol=0, equal_nan=True)
    assert not sure.table["below_floor"].any() and not found.table["below_floor"].any()


def test_rounding_of_float64_that_grows_over_layers_marks_nothing() -> None:
    """Tokens differ along a direction that falls by 0.3 in each layer, beside a large mean that does not: float64's
    rounding of the mean grows beside the differences until the passes agree to six digits only. Deviation arithmetic
    has lost nothing: 60 digits say so."""
    arch = Architecture(
        layers=10, width=3, heads=1, norm="none", mlp="none", attention_skip=0.5, kernel="uniform", mask="window:0",
        biases=False,
    )  # fmt: skip
    Q = torch.linalg.qr(normal(3, 3))[0]
    net = one_head(arch, value=Q @ torch.diag(torch.tensor([0.5, -0.2, 0.0], dtype=torch.float64)) @ Q.T)
    X = (100 * Q[:, 0] + normal(4, 1, seed=1) * Q[:, 1])[None]
    profile = measure(net, X, metrics="residual")
    with mp.workdps(60):
        exact = [float(log10_residual(state)) for state in Network(net).states(X[0])]
    assert profile.curve("residual", "log10")[0].tolist() == pytest.approx(exact, abs=1e-9)
    assert not profile.table["below_floor"].any()


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7, 1e-9])
def test_a_metric_without_a_rule_has_no_more_digits_than_its_floor_leaves(size: float) -> None:
    """What heads add is next to the same at all tokens: float64 tokens of size one hold little of what differs, and
    their rounding is often the same in both passes. The same metric by its rule knows what differs."""
    with_rule = METRICS["relative_mu"]
    assert with_rule.rule is not None
    plain = replace(with_rule, name="plain_mu", rule=None, sensitive_to=None, of="heads")
    net = Transformer.random(Architecture(layers=2, width=16, heads=2), seed=0)
    for layer in net.weights.layers:
        layer.attention.query.weight.mul_(size)
    table = measure(net, normal(2, 6, 16), metrics=[plain, with_rule.of_heads()]).table
    found, sure = (table.filter(pl.col("metric") == name) for name in ("plain_mu", "head_relative_mu"))
    error = (found["value"] / sure["value"] - 1).abs()
    assert len(error) == 8 and float(sure["digits"].min()) > 9  # type: ignore[arg-type]
    assert (error <= 10 ** -found["digits"] + 10 ** -sure["digits"]).all()
    assert (found["digits"] >= 12 + np.log10(size) - 1).all()  # it says no less than it knows, but for the margin


@pytest.mark.parametrize(
    ("smallest", "apart", "miscounted"), [(0.1, 1e-11, False), (1e-10, 1e-11, True), (0.0, 1e-15, False)]
)
def test_ranks_are_in_doubt_where_a_singular_value_may_be_rounding(
    smallest: float, apart: float, miscounted: bool
) -> None:
    U, _ = torch.linalg.qr(normal(5, 3) - normal(5, 3).mean(0))
    X = U @ torch.diag(torch.tensor([1.0, 0.5, smallest], dtype=torch.float64)) @ torch.linalg.qr(normal(4, 3))[0].T
    state, distance = State.of(X[None], torch.ones(1, 5).bool()), torch.tensor([apart], dtype=torch.float64)
    assert bool(_miscounted(METRICS["affine_rank"], state, distance)) is miscounted
