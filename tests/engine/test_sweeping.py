"""The same table, however many workers there are, and however often it is interrupted."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import rankscope
from rankscope import Architecture, certify, decompose, fresh, measure
from rankscope.engine import Spec, Sweep, sweep
from rankscope.engine.shared_inputs import excerpts_for
from rankscope.engine.spec import SweepOptions, checked
from rankscope.engine.sweeping import factors_frame
from rankscope.errors import SweepError
from tests.cli.running import COMMAND
from tests.engine.swept import CELLS, SPEC, same, swept
from tests.raising import raises


@pytest.mark.slow
def test_rows_are_those_of_a_loop_by_hand(alone: Sweep) -> None:
    texts = excerpts_for({"samples": 2, "tokens": 8})
    net = fresh("bert-tiny", seed=1).variant(layers=2, skip=0.5)
    X, padding = fresh("bert-tiny", seed=1).encode(texts, 8)
    mine = alone.table.filter(depth=2, seed=1)
    table = measure(net, X, padding, ["relative_mu", "entropy"]).table
    assert mine["value"].to_list() == table["value"].to_list()
    assert mine["cell"].unique().to_list() == [2 + 1]
    paths = rankscope.read(alone.run).tables["sweep_paths"].filter(depth=2, seed=1)
    shares = decompose(net, X, padding).by_length().table.filter(start="all").sort("sample", "length")
    assert paths["share"].to_list() == shares["share"].to_list()
    proved = rankscope.read(alone.run).tables["sweep_certificates"].filter(depth=2, seed=1)
    assert proved["log10_bound"].to_list() == certify(net, X, padding).summary()["log10_bound"].to_list()


def test_a_cell_that_fails_is_a_row_with_its_reason(alone: Sweep) -> None:
    assert len(alone.cells) == CELLS and alone.cells["done"].all()
    assert alone.failed["cell"].to_list() == [CELLS - 2, CELLS - 1]
    assert "seed must go with random weights" in alone.failed["reason"][0]
    assert not set(alone.failed["cell"]) & set(alone.table["cell"])
    assert repr(alone).startswith(f"Sweep: {CELLS - 2} of {CELLS} cells, 2 failed")


def test_a_changed_specification_computes_what_is_new(alone: Sweep, tmp_path: Path) -> None:
    new = {"model": "bert-tiny", "depth": 1, "skip": 0.5, "seed": 2}
    small = {**SPEC, "list": [new], "grid": {**SPEC["grid"], "seed": {"range": 1}}}
    done: list[tuple[int, int]] = []
    shutil.copytree(alone.run, tmp_path / "run")
    # What is not asked for any more is kept, and not shown.
    fewer = sweep(small, tmp_path / "run", workers=1, progress=lambda *count: done.append(count))
    assert done == [(2, 3), (3, 3)]
    assert len(fewer.cells) == 3 and fewer.table["seed"].unique().sort().to_list() == [0, 2]
    net = fresh("bert-tiny", seed=2)
    X, padding = net.encode(excerpts_for({"samples": 2, "tokens": 8}), 8)
    table = measure(net.variant(layers=1, skip=0.5), X, padding, ["relative_mu", "entropy"]).table
    assert fewer.table.filter(seed=2)["value"].to_list() == table["value"].to_list()
    done.clear()
    sweep(SPEC, tmp_path / "run", workers=1, progress=lambda *count: done.append(count))
    assert done == [(CELLS, CELLS)]
    same(alone.run, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "workers"), [(1, 1), (12, 2)])
def test_a_killed_sweep_resumes_to_the_same_bits(kills: int, workers: int, alone: Sweep, tmp_path: Path) -> None:
    rng = random.Random(kills)
    command = [sys.executable, "-m", "tests.engine.swept", str(tmp_path / "run"), str(workers)]
    for _ in range(kills):
        process = subprocess.Popen(command, start_new_session=True)
        kept = tmp_path / "run" / "kept" / "journal.jsonl"
        seen = kept.read_text().count("\n") if kept.exists() else 0
        aim, patience = seen + rng.randrange(1, 4), time.monotonic() + 120
        while process.poll() is None and time.monotonic() < patience:
            if kept.exists() and kept.read_text().count("\n") >= aim:
                break
            time.sleep(0.02 * rng.random())
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    swept(tmp_path / "run", workers=1)
    same(alone.run, tmp_path / "run")


@pytest.mark.slow
def test_what_changed_and_what_was_lacking_is_measured_again(tmp_path: Path) -> None:
    text, arch, model = tmp_path / "text.txt", tmp_path / "mine.json", tmp_path / "model"
    cells = [{"model": str(arch), "text": str(text)}, {"model": str(model)}]
    spec = {"metrics": "mu", "all": {"samples": 1, "tokens": 4}, "list": cells}
    arch.write_text(json.dumps({"layers": 2, "width": 8, "heads": 2}))
    text.write_text("one two three")
    before = sweep(spec, tmp_path / "run", workers=1)
    assert before.failed["cell"].to_list() == [1]
    text.write_text("four five six")
    fresh("bert-tiny").variant(layers=1).save(model)
    after = sweep(spec, tmp_path / "run", workers=1)
    assert after.failed.is_empty() and after.table["cell"].to_list() == [0, 0, 0, 1, 1]
    net = fresh(Architecture(layers=2, width=8, heads=2))
    for words, result in (("one two three", before), ("four five six", after)):
        table = measure(net, *net.encode([words], 4), "mu").table
        assert result.table.filter(cell=0)["value"].to_list() == table["value"].to_list()


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Workers do not run the script again, as those of `multiprocessing` would; threads stay as they were."""
    script = tmp_path / "study.py"
    script.write_text(
        "import rankscope, torch\n"
        "torch.set_num_threads(2)\n"
        "spec = {'metrics': 'mu', 'all': {'model': 'bert-tiny', 'samples': 1, 'tokens': 4}}\n"
        "print(len(rankscope.sweep(spec, 'run', workers=2).table), torch.get_num_threads())\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "3 2\n" and not list((tmp_path / "run").glob(".shared*"))


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"on": "spark"}, "on"), ({"on": "ray:localhost:1"}, "on"), ({"workers": 0}, "workers"),
        ({"threads": 0}, "threads"), ({"gpus_per_cell": -1.0}, "gpus_per_cell"),
        ({"gpus_per_cell": 1000.0}, "gpus_per_cell"), ({"cores": 2}, "cores"),
    ],
)  # fmt: skip
def test_a_sweep_that_has_nowhere_to_run_writes_nothing(options: dict[str, Any], subject: str, tmp_path: Path) -> None:
    with raises(SweepError, subject=subject):
        sweep({"grid": {"skip": 1.0}}, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with raises(SweepError, subject="text"):
        sweep({"all": {"text": str(tmp_path / "none.txt")}}, tmp_path)


@pytest.mark.slow
def test_without_the_extra_it_says_the_line_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text("[grid]\nskip = 1.0\n")
    code = f"import sys; sys.modules['ray'] = None; {COMMAND[-1]}"
    command = [*COMMAND[:-1], code, "sweep", "study.toml", "--on", "ray"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.strip().endswith("pip install 'rankscope[ray]'")
    assert not (tmp_path / "runs").exists()


def test_a_factor_of_several_kinds_is_a_word() -> None:
    cells: list[dict[str, Any]] = [
        {"mask": "causal", "seed": 3},
        {"skip": 1, "norm": True},
        {"skip": 0.5, "norm": "no"},
        {"parallel": False},
    ]
    frame = factors_frame(Spec(tuple(map(checked, cells)), SweepOptions()))
    kinds = {"skip": pl.Float64, "mask": pl.String, "norm": pl.String, "seed": pl.Int64, "parallel": pl.Boolean}
    assert {name: frame.schema[name] for name in kinds} == kinds
    assert frame["skip"].to_list() == [None, 1.0, 0.5, None] and frame["norm"].to_list() == [None, "True", "no", None]
