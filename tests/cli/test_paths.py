"""`rankscope paths`: tables, the folder, and parts that add up."""

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from rankscope import certify, fresh
from rankscope.cli.inputs import bundled_text
from tests.cli.conftest import WrittenRuns
from tests.cli.running import answered

SMALL = ["bert-tiny", "--max-length", "16", "--samples", "2"]


def test_paths_prints_tables_and_writes_a_folder(runs: WrittenRuns) -> None:
    out = runs.outputs["paths"]
    assert "The parts add up to the output within" in out and "heaviest single paths" in out
    names = {path.name for path in (runs.folder / "paths").iterdir()}
    assert {"lengths.parquet", "layers.parquet", "heads.parquet", "single_paths.parquet"} < names
    assert {"lengths.png", "lengths.svg", "heads.png", "single_paths.png", "manifest.json"} < names


def test_paths_as_json_add_up() -> None:
    answer = answered("paths", *SMALL, "--variant", "san+skip")
    shares = [row["share"] for row in answer["lengths"] if row["start"] == "all" and row["sample"] == 0]
    assert sum(shares) == pytest.approx(1.0)
    assert [row["paths"] for row in answer["lengths"] if row["start"] == "embedding"][::2] == ["1", "4", "4"]
    assert answer["manifest"]["closure"] < 1e-12 and len(answer["heads"]) == 2 * 2 * 2


SMALL = ["bert-tiny", "--max-length", "16", "--samples", "2"]


def test_bounds_prints_tables_that_fit_and_writes_a_folder(runs: WrittenRuns) -> None:
    out = runs.outputs["bounds"]
    assert " dobrushin " in out and "Hypotheses that fail" in out
    assert "Measured to 1e-06 of the tokens' size: uniform by layer" in out
    names = {path.name for path in (runs.folder / "bounds").iterdir()}
    assert names >= {"certificates.parquet", "bounds.png", "bounds.svg", "manifest.json"}


def test_bounds_as_json_never_shows_a_bound_without_its_hypotheses() -> None:
    answer = answered("bounds", *SMALL, "--layers", "3")
    assert {row["layer"] for row in answer["table"]} == {1, 2, 3}
    met = {row["theorem"] for row in answer["table"] if row["met"]}
    assert {"dobrushin", "aligned-skip", "norm-rank"} <= met
    for row in answer["table"]:
        assert row["met"] == all(each["met"] for each in row["hypotheses"]) == (row["why"] is None)
        assert row["met"] or (row["log10_bound"] is None and row["slack"] is None)
    assert {row["sample"] for row in answer["collapse"]["measured"]} == {0, 1}


def test_scaled_tokens_are_certified_sample_by_sample() -> None:
    """What is said of all samples at once, scaled here."""
    asked = ["--layers", "1", "--scale", "0.5", "--theorems", "dobrushin,norm-rank"]
    answer = answered("bounds", "bert-tiny", "--max-length", "6", "--samples", "2", *asked)
    net = fresh("bert-tiny").variant(layers=1)
    X, padding = net.encode(bundled_text(2, 6), 6)
    expected = certify(net, 0.5 * X, padding, ["dobrushin", "norm-rank"]).table
    keys, numbers = ["theorem", "sample", "layer"], ["log10_bound", "log10_measured", "log10_size"]
    found = pl.DataFrame(answer["table"]).select(*keys, *numbers).sort(keys)
    assert_frame_equal(found, expected.select(*keys, *numbers).sort(keys), check_dtypes=False, rel_tol=1e-9)
    assert {*found["sample"]} == {0, 1} and answer["manifest"]["scale"] == 0.5
