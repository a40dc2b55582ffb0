"""The critical skip: by hand, against theory, its brackets, where there is none, and what is no question."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.errors import ArchitectureError, MetricError, RankscopeError, TokensError
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.theory import critical_skip, slope, transverse_exponent
from tests.builders import normal
from tests.raising import raises
from tests.theory.test_transverse import identity_attention


def pure(mask: str = "complete", **changes: Any) -> Transformer:
    """Attention and skips alone."""
    arch = Architecture(layers=2, width=8, heads=2, mlp="none", norm="none", mask=mask, **changes)
    return Transformer.random(arch, seed=1)


@pytest.mark.slow
def test_one_under_a_complete_mask() -> None:
    """To first order the skip is all that is left of a difference."""
    found = critical_skip(pure(), normal(1, 5, 8), depth=12, low=0.98, high=1.03, tolerance=4e-3)
    assert found.weight == pytest.approx(1.0, abs=4e-3)
    assert found.theory == pytest.approx(1.0, abs=2e-3)
    assert found.bracket is not None and found.guaranteed is not None
    for least, most in (found.bracket, found.guaranteed):
        assert least - 2e-3 <= found.weight <= most + 2e-3  # type: ignore[operator]
    assert found.rate_low == pytest.approx(math.log(0.98), abs=1e-3)
    assert found.rate_high == pytest.approx(math.log(1.03), abs=1e-3)
    assert found.table.columns == ["weight", "rate"]
    assert found.table["weight"][:2].to_list() == [0.98, 1.03]
    assert found.table["rate"][:2].to_list() == [found.rate_low, found.rate_high]
    assert "crosses zero between" in found.why and "crosses zero between" in found.theory_why


@pytest.mark.slow
@pytest.mark.parametrize(("w", "n", "expected"), [(0.5, 2, 0.75), pytest.param(-0.6, 3, 1.2, marks=pytest.mark.slow)])
def test_uniform_causal_attention_by_hand(w: float, n: int, expected: float) -> None:
    """W = w I: where the largest |lambda + w / i|, i = 2..n, is one."""
    net, low = identity_attention(w, 1.0, "causal", 2), expected - 0.1
    found = critical_skip(net, normal(1, n, 2), depth=12 * (n - 1), low=low, high=low + 0.32, tolerance=0.02)
    assert found.theory == pytest.approx(expected, abs=0.01)
    assert found.weight == pytest.approx(expected, abs=0.02)
    assert found.bracket is not None and found.weight is not None
    assert found.bracket[0] - 0.01 <= found.weight <= found.bracket[1] + 0.01


def near(kind: dict[str, Any], mask: str) -> tuple[Transformer, Tensor]:
    """A network of shared layers, and tokens that all but agree."""
    arch = Architecture(layers=1, width=6, heads=2, mlp_width=8, mask=mask, shared=True, **kind)
    X = normal(1, 1, 6, seed=3) + 1e-9 * normal(1, 3, 6)
    return Transformer.random(arch, seed=1, init="xavier"), X


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"norm": "none", "mlp": "plain"}, "complete"),
    ({"norm_place": "sandwich", "mlp": "none"}, "causal"),
    ({"norm_place": "pre", "mlp": "gated", "parallel": True, "norm": "rms"}, "window:1"),
    ({"norm_place": "pre", "mlp": "plain"}, "causal"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mask"), KINDS[:1])
def test_what_is_measured_near_collapse_agrees_with_theory(kind: dict[str, Any], mask: str) -> None:
    net, X = near(kind, mask)
    found = critical_skip(net, X, depth=16, low=0.7, high=1.1, tolerance=0.08)
    assert found.weight is not None and found.theory is not None
    assert found.weight == pytest.approx(found.theory, abs=0.08)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mask"), KINDS)
def test_it_agrees_to_the_tolerance_over_many_layers(kind: dict[str, Any], mask: str) -> None:
    net, X = near(kind, mask)
    found = critical_skip(net, X, depth=150, low=0.6, high=1.24, tolerance=5e-3)
    assert found.weight is not None and found.theory is not None
    assert found.weight == pytest.approx(found.theory, abs=1e-2)


@pytest.mark.slow
def test_theory_is_local() -> None:
    """Causal attention without norms, unstable to first order: uniform attention follows the exponent. With
    softmax scores grow as tokens do, until the second token attends to the first alone: what they differ
    by then shrinks by the skip's 1/2, from 1e-9 on, and never grows to where it could be seen."""
    arch = Architecture(
        layers=1, width=8, heads=2, mlp="none", norm="none", mask="causal", attention_skip=0.5, shared=True
    )
    net = Transformer.random(arch, seed=3, init="xavier")
    x = normal(8)
    X = x + 1e-9 * normal(1, 2, 8, seed=1)
    deep = net.variant(layers=70)
    local = transverse_exponent(deep, x, 2)
    assert local.rate > 0.2 and local.common > local.rate
    rates = []
    for kernel in ("uniform", "softmax"):
        mu = measure(deep.variant(kernel=kernel), X, metrics="mu", check=False).curve("mu", "log10")
        rates.append(float(slope(mu)) * math.log(10))
    assert rates[0] == pytest.approx(local.rate, abs=0.01)
    assert rates[1] == pytest.approx(math.log(0.5), abs=0.01)
    found = critical_skip(net, X, depth=4, low=0.0, high=1.0, tolerance=0.4)
    assert "no norm keeps tokens from growing" in found.theory_why


