import json
import re
from pathlib import Path

import torch

from rankscope.figures import power
from rankscope.nets import Architecture, Transformer, named_variant
from rankscope.profiles import Profile, measure
from rankscope.report import verdict, write_run_directory

NET = Transformer.random(Architecture(layers=5, width=16, heads=2), init="xavier")
X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def both(arithmetic: str = "float64") -> Profile:
    nets = {name: named_variant(NET, name) for name in ("san", "transformer")}
    return Profile.join([measure(net, X, variant=v, arithmetic=arithmetic) for v, net in nets.items()])


def test_the_run_directory_holds_everything(tmp_path: Path) -> None:
    profile = both()
    page = write_run_directory(profile, tmp_path / "run", "a title")
    names = {path.name for path in page.parent.iterdir()}
    assert {"profile.parquet", "manifest.json", "report.html"} <= names
    assert {f"{m}.{kind}" for m in profile.metrics for kind in ("png", "svg")} <= names
    assert not [name for name in names if name.startswith(".")]
    assert json.loads((page.parent / "manifest.json").read_text()) == profile.manifest
    assert Profile.read(page.parent / "profile.parquet").table.equals(profile.table)


def test_the_page_stands_alone_and_escapes_what_it_is_told(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    profile = measure(NET, X, variant=hostile)
    html = write_run_directory(profile, tmp_path, hostile).read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']+)""", html)
    assert fetched == []
    assert "Content-Security-Policy" in html


def test_the_page_shows_each_layers_value_and_marks_the_floor(tmp_path: Path) -> None:
    profile = both()
    html = write_run_directory(profile, tmp_path, "t").read_text()
    for variant in profile.variants:
        for log10 in profile.curve("relative_residual", "log10", variant=variant).mean(0).tolist():
            assert f">{power(log10)}</td>" in html
    marked = profile.at_floor("relative_residual", variant="san").sum()
    assert html.count('class="noise"') == int(marked) > 0
    assert verdict(profile) in html.replace("&#39;", "'")


def test_several_arithmetics_are_drawn_side_by_side(tmp_path: Path) -> None:
    page = write_run_directory(Profile.join([both(), both("deviation")]), tmp_path, "t")
    assert {"arithmetics_san.png", "arithmetics_transformer.svg"} <= {p.name for p in tmp_path.iterdir()}
    assert "arithmetics_san" in page.read_text()


def test_the_verdict_says_who_collapses_and_when() -> None:
    profile = both()
    curve = profile.curve("relative_residual", "log10", variant="san").mean(0).tolist()
    below = next(k for k, value in enumerate(curve) if value <= -3)
    floor = profile.at_floor("relative_residual", variant="san").tolist().index(True)
    said = verdict(profile)
    assert f"san (below 0.001 from layer {below}, at float64's floor from layer {floor})" in said
    assert "At layer 5 tokens stay apart in transformer (0." in said


def test_the_verdict_gives_the_number_where_there_is_no_floor() -> None:
    profile = both("deviation")
    curve = profile.curve("relative_residual", "log10", variant="san").mean(0).tolist()
    below = next(k for k, value in enumerate(curve) if value <= -3)
    assert curve[-1] < -40
    assert f"san (below 0.001 from layer {below}, {power(curve[-1])})" in verdict(profile)
