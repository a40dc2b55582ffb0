"""The studies of papers on a cluster have the numbers of one process."""

from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

from rankscope import read
from tests.cli.running import answered

pytest.importorskip("ray", reason="pip install 'rankscope[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.mark.slow
def test_reproduce_goes_to_the_cluster(nodes: Any, tmp_path: Path) -> None:
    for name, on in (("here", []), ("there", ["--on", "ray"])):
        answered("reproduce", "dong2021", "lengths", *on, "-o", str(tmp_path / name))
    tables = [read(tmp_path / name / "quick" / "dong2021" / "lengths") for name in ("here", "there")]
    assert (tmp_path / "there" / "quick" / "REPRODUCTION.md").is_file()
    assert tables[0].names == tables[1].names
    for name in tables[0].names:
        assert_frame_equal(tables[0].table(name), tables[1].table(name), check_exact=True)
