"""A training that is killed while its disk fills and its run is read: nothing that was written is lost."""

from pathlib import Path

import pytest

from tests.monitor.soak import can_mount, on_small_disk


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="a small disk is mounted in a namespace of its own")
def test_killed_on_a_full_disk_a_run_keeps_what_was_written_and_weights_keep_their_bits(tmp_path: Path) -> None:
    soaked = on_small_disk(tmp_path / "soak", steps=20_000, kills=10)
    assert soaked.kills == 10 and soaked.filled > 10 and soaked.readings > 100 and soaked.lost > 0
    assert not soaked.wrong and not soaked.missing and not soaked.unsaid
    assert soaked.same_rows and soaked.same_weights