@pytest.mark.parametrize(("fields", "warned"), [({}, True), ({"query_norm": True}, False), ({"score_cap": 2.0}, False)])
def test_theory_warns_where_nothing_bounds_scores(fields: dict[str, Any], warned: bool) -> None:
    """Tokens of these networks grow at the crossing, and scores with them; any one bound of scores is enough."""
    arch = Architecture(layers=1, width=4, heads=1, mlp="none", norm="none", mask="causal", shared=True, **fields)
    net, x = Transformer.random(arch, seed=3, init="xavier"), normal(4)
    found = critical_skip(net, x + 1e-9 * normal(1, 2, 4, seed=1), depth=2, low=0.0, high=1.5, tolerance=10.0)
    assert found.theory is not None
    assert transverse_exponent(net.variant(attention_skip=found.theory, layers=2), x, 2).common > 0
    assert ("no norm keeps tokens from growing" in found.theory_why) is warned


@pytest.mark.slow
@given(st.integers(0, 999), st.sampled_from(["complete", "causal"]), st.sampled_from(["softmax", "uniform"]))
@settings(max_examples=3)
def test_the_guarantee_holds_in_every_layer_on_any_input(seed: int, mask: str, kernel: str) -> None:
    net = pure(mask, kernel=kernel, key_heads=1)
    X = 10.0 ** (seed % 3) * normal(1, 6, 8, seed=seed)
    guaranteed = critical_skip(net, X, depth=2, tolerance=10.0).guaranteed
    assert guaranteed is not None and 0 < guaranteed[0] <= 1 <= guaranteed[1]
    for weight, sign in ((guaranteed[0] - 1e-6, -1), (guaranteed[1] + 1e-6, 1)):
        mu = measure(net.variant(attention_skip=weight, layers=6), X, metrics="mu", check=False).curve("mu", "log10")
        assert bool((sign * mu.diff() > 0).all())


def test_nothing_is_guaranteed_with_parts() -> None:
    """ContraNorm of 5 multiplies what tokens differ by, which the guarantee of heads alone does not know."""
    net, X = pure("causal"), normal(1, 6, 8)
    contra = net.with_remedy("contranorm", s=5.0)
    bare, pushed = (critical_skip(variant, X, depth=2, tolerance=10.0) for variant in (net, contra))
    assert bare.guaranteed is not None
    below = contra.variant(attention_skip=bare.guaranteed[0] - 1e-6, layers=2)
    mu = measure(below, X, metrics="mu", check=False).curve("mu", "log10")
    assert bool((mu.diff() > 0).any())
    assert pushed.guaranteed is None and pushed.bracket is None


