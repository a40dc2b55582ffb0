"""A run directory has tables, manifest, figures to print and the report, whatever its variants are called."""

import json
import re
from pathlib import Path

import pytest

from rankscope.profiles import Profile, measure
from rankscope.report import write_run_directory
from rankscope.runs import read
from tests.report.runs import NET, X, parsed


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
