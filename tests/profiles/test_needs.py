"""What does not fit is refused before it starts, and the sentence says what would."""

import subprocess
import sys

import pytest
import torch

from rankscope import Architecture, Transformer, measure
from rankscope.errors import TooLargeError
from rankscope.metrics import Metric
from rankscope.nets.devices import free_memory
from rankscope.profiles.pass_cost import MATRICES, check_memory

CPU = torch.device("cpu")
WHOLE = Metric("trace", lambda P, padding=None: P.diagonal(dim1=-2, dim2=-1).sum(-1), of="attention")
"""What cannot be read off rows."""
ARCH = Architecture(layers=1, width=64, heads=2)


def test_a_pass_that_cannot_fit_names_what_would() -> None:
    free = free_memory(CPU)
    if free is None:
        pytest.skip("this machine does not say how much memory is free")
    matrix = MATRICES["deviation"] * 2 * 8
    alone, tokens = int((0.4 * free / matrix) ** 0.5), int((3 * free / matrix) ** 0.5)
    with pytest.raises(TooLargeError, match=r"needs about .* free: batch=[12] fits"):
        check_memory(ARCH, 8, alone, 8, "deviation", CPU, streams=True)
    with pytest.raises(TooLargeError, match="confirm=False reads long contexts"):
        check_memory(ARCH, 1, tokens, 1, "confirm", CPU, streams=True)
    check_memory(ARCH, 1, tokens, 1, "rows", CPU, streams=True)  # which grows with the tokens alone
    with pytest.raises(TooLargeError, match="deviation arithmetic .* tokens fit$"):
        check_memory(ARCH, 1, free, 1, "rows", CPU, streams=True)
    with pytest.raises(TooLargeError, match="tokens fit$"):
        check_memory(ARCH, 1, tokens, 1, "float", CPU, streams=False)
    check_memory(ARCH, 1, 64, 16, "deviation", CPU, streams=True)


def test_measure_asks_before_it_starts() -> None:
    net = Transformer.random(Architecture(layers=1, width=2, heads=1))
    tokens = 2_000_000  # a matrix of 32 TB
    with pytest.raises(TooLargeError, match="2,000,000 tokens in 1 heads"):
        measure(net, torch.zeros(1, tokens, 2), metrics=[WHOLE])
    with pytest.raises(TooLargeError, match="attention of 1 x 2,000,000"):
        measure(net, torch.zeros(1, tokens, 2), metrics=[WHOLE], arithmetic="float32")


PEAK = """
import pathlib, resource, torch
from rankscope import Architecture, Transformer, measure
torch.set_num_threads(1)
net = Transformer.random(Architecture(layers=1, width=64, heads=2, mask="causal"))
def peak():
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # What rusage says may be of the process that started this one.
    return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])
measure(net, torch.randn(1, 16, 64), metrics={metrics}, arithmetic="{arithmetic}")
before = peak()
measure(net, torch.randn(1, {tokens}, 64), metrics={metrics}, arithmetic="{arithmetic}")
print(peak() - before)
"""


def rise(arithmetic: str, tokens: int, metrics: list[str]) -> float:
    """Bytes by which the peak of a process of its own rises."""
    code = PEAK.format(arithmetic=arithmetic, tokens=tokens, metrics=metrics)
    unit = 1 if sys.platform == "darwin" else 1024
    return float(subprocess.check_output([sys.executable, "-c", code])) * unit


@pytest.mark.slow
@pytest.mark.parametrize(("arithmetic", "kind"), [("deviation", "deviation"), ("float64", "float")])
def test_what_is_told_is_what_is_needed(arithmetic: str, kind: str) -> None:
    metrics = ["mu"] if kind == "deviation" else ["mu", "dobrushin"]
    needed = rise(arithmetic, 2048, metrics) / (2 * 2048**2 * 8)
    assert MATRICES[kind] / 2 <= needed <= 1.1 * MATRICES[kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    "metrics", [["mu", "entropy", "first_token_mass"], ["dobrushin"], ["mean_abs_cosine", "min_cosine"]]
)
def test_memory_of_long_contexts_is_linear_in_tokens(metrics: list[str]) -> None:
    short, long = (rise("float32", tokens, metrics) for tokens in (4096, 8192))
    assert long <= 2.2 * short + 2**24
