"""One cell: what it is measured on, how it can end, and what its worker keeps."""

import os
import signal
from pathlib import Path

import pytest
import torch

from rankscope import fresh, measure
from rankscope.engine import Sweep
from rankscope.engine.spec import Cell, SweepOptions
from rankscope.engine.work import CellInputs, InputsLoader, LocalProcesses, measure_cell
from rankscope.errors import FileError, SweepError
from tests.engine.swept import same, swept
from tests.raising import raises

CELL: Cell = {"model": "bert-tiny", "tokens": 4}
OPTIONS = SweepOptions(metrics=("mu",))


def inputs() -> CellInputs:
    net = fresh("bert-tiny")
    return CellInputs(net, *net.encode(["Call me Ishmael"], 4))


def test_inputs_that_two_cells_in_a_row_share_are_loaded_once() -> None:
    loads: list[str] = []

    def loader(name: str) -> InputsLoader:
        def load() -> CellInputs:
            loads.append(name)
            return inputs()

        return InputsLoader(name, load)

    skips = (0.0, 0.5)
    outcomes = [measure_cell({**CELL, "skip": skip}, loader("a"), OPTIONS, 1, "cpu") for skip in skips]
    assert measure_cell(CELL, loader("b"), OPTIONS, 1, "cpu").reason is None and loads == ["a", "b"]
    shared = inputs()
    for outcome, skip in zip(outcomes, skips, strict=True):
        table = measure(shared.net.variant(skip=skip), shared.X, shared.padding, "mu").table
        assert outcome.tables["sweep"]["value"].to_list() == table["value"].to_list()


@pytest.mark.parametrize(
    ("error", "words", "lasting"),
    [
        (SweepError("depth must be 1 or more", subject="depth"), "depth must be 1 or more", True),
        (FileError("none at x", subject="x"), "none at x", False),
        (torch.OutOfMemoryError("5 GiB"), "out of memory (5 GiB)", False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory", False),
        (ZeroDivisionError("by 0"), "ZeroDivisionError: by 0 (fail", False),
    ],
)
def test_an_error_is_the_reason_of_its_cell(error: Exception, words: str, lasting: bool) -> None:
    """What lacked a file or memory may succeed at the next attempt; a bad combination of factors will not."""

    def fail() -> CellInputs:
        raise error

    outcome = measure_cell(CELL, InputsLoader("failing", fail), OPTIONS, 1, "cpu")
    assert words in str(outcome.reason) and outcome.lasting is lasting and not outcome.tables


def test_more_gpus_than_there_are_are_refused() -> None:
    with raises(SweepError, subject="gpus_per_cell"):
        LocalProcesses(gpus=torch.cuda.device_count() + 1)


def children() -> list[int]:
    """Processes that this one has started."""
    here = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{here}/task/{here}/children").read_text().split()]


@pytest.mark.slow
def test_two_workers_give_the_same_bits_though_one_is_killed(alone: Sweep, tmp_path: Path) -> None:
    """Another does what it was doing; two workers give the bits of one."""
    killed: list[int] = []
    others = {*children()}  # a browser of tests that ran before

    def kill(done: int, of: int) -> None:
        workers = [pid for pid in children() if pid not in others]
        if done == 3:  # which of them has a cell and which is waiting is chance
            killed.extend(workers[:1])
            os.kill(workers[0], signal.SIGKILL)

    swept(tmp_path / "run", workers=2, progress=kill)
    assert len(killed) == 1
    same(alone.run, tmp_path / "run")
