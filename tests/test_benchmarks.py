"""Every benchmark at its smallest: it runs, and its rows are ratios. How large they are is `make bench`'s."""

import math
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks import __main__ as printed
from benchmarks import cutting, depth_card, device, growth, opening, peers, timing

ALONE = {"depth_card", "device", "growth", "lab", "peers", "shipped_models", "timing"}
"""Modules that `make bench` does not run: each has a command of its own, or none."""
HEAVY = {
    "certifying",
    "deviations",
    "exploring",
    "forecasting",
    "monitoring",
    "opening",
    "streaming",
    "sweeping",
    "watching",
}
"""They take seconds, or start servers, workers or a browser, or train: `make slow` runs these."""


def well_formed(rows: list[timing.Row]) -> None:
    assert rows
    for what, against, ratio in rows:
        assert what and against and math.isfinite(ratio) and ratio > 0, (what, against, ratio)


def test_every_module_is_run_or_stands_alone() -> None:
    modules = {path.stem for path in Path(benchmarks.__file__).parent.glob("[!_]*.py")}
    assert modules == {*printed.TITLES, *ALONE}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "module", [pytest.param(each, marks=[pytest.mark.slow] * (each in HEAVY)) for each in printed.TITLES]
)
def test_a_benchmark_gives_ratios(module: str) -> None:
    if module == "opening" and opening.chromium() is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with ThreadPoolExecutor(1) as alone:  # a browser's test may hold this thread's loop
        well_formed(alone.submit(printed.rows, module, small=True).result())


@pytest.mark.parametrize(("peer", "package"), [("lens", "transformer_lens"), ("nnsight", "nnsight")])
def test_a_peer_gives_ratios(peer: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} has an environment of its own: see benchmarks/peers.py")
    well_formed(peers.rows(peer, small=True))


@pytest.mark.slow  # twenty seconds: every small network, twice
def test_growth_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "memory_of", lambda point: dict.fromkeys(growth.CASES, 8.0 * point.tokens))
    monkeypatch.setattr(growth, "ROUNDS", 2)
    threads = torch.get_num_threads()
    try:
        table = growth.run("cpu", tmp_path, small=True)
    finally:
        torch.set_num_threads(threads)
    assert len(table) == len(list(growth.points("cpu", small=True))) * len(growth.CASES) * 2
    assert growth.exponents(table, "tokens", "deviation", "memory_mb") == pytest.approx([1.0, 1.0])
    assert growth.exponents(table, "width", "plain", "memory_mb") == pytest.approx([0.0, 0.0])
    growth.draw(tmp_path)
    assert (tmp_path / "growth_cpu.png").stat().st_size
    tables = (tmp_path / "growth_cpu.txt").read_text().split("\n\n")[1:]
    assert [len({line.count("|") for line in each.splitlines()}) for each in tables] == [1, 1, 1]


@pytest.mark.slow
def test_growth_of_memory_is_that_of_a_process_of_its_own() -> None:
    memory = growth.memory_of(growth.Point(1, 512, 32, 1))
    assert set(memory) == set(growth.CASES) and memory["plain"] > 512**2 * 8 / 2**20


def test_a_llama_is_measured_in_every_arithmetic() -> None:
    arch = device.LLAMA_7B.replace(layers=2, width=16, heads=2, mlp_width=24)
    assert device.LLAMA_7B.head_width == 128 and arch.mlp_width == 24
    lines = list(device.size_rows(arch, 2, 6, "cpu"))
    assert len(lines) == 2 * 9 and {line.count("|") for line in lines} == {7}
    assert not any("must" in line or "needs" in line for line in lines)  # none was refused


@pytest.mark.slow
def test_what_memory_rises_by_is_what_is_held() -> None:
    holding = "import torch; from benchmarks import timing; "
    holding += "timing.report_rise(lambda: torch.ones(1), lambda: torch.ones(2**24))"
    assert 60 < timing.rise_of_memory("-c", holding) < 80  # 64 MB, and what torch takes beside it


@pytest.mark.slow
def test_the_depth_card_of_a_streamed_llama_is_measured(tmp_path: Path) -> None:
    numbers = depth_card.write_llama(tmp_path, depth_card.Shape(2, 16, 24, 4, 2, 60))
    assert numbers == 60 * 16 + 16 + 2 * (16 * 16 * 2 + 16 * 8 * 2 + 16 * 24 * 3 + 2 * 16)
    seconds, peak, sentence = depth_card.measured(tmp_path, 8, "heads")
    assert seconds > 0 and peak > 0 and sentence is not None and "2 layers count as" in sentence


@pytest.mark.slow
def test_cuts_of_a_trained_network_resume_and_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "HELD", 8)
    monkeypatch.setattr(cutting, "CALIBRATION", 2)
    monkeypatch.setattr(cutting, "DRAWS", 2)
    cutting.train(tmp_path, "gpt-6", seeds=1, device="cpu", steps=2, width=8)
    cutting.run_cuts(tmp_path, "gpt-6", seeds=[0], device="cpu")
    rows = cutting.read_rows(tmp_path / "gpt-6.jsonl")
    assert len(rows) == len(cutting.KEEPS) * (12 + 3 + 2)  # greedy and one_shot of six, three exact, two random draws
    for row in rows:
        assert len(row["layers"]) == 6 - max(1, math.floor(6 * row["keep"] + 0.5)) and math.isfinite(row["loss"])
    exact = {row["keep"]: row["relative_error"] for row in rows if (row["by"], row["search"]) == ("error", "exact")}
    assert set(exact) == set(cutting.KEEPS)
    cutting.run_cuts(tmp_path, "gpt-6", seeds=[0], device="cpu")
    assert cutting.read_rows(tmp_path / "gpt-6.jsonl") == rows
    shown = cutting.report(tmp_path)
    assert "gpt-6: loss, whole" in shown and shown.count("| random | one_shot |") == 3


def test_ranks_agree_by_spearman() -> None:
    from scipy.stats import spearmanr

    a, b = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert cutting.spearman(a, b) == pytest.approx(spearmanr(a.numpy(), b.numpy()).statistic, rel=1e-12)
