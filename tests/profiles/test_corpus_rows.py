"""Rows of excerpts give the same statistics however they come in chunks."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import polars as pl
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.profiles import CorpusRows, Profile, Summary, measure
from rankscope.profiles.corpus_rows import with_checks
from rankscope.profiles.summary import QUANTILES
from rankscope.runs import Store
from rankscope.runs.manifest import Manifest, Network
from tests.profiles.excerpts import NET, X, both, summed

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


WHOLE = chunked([])


@given(st.lists(st.integers(0, 40), max_size=6))
def test_statistics_are_those_of_the_whole_table_for_any_chunks(cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        summary = chunked(cuts, store)
    assert summary.table.equals(WHOLE.table)
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
