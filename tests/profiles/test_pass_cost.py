"""What a pass costs in memory and time: what does not fit is refused, and what is counted is what is done."""

import re
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rankscope import Architecture, Transformer, measure
from rankscope.errors import TooLargeError
from rankscope.metrics import Metric
from rankscope.nets import Experts, free_memory
from rankscope.profiles import check_memory, in_words, seconds
from rankscope.profiles.pass_cost import COSTS, MATRICES, multiply_adds, pass_bytes, rate
from tests.raising import raises

CPU = torch.device("cpu")
WHOLE = Metric("trace", lambda P, padding=None: P.diagonal(dim1=-2, dim2=-1).sum(-1), of="attention")
"""What cannot be read off rows."""
ARCH = Architecture(layers=1, width=64, heads=2)


def test_a_pass_that_cannot_fit_names_what_would() -> None:
    free = free_memory(CPU) or pytest.skip("this machine does not say how much memory is free")
    matrix = MATRICES["deviation"] * 2 * 8
    alone, tokens = int((0.4 * free / matrix) ** 0.5), int((3 * free / matrix) ** 0.5)
    with raises(TooLargeError, subject="batch_size") as caught:
        check_memory(ARCH, 8, alone, 8, "deviation", CPU, streams=True)
    assert "batch_size=1 " in str(caught.value) or "batch_size=2 " in str(caught.value)
    with raises(TooLargeError, subject="tokens") as caught:
        check_memory(ARCH, 1, tokens, 1, "confirm", CPU, streams=True)
    assert "confirm=False" in str(caught.value)
    check_memory(ARCH, 1, tokens, 1, "rows", CPU, streams=True)  # which grows with the tokens alone
    with raises(TooLargeError, subject="tokens"):
        check_memory(ARCH, 1, free, 1, "rows", CPU, streams=True)
    with raises(TooLargeError, subject="tokens"):
        check_memory(ARCH, 1, tokens, 1, "float", CPU, streams=False)
    check_memory(ARCH, 1, 64, 16, "deviation", CPU, streams=True)


def test_measure_asks_before_it_starts() -> None:
    net = Transformer.random(Architecture(layers=1, width=2, heads=1))
    tokens = 2_000_000  # a matrix of 32 TB
    with raises(TooLargeError, subject="tokens"):
        measure(net, torch.zeros(1, tokens, 2), metrics=[WHOLE])
    with raises(TooLargeError, subject="tokens"):
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


@pytest.mark.parametrize(
    "arch",
    [
        Architecture(layers=2, width=8, heads=2),
        Architecture(layers=3, width=12, heads=4, key_heads=2, mlp="gated", mlp_width=20),
        Architecture(layers=1, width=8, heads=2, mlp="none"),
    ],
)
def test_products_are_those_that_torch_counts(arch: Architecture) -> None:
    net, X = Transformer.random(arch), torch.randn(3, 5, arch.width, dtype=torch.float64)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        net.run(X, attention=True)
    assert 2 * multiply_adds(arch, 3, 5) == counted.get_total_flops()


def test_a_token_meets_the_experts_that_it_is_sent_to() -> None:
    few, many = (
        Architecture(layers=1, width=8, heads=2, mlp="experts", experts=Experts(number=n, chosen=2, width=16))
        for n in (4, 8)
    )
    assert multiply_adds(many, 1, 10) - multiply_adds(few, 1, 10) == 10 * 8 * 4  # the router alone


def test_it_grows_with_what_is_asked() -> None:
    arch = Architecture(layers=2, width=8, heads=2)
    one, four = (seconds(arch, samples, 16, "float", torch.float64, CPU) for samples in (1, 4))
    assert 0 < one < four < 4 * one
    start = COSTS["cpu"]["float"].start * arch.layers
    assert seconds(arch, 4, 16, "float", torch.float64, CPU, batch_size=1) == pytest.approx(four + 3 * start)
    assert seconds(arch, 1, 16, "confirm", torch.float64, CPU) > one
    assert rate(torch.float64, CPU) == rate(torch.float64, CPU)


def test_blocks_of_rows_are_of_all_samples_together() -> None:
    one, four = (pass_bytes(ARCH, samples, 4096, "rows", torch.device("cuda")) for samples in (1, 4))
    assert one < four < 4 * one and one > pass_bytes(ARCH, 1, 4096, "rows", torch.device("cpu"))


def test_measure_tells_its_time_to_who_listens(caplog: pytest.LogCaptureFixture) -> None:
    net, X = Transformer.random(ARCH), torch.randn(3, 5, 64)
    measure(net, X, metrics=["mu"])
    assert not caplog.records
    with caplog.at_level("INFO", logger="rankscope"):
        measure(net, X, metrics=["mu"], variant="san")
    [record] = caplog.records
    assert record.getMessage() == "3 x 5 tokens, san: this will take about 0 seconds by estimate"


def test_it_is_said_in_words() -> None:
    assert [in_words(each) for each in (12.3, 180.0, 3 * 3600.0)] == [
        "about 12 seconds", "about 3 minutes", "about 3 hours",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["rows", "float"])
def test_as_many_tokens_as_are_named_fit_and_twice_as_many_do_not(kind: str) -> None:
    free = free_memory(CPU) or pytest.skip("this machine does not say how much memory is free")
    with raises(TooLargeError, subject="tokens") as caught:
        check_memory(ARCH, 1, free, 1, kind, CPU, streams=False)
    (words,) = re.findall(r"([\d,]+) tokens fit", str(caught.value))
    tokens = int(words.replace(",", ""))
    check_memory(ARCH, 1, tokens // 2, 1, kind, CPU, streams=False)  # others take and free memory meanwhile
    with raises(TooLargeError, subject="tokens"):
        check_memory(ARCH, 1, 2 * tokens, 1, kind, CPU, streams=False)
