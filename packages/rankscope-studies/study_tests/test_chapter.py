"""Studies in a report: pictures and tables, and a sentence where a picture is none."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rankscope.errors import FileError
from rankscope.report import read_run, write_report
from rankscope_studies.chapter import checked
from tests.raising import raises
from tests.report.runs import HOSTILE, parsed, study


def test_studies_become_pictures_and_tables(tmp_path: Path) -> None:
    drawn = Image.effect_noise((1200, 80), 80.0)
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG")
    study(tmp_path / "quick" / "dong2021" / "fig2", buffer.getvalue(), HOSTILE)
    assert read_run(tmp_path / "quick").title == "dong2021 fig2, run again"
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


def test_a_picture_that_is_none_is_said_in_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "PNG")
    good = buffer.getvalue()
    study(folder, good)
    for content in (b"", b"garbage", good[: len(good) // 2], good[:20] + b"\xff" * 8 + good[28:]):
        (folder / "drawn.png").write_bytes(content)
        page = write_report([folder], tmp_path / "report.html").read_text()
        assert "drawn.png, missing.png" in page and "differs: seeds" in page


@pytest.mark.parametrize(
    ("comparison", "fits"),
    [
        ({}, True), ({"agrees": None}, True), ({"agrees": False}, True),
        ({"agrees": "yes"}, False), ("agrees", False), (None, False), (["agrees"], False),
    ],
)  # fmt: skip
def test_a_study_compares_by_yes_no_or_neither(comparison: Any, fits: bool) -> None:
    path, found = Path("study/outcome.json"), {"comparisons": [{"agrees": True}, comparison]}
    if fits:
        assert checked(path, found) == found
    else:
        with raises(FileError, subject=str(path)):
            checked(path, found)


def test_an_outcome_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text("[1]")
    with raises(FileError, subject=str(tmp_path / "outcome.json")):
        read_run(tmp_path)
