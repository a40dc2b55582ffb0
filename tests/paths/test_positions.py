"""Shares by source token, against every path walked one at a time from every single token."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import ClosureError, PathError
from rankscope.nets import Architecture
from rankscope.paths import decompose
from tests.builders import awake, normal
from tests.paths.enumeration import CASES, both, network, tokens
from tests.strategies import architectures

QUERIES = (-1, 1, None)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_terms_of_source_tokens_are_the_sums_of_their_paths(case: str) -> None:
    d, reference = both(case)
    found = {
        (query, lengths): d.by_position(query, lengths=lengths, sizes=True).table
        for query in QUERIES
        for lengths in (False, True)
    }
    for source in [*range(4), None]:
        if source is None:
            terms = reference.bias_terms
        else:
            alone = np.zeros_like(reference.X)
            alone[source] = reference.X[source]
            terms = reference.terms(-1, None, alone)
        for query in QUERIES:
            at = slice(None) if query is None else query
            y = reference.output[at]
            by_length = [np.zeros_like(y) for _ in range(4)]
            for term in terms:
                by_length[term.length] += term.value[at]
            mine = pl.col("source").is_null() if source is None else pl.col("source") == source
            [row] = found[query, False].filter(mine).iter_rows(named=True)
            whole = sum(by_length)
            assert row["share"] == pytest.approx((whole * y).sum() / (y * y).sum(), rel=1e-8, abs=1e-11)
            assert row["norm"] == pytest.approx(np.linalg.norm(whole), rel=1e-8, abs=1e-11)
            rows = found[query, True].filter(mine).sort("length")
            for length, row in enumerate(rows.iter_rows(named=True)):
                assert row["length"] == length
                share = (by_length[length] * y).sum() / (y * y).sum()
                assert row["share"] == pytest.approx(share, rel=1e-8, abs=1e-11)
                assert row["norm"] == pytest.approx(np.linalg.norm(by_length[length]), rel=1e-8, abs=1e-11)


@given(architectures(), st.integers(-5, 4), st.booleans(), st.integers(0, 2**31))
def test_shares_add_up_to_one_with_those_of_biases(arch: Architecture, query: int, lengths: bool, seed: int) -> None:
    d = decompose(awake(arch, seed % 100), normal(2, 5, arch.width, seed=seed))
    found = d.by_position(query, lengths=lengths)
    sums = found.table.group_by("sample").agg(pl.col("share").sum())["share"].to_numpy()
    assert np.abs(sums - 1).max() == pytest.approx(found.closure, abs=1e-12)
    assert found.closure < 1e-9


@pytest.mark.parametrize("query", range(5))
def test_under_a_causal_mask_nothing_starts_at_later_tokens(query: int) -> None:
    arch = Architecture(layers=3, width=8, heads=2, mask="causal", norm_place="pre", final_norm=True)
    table = decompose(awake(arch), normal(2, 5, 8)).by_position(query, lengths=True, sizes=True).table
    later = table.filter(pl.col("source") > query)
    assert len(later) == 2 * 4 * (4 - query)
    assert (later["share"] == 0).all() and (later["norm"] == 0).all()
    straight = table.filter(length=0).filter(pl.col("source") != query)
    assert (straight["share"] == 0).all()  # A path past all heads ends at the token where it starts


def test_padding_is_no_source_and_changes_nothing() -> None:
    """Sample 1 has four tokens, with padding to the left and in between; alone it has the same shares."""
    net, X = awake(Architecture(layers=2, width=8, heads=2, mask="causal", positions="rotary")), normal(2, 6, 8)
    padding = torch.tensor([[False] * 6, [True, False, False, True, False, False]])
    for options in ({}, {"lengths": True}, {"sizes": True}, {"query": None}, {"query": 2}):
        both_samples = decompose(net, X, padding).by_position(**options).table
        alone = decompose(net, X[1:, ~padding[1]]).by_position(**options).table
        mine = both_samples.filter(sample=1).with_columns(pl.lit(0, dtype=pl.Int64).alias("sample"))
        assert mine["source"].to_list() == alone["source"].to_list()
        for column in {"share", "norm"} & set(mine.columns):
            np.testing.assert_allclose(mine[column], alone[column], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("query", [4, -5, 1.0, True, "last"])
def test_a_token_that_a_sample_lacks_is_refused(query: object) -> None:
    d = decompose(network({}), tokens())
    with pytest.raises(PathError, match="query must be a whole number from -4 to 3"):
        d.by_position(query)  # type: ignore[arg-type]


def test_shares_that_do_not_add_up_are_refused() -> None:
    """Of a frozen network whose output was changed, shares miss one."""
    d = decompose(network({}), tokens())
    changed = replace(d, network=replace(d.frozen, output=1.01 * d.frozen.output))
    with pytest.raises(ClosureError, match="they miss it by"):
        changed.by_position()


def test_an_output_of_zero_has_shares_of_zero() -> None:
    arch = Architecture(layers=1, width=4, heads=1, mlp="none", norm="none", biases=False)
    found = decompose(awake(arch), torch.zeros(1, 3, 4, dtype=torch.float64)).by_position(sizes=True)
    assert found.closure == 0 and found.table["share"].to_list() == [0.0] * 4
