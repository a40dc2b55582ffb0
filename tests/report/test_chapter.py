"""A page of many runs stays within its budget, and says what it leaves out for that."""

import json
import shutil
from pathlib import Path

import pytest

from rankscope.figures import power
from rankscope.profiles import Profile, measure
from rankscope.profiles.profile import curve_table
from rankscope.report import read_run, render, write_report
from rankscope.report.chapter import BUDGET, LEFT_OUT, Chapter, chapter, fit
from rankscope.runs import EarlyStop
from tests.report.runs import NET, X, links_within, study


@pytest.fixture(scope="module")
def folders(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [Path(shutil.copytree(everything, root / name)) for name in "123"]


def chapters_of(folders: list[Path]) -> list[Chapter]:
    return [chapter(read_run(folder), number, folder.name) for number, folder in enumerate(folders, 1)]


def weight(chapters: list[Chapter], kind: str | None = None) -> int:
    return sum(size for each in chapters for part, size in each.weights() if kind in (None, part))


def table_titles(chapters: list[Chapter]) -> list[list[str]]:
    return [[table.title for section in each.sections for table in section.tables] for each in chapters]


@pytest.mark.slow
def test_a_page_within_its_budget_is_whole(folders: list[Path]) -> None:
    chapters = chapters_of(folders)
    whole = weight(chapters)
    assert whole < BUDGET
    fit(chapters, whole)
    assert weight(chapters) == whole and not any(each.left for each in chapters)


def test_the_cloud_of_the_last_chapter_goes_first(folders: list[Path]) -> None:
    chapters = chapters_of(folders)
    fit(chapters, weight(chapters) - 1)
    assert [each.left for each in chapters] == [[], [], [LEFT_OUT["cloud"]]]
    assert "run3-figure-cloud" not in chapters[2].figures and "run2-figure-cloud" in chapters[1].figures
    assert "cloud" not in [section.key for section in chapters[2].sections]
    (note,) = chapters[2].notes
    assert LEFT_OUT["cloud"] in note and f"rankscope report {folders[2]}" in note


def test_later_chapters_give_before_the_first_and_tables_stay(folders: list[Path]) -> None:
    chapters = chapters_of(folders)
    tables, first = table_titles(chapters), weight(chapters[:1])
    fit(chapters, 0)
    assert weight(chapters) == weight(chapters[:1]) == first and chapters[0].left == []
    assert table_titles(chapters) == tables and all(each.finding for each in chapters)
    assert weight(chapters[1:]) == 0 and not chapters[1].figures


def test_it_stops_as_soon_as_it_fits(folders: list[Path]) -> None:
    chapters = chapters_of(folders)
    whole = weight(chapters)
    for share in (0.9, 0.6, 0.4):
        fit(chapters, int(whole * share))
        assert weight(chapters) <= int(whole * share)
        assert chapters[1].left == chapters[2].left[: len(chapters[1].left)]  # the same kinds, the last first
        assert len(chapters[2].left) - len(chapters[1].left) in (0, 1)


@pytest.mark.slow
def test_a_page_of_several_runs_says_what_it_leaves_out(folders: list[Path]) -> None:
    runs = [read_run(folder) for folder in folders]
    one, three = render(runs[:1]), render(runs, budget=0)
    assert "Left out" not in one
    assert three.count("Left out, so that a page of so many runs still opens: the tokens layer by layer") == 2
    assert three.count("<article") == 3 and len(three) < 1.1 * len(one)
    links_within(three)


def test_a_study_that_has_only_notes_stays_and_folders_are_quoted(everything: Path, tmp_path: Path) -> None:
    folders = [Path(shutil.copytree(everything, tmp_path / name)) for name in ("1", "two words")]
    study(folders[1] / "study", b"", "said")
    outcome = json.loads((folders[1] / "study" / "outcome.json").read_text())
    (folders[1] / "study" / "outcome.json").write_text(json.dumps({**outcome, "comparisons": []}))
    chapters = chapters_of(folders)
    fit(chapters, 0)
    assert [section.notes[0] for section in chapters[1].sections if section.key == "study-0"] == ["said"]
    assert chapters[1].notes[-1].endswith(f"rankscope report '{folders[1]}'")


def test_a_run_that_was_stopped_says_so(written: tuple[Profile, Path], tmp_path: Path) -> None:
    stopped, profile = EarlyStop(finished=("san", "transformer"), asked=5), written[0]
    Profile(profile.table, profile.manifest.adding(stopped=stopped)).save(tmp_path / "profile.parquet")
    html = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "This run was stopped early: of 5 there are 2 (san, transformer)." in html


@pytest.mark.slow
def test_layers_of_networks_of_other_depths_stand_under_their_numbers() -> None:
    nets = {"short": NET, "deep": NET.variant(layers=40)}
    both = Profile.join([measure(net, X[:1], metrics="relative_residual", variant=v) for v, net in nets.items()])
    table = curve_table(both.views("relative_residual"))
    assert {len(row) for row in table.rows} == {len(table.headings)}
    for row in table.rows:
        logs = both.curve("relative_residual", "log10", variant=row[0]).mean(0).tolist()
        for layer, cell in zip(table.headings[1:], row[1:], strict=True):
            assert cell == (power(logs[int(layer)]) if int(layer) < len(logs) else "")
