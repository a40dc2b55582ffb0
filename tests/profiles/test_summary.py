"""Streaming statistics against whole-data references, for any chunking."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rankscope.errors import FileError, MetricError
from rankscope.nets import Architecture, Transformer, named_variant
from rankscope.profiles import Gatherer, Profile, Summary, measure
from rankscope.profiles.moments import Moments
from rankscope.profiles.profile import SCHEMA
from rankscope.profiles.summary import QUANTILES

NET = Transformer.random(Architecture(layers=3, width=16, heads=2), init="xavier")
X = torch.randn(40, 7, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ALIKE = torch.ones(1, 7, 16, dtype=torch.float64)
"""An excerpt whose tokens are all the same: its residual is zero."""


def both(X: torch.Tensor, arithmetic: str = "float64", layers: int = 3) -> Profile:
    nets = {name: named_variant(NET.variant(layers=layers), name) for name in ("san", "transformer")}
    metrics = ["mu", "relative_residual", "entropy"]
    return Profile.join(
        [measure(net, X, variant=name, metrics=metrics, arithmetic=arithmetic) for name, net in nets.items()]
    )


ALL = both(X)


def part(start: int, end: int) -> Profile:
    """The profile of some samples, numbered as if they had been measured alone."""
    rows = ALL.table.filter(pl.col("sample").is_between(start, end, closed="left"))
    return Profile(rows.with_columns(pl.col("sample") - start), ALL.manifest)


def chunked(cuts: Sequence[int], reservoir: int = 4096, end: int = 40) -> Gatherer:
    gathered = Gatherer(reservoir)
    for start, stop in pairwise([0, *sorted(cuts), end]):
        gathered.add(part(start, stop))
    return gathered


@given(st.lists(st.integers(0, 40), max_size=6))
def test_statistics_are_those_of_the_whole_table_for_any_chunks(cuts: list[int]) -> None:
    summary = chunked(cuts).summary()
    row = ["variant", "arithmetic", "layer", "head", "metric"]
    value = pl.col("value")
    whole = ALL.table.group_by(row, maintain_order=True).agg(
        count=value.count(), mean=value.mean(), sd=value.std(), least=value.min(), most=value.max(),
        log10_mean=pl.col("log10").mean(), log10_sd=pl.col("log10").std(),
        below_floor=pl.col("below_floor").mean(), floor=pl.col("floor").mean(),
        **{name: value.quantile(share, "linear") for name, share in QUANTILES.items()},
        **{f"log10_{name}": pl.col("log10").quantile(q, "linear") for name, q in QUANTILES.items()},
    )  # fmt: skip
    joined = whole.join(summary.table, on=row, nulls_equal=True, validate="1:1")
    assert len(joined) == len(whole) == len(summary.table)
    for name in set(whole.columns) - set(row):
        assert np.allclose(joined[name], joined[f"{name}_right"], rtol=1e-9, atol=1e-300), name
    assert summary.excerpts == 40 and summary.quantiles == "exact"


@given(
    npst.arrays(float, st.tuples(st.integers(2, 60), st.just(2)), elements=st.floats(-1, 1)),
    st.floats(-1e8, 1e8),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_badly_conditioned_numbers_against_exact_fractions(
    spread: np.ndarray, offset: float, cuts: list[int]
) -> None:
    """Error of the standard deviation within n u kappa, the condition number sqrt(1 + mean^2 / variance)."""
    data = offset + spread
    moments = Moments.empty(2)
    for part in np.array_split(data, sorted(cuts)):
        moments.add(part)
    n, u = len(data), float(np.finfo(float).eps)
    for column in range(2):
        numbers = [Fraction(value) for value in data[:, column].tolist()]
        mean = sum(numbers, Fraction(0)) / n
        squares = sum(((x - mean) ** 2 for x in numbers), Fraction(0))
        size = max(abs(float(x)) for x in numbers)
        assert abs(moments.mean[column] - float(mean)) <= 8 * u * size
        assert abs(float(mean) - math.fsum(map(float, numbers)) / n) <= 8 * u * size
        exact = math.sqrt(squares / (n - 1))
        assert abs(moments.sd()[column] - exact) <= 4 * n * u * (exact + size * u * n) + 8 * u * size


def test_infinities_and_nothing_are_counted_apart() -> None:
    moments = Moments.empty(3)
    moments.add(np.array([[1.0, np.nan, np.nan], [np.inf, 2.0, np.nan], [3.0, -np.inf, np.nan]]))
    assert moments.count.tolist() == [2, 1, 0]
    assert moments.mean[:2].tolist() == [2.0, 2.0] and np.isnan(moments.known(moments.mean)[2])
    assert moments.sd()[0] == math.sqrt(2) and np.isnan(moments.sd()[1:]).all()


def test_the_largest_numbers_have_a_mean() -> None:
    moments = Moments.empty(1)
    moments.add(np.full((10, 1), 1.7e308))
    assert math.isclose(moments.mean[0], 1.7e308)


def test_zeros_have_no_log_and_are_said() -> None:
    gathered = Gatherer()
    gathered.add(measure(NET, torch.cat([X[:2], ALIKE]), metrics="mu", arithmetic="deviation"))
    row = gathered.summary().table.filter(layer=0).row(0, named=True)
    logs = measure(NET, X[:2], metrics="mu").curve("mu", "log10")[:, 0]
    assert (row["zeros"], row["count"], row["log10_count"], row["least"]) == (1, 3, 2, 0.0)
    assert math.isclose(row["log10_mean"], float(logs.mean())) and row["log10_q05"] == -math.inf
    assert math.isclose(row["log10_q50"], float(logs.min()))


def test_what_underflows_keeps_its_logs() -> None:
    deep = named_variant(NET.variant(layers=9), "san")
    profile = measure(deep, X[:5], metrics="residual")
    gathered = Gatherer()
    gathered.add(profile)
    summary = gathered.summary()
    logs = profile.curve("residual", "log10")
    assert float(summary.curve("residual", "q50")[-1]) == 0.0
    assert torch.allclose(summary.curve("residual", "log10_q50"), logs.median(0).values)
    assert float(logs[:, -1].max()) < -400


def test_what_overflows_is_counted_and_left_out() -> None:
    profile = measure(NET, torch.cat([X[:3], 1e300 * X[3:4]]), metrics="residual", arithmetic="float32")
    gathered = Gatherer()
    gathered.add(profile)
    summary = gathered.summary()
    assert summary.curve("residual", "not_finite")[-1] == 1 and summary.curve("residual", "count")[-1] == 3
    assert torch.allclose(
        summary.curve("residual", "mean")[-1], profile.curve("residual")[:3, -1].mean(), rtol=1e-12
    )
    assert summary.manifest["networks"][0]["checks"]["first_layer_not_finite"] is not None


def gathered_alone(sample: int) -> np.ndarray:
    alone = Gatherer()
    alone.add(part(sample, sample + 1))
    return np.asarray(alone.arrays()["kept"][0, 0])


def test_beyond_the_reservoir_whole_excerpts_are_drawn_and_it_is_said() -> None:
    whole, parts = chunked([], reservoir=8), chunked([3, 4, 20, 33], reservoir=8)
    assert whole.summary().quantiles == "of 8 excerpts drawn uniformly from 40"
    assert whole.summary().table.select(*QUANTILES).equals(parts.summary().table.select(*QUANTILES))
    mu = ALL.curve("mu", variant="san")[:, -1].tolist()
    kept = whole.arrays()["kept"][0]
    rows = {tuple(row) for row in kept.tolist()}
    assert len(rows) == 8
    column = whole.rows.with_row_index().filter(variant="san", metric="mu", layer=3)["index"].item()
    drawn = [mu.index(value) for value in kept[:, column].tolist()]
    each = [gathered_alone(k) for k in drawn]
    assert np.array_equal(np.stack(each), kept), "all rows of an excerpt go together"


def numbers(count: int) -> Profile:
    """Excerpts whose one value is their number."""
    column = [float(k) for k in range(count)]
    table = pl.DataFrame(
        {"variant": "v", "arithmetic": "float64", "sample": range(count), "layer": 0, "head": None,
         "metric": "mu", "value": column, "log10": column, "floor": 0.0, "below_floor": False}, schema=SCHEMA,
    )  # fmt: skip
    checks = {"padded_tokens": 0, "largest_row_sum_defect": 0.0, "rows_sum_to_one": True}
    network = {"metrics": ["mu"], "checks": {**checks, "first_layer_not_finite": None}}
    return Profile(table, {"networks": [network]})


def test_the_draw_is_uniform() -> None:
    """Each of 300 excerpts is among the 30 with chance 1/10: chi-square over seeds, six deviations."""
    profile, seeds = numbers(300), 200
    seen = np.zeros(300)
    for seed in range(seeds):
        gathered = Gatherer(30, seed)
        gathered.add(profile)
        kept = gathered.arrays()["kept"][0, :, 0].astype(int)
        assert len(set(kept.tolist())) == 30
        seen[kept] += 1
    chance = 0.1
    chi = ((seen - seeds * chance) ** 2 / (seeds * chance * (1 - chance))).sum()
    assert abs(chi - 300) < 6 * math.sqrt(2 * 300)


def test_a_summary_survives_its_file(tmp_path: Path) -> None:
    summary = chunked([7]).summary()
    again = Summary.read(summary.save(tmp_path / "new" / "summary.parquet"))
    assert again.table.equals(summary.table) and again.manifest == summary.manifest
    assert again.metrics == ["mu", "relative_residual", "entropy"] and again.variants == [
        "san",
        "transformer",
    ]
    profile = both(X[:1]).save(tmp_path / "profile.parquet")
    with pytest.raises(FileError, match="it is another kind of table"):
        Summary.read(profile)
    with pytest.raises(FileError, match="there is none at .*absent"):
        Summary.read(tmp_path / "absent.parquet")


def test_the_state_survives_and_goes_on() -> None:
    gathered = chunked([5], reservoir=12, end=20)
    again = Gatherer.restored(gathered.arrays())
    for each in (gathered, again):
        each.add(part(20, 40))
    assert again.summary().table.equals(gathered.summary().table)
    assert again.summary().manifest == gathered.summary().manifest


def test_checks_of_all_chunks_are_joined() -> None:
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[:, 5:] = True
    gathered = Gatherer()
    gathered.add(measure(NET, X[:4], padding))
    gathered.add(measure(NET, X[4:6], padding[:2]))
    assert gathered.summary().manifest["networks"][0]["checks"]["padded_tokens"] == 12


def test_mistakes_are_sentences() -> None:
    gathered = Gatherer()
    with pytest.raises(MetricError, match="must be of at least one excerpt; none was added"):
        gathered.summary()
    gathered.add(both(X[:2]))
    with pytest.raises(MetricError, match="this one has others: measure the same networks"):
        gathered.add(measure(NET, X[:2], metrics="mu"))
    with pytest.raises(MetricError, match="column must be one of count"):
        gathered.summary().curve("mu", "median", variant="san")
    with pytest.raises(MetricError, match="reservoir must be at least 1 excerpt; got 0"):
        Gatherer(0)


def test_the_figure_draws_the_median_its_bands_and_the_floor() -> None:
    gathered = Gatherer()
    gathered.add(both(X, "float32", layers=6))
    summary = gathered.summary()
    (axes,) = summary.plot("relative_residual").axes
    line = next(line for line in axes.lines if line.get_label() == "transformer")
    median = summary.curve("relative_residual", "log10_q50", variant="transformer").numpy()
    assert np.allclose(np.asarray(line.get_ydata(), dtype=float), median)
    assert len(axes.collections) == 4, "two bands for each of two variants"
    assert "floor of float32" in [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    noise = summary.at_floor("relative_residual", variant="san").numpy()
    solid = next(line for line in axes.lines if line.get_label() == "san")
    assert noise.any() and np.array_equal(np.isnan(np.asarray(solid.get_ydata(), dtype=float)), noise)
    (linear,) = summary.plot("entropy").axes
    assert linear.get_ylim()[0] == 0
    summary.plot("entropy").savefig("/dev/null", format="png")
