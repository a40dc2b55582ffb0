"""The report: made from a directory alone, nothing in it but text, numbers and its own scripts."""

import base64
import hashlib
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
from PIL import Image

from rankscope.errors import FileError
from rankscope.figures.text import power
from rankscope.files import write_text
from rankscope.profiles import Profile, measure
from rankscope.report import read_run, verdict, write_report, write_run_directory
from rankscope.report.reported_run import TABLES
from rankscope.report.tables import curve_table
from rankscope.runs import EarlyStop, read
from rankscope.theory import Certificates, certify
from tests.raising import raises
from tests.report.runs import NET, X, links_within, profile_of, study, whole_run

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></title>\u2028"


class Scripts(HTMLParser):
    """Collects every script of a page, and every attribute that could fetch or run something."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.inside: dict[str, str | None] | None = None
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.active: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.active += [(tag, k, v) for k, v in attrs if k in ("src", "href", "action") or k.startswith("on")]
        if tag == "script":
            self.inside = dict(attrs)
            self.found.append((self.inside, ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = None if tag == "script" else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.found[-1] = (self.inside, self.found[-1][1] + data)

    @property
    def data(self) -> str:
        """Of the figures."""
        return next(text for about, text in self.found if about.get("type") == "application/json")


def parsed(html: str) -> Scripts:
    found = Scripts()
    found.feed(html)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    """(a profile, the page of its run)."""
    profile = profile_of()
    return profile, write_run_directory(profile, tmp_path_factory.mktemp("run"), "a title")


def test_the_run_directory_holds_everything(written: tuple[Profile, Path]) -> None:
    profile, page = written
    names = {path.name for path in page.parent.iterdir()}
    assert {"profile.parquet", "manifest.json", "report.html"} <= names
    assert {f"{m}.{kind}" for m in profile.metrics for kind in ("png", "svg")} <= names
    assert not [name for name in names if name.startswith(".")]
    assert read(page.parent).manifests["measure"] == profile.manifest.adding(title="a title")
    assert Profile.read(page.parent / "profile.parquet").table.equals(profile.table)


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


def test_a_section_for_each_table_and_a_chapter_for_each_run(
    everything: Path, written: tuple[Profile, Path], tmp_path: Path
) -> None:
    html = write_report([everything, written[1].parent], tmp_path / "both.html").read_text()
    assert html.count("<article") == 2
    assert 'id="run1-cloud"' in html and 'id="run2-residual"' in html and 'id="run2-cloud"' not in html
    links_within(html)
    assert len(parsed(html).found) == 4  # the scripts stand in it once, whatever the number of runs


def test_several_arithmetics_are_drawn_side_by_side(tmp_path: Path) -> None:
    nets = {name: NET.variant(name) for name in ("san", "transformer")}
    kinds = ("float64", "deviation")
    runs = [measure(net, X, metrics="mu", variant=v, arithmetic=kind) for v, net in nets.items() for kind in kinds]
    page = write_run_directory(Profile.join(runs), tmp_path, "t")
    assert {"arithmetics_san.png", "arithmetics_transformer.svg"} <= {p.name for p in tmp_path.iterdir()}
    assert "run1-figure-arithmetics-1" in page.read_text()


def test_a_name_may_be_anything(tmp_path: Path) -> None:
    """No file outside of the folder, no figure that its script cannot find."""
    odd = ("a\rb\0c", "n" * 10_000, "turned \u202e about")
    drawn = [
        ("../../org/model:san", "float64"),
        ("../../org/model:san", "float32"),
        *((name, "float64") for name in odd),
    ]
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


def test_a_run_that_was_stopped_says_so(written: tuple[Profile, Path], tmp_path: Path) -> None:
    stopped, profile = EarlyStop(finished=("san", "transformer"), asked=5), written[0]
    Profile(profile.table, profile.manifest.adding(stopped=stopped)).save(tmp_path / "profile.parquet")
    html = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "This run was stopped early: of 5 there are 2 (san, transformer)." in html


def test_layers_of_networks_of_other_depths_stand_under_their_numbers() -> None:
    nets = {"short": NET, "deep": NET.variant(layers=40)}
    both = Profile.join([measure(net, X[:1], metrics="relative_residual", variant=v) for v, net in nets.items()])
    table = curve_table(both.views("relative_residual"))
    assert {len(row) for row in table.rows} == {len(table.headings)}
    for row in table.rows:
        logs = both.curve("relative_residual", "log10", variant=row[0]).mean(0).tolist()
        for layer, cell in zip(table.headings[1:], row[1:], strict=True):
            assert cell == (power(logs[int(layer)]) if int(layer) < len(logs) else "")


def test_a_manifest_of_another_make_is_no_stumbling_block(written: tuple[Profile, Path], tmp_path: Path) -> None:
    shutil.copytree(written[1].parent, tmp_path, dirs_exist_ok=True)
    for odd in ({"networks": "none", "origin": "here"}, {"networks": [{"architecture": {"layers": 1}}]}):
        (tmp_path / "manifest.json").write_text(json.dumps(odd))
        assert "Tokens stay apart" in write_report([tmp_path], tmp_path / "report.html").read_text()


def test_names_of_ones_own_are_shown(written: tuple[Profile, Path], tmp_path: Path) -> None:
    """A metric and a theorem that this version does not know."""
    own = written[0].table.with_columns(pl.col("metric").replace({"mu": "my_metric"}))
    found = certify(NET, X[:1], theorems="dobrushin")
    bound = found.table.with_columns(pl.lit("my_theorem").alias("theorem"), pl.lit("size").alias("quantity"))
    tables = {"certificates": Certificates(bound, found.manifest)}
    html = write_run_directory(Profile(own, written[0].manifest), tmp_path, "t", tables).read_text()
    assert "my_metric" in html and "my_theorem" in html and "run1-figure-bounds-0" in html


def test_studies_become_pictures_and_tables(tmp_path: Path) -> None:
    drawn = Image.effect_noise((1200, 80), 80.0)
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG")
    study(tmp_path / "quick" / "dong2021" / "fig2", buffer.getvalue(), HOSTILE)
    html = write_report([tmp_path / "quick"], tmp_path / "report.html").read_text()
    found = parsed(html)
    pictures = [value for tag, name, value in found.active if tag == "img"]
    assert len(pictures) == 1 and (pictures[0] or "").startswith("data:image/png;base64,")
    small = Image.open(io.BytesIO(base64.b64decode((pictures[0] or "").split(",")[1])))
    assert small.width <= 1100
    assert not found.found  # no figure to draw, no script
    assert "differs: seeds" in html
    alone = write_report([tmp_path / "quick" / "dong2021" / "fig2"], tmp_path / "one.html").read_text()
    assert "differs: seeds" in alone


def test_a_folder_that_is_no_run_is_a_sentence(written: tuple[Profile, Path], tmp_path: Path) -> None:
    """The subject of the error is the folder, or the file that is not as it must be."""

    def refused(path: Path, folder: Path = tmp_path) -> None:
        with raises(FileError, subject=str(path)):
            read_run(folder)

    refused(tmp_path)
    refused(tmp_path / "nowhere", tmp_path / "nowhere")
    with raises(FileError, subject="folders"):
        write_report([], tmp_path / "report.html")
    with raises(FileError, subject=str(tmp_path)):
        write_text(tmp_path, "page")
    heads, profile, outcome = (tmp_path / name for name in ("heads.parquet", "profile.parquet", "outcome.json"))
    heads.write_text("no table")
    refused(heads)
    written[0].table.write_parquet(heads)
    refused(heads)
    pl.DataFrame({name: ["word"] for name in TABLES["heads"]}).write_parquet(heads)
    refused(heads)
    heads.unlink()
    Profile(written[0].table.head(0), written[0].manifest).save(profile)
    refused(profile)
    written[0].table.write_parquet(profile, metadata={"rankscope": "[1"})
    refused(profile)
    profile.unlink()
    outcome.write_text("[1]")
    refused(outcome)
