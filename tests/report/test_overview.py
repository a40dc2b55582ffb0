"""Several runs in one page: headings that tell them apart, and the same variant side by side."""

from pathlib import Path

import pytest

from rankscope.figures import Line, power
from rankscope.profiles import Profile, Summary, measure
from rankscope.report import ReportedRun, write_report
from rankscope.report.overview import side_by_side, titles
from rankscope.runs import Manifest, Text
from rankscope.theory import certify
from tests.report.runs import NET, X, profile_of, summary_of


def run_of(folder: str, profile: Profile | Summary | None = None, **more: object) -> ReportedRun:
    manifest = Manifest(origin={"name": "tiny", "weights": "random"}, text=Text(path="texts/moby.txt"))
    return ReportedRun(Path(folder), manifest, profile, **more)  # type: ignore[arg-type]


@pytest.mark.slow
def test_headings_say_what_was_done_and_tell_runs_apart() -> None:
    profile = profile_of()
    runs = [
        run_of("a", profile), run_of("b", profile), run_of("c/b", profile), run_of("d", summary_of(profile)),
        run_of("e", certificates={"san": certify(NET, X)}),
        run_of("f", outcomes=[(Path("g"), {"paper": "wu2024", "figure": "fig1"})]),
    ]  # fmt: skip
    found = titles(runs)
    assert len(set(found)) == len(runs)
    assert found[0] == "tiny, random weights (a)" and found[2] == "tiny, random weights (c/b)"
    assert found[3:] == [
        "tiny, random weights: 2 excerpts of moby.txt", "tiny, random weights: bounds of san",
        "wu2024 fig1, run again",
    ]  # fmt: skip


def test_a_run_whose_title_is_blank_has_its_folder_as_heading() -> None:
    runs = [ReportedRun(Path("a/b"), Manifest(title=" \t ")), ReportedRun(Path("a/c"), Manifest(title=""))]
    assert titles(runs) == ["b", "c"]


def test_the_variants_that_several_runs_have_stand_side_by_side() -> None:
    first, then = profile_of(("san", "transformer", "transformer-mlp"), "deviation"), profile_of(("san",))
    deep = measure(NET.variant(layers=7), X, variant="transformer")
    section = side_by_side([run_of("a", first), run_of("b", then), run_of("c", deep)], ["a", "b", "c"])
    (table,), (plot,) = section.tables, section.plots
    assert table.headings == ["run", "transformer", "san"]
    for row, profile in zip(table.rows, (first, then, deep), strict=True):
        for cell, variant in zip(row[1:], ("transformer", "san"), strict=True):
            if variant not in profile.variants:
                assert cell == ""
                continue
            logs = profile.curve("relative_residual", "log10", variant=variant).mean(0)
            floor = bool(profile.at_floor("relative_residual", variant=variant)[-1])
            assert cell == power(float(logs[-1])) + (" ○" if floor else "")
    labels = [
        [mark.name for mark in chart.panels[0].marks if isinstance(mark, Line) and mark.noise is not None]
        for _, chart in plot.views
    ]
    assert labels == [["1 a", "3 c"], ["1 a, deviation", "2 b, float64"]]


def test_a_variant_that_fell_back_to_a_coarser_arithmetic_is_shown_in_that() -> None:
    fell = profile_of(("transformer",), "float64")
    mixed = Profile.join([fell, profile_of(("san",), "deviation")])
    section = side_by_side([run_of("a", mixed), run_of("b", profile_of(arithmetic="deviation"))], ["a", "b"])
    (table,) = section.tables
    assert table.headings == ["run", "transformer", "san"] and all(all(row) for row in table.rows)
    logs = fell.curve("relative_residual", "log10", variant="transformer").mean(0)
    assert table.rows[0][1] == power(float(logs[-1]))


def test_runs_of_other_variants_are_listed_alone(tmp_path: Path) -> None:
    for name in ("san", "transformer"):
        (tmp_path / name).mkdir()
        profile = measure(NET.variant(name), X, metrics="relative_residual", variant=name)
        profile.save(tmp_path / name / "profile.parquet")
    folders = [tmp_path / "san", tmp_path / "transformer"]
    html = write_report(folders, tmp_path / "both.html").read_text()
    assert "<h1>2 runs</h1>" in html and 'id="runs-beside"' not in html and "runs-figure" not in html
    assert 'id="runs"' not in write_report(folders[:1], tmp_path / "one.html").read_text()
