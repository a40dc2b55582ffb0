"""Path-length distributions against what was published."""

from pathlib import Path

import polars as pl
import pytest

from rankscope_studies import Setup, chosen, reproduce


def test_path_lengths_agree_with_all_that_was_published(tmp_path: Path) -> None:
    (study,) = chosen("dong2021", "lengths")
    outcome = reproduce(study, Setup(folder=tmp_path))
    assert len(outcome.comparisons) == 8 and all(comparison.agrees for comparison in outcome.comparisons)
    shares = outcome.tables["lengths"].group_by("architecture").agg(pl.col("share").sum())
    assert shares["share"].to_list() == pytest.approx([1.0] * 7)