@pytest.mark.slow
def test_where_nothing_crosses() -> None:
    X = normal(1, 4, 8)
    after = Transformer.random(Architecture(layers=1, width=8, heads=2, mlp="none"), init="xavier")
    found = critical_skip(after, X, high=1000.0, depth=6)
    assert found.weight is None and "at weight 1000 the rate has come to zero" in found.why
    assert found.bracket is None and found.guaranteed is None

    found = critical_skip(pure(), X, high=0.9, depth=6)
    assert found.weight is None and found.theory is None
    assert "at weight 0.9 tokens still collapse, the rate is -0.10" in found.why
    assert "at weight 0.9 tokens still collapse, the rate is -0.105" in found.theory_why
    assert found.bracket is None and found.guaranteed is not None
    assert found.table.height == 2

    found = critical_skip(pure(), X, low=1.5, depth=6)
    assert found.weight is None and "at weight 1.5 tokens do not collapse, the rate is 0.40" in found.why

    equal = X[:, :1].expand(-1, 4, -1)
    found = critical_skip(pure(), equal, depth=6)
    assert found.weight is None and found.rate_high == -math.inf


@pytest.mark.slow
def test_where_theory_does_not_apply() -> None:
    arch = Architecture(layers=1, width=8, heads=2, mlp="none", norm="none", positions="alibi")
    found = critical_skip(Transformer.random(arch), normal(1, 4, 8), depth=6, low=0.5, high=1.4, tolerance=0.1)
    assert found.weight == pytest.approx(1.0, abs=0.1) and found.theory is None
    assert found.theory_why.startswith("theory does not apply: positions must be none or absolute")


@pytest.mark.slow
def test_padding_and_precision_change_nothing() -> None:
    net, X = pure("causal"), normal(2, 4, 8)
    options: dict[str, Any] = {"depth": 4, "low": 0.7, "high": 1.4, "tolerance": 0.2}
    plain = critical_skip(net, X, **options)
    wide = torch.cat([normal(2, 2, 8, seed=9), X], 1)
    padding = torch.arange(6).expand(2, 6) < 2
    padded = critical_skip(net, wide, padding, **options)
    assert padded.table["rate"].to_list() == pytest.approx(plain.table["rate"].to_list())
    assert (padded.weight, padded.theory, padded.guaranteed) == (plain.weight, plain.theory, plain.guaranteed)
    single = critical_skip(net.to(torch.float32), X.float(), **options)
    assert single.table["rate"].to_list() == pytest.approx(plain.table["rate"].to_list(), abs=1e-5)


@pytest.mark.slow
def test_the_share_of_the_tokens() -> None:
    """W = w I, w < 0: tokens shrink by lambda + w, what they differ by at most by lambda + w/n."""
    net = identity_attention(-0.5, 1.0, "complete", 2)
    found = critical_skip(net, 1 + normal(1, 3, 2), metric="relative_mu", depth=8, low=0.05, high=0.6, tolerance=0.02)
    assert found.theory == pytest.approx(0.25, abs=0.02)  # lambda = |lambda - 0.5|
    assert found.guaranteed is None and found.bracket is None


def test_what_is_no_question() -> None:
    net, X = pure(), normal(1, 3, 8)
    silent = net.variant(heads=[])
    sigmoid = net.variant(kernel="sigmoid")
    wrong: list[tuple[Transformer, dict[str, Any], type[RankscopeError], str]] = [
        (net, {"metric": "relative_nu"}, MetricError, "metric"),
        (net, {"metric": "residual"}, MetricError, "metric"),
        (net, {"low": 1.0, "high": 1.0}, ArchitectureError, "low"),
        (net, {"low": -1.0}, ArchitectureError, "low"),
        (net, {"high": math.inf}, ArchitectureError, "low"),
        (net, {"low": math.nan}, ArchitectureError, "low"),
        (net, {"tolerance": 0.0}, ArchitectureError, "tolerance"),
        (net, {"depth": 0}, ArchitectureError, "layers"),
        (silent, {}, ArchitectureError, "heads"),
        (sigmoid, {}, ArchitectureError, "architecture"),
    ]
    for network, options, error, subject in wrong:
        with raises(error, subject):
            critical_skip(network, X, **options)
    with raises(TokensError, "padding"):
        critical_skip(net, X, torch.ones(1, 3, dtype=torch.bool), depth=2)
    with raises(TokensError, "X"):
        critical_skip(net, X.long())
    with raises(MetricError, "table"):
        critical_skip(net, X[:0], depth=2)
    one = critical_skip(net, X[:, :1], depth=2)
    assert one.weight is None and one.rate_high == -math.inf
    assert one.theory_why == "theory does not apply: tokens that may differ must be at least 2; got 1"
