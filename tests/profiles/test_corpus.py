"""Corpora, interrupted and taken up again."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.errors import FileError, MetricError, TokensError
from rankscope.metrics import Metric, metric
from rankscope.nets import Architecture, Transformer, named_variant
from rankscope.profiles import Profile, Summary, measure, measure_corpus
from rankscope.profiles.corpus import gathering
from rankscope.sources import bundled_excerpts
from rankscope.sources.fresh import untrained

NET = untrained(Architecture(layers=3, width=16, heads=2), "small", seed=1, init="xavier")
NETS = {name: named_variant(NET, name) for name in ("san", "transformer")}
TEXTS = bundled_excerpts(10)[:26]
ASKED: dict[str, Any] = {
    "metrics": ["mu", "entropy"],
    "arithmetic": ["deviation", "float32"],
    "length": 12,
    "batch": 4,
}


class StoppedError(Exception):
    """What ends a run before its time."""


def stopping(texts: list[str], after: int) -> Iterator[str]:
    yield from texts[:after]
    raise StoppedError


def test_statistics_are_those_of_measuring_every_excerpt() -> None:
    summary = measure_corpus(NETS, iter(TEXTS), metrics="mu", length=12, batch=7)
    X, padding = NET.encode(TEXTS, 12)
    profile = Profile.join([measure(net, X, padding, "mu", variant=name) for name, net in NETS.items()])
    for name in NETS:
        logs = profile.curve("mu", "log10", variant=name)
        assert torch.allclose(summary.curve("mu", "log10_mean", variant=name), logs.mean(0), rtol=1e-9)
        found = summary.curve("mu", "log10_q25", variant=name)
        assert torch.allclose(found, logs.quantile(0.25, dim=0), rtol=1e-9)
    assert summary.excerpts == len(TEXTS)


@pytest.fixture(scope="module")
def once() -> Summary:
    """In one go."""
    return measure_corpus(NETS, TEXTS, reservoir=6, **ASKED)


@pytest.mark.parametrize("after", [3, 4, 9, 25])
def test_an_interrupted_run_gives_the_same_bits(tmp_path: Path, after: int, once: Summary) -> None:
    path = tmp_path / "checkpoint.npz"
    with pytest.raises(StoppedError):
        measure_corpus(NETS, stopping(TEXTS, after), checkpoint=path, reservoir=6, **ASKED)
    assert path.exists() == (after >= 4)
    again = measure_corpus(NETS, TEXTS, checkpoint=path, reservoir=6, **ASKED)
    assert again.table.equals(once.table)
    assert [n["checks"] for n in again.manifest["networks"]] == [
        n["checks"] for n in once.manifest["networks"]
    ]


def test_only_what_is_left_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    with pytest.raises(StoppedError):
        measure_corpus(NETS, stopping(TEXTS, 18), checkpoint=path, **ASKED)
    seen = [g.excerpts for g in gathering(NETS, TEXTS, checkpoint=path, **ASKED)]
    assert seen == [16, 20, 24, 26]


def test_a_corpus_that_grew_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    measure_corpus(NETS, TEXTS[:10], checkpoint=path, **ASKED)
    seen = [g.excerpts for g in gathering(NETS, TEXTS, checkpoint=path, **ASKED)]
    assert seen[0] == 8
    grown = measure_corpus(NETS, TEXTS, checkpoint=path, **ASKED)
    assert grown.table.equals(measure_corpus(NETS, TEXTS, **ASKED).table)


def test_checkpoints_are_written_along_the_way(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    steps = gathering(NETS, TEXTS, checkpoint=path, saved_every=0.0, **ASKED)
    assert [path.exists() for _ in steps][:3] == [False, True, True]
    assert [found.name for found in tmp_path.iterdir()] == ["checkpoint.npz"]


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Python's own handler, also where the tests run in the background and the signal is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_leaves_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"

    def interrupted() -> Iterator[str]:
        yield from TEXTS[:10]
        os.kill(os.getpid(), signal.SIGINT)
        yield from TEXTS[10:]

    with pytest.raises(KeyboardInterrupt):
        measure_corpus(NETS, interrupted(), checkpoint=path, **ASKED)
    seen = [g.excerpts for g in gathering(NETS, TEXTS, checkpoint=path, **ASKED)]
    assert seen[0] == 8


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_waits_until_a_chunk_is_counted() -> None:
    from rankscope.profiles.corpus import _undisturbed

    done = []
    with pytest.raises(KeyboardInterrupt), _undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("counted")
    assert done == ["counted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_run_does_not_take_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    measure_corpus(NETS, TEXTS, checkpoint=path, **ASKED)
    before = path.read_bytes()
    changes = {"length": 9, "batch": 5, "metrics": ["mu"]}
    for name, value in changes.items():
        said = {"length": "tokens"}.get(name, name)
        with pytest.raises(
            FileError, match=f"it is of one with other {said}: give another folder, or delete"
        ):
            measure_corpus(NETS, TEXTS, checkpoint=path, **{**ASKED, name: value})
    other = {"san": NETS["san"], "transformer": NETS["transformer"].variant(skip=0.5)}
    with pytest.raises(FileError, match="other variants"):
        measure_corpus(other, TEXTS, checkpoint=path, **ASKED)
    with pytest.raises(FileError, match="has counted 24 excerpts, .*; others came: give another folder"):
        measure_corpus(NETS, ["new", *TEXTS[1:]], checkpoint=path, **ASKED)
    with pytest.raises(FileError, match="has counted 24 excerpts, .*; only 20 came"):
        measure_corpus(NETS, TEXTS[:20], checkpoint=path, **ASKED)
    assert path.read_bytes() == before


def test_a_damaged_checkpoint_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    measure_corpus(NETS, TEXTS[:8], checkpoint=path, **ASKED)
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(FileError, match="it cannot be read .*: delete it to start anew"):
            measure_corpus(NETS, TEXTS, checkpoint=path, **ASKED)


def test_progress_is_told_and_mistakes_are_sentences() -> None:
    told: list[int] = []
    measure_corpus(NETS, TEXTS, metrics="mu", length=4, batch=10, progress=told.append)
    assert told == [10, 20, 26]
    with pytest.raises(TokensError, match="at least one excerpt with a token; it holds none"):
        measure_corpus(NETS, [])
    with pytest.raises(TokensError, match="batch must be at least 1 excerpt; got 0"):
        measure_corpus(NETS, TEXTS, batch=0)
    with pytest.raises(MetricError, match="at least one network; received none"):
        measure_corpus({}, TEXTS)
    with pytest.raises(MetricError, match="metric must be one of"):
        measure_corpus(NETS, TEXTS, metrics="mew")
    with pytest.raises(TokensError, match="has no tokenizer and no embedding"):
        measure_corpus({"bare": Transformer.random(NET.arch)}, TEXTS)


def test_a_metric_of_ones_own_is_gathered() -> None:
    known = metric("mu")
    mine = Metric("mine", lambda x, padding: known.compute(x) ** 2, degree=2, scale=known.compute)
    summary = measure_corpus(NETS, TEXTS[:3], metrics=["mu", mine], length=4)
    found, expected = (summary.curve(name, "q50", variant="san") for name in ("mine", "mu"))
    assert torch.allclose(found, expected**2, rtol=1e-9)


def test_a_kernel_without_a_rule_is_measured_once() -> None:
    net = untrained(Architecture(layers=1, width=8, heads=2, kernel="sigmoid"), "sigmoid")
    summary = measure_corpus({"v": net}, TEXTS[:3], metrics="mu", arithmetic=["deviation", "float64"])
    assert summary.lines("mu") == [("v", "float64")]
