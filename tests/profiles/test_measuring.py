"""`measure`: what is read of a network, and what it takes: tokens, what `encode` gave, or texts."""

import math
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
import torch

from rankscope import certify, decompose, fresh
from rankscope.errors import MetricError, RankscopeError, TokensError
from rankscope.metrics import METRICS, metric
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import DEFAULT_METRICS, measure
from tests.builders import normal
from tests.raising import raises

BASE: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2}
NET = Transformer.random(Architecture(**BASE, mask="causal"), seed=1, init="xavier")
X = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PADDING = torch.arange(6)[None] >= torch.tensor([[6], [4], [1], [0], [5]])


@pytest.mark.parametrize("name", [each for each in METRICS if METRICS[each].of not in ("routing", "scores")])
def test_measure_reads_each_metric_off_the_networks_own_states(name: str) -> None:
    profile = measure(NET, X, PADDING, [name], "float64")
    run = NET.run(X, PADDING, attention=True)
    curve = profile.curve(name)
    if METRICS[name].of == "tokens":
        expected = torch.stack([metric(name).compute(state, PADDING) for state in run.states], 1)
        assert curve.shape == (5, 4)
    else:
        expected = torch.stack([metric(name).compute(P, PADDING) for P in run.attention], 1)
        assert curve.shape == (5, 4, 2)
        assert curve[:, 0].isnan().all()
        curve = curve[:, 1:]
    assert torch.allclose(curve, expected, rtol=1e-12, atol=1e-14, equal_nan=True)


def test_the_table_is_tidy() -> None:
    profile = measure(NET, X, PADDING, ["mu", "dobrushin"], variant="mine")
    assert profile.table.columns == [
        "variant", "arithmetic", "sample", "layer", "head", "metric",
        "value", "log10", "floor", "below_floor", "digits",
    ]  # fmt: skip
    keys = ["variant", "arithmetic", "sample", "layer", "head", "metric"]
    assert len(profile.table.select(keys).unique()) == len(profile.table) == 5 * 4 + 5 * 3 * 2
    assert profile.variants == ["mine"] and profile.metrics == ["mu", "dobrushin"]
    rows = profile.rows("mu").drop_nans()
    for row in rows.filter(pl.col("value") > 0).iter_rows(named=True):
        assert math.isclose(10 ** row["log10"], row["value"])


def test_batches_do_not_change_the_numbers() -> None:
    whole, parts = (measure(NET, X, PADDING, batch_size=size) for size in (16, 2))
    for name in DEFAULT_METRICS:
        assert torch.allclose(whole.curve(name), parts.curve(name), rtol=1e-12, equal_nan=True)


