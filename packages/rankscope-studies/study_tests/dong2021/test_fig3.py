"""Figure 3 of the 2021 paper, at sizes that tests can afford."""

from itertools import product
from pathlib import Path

import polars as pl
import pytest

from rankscope_studies import Setup
from rankscope_studies.dong2021 import fig3
from rankscope_studies.dong2021.circle import ENDS, NETWORKS


@pytest.mark.slow
def test_a_rerun_gives_the_same_tables(tmp_path: Path) -> None:
    sizes = fig3.CircleSizes(seeds=2, rounds=2, published_seeds=1, published_rounds=2, widths=(4,), steps=10)
    first, again, cached = (fig3._run(Setup(folder=tmp_path / name), sizes) for name in ("one", "two", "one"))
    for name, table in first.tables.items():
        assert table.equals(again.tables[name]) and table.equals(cached.tables[name])
    assert [*first.figures] == ["circle", "distances"]
    assert len(first.comparisons) == 6
    ends = first.tables["ends"]
    assert set(ends.select("network", "width").iter_rows()) == set(product(NETWORKS, (4,)))
    assert ends.select(pl.col("ending").is_in(ENDS).all()).item()
