"""The report: made from a directory alone, nothing in it but text, numbers and its own scripts."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from rankscope.figures import Line, power
from rankscope.profiles import Profile, Summary, measure
from rankscope.report import ReportedRun, verdict, write_report, write_run_directory
from rankscope.report.page import side_by_side, titles
from rankscope.runs import Manifest, Text, read
from rankscope.theory import certify
from tests.report.runs import HOSTILE, NET, X, parsed, profile_of, summary_of, whole_run


def test_the_page_stands_alone_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    html = whole_run(tmp_path, HOSTILE, HOSTILE).read_text()
    found = parsed(html)
    executed = [text for attributes, text in found.found if attributes.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in executed]
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert len(policy) == 1
    allowed = re.findall(r"&#39;sha256-([^&]+)&#39;", policy[0])
    assert len(executed) == 3 and allowed == hashes
    assert "default-src &#39;none&#39;" in policy[0]
    assert "unsafe-eval" not in policy[0] and "connect-src" not in policy[0]
    assert "alert(" not in "".join(text for text in executed[1:])
    for tag, name, value in found.active:
        assert name in ("href", "src") and (value or "").startswith(("#", "data:")), (tag, name, value)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "\u2028" not in found.data and "<" not in found.data
    assert {key.split("-figure-")[1] for key in json.loads(found.data)} >= {
        "curves", "cloud", "spectrum", "lengths", "heads", "bounds-0"
    }  # fmt: skip
    assert len(html) < 8e6


def test_the_page_shows_each_layers_value_and_marks_the_floor(written: tuple[Profile, Path]) -> None:
    profile, page = written
    html = page.read_text()
    for variant in profile.variants:
        for log10 in profile.curve("relative_residual", "log10", variant=variant).mean(0).tolist():
            assert f">{power(log10)}</td>" in html
    marked = profile.at_floor("relative_residual", variant="san").sum()
    assert html.count('class="noise"') == int(marked) > 0
    bare = re.sub(r'<span class="number">([^<]*)</span>', r"\1", html)
    assert verdict(profile) in bare.replace("&#39;", "'")


def test_the_run_directory_holds_everything(written: tuple[Profile, Path]) -> None:
    profile, page = written
    names = {path.name for path in page.parent.iterdir()}
    assert {"profile.parquet", "manifest.json", "report.html"} <= names
    assert {f"{m}.{kind}" for m in profile.metrics for kind in ("png", "svg")} <= names
    assert not [name for name in names if name.startswith(".")]
    assert read(page.parent).manifests["measure"] == profile.manifest.adding(title="a title")
    assert Profile.read(page.parent / "profile.parquet").table.equals(profile.table)


@pytest.mark.slow
def test_several_arithmetics_are_drawn_side_by_side(tmp_path: Path) -> None:
    nets = {name: NET.variant(name) for name in ("san", "transformer")}
    kinds = ("float64", "deviation")
    runs = [measure(net, X, metrics="mu", variant=v, arithmetic=kind) for v, net in nets.items() for kind in kinds]
    page = write_run_directory(Profile.join(runs), tmp_path, "t")
    assert {"arithmetics_san.png", "arithmetics_transformer.svg"} <= {p.name for p in tmp_path.iterdir()}
    assert "run1-figure-arithmetics-1" in page.read_text()


@pytest.mark.slow
def test_a_name_may_be_anything(tmp_path: Path) -> None:
    """No file outside of the folder, no figure that its script cannot find."""
    odd = "a\rb\0c turned \u202e about" + "n" * 10_000
    drawn = [("../../org/model:san", "float64"), ("../../org/model:san", "float32"), (odd, "float64")]
    runs = [measure(NET, X, metrics="relative_residual", variant=v, arithmetic=a) for v, a in drawn]
    run = tmp_path / "in" / "run"
    html = write_run_directory(Profile.join(runs), run, "half a character: \ud800").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in run.parent.iterdir()] == ["run"]
    assert "\u202e" not in re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    ids = set(re.findall(r'\bid="([^"]+)"', html))
    for key, views in json.loads(parsed(html).data).items():
        assert key in ids
        for trace in (trace for view in views for trace in view["figure"]["data"]):
            assert len(trace.get("name", "")) < 400


def run_of(folder: str, profile: Profile | Summary | None = None, **more: object) -> ReportedRun:
    manifest = Manifest(origin={"name": "tiny", "weights": "random"}, text=Text(path="texts/moby.txt"))
    return ReportedRun(Path(folder), manifest, profile, **more)  # type: ignore[arg-type]


@pytest.mark.slow
def test_headings_say_what_was_done_and_tell_runs_apart() -> None:
    profile = profile_of()
    runs = [
        run_of("a", profile), run_of("b", profile), run_of("c/b", profile), run_of("d", summary_of(profile)),
        run_of("e", certificates={"san": certify(NET, X)}),
    ]  # fmt: skip
    found = titles(runs)
    assert len(set(found)) == len(runs)
    assert found[0] == "tiny, random weights (a)" and found[2] == "tiny, random weights (c/b)"
    assert found[3:] == [
        "tiny, random weights: 2 excerpts of moby.txt", "tiny, random weights: bounds of san",
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
