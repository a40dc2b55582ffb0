"""Figure 2 of the 2024 paper at small sizes."""

from pathlib import Path

import polars as pl
import pytest

from rankscope_studies import Setup
from rankscope_studies.wu2024 import networks
from study_tests.wu2024.small import small_run


@pytest.mark.slow
def test_figure_2_holds_every_curve_and_goes_on_when_interrupted(tmp_path: Path) -> None:
    """Parts that are there are read, not computed: a changed one shows in the outcome."""
    table = small_run("fig2")(Setup(tmp_path)).tables["collapse"]
    assert set(table["variant"]) == set(networks.VARIANTS) and set(table["mask"]) == set(networks.MASKS)
    # 5 variants, 4 masks, dropout off and on, 2 excerpts, 3 layers, 2 metrics
    assert len(table) == 5 * 4 * 2 * 2 * 3 * 2
    assert table["log10"].is_finite().all()
    off = table.filter(~pl.col("dropout"))
    assert set(off["arithmetic"]) == {"deviation"}
    complete, causal = (networks.last(off, "relative_mu", variant="SAN", mask=m) for m in ("complete", "causal"))
    assert complete < causal
    parts = sorted((tmp_path / "parts").iterdir())
    gone, changed = parts[0], parts[1]
    edited = pl.read_parquet(changed).with_columns(pl.lit(-7.0).alias("log10"))
    edited.write_parquet(changed)
    gone.unlink()
    table = small_run("fig2")(Setup(tmp_path)).tables["collapse"]
    assert gone.exists()
    assert len(table.filter(pl.col("log10") == -7.0)) == len(edited)
