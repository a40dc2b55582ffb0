import json
import re
from pathlib import Path

import torch

from rankscope.nets import Architecture, Transformer, named_variant
from rankscope.profiles import Profile, measure
from rankscope.report import verdict, write_run_directory

NET = Transformer.random(Architecture(layers=5, width=16, heads=2), init="xavier")
X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def both() -> Profile:
    return Profile.join([measure(named_variant(NET, v), X, variant=v) for v in ("san", "transformer")])


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
        for value in profile.curve("relative_residual", variant=variant).mean(0).tolist():
            assert f">{value:.3g}</td>" in html
    marked = profile.curve("relative_residual", "below_floor", variant="san").amax(0).sum()
    assert html.count('class="noise"') == int(marked) > 0
    assert verdict(profile) in html.replace("&#39;", "'")


def test_the_verdict_says_who_collapses_and_when() -> None:
    said = verdict(both())
    curve = both().curve("relative_residual", variant="san").mean(0).tolist()
    noise = both().curve("relative_residual", "below_floor", variant="san").amin(0).tolist()
    below = next(k for k, value in enumerate(curve) if value <= 1e-3)
    floor = next(k for k, part in enumerate(noise) if part)
    assert f"san (below 0.001 from layer {below}, at float64's floor from layer {floor})" in said
    assert "At layer 5 tokens stay apart in transformer (0." in said
