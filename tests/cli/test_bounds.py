"""`rankscope bounds`: tables, the folder, and no bound without its hypotheses."""

from tests.cli.conftest import WrittenRuns
from tests.cli.running import answered

SMALL = ["bert-tiny", "--tokens", "16", "--samples", "2"]


def test_bounds_prints_tables_that_fit_and_writes_a_folder(runs: WrittenRuns) -> None:
    out = runs.outputs["bounds"]
    assert " dobrushin " in out and "hypotheses that fail" in out
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
