from pathlib import Path

import polars as pl
import pytest
import torch

from rankscope.errors import FileError
from rankscope.files import atomic, write_text
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import Profile, measure
from rankscope.runs import Manifest

NET = Transformer.random(Architecture(layers=2, width=8, heads=2))
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = measure(NET, X, metrics=["mu", "dobrushin"])
    again = Profile.read(profile.save(tmp_path / "new" / "profile.parquet"))
    assert again.table.equals(profile.table) and again.table.schema == profile.table.schema
    assert again.manifest == profile.manifest
    assert again.manifest.networks[0].fingerprint == NET.fingerprint
    assert Architecture.from_dict(again.manifest.networks[0].architecture or {}) == NET.arch


def test_a_file_that_is_no_profile_is_a_sentence(tmp_path: Path) -> None:
    good = measure(NET, X).save(tmp_path / "good.parquet")
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:500])
    (tmp_path / "text.parquet").write_text("hello")
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(FileError, match="there is none at .*absent"):
        Profile.read(tmp_path / "absent.parquet")
    for name in ("cut", "text"):
        with pytest.raises(FileError, match=f"{name}.parquet must be a Parquet file written by Profile.save"):
            Profile.read(tmp_path / f"{name}.parquet")
    with pytest.raises(FileError, match="it is another kind of table"):
        Profile.read(tmp_path / "other.parquet")


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "before")
    with pytest.raises(KeyboardInterrupt), atomic(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["file.txt"]
    assert path.stat().st_mode & 0o444


def test_a_failing_save_keeps_the_old_profile(tmp_path: Path) -> None:
    profile = measure(NET, X)
    path = profile.save(tmp_path / "profile.parquet")
    broken = Profile(profile.table, Manifest(more={"unserialisable": object()}))
    with pytest.raises(TypeError):
        broken.save(path)
    assert Profile.read(path).manifest == profile.manifest
    assert [found.name for found in tmp_path.iterdir()] == ["profile.parquet"]