def test_progress_counts_up_to_its_total() -> None:
    seen: list[tuple[int, int]] = []
    measure(NET, X, batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (9, 9)


def test_the_arithmetic_is_the_networks_not_the_metrics() -> None:
    """A float32 network differs from a float64 one by its rounding, and says so by its floor."""
    fine, coarse = (measure(NET, X, metrics=["relative_mu"], arithmetic=a) for a in ("float64", "float32"))
    difference = (fine.curve("relative_mu") - coarse.curve("relative_mu")).abs()
    assert 0 < float(difference.max()) < 1e-5
    ratio = coarse.curve("relative_mu", "floor") / fine.curve("relative_mu", "floor")
    assert torch.allclose(ratio, torch.full_like(ratio, 2.0**29))


def test_checks_are_in_the_manifest() -> None:
    def checks(net: Transformer) -> dict[str, Any]:
        found: dict[str, Any] = measure(net, X, PADDING).manifest.networks[0].checks
        return found

    assert checks(NET)["largest_row_sum_defect"] < 1e-14
    assert checks(NET)["padded_tokens"] == int(PADDING.sum())
    assert checks(NET)["dropout"] == 0
    assert checks(NET)["rows_sum_to_one"]
    sigmoid = checks(NET.variant(kernel="sigmoid"))
    assert sigmoid["largest_row_sum_defect"] > 0.01 and not sigmoid["rows_sum_to_one"]


def test_an_overflow_is_told_and_costs_nothing_else() -> None:
    arch = Architecture(**{**BASE, "layers": 40}, norm="none", mlp="none")
    tensors = {name: 50 * tensor for name, tensor in Transformer.random(arch, init="xavier").state_dict().items()}
    net = Transformer.from_weights(arch, tensors)
    tokens = torch.stack([X[0], torch.zeros_like(X[0])])
    profile = measure(net, tokens, metrics=["mu", "entropy"], arithmetic="float32")
    curve = profile.curve("mu")
    first = profile.manifest.networks[0].checks["first_layer_not_finite"]
    assert 1 < first < 40
    assert curve[0, :first].isfinite().all() and curve[0, first:].isnan().all()
    assert not curve[1].any()


@pytest.mark.parametrize(
    ("change", "error", "subject"),
    [
        ({"metrics": ["mew"]}, MetricError, "metric"),
        ({"metrics": []}, MetricError, "metrics"),
        ({"arithmetic": "float8"}, MetricError, "arithmetic"),
        ({"X": torch.ones(1, 2, 8, dtype=torch.int64)}, TokensError, "X"),
        ({"X": torch.ones(1, 2, 9)}, TokensError, "X"),
        ({"batch_size": 0}, TokensError, "batch_size"),
        ({"batch": 2}, MetricError, "batch"),
        ({"padding": torch.zeros(5, 7, dtype=torch.bool)}, TokensError, "padding"),
    ],
)
def test_bad_input_is_a_sentence(change: dict[str, Any], error: type[RankscopeError], subject: str) -> None:
    with raises(error, subject):
        measure(**{"net": NET, "X": X, **change})


TEXTS = ["Call me Ishmael.", "Some years ago, never mind how long precisely"]
SMALL = fresh(Architecture(layers=2, width=8, heads=2))


def outcome(answer: Any) -> Any:
    """Numbers that tell one answer from another."""
    return answer.output if hasattr(answer, "output") else answer.table.drop("hypotheses", strict=False).rows()


@pytest.mark.parametrize("ask", [measure, pytest.param(certify, marks=pytest.mark.slow), decompose])
def test_texts_and_what_encode_gave_are_as_good_as_tokens(ask: Callable[..., Any]) -> None:
    tokens = outcome(ask(SMALL, *SMALL.encode(TEXTS)))
    same = torch.equal if isinstance(tokens, torch.Tensor) else lambda a, b: str(a) == str(b)
    assert same(outcome(ask(SMALL, SMALL.encode(TEXTS))), tokens)
    assert same(outcome(ask(SMALL, TEXTS)), tokens)
    assert same(outcome(ask(SMALL, tuple(TEXTS))), tokens)
    assert same(outcome(ask(SMALL, TEXTS[0])), outcome(ask(SMALL, *SMALL.encode(TEXTS[:1]))))


def test_a_variant_by_its_name_is_the_one_by_its_parts() -> None:
    assert SMALL.variant("san").arch == SMALL.variant(skip=False, mlp=False, norm=False).arch
    assert SMALL.variant("transformer").arch == SMALL.arch
    assert SMALL.variant("transformer-norm").arch == SMALL.variant(norm=False).arch
    deep = SMALL.variant("san+norm", layers=5, mask="causal").arch
    assert deep == SMALL.variant(skip=False, mlp=False, layers=5, mask="causal").arch
    assert SMALL.variant("san", skip=0.5).arch.attention_skip == 0.5
    assert SMALL.variant("san").weights.layers[0] is SMALL.weights.layers[0]


@pytest.mark.parametrize("norm", ["layer", "rms", "scale"])
def test_a_norm_whose_squares_overflow_is_not_read_as_tokens_that_are_equal(norm: str) -> None:
    """Of skips of 1e25 float32 has the sums, not their squares: divided by infinity tokens would be zero, and so mu."""
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, norm=norm, mlp="none", attention_skip=1e25))
    readings = {name: measure(net, normal(2, 5, 8), metrics=["mu"], arithmetic=name) for name in ("float32", "float64")}
    assert readings["float32"].curve("mu")[:, 1:].isnan().all()
    assert readings["float64"].curve("mu")[:, 1:].min() > 0.1
