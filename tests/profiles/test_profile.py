"""A profile: its file, what joins and what does not, and what it has no rows of."""

from pathlib import Path

import polars as pl
import pytest
import torch

from rankscope.errors import FileError, MetricError
from rankscope.files import atomic, write_text
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import Profile, measure
from rankscope.runs import Manifest
from tests.raising import raises

NET = Transformer.random(Architecture(layers=3, width=8, heads=2, mask="causal"), seed=1, init="xavier")
X = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


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
    for name in ("absent", "cut", "text", "other"):
        with raises(FileError, subject=str(tmp_path / f"{name}.parquet")):
            Profile.read(tmp_path / f"{name}.parquet")


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


def test_profiles_that_say_the_same_twice_are_not_joined() -> None:
    with raises(MetricError, subject="profiles"):
        Profile.join([measure(NET, X), measure(NET.variant("san"), X)])
    assert len(measure(NET, X, metrics=["mu", "mu"]).table) == len(measure(NET, X, metrics="mu").table)


def test_a_layer_is_at_its_floor_when_every_sample_is() -> None:
    """One short text is uniform from the start; the other is not, and is not called noise for it."""
    padding = torch.arange(6)[None] >= torch.tensor([[6], [1]])
    mixed = measure(NET, X[:2], padding, ["relative_mu"], "float64")
    assert not mixed.at_floor("relative_mu").any()
    pure = NET.variant("san").variant(mask="complete", layers=9)
    san = measure(pure, X, None, ["relative_mu", "dobrushin"], "float64")
    for name in ("relative_mu", "dobrushin"):
        noise = san.curve(name, "below_floor")
        everywhere = noise.flatten(2).amin(-1).amin(0) if noise.ndim == 3 else noise.amin(0)
        assert san.at_floor(name).tolist() == (everywhere == 1).tolist()
        assert san.at_floor(name)[-1] and not san.at_floor(name)[0]


def test_an_empty_batch_has_an_empty_profile() -> None:
    empty = measure(NET, X[:0])
    with raises(MetricError, subject="table"):
        empty.curve("mu")
    with raises(MetricError, subject="table"):
        empty.plot()


def test_a_profile_asked_for_what_it_has_not_says_what_it_has() -> None:
    profile = Profile.join([measure(NET.variant(v), X, variant=v) for v in ("san", "transformer")])
    with raises(MetricError, subject="variant"):
        profile.curve("mu")
    with raises(MetricError, subject="variant") as caught:
        profile.curve("mu", variant="sam")
    assert "'san'" in str(caught.value)
    with raises(MetricError, subject="column"):
        profile.curve("mu", "median", variant="san")
    with raises(MetricError, subject="profiles"):
        Profile.join([])
    assert profile.curve("mu", variant="san").shape == (5, 4)
