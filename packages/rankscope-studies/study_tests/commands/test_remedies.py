"""`rankscope remedies`: side by side, and resumed."""

from pathlib import Path

import pytest

from tests.cli.running import answered, printed


@pytest.mark.slow
def test_remedies_are_put_side_by_side_and_gone_on_with(tmp_path: Path) -> None:
    line = ["remedies", "bert-tiny", "--remedy", "gate", "--remedy", "lnscale", "--seeds", "1", "-o", "out"]
    out = printed(*line, cwd=tmp_path)
    assert "At initialisation: layers until" in out and "lnscale" in out and "Nothing was trained" in out
    parts = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").iterdir()}
    answer = answered(*line, "--workers", "2", cwd=tmp_path)
    assert [row["remedy"] for row in answer["remedies"]] == ["none", "gate", "lnscale"]
    assert {claim["verdict"] for claim in answer["claims"]} <= {
        "agrees", "does not", "does nothing here", "cannot be told"
    }  # fmt: skip
    assert Path(tmp_path / answer["report"]).is_file()
    assert parts == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").iterdir()}
