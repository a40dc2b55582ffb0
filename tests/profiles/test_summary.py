"""Statistics over excerpts against whole-data references."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import polars as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rankscope.errors import FileError, MetricError
from rankscope.profiles import CorpusRows, Profile, Summary, measure
from rankscope.profiles.summary import QUANTILES, statistics_of, with_checks
from rankscope.runs import Manifest, Network, Store
from tests.profiles.excerpts import NET, X, both, summed
from tests.raising import raises

WHOLE = summed(both(X))

ALIKE = torch.ones(1, 7, 16, dtype=torch.float64)
"""An excerpt whose tokens are all the same: its residual is zero."""


@given(npst.arrays(float, st.tuples(st.just(2), st.integers(2, 60)), elements=st.floats(-1, 1)), st.floats(-1e8, 1e8))
def test_badly_conditioned_numbers_against_exact_fractions(spread: np.ndarray, offset: float) -> None:
    """Error of the deviation within n u kappa, the condition number sqrt(1 + mean^2 / variance); of subnormal
    numbers, within units of the smallest."""
    data = offset + spread
    found = statistics_of(data)
    n, u = data.shape[1], float(np.finfo(float).eps)
    for row in range(2):
        numbers = [Fraction(value) for value in data[row].tolist()]
        mean = sum(numbers, Fraction(0)) / n
        squares = sum(((x - mean) ** 2 for x in numbers), Fraction(0))
        size = max(abs(float(x)) for x in numbers)
        smallest = n * 5e-324
        assert abs(found["mean"][row] - float(mean)) <= 8 * u * size + smallest
        exact = math.sqrt(squares / (n - 1))
        assert abs(found["sd"][row] - exact) <= 4 * n * u * (exact + size * u * n) + 8 * u * size + smallest


def test_infinities_and_nothing_are_counted_apart() -> None:
    nan, inf = math.nan, math.inf
    found = statistics_of(np.array([[1.0, inf, 3.0], [nan, 2.0, -inf], [nan, nan, nan]]))
    assert found["count"].tolist() == [2, 1, 0]
    assert found["mean"][:2].tolist() == [2.0, 2.0] and np.isnan(found["mean"][2])
    assert found["sd"][0] == math.sqrt(2) and np.isnan(found["sd"][1:]).all()
    assert found["q50"][:2].tolist() == [3.0, -inf] and np.isnan(found["q50"][2])
    assert math.isclose(statistics_of(np.full((1, 10), 1.7e308))["mean"][0], 1.7e308)


@given(npst.arrays(float, st.integers(1, 9), elements=st.sampled_from([0.0, 1e-3, 2.0, 5.0])))
def test_next_to_zeros_a_quantile_of_logs_is_the_log_of_that_of_the_values(values: np.ndarray) -> None:
    with np.errstate(divide="ignore"):
        logs = np.log10(values)
    of_values, of_logs = statistics_of(values[None]), statistics_of(logs[None], logs=True)
    zeros = int((values == 0).sum())
    for name, share in QUANTILES.items():
        place = share * (len(values) - 1)
        if place < zeros:  # at a zero, or after the last of them
            with np.errstate(divide="ignore"):
                assert np.allclose(of_logs[name], np.log10(of_values[name]), rtol=1e-12)


def test_zeros_have_no_log_and_are_said() -> None:
    found = summed(measure(NET, torch.cat([X[:2], ALIKE]), metrics="mu", arithmetic="deviation"))
    row = found.table.filter(layer=0).row(0, named=True)
    logs = measure(NET, X[:2], metrics="mu").curve("mu", "log10")[:, 0]
    assert (row["zeros"], row["count"], row["log10_count"], row["least"]) == (1, 3, 2, 0.0)
    assert math.isclose(row["log10_mean"], float(logs.mean()))
    assert math.isclose(row["log10_q05"], math.log10(row["q05"]))
    assert math.isclose(row["log10_q50"], float(logs.min()))


def test_what_underflows_keeps_its_logs() -> None:
    deep = NET.variant(layers=9).variant("san")
    profile = measure(deep, X[:5], metrics="residual")
    summary = summed(profile)
    logs = profile.curve("residual", "log10")
    assert float(summary.curve("residual", "q50")[-1]) == 0.0
    assert torch.allclose(summary.curve("residual", "log10_q50"), logs.median(0).values)
    assert float(logs[:, -1].max()) < -400


def test_what_overflows_is_counted_and_left_out() -> None:
    profile = measure(NET, torch.cat([X[:3], 1e300 * X[3:4]]), metrics="residual", arithmetic="float32")
    summary = summed(profile)
    assert summary.curve("residual", "not_finite")[-1] == 1 and summary.curve("residual", "count")[-1] == 3
    expected = profile.curve("residual")[:3, -1].mean()
    assert torch.allclose(summary.curve("residual", "mean")[-1], expected, rtol=1e-12)
    assert summary.manifest.networks[0].checks["first_layer_not_finite"] is not None


def test_a_summary_survives_its_file(tmp_path: Path) -> None:
    again = Summary.read(WHOLE.save(tmp_path / "new" / "summary.parquet"))
    assert again.table.equals(WHOLE.table) and again.manifest == WHOLE.manifest
    assert again.metrics == ["mu", "relative_residual", "entropy"]
    assert again.variants == ["san", "transformer"]
    profile = both(X[:1]).save(tmp_path / "profile.parquet")
    for path in (profile, tmp_path / "absent.parquet"):
        with raises(FileError, subject=str(path)):
            Summary.read(path)


def test_mistakes_are_sentences() -> None:
    with raises(MetricError, subject="excerpts"):
        summed()
    with raises(MetricError, subject="profile"):
        summed(both(X[:2]), measure(NET, X[:2], metrics="mu"))
    with raises(MetricError, subject="column"):
        WHOLE.curve("mu", "median", variant="san")


def test_the_figure_draws_the_median_its_bands_and_the_floor() -> None:
    summary = summed(both(X, "float32", layers=6))
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


ALL = both(X)


def part(start: int, end: int) -> Profile:
    """The profile of some samples, numbered as if they had been measured alone."""
    rows = ALL.table.filter(pl.col("sample").is_between(start, end, closed="left"))
    return Profile(rows.with_columns(pl.col("sample") - start), ALL.manifest)


def chunked(cuts: Sequence[int], store: Store | None = None) -> Summary:
    gathered = CorpusRows(store)
    for number, (start, stop) in enumerate(pairwise([0, *sorted(cuts), 40])):
        gathered.add(part(start, stop))
        if number % 2:
            gathered.flush()
    return gathered.summary()


CORPUS = chunked([])


@given(st.lists(st.integers(0, 40), max_size=6))
def test_statistics_are_those_of_the_whole_table_for_any_chunks(cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        summary = chunked(cuts, store)
    assert summary.table.equals(CORPUS.table)
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
    assert summary.excerpts == 40


def test_checks_of_all_chunks_are_joined() -> None:
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[:, 5:] = True
    found = summed(measure(NET, X[:4], padding), measure(NET, X[4:6], padding[:2]))
    assert found.manifest.networks[0].checks["padded_tokens"] == 12


def test_rows_of_all_parts_must_sum_to_one_and_the_first_layer_that_breaks_counts() -> None:
    def manifest(sums: bool, defect: float, broken: int | None) -> Manifest:
        checks = {"padded_tokens": 2, "largest_row_sum_defect": defect, "rows_sum_to_one": sums}
        return replace(ALL.manifest, networks=(Network(checks=checks | {"first_layer_not_finite": broken}),))

    for sums, others in product((True, False), repeat=2):
        both_parts = with_checks(manifest(sums, 1e-9, None), manifest(others, 1e-3, 4))
        assert both_parts.networks[0].checks == {
            "padded_tokens": 4, "largest_row_sum_defect": 1e-3, "rows_sum_to_one": sums and others,
            "first_layer_not_finite": 4,
        }  # fmt: skip
