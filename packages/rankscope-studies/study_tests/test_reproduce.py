"""The frame of studies: what is written, what is kept, what is said of a name that there is not."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rankscope.errors import ArchitectureError, StudyError
from rankscope.figures import panels
from rankscope.runs import read
from rankscope.runs.tables import manifest_in
from rankscope_studies import STUDIES, Comparison, Setup, Study, StudyResult, chosen, reproduce, write_page
from tests.raising import raises


def small(setup: Setup) -> StudyResult:
    """A study of one part, which counts how often it is computed."""
    calls = setup.folder / "calls"

    def compute() -> pl.DataFrame:
        calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
        return pl.DataFrame({"a": [1.0, 2.0]})

    table = setup.cached("part", compute, size=2)
    figure, (axes,) = panels()
    axes.plot(table["a"])
    said = [Comparison("a | b", "1", "1", True), Comparison("c", "2", "3", False, "another seed")]
    return StudyResult({"figure": figure}, {"table": table}, said, ["Run on nothing."])


STUDY = Study("dong2021", "lengths", "a small one", small)


def test_a_study_writes_all_it_gives_and_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path)
    first, second = reproduce(STUDY, setup), reproduce(STUDY, setup)
    folder = tmp_path / "quick" / "dong2021" / "lengths"
    assert {path.name for path in folder.iterdir()} >= {"figure.png", "figure.svg", "table.parquet"}
    assert (folder / "calls").read_text() == "x"  # computed once
    assert first.tables["table"].equals(second.tables["table"])
    assert pl.read_parquet(folder / "table.parquet").equals(first.tables["table"])
    outcome = json.loads((folder / "outcome.json").read_text())
    assert [comparison["agrees"] for comparison in outcome["comparisons"]] == [True, False]
    assert read(folder).table("table").equals(first.tables["table"])
    kept = {json.dumps(manifest_in(path).key) for path in (folder / "parts").iterdir()}
    assert [json.loads(key)["versions"]["rankscope"] for key in kept] == [version("rankscope")]
    other = Setup(folder=tmp_path, models=("mine",))
    reproduce(STUDY, other)
    assert (folder / "calls").read_text() == "xx"  # other settings, another part


def test_the_page_lists_what_was_done_and_what_was_not(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path)
    reproduce(STUDY, setup)
    page = write_page(setup).read_text()
    assert "| a \\| b | 1 | 1 | agrees |" in page
    assert "| c | 2 | 3 | differs: another seed |" in page
    assert "Run on nothing." in page and "Not run: dong2021 fig2" in page
    assert "![a small one](dong2021/lengths/figure.png)" in page


def test_names_of_papers_and_figures() -> None:
    assert chosen("all") == list(STUDIES)
    assert [study.figure for study in chosen("dong2021", "fig2")] == ["fig2"]
    assert len({study.name for study in STUDIES}) == len(STUDIES)
    for paper, figure, subject in (
        ("dong2022", None, "paper"), ("dong2021", "fig99", "figure"), ("all", "fig2", "figure"),
    ):  # fmt: skip
        with raises(StudyError, subject=subject):
            chosen(paper, figure)


def test_a_device_that_is_not_there_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (study,) = chosen("dong2021", "fig3")
    with raises(ArchitectureError, subject="device"):
        reproduce(study, Setup(folder=tmp_path, device="nowhere"))
    assert not list(tmp_path.rglob("*.parquet"))


SHARING = """
import sys, time
import polars as pl
from pathlib import Path
from rankscope_studies import Setup

folder, who = Path(sys.argv[1]), sys.argv[2]

def compute(part):
    with (folder / "computed").open("a") as log:
        log.write(f"{part}\\n")
    time.sleep(0.1)
    return pl.DataFrame({"part": [part]})

parts = {f"part {k}": lambda k=k: compute(k) for k in range(8)}
Setup(folder).cached_parts(parts).write_csv(folder / f"{who}.csv")
"""


@pytest.mark.slow
def test_processes_that_run_the_same_study_share_its_parts(tmp_path: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-c", SHARING, str(tmp_path), who]) for who in ("one", "two")]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    assert sorted((tmp_path / "computed").read_text().split()) == [str(part) for part in range(8)]  # each of them once
    assert all(pl.read_csv(tmp_path / f"{who}.csv")["part"].to_list() == [*range(8)] for who in ("one", "two"))
    assert not list((tmp_path / "parts").glob(".*.lock"))


def test_a_part_that_fails_is_computed_by_the_next_run(tmp_path: Path) -> None:
    def fail() -> pl.DataFrame:
        raise StudyError("a part must give a table; got none", subject="part")

    with raises(StudyError, "part"):
        Setup(tmp_path).cached("part", fail)
    assert Setup(tmp_path).cached("part", lambda: pl.DataFrame({"a": [1]}))["a"].to_list() == [1]


def test_parts_of_other_machines_are_taken_only_if_asked_for_and_said(tmp_path: Path) -> None:
    def part(value: int, **how: Any) -> tuple[list[int], list[str]]:
        setup = Setup(tmp_path, **how)
        table = setup.cached("part", lambda: pl.DataFrame({"a": [value]}), size=2)
        assert setup.devices == ("cpu and cuda" if setup.notes() else setup.device)
        return table["a"].to_list(), setup.notes()

    assert part(1, device="cuda") == ([1], [])
    values, notes = part(2, any_machine=True)
    assert values == [1] and len(notes) == 1 and f"1 on cuda, torch {version('torch')}" in notes[0]
    assert part(3, any_machine=True, models=("mine",)) == ([3], [])  # other work
    assert part(4) == ([4], [])
    assert part(5, any_machine=True) == ([4], [])  # this machine's own comes first
    taken = Setup(tmp_path, any_machine=True).cached("other", lambda: pl.DataFrame({"a": [6]}), size=2)
    assert taken["a"].to_list() == [6]  # a part of another name


def test_what_other_machines_computed_is_in_the_notes_of_a_study(tmp_path: Path) -> None:
    folder = tmp_path / "quick" / "dong2021" / "lengths"
    folder.mkdir(parents=True)
    STUDY.run(Setup(folder, device="cuda"))
    result = reproduce(STUDY, Setup(tmp_path, any_machine=True))
    assert (folder / "calls").read_text() == "x"
    assert result.notes[0] == "Run on nothing." and "on cuda" in result.notes[1]
    assert json.loads((folder / "outcome.json").read_text())["notes"] == result.notes
