"""What several cells read is made once, and every worker has the same."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from rankscope import fresh
from rankscope.engine.shared_inputs import FileChecksums, SharedInputs, dump
from rankscope.engine.spec import Cell
from rankscope.errors import SourceError
from tests.raising import raises


def test_trained_weights_are_stored_once_and_read_from_there(tmp_path: Path) -> None:
    net = fresh("bert-tiny", seed=4).variant(layers=1)
    net.save(tmp_path / "model")
    cell: Cell = {"model": str(tmp_path / "model"), "samples": 2, "tokens": 5}
    (tmp_path / "run").mkdir()
    with SharedInputs(tmp_path / "run", FileChecksums([cell])) as shared:
        loader = shared.loader(cell)
        assert shared.loader({**cell, "skip": 0.5}) is loader is not shared.loader({**cell, "tokens": 4})
        inputs = pickle.loads(pickle.dumps(loader)).load()
    assert inputs.net.fingerprint == net.fingerprint and inputs.X.shape == (2, 5, net.arch.width)
    assert not list((tmp_path / "run").iterdir())


def test_inputs_that_cannot_be_read_fail_in_the_worker(tmp_path: Path) -> None:
    cell: Cell = {"model": str(tmp_path / "none"), "samples": 1, "tokens": 4}
    with SharedInputs(tmp_path, FileChecksums([cell])) as shared:
        loader = shared.loader(cell)
    with raises(SourceError):
        loader.load()


def test_any_error_on_the_way_is_that_of_its_cells_alone(tmp_path: Path) -> None:
    fresh("bert-tiny").variant(layers=1).save(tmp_path / "model")
    cell: Cell = {"model": str(tmp_path / "model"), "samples": 1, "tokens": 4}
    (tmp_path / "run").mkdir()
    with SharedInputs(tmp_path / "run", FileChecksums([cell])) as shared:
        for folder in (tmp_path / "run").iterdir():  # what a cleaner of temporary files does
            folder.rmdir()
        loader = pickle.loads(pickle.dumps(shared.loader(cell)))
    with raises(SourceError):
        loader.load()


def test_checksums_tell_changed_files_apart(tmp_path: Path) -> None:
    text, arch = tmp_path / "text.txt", tmp_path / "mine.json"
    cell: Cell = {"model": str(arch), "text": str(text)}
    seen = []
    for layers, words in ((2, "one"), (2, "two"), (3, "two"), (2, "one")):
        arch.write_text(json.dumps({"layers": layers, "width": 8, "heads": 2}))
        text.write_text(words)
        seen.append(FileChecksums([cell]).of(cell))
    assert seen[0] == seen[3] and all(seen[k] != seen[k + 1] for k in range(3))


def test_tensors_are_read_without_a_copy_and_one_that_occurs_twice_is_stored_once() -> None:
    pytest.importorskip("ray", reason="pip install 'rankscope[ray]'")
    weight = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    stored = dump({"weight": weight, "again": weight, "turned": weight.T, "half": weight.bfloat16(), "name": "a"})
    assert [len(buffer) for buffer in stored.buffers] == [48, 48]  # `weight`, and `turned` made contiguous
    read = stored.load()
    assert read["again"] is read["weight"] and read["name"] == "a" and torch.equal(read["half"], weight.bfloat16())
    assert torch.equal(read["weight"], weight) and torch.equal(read["turned"], weight.T)
    assert read["weight"].data_ptr() in {buffer.ctypes.data for buffer in stored.buffers}
