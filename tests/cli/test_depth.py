"""`rankscope depth`: tables that fit, a picture, JSON, and a folder with a report."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rankscope import Architecture, DepthCard
from tests.cli.running import SMALL, answered, printed, rankscope


def test_it_prints_layers_heads_and_what_they_come_to() -> None:
    said = printed("depth", *SMALL)  # fits into 80 columns
    assert "Layers" in said and "Means over samples." in said and "Heads, mean over samples" in said
    assert "bert-tiny: 2 layers count as" in said and "Effective depth" in said and "mean path length" in said


@pytest.mark.parametrize(("width", "shown", "left_out"), [(60, "influence", "entropy"), (120, "biases", "…")])
def test_in_little_room_columns_are_left_out_and_none_is_cut(
    width: int, shown: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    said = rankscope("depth", *SMALL, "--no-heads").out
    header = next(line for line in said.splitlines() if line.strip().startswith("layer  lost"))
    assert shown in header and left_out not in header and "…" not in said
    assert max(map(len, said.splitlines())) <= width


def test_a_picture_a_folder_and_a_report(tmp_path: Path) -> None:
    said = printed("depth", *SMALL, "--no-heads", "--svg", "card.svg", "-o", "run", cwd=tmp_path)
    assert "Heads, mean over samples" not in said and "Heads were not taken out" in said
    assert ElementTree.parse(tmp_path / "card.svg").getroot().tag.endswith("svg")
    card = DepthCard.read(tmp_path / "run")
    assert card.layers.height == 2 and card.manifest.model == "bert-tiny" and card.manifest.text is not None
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Which layers and heads the output needs" in page and card.sentence in page
    assert "bert-tiny" in page.partition("</title>")[0] and "layers that count" in page


def test_json_has_everything() -> None:
    told = answered("depth", *SMALL)
    assert len(told["layers"]) == 2 and len(told["heads"]) == 4 and told["norms"]
    assert {found["name"] for found in told["effective_depths"]} >= {"layers_that_count", "mean_path_length"}


def test_a_network_that_paths_do_not_cover_says_so(tmp_path: Path) -> None:
    arch = Architecture(layers=2, width=8, heads=2, norm="rms", key_latent=4, biases=False, positions="rotary")
    path = tmp_path / "latent.json"
    path.write_text(json.dumps(arch.to_dict()))
    said = printed("depth", str(path), "--tokens", "8", "--samples", "1")
    assert "There are no shares of paths" in " ".join(said.split())


@pytest.mark.slow
def test_a_folder_of_another_network_is_refused(tmp_path: Path) -> None:
    printed("depth", *SMALL, "--no-heads", "-o", "run", cwd=tmp_path)
    done = rankscope("measure", "bert-mini", *SMALL[1:], "-o", "run", cwd=tmp_path)
    assert done.code == 2 and "another folder" in done.err


@pytest.mark.parametrize("command", [("depth", "--no-heads"), ("cut",), ("paths",), ("bounds",), ("compare",)])
def test_of_a_longer_text_it_is_said_how_many_excerpts_were_read(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *options = command
    things = ["bert-tiny", "bert-tiny:san"] if name == "compare" else ["bert-tiny"]
    notes = tmp_path / "notes.txt"
    notes.write_text("\n\n".join(f"the whale was in the sea for day {day}" for day in range(6)))
    asked = (name, *things, *options, "--tokens", "8", "--text", str(notes))
    done = rankscope(*asked, "--samples", "3")
    assert done.code == 0 and f"read the first 3 of 6 excerpts of {notes}" in done.err
    assert "excerpts of" not in rankscope(*asked, "--samples", "6").err
    assert "excerpts of" not in rankscope(*asked, "--samples", "3", "--quiet").err
