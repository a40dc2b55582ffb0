import math
from typing import Any

import polars as pl
import pytest
import torch

from rankscope.errors import MetricError, TokensError
from rankscope.metrics import METRICS, metric
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import DEFAULT_METRICS, Profile, measure
from tests.raising import raises

BASE: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2}
NET = Transformer.random(Architecture(**BASE, mask="causal"), seed=1, init="xavier")
X = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PADDING = torch.arange(6)[None] >= torch.tensor([[6], [4], [1], [0], [5]])


@pytest.mark.parametrize("name", [each for each in METRICS if METRICS[each].of != "routing"])
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
    whole, parts = (measure(NET, X, PADDING, batch=size) for size in (16, 2))
    for name in DEFAULT_METRICS:
        assert torch.allclose(whole.curve(name), parts.curve(name), rtol=1e-12, equal_nan=True)


def test_progress_counts_up_to_its_total() -> None:
    seen: list[tuple[int, int]] = []
    measure(NET, X, batch=2, progress=lambda done, total: seen.append((done, total)))
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
    tensors = {name: 50 * tensor for name, tensor in Transformer.random(arch, init="xavier").state().items()}
    net = Transformer.from_weights(arch, tensors)
    tokens = torch.stack([X[0], torch.zeros_like(X[0])])
    profile = measure(net, tokens, metrics=["mu", "entropy"], arithmetic="float32")
    curve = profile.curve("mu")
    first = profile.manifest.networks[0].checks["first_layer_not_finite"]
    assert 1 < first < 40
    assert curve[0, :first].isfinite().all() and curve[0, first:].isnan().all()
    assert not curve[1].any()


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"metrics": ["mew"]}, MetricError, "metric must be one of"),
        ({"metrics": []}, MetricError, "at least one metric; received none"),
        ({"arithmetic": "float8"}, MetricError, "arithmetic must be one of deviation, float64, float32, bfloat16"),
        ({"X": torch.ones(1, 2, 8, dtype=torch.int64)}, TokensError, "floating tensor.*received torch.int64"),
        ({"X": torch.ones(1, 2, 9)}, TokensError, r"of width 8; received \(1, 2, 9\)"),
        ({"batch": 0}, TokensError, "batch must be at least 1 sample; got 0"),
        ({"padding": torch.zeros(5, 7, dtype=torch.bool)}, TokensError, r"tokens' shape \(5, 6\)"),
    ],
)
def test_bad_input_is_a_sentence(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        measure(**{"net": NET, "X": X, **change})


def test_profiles_that_say_the_same_twice_are_not_joined() -> None:
    with raises(MetricError, subject="profiles"):
        Profile.join([measure(NET, X), measure(NET.variant("san"), X)])
    assert len(measure(NET, X, metrics=["mu", "mu"]).table) == len(measure(NET, X, metrics="mu").table)


def test_a_layer_is_at_its_floor_when_every_sample_is() -> None:
    """One short text is uniform from the start; the other is not, and is not called noise for it."""
    padding = torch.arange(6)[None] >= torch.tensor([[6], [1]])
    mixed = measure(NET, X[:2], padding, ["relative_mu"], "float64")
    assert not mixed.at_floor("relative_mu").any()
    pure = NET.variant("san").variant(mask="complete", layers=9)
    san = measure(pure, X, None, ["relative_mu", "dobrushin"], "float64")
    for name in ("relative_mu", "dobrushin"):
        noise = san.curve(name, "below_floor")
        everywhere = noise.flatten(2).amin(-1).amin(0) if noise.ndim == 3 else noise.amin(0)
        assert san.at_floor(name).tolist() == (everywhere == 1).tolist()
        assert san.at_floor(name)[-1] and not san.at_floor(name)[0]


def test_an_empty_batch_has_an_empty_profile() -> None:
    with raises(MetricError, subject="table"):
        measure(NET, X[:0]).curve("mu")


def test_a_profile_asked_for_what_it_has_not_says_what_it_has() -> None:
    profile = Profile.join([measure(NET.variant(v), X, variant=v) for v in ("san", "transformer")])
    with raises(MetricError, subject="variant"):
        profile.curve("mu")
    with pytest.raises(MetricError, match=r"got 'sam' \(did you mean 'san'\?\)"):
        profile.curve("mu", variant="sam")
    with raises(MetricError, subject="column"):
        profile.curve("mu", "median", variant="san")
    with raises(MetricError, subject="profiles"):
        Profile.join([])
    assert profile.curve("mu", variant="san").shape == (5, 4)
