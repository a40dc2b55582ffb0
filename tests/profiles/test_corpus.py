"""Corpora, interrupted and taken up again."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from rankscope.errors import FileError, MetricError, TokensError
from rankscope.metrics import Metric, metric
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import SCHEMA, Profile, Summary, corpus_steps, measure, measure_corpus
from rankscope.runs import Store, read
from rankscope.sources import bundled_excerpts, fresh
from tests.raising import raises

NET = fresh(Architecture(layers=3, width=16, heads=2), seed=1, init="xavier", name="small")
NETS = {name: NET.variant(name) for name in ("san", "transformer")}
TEXTS = bundled_excerpts(10)[:26]
FLOATS = ["float64", "float32"]
ASKED: dict[str, Any] = {"metrics": ["mu", "entropy"], "arithmetic": FLOATS, "max_length": 12, "batch_size": 4}


class StoppedError(Exception):
    """What ends a run before its time."""


def stopping(texts: list[str], after: int) -> Iterator[str]:
    yield from texts[:after]
    raise StoppedError


def steps(folder: Path) -> list[int]:
    """Excerpts after each step of a run that goes on in the folder."""
    with Store(folder) as store:
        return [gathered.excerpts for gathered in corpus_steps(NETS, TEXTS, store, **ASKED)]


def test_statistics_are_those_of_measuring_every_excerpt() -> None:
    summary = measure_corpus(NETS, iter(TEXTS), metrics="mu", max_length=12, batch_size=7)
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
    return measure_corpus(NETS, TEXTS, **ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("after", [3, 4, 9])
def test_an_interrupted_run_gives_the_same_bits(tmp_path: Path, after: int, once: Summary) -> None:
    with pytest.raises(StoppedError):
        measure_corpus(NETS, stopping(TEXTS, after), folder=tmp_path, **ASKED)
    assert (tmp_path / "rows").exists() == (after >= 4)
    again = measure_corpus(NETS, TEXTS, folder=tmp_path, **ASKED)
    assert again.table.equals(once.table)
    assert again.manifest.networks == once.manifest.networks


def test_only_what_is_left_is_measured_again(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        measure_corpus(NETS, stopping(TEXTS, 18), folder=tmp_path, **ASKED)
    assert steps(tmp_path) == [16, 20, 24, 26]


def test_a_corpus_that_grew_goes_on(tmp_path: Path, once: Summary) -> None:
    measure_corpus(NETS, TEXTS[:10], folder=tmp_path, **ASKED)
    assert steps(tmp_path)[0] == 8
    assert measure_corpus(NETS, TEXTS, folder=tmp_path, **ASKED).table.equals(once.table)


def test_rows_are_written_along_the_way_and_kept(tmp_path: Path, once: Summary) -> None:
    """A run that is killed loses what came after its last chunk, and a chunk that it had not listed."""
    with Store(tmp_path) as store:
        found = corpus_steps(NETS, TEXTS, store, saved_every=0.0, **ASKED)
        assert [len(store.run.chunks("rows")) for _ in found] == [0, 1, 2, 3, 4, 5, 6]
    kept = {path.name: path.read_bytes() for path in (tmp_path / "rows").iterdir()}
    assert sorted(kept) == [f"{number:06}.parquet" for number in range(7)]
    rows = read(tmp_path).tables["rows"]
    assert rows["sample"].n_unique() == len(TEXTS) and rows.schema == pl.Schema(SCHEMA)
    listed = json.loads((tmp_path / "manifest.json").read_text())
    for number in (4, 5, 6):
        del listed["entries"]["corpus"]["files"][f"rows/{number:06}.parquet"]
    (tmp_path / "manifest.json").write_text(json.dumps(listed))
    (tmp_path / "rows" / "000004.parquet").write_bytes(b"half")
    again = measure_corpus(NETS, TEXTS, folder=tmp_path, **ASKED)
    assert again.table.equals(once.table)
    assert all((tmp_path / "rows" / name).read_bytes() == kept[name] for name in sorted(kept)[:4])


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Python's own handler, also where the tests run in the background and the signal is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_leaves_what_was_done(tmp_path: Path) -> None:

    def interrupted() -> Iterator[str]:
        yield from TEXTS[:10]
        os.kill(os.getpid(), signal.SIGINT)
        yield from TEXTS[10:]

    with pytest.raises(KeyboardInterrupt):
        measure_corpus(NETS, interrupted(), folder=tmp_path, **ASKED)
    assert steps(tmp_path)[0] == 8


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_waits_until_a_chunk_is_counted() -> None:
    from rankscope.files import undisturbed

    done = []
    with pytest.raises(KeyboardInterrupt), undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("counted")
    assert done == ["counted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_another_run_does_not_take_the_rows(tmp_path: Path) -> None:
    measure_corpus(NETS, TEXTS, folder=tmp_path, **ASKED)
    before = (tmp_path / "manifest.json").read_bytes()
    rows = str(tmp_path / "rows")
    changes: dict[str, Any] = {"max_length": 9, "batch_size": 5, "metrics": ["mu"]}
    for name, value in changes.items():
        with raises(FileError, subject=rows) as caught:
            measure_corpus(NETS, TEXTS, folder=tmp_path, **{**ASKED, name: value})
        saved = {"max_length": "tokens", "batch_size": "batch"}.get(name, name)  # as in runs of earlier versions
        assert f"{saved} (" in str(caught.value)
    others = {"san": NETS["san"], "transformer": NETS["transformer"].variant(skip=0.5)}
    with raises(FileError, subject=rows):
        measure_corpus(others, TEXTS, folder=tmp_path, **ASKED)
    assert (tmp_path / "manifest.json").read_bytes() == before
    for texts in (["new", *TEXTS[1:]], TEXTS[:20]):
        with raises(FileError, subject=rows):
            measure_corpus(NETS, texts, folder=tmp_path, **ASKED)


@pytest.mark.slow
def test_damaged_rows_are_a_sentence_and_can_be_deleted(tmp_path: Path, once: Summary) -> None:
    measure_corpus(NETS, TEXTS[:8], folder=tmp_path, **ASKED)
    (path,) = (tmp_path / "rows").iterdir()
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], whole + b"\0"):
        path.write_bytes(content)
        with raises(FileError, subject=f"rows/{path.name}"):
            measure_corpus(NETS, TEXTS, folder=tmp_path, **ASKED)
    shutil.rmtree(tmp_path / "rows")
    assert measure_corpus(NETS, TEXTS, folder=tmp_path, **ASKED).table.equals(once.table)


@pytest.mark.slow
def test_progress_is_told_and_mistakes_are_sentences() -> None:
    told: list[int] = []
    measure_corpus(NETS, TEXTS, metrics="mu", max_length=4, batch_size=10, progress=told.append)
    assert told == [10, 20, 26]
    with raises(TokensError, subject="texts"):
        measure_corpus(NETS, [])
    with raises(TokensError, subject="batch_size"):
        measure_corpus(NETS, TEXTS, batch_size=0)
    with raises(MetricError, subject="nets"):
        measure_corpus({}, TEXTS)
    with raises(MetricError, subject="metric"):
        measure_corpus(NETS, TEXTS, metrics="mew")
    with raises(TokensError, subject="texts"):
        measure_corpus({"bare": Transformer.random(NET.arch)}, TEXTS)


def test_a_metric_of_ones_own_is_gathered() -> None:
    known = metric("mu")
    mine = Metric("mine", lambda x, padding: known.compute(x) ** 2, degree=2, scale=known.compute)
    summary = measure_corpus(NETS, TEXTS[:3], metrics=["mu", mine], max_length=4)
    found, expected = (summary.curve(name, "q50", variant="san") for name in ("mine", "mu"))
    assert torch.allclose(found, expected**2, rtol=1e-9)


def test_a_kernel_without_a_rule_is_measured_once() -> None:
    net = fresh(Architecture(layers=1, width=8, heads=2, kernel="sigmoid"), name="sigmoid")
    summary = measure_corpus({"v": net}, TEXTS[:3], metrics="mu", arithmetic=["deviation", "float64"])
    assert summary.lines("mu") == [("v", "float64")]
