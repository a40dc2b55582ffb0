"""Attention by blocks of rows: what comes of it is what the whole matrix gives, at any scale."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope import measure
from rankscope.deviation import DeviationStep, propagate
from rankscope.deviation.by_rows import PatternByRows
from rankscope.deviation.comparison import state_distance
from rankscope.errors import ArchitectureError
from rankscope.metrics import Reading, metric
from rankscope.metrics.log_readings import ScaledPattern
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure_together
from rankscope.profiles.pass_cost import pass_bytes
from tests.builders import normal
from tests.raising import raises
from tests.strategies import architectures

METRICS = ["relative_residual", "mu", "mean_cosine_gap", "max_cosine_gap", "head_mu", "entropy",
           "first_token_mass", "dobrushin", "second_singular_value", "row_sum_defect"]  # fmt: skip


def bytes_of(rows: int, net: Transformer, X: torch.Tensor) -> int:
    """The bytes of a block of so many rows."""
    return 8 * len(X) * net.arch.heads * X.shape[1] * rows


def by_blocks(net: Transformer, X: torch.Tensor, padding: torch.Tensor | None, metrics: Any, rows: int) -> pl.DataFrame:
    """What is measured in blocks of so many rows, with no pattern held whole."""
    options: dict[str, Any] = {"most_held": 0, "block_bytes": bytes_of(rows, net, X)}
    (profile,) = measure_together({"as given": (net, X, padding)}, metrics, **options)
    return profile.table


def both(
    net: Transformer, X: torch.Tensor, padding: torch.Tensor | None, rows: int = 3
) -> Iterator[tuple[DeviationStep, DeviationStep]]:
    """Every layer whole, and by rows."""
    block_bytes = bytes_of(rows, net, X)
    yield from zip(
        propagate(net, X, padding), propagate(net, X, padding, by_rows=True, block_bytes=block_bytes), strict=True
    )


def padded(before: int, n: int, after: int) -> torch.Tensor:
    """Of two samples the second has padding on both sides."""
    padding = torch.zeros(2, before + n + after, dtype=torch.bool)
    padding[1, :before], padding[1, before + n :] = True, True
    return padding


@given(architectures(), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2), st.integers(1, 3),
       st.sampled_from([1.0, 0.03]), st.sampled_from([0.0, 2.0]), st.integers(0, 999))  # fmt: skip
def test_states_are_those_of_the_whole_matrix(
    arch: Architecture, n: int, before: int, after: int, number: int, sharp: float, cap: float, seed: int
) -> None:
    """Tokens to 1e-12 of their size, and what they differ by to 1e-12 of its own."""
    arch = arch.replace(divisor=arch.divisor * sharp, query_norm=seed % 5 == 0)
    if arch.kernel in ("softmax", "sigmoid"):
        arch = arch.replace(kernel="softmax", score_cap=cap)
    net = Transformer.random(arch, seed=seed, init="xavier")
    padding = padded(before, n, after)
    X = normal(2, padding.shape[1], 8, seed=seed)
    for whole, rows in both(net, X, padding, number):
        expected = whole.state.tokens()
        assert torch.allclose(rows.state.tokens(), expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
        assert float(state_distance(whole.state, rows.state, deep=False).max()) <= 1e-12
        assert isinstance(rows.attention, PatternByRows) == (whole.attention is not None)


def test_pure_attention_at_any_depth() -> None:
    """Logs of residuals to the digits that they have, far below 1e-1000."""
    net = Transformer.random(Architecture(layers=9, width=32, heads=2), seed=0).variant("san")
    *_, (whole, rows) = both(net, 0.5 * normal(1, 13, 32), None)
    assert float(whole.state.R.log) < -1000 * 2.31
    assert float(rows.state.R.log) == pytest.approx(float(whole.state.R.log), rel=1e-13)
    assert float(state_distance(whole.state, rows.state).max()) <= 1e-12


NETWORKS: dict[str, dict[str, Any]] = {
    "causal, rotary": {"mask": "causal", "positions": "rotary"},
    "windows by layer, alibi": {"mask": "causal&window:3;complete", "positions": "alibi"},
    "one head silent": {"kept_heads": ((0,), (0, 1)), "head_gate": True},
    "pure attention": {"norm": "none", "mlp": "none", "attention_skip": 0.0},
    "capped, relative": {"score_cap": 2.0, "positions": "relative"},
    "bias, gaussian": {"positions": "bias", "kernel": "gaussian", "mask": "causal"},
    "uniform": {"kernel": "uniform", "mask": "strided"},
    "grouped, normed queries": {"heads": 4, "key_heads": 2, "query_norm": True},
    "latents": {"key_latent": 6, "query_latent": 5},
    "sharp": {"divisor": 0.05, "mask": "causal"},
    "cross-attention": {"cross_attention": True, "mask": "causal"},
}


PADDED = [(kind, padded(2, 8, 1)) for kind in NETWORKS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "padding"), [*PADDED, ("causal, rotary", None), ("pure attention", None)])
def test_readings_are_those_of_the_whole_matrix(kind: str, padding: torch.Tensor | None) -> None:
    """Metrics of tokens, heads and attention, and what the second pass marks of them."""
    net = Transformer.random(Architecture(**{"layers": 2, "width": 8, "heads": 2, **NETWORKS[kind]}), seed=1)
    X = normal(2, 11, 8, seed=2)
    if net.arch.cross_attention:
        net = net.with_memory(normal(2, 7, 8, seed=3))
    whole = measure(net, X, padding, METRICS).table
    rows = by_blocks(net, X, padding, METRICS, 3)
    assert rows["below_floor"].equals(whole["below_floor"])
    for one, other in zip(whole.iter_rows(named=True), rows.iter_rows(named=True), strict=True):
        assert [one[name] for name in ("sample", "layer", "head", "metric")] == [
            other[name] for name in ("sample", "layer", "head", "metric")
        ]
        if not one["below_floor"]:
            assert other["value"] == pytest.approx(one["value"], rel=1e-11, abs=1e-14, nan_ok=True)
            if one["metric"] not in ("second_singular_value", "row_sum_defect"):  # which have float64's floor
                assert other["log10"] == pytest.approx(one["log10"], rel=1e-11, abs=1e-11, nan_ok=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("divisor", [1e-20, 1e-30])
def test_what_rounding_decides_is_marked(divisor: float) -> None:
    """Tokens that are the same but for their last digits, and scores so steep that these choose among them:
    what 32 digits read otherwise is marked, by rows as in one piece."""
    arch = Architecture(layers=2, width=8, heads=2, divisor=divisor, attention_skip=0.0, mlp="none")
    net, X = Transformer.random(arch, seed=3), normal(1, 9, 8)
    X[:, 5:] = X[:, :4] * (1 + 1e-15 * normal(1, 4, 8, seed=5))
    whole = measure(net, X, metrics=["mu", "entropy"]).table
    rows = by_blocks(net, X, None, ["mu", "entropy"], 2)
    sure = measure(net, X, metrics=["mu", "entropy"], confirm=True).table["log10"]
    wrong = [(each["log10"] - sure).abs() > 1e-6 * sure.abs() for each in (whole, rows)]
    assert all(each.sum() > 2 for each in wrong)
    assert whole["below_floor"].filter(wrong[0]).all() and rows["below_floor"].filter(wrong[1]).all()
    assert rows["below_floor"].equals(whole["below_floor"])


def test_a_metric_with_a_rule_of_its_own_keeps_the_matrix() -> None:
    def rule(P: ScaledPattern) -> Reading:
        trace = P.matrix().diagonal(dim1=-2, dim2=-1).sum(-1)
        return Reading.of(trace, torch.zeros_like(trace))

    mine = replace(metric("first_token_mass"), name="trace", rule=rule)
    net, X = Transformer.random(Architecture(layers=1, width=8, heads=2)), normal(1, 6, 8)
    whole = measure(net, X, metrics=[mine]).table
    assert by_blocks(net, X, None, [mine], 2).equals(whole)


PEAK = """
import pathlib, resource, torch
from rankscope import Architecture, Transformer, measure
torch.set_num_threads(1)
net = Transformer.random(Architecture(layers=2, width=64, heads=2, mask="causal"))
def peak():
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # What rusage says may be of the process that started this one.
    return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])
measure(net, torch.randn(1, 16, 64), metrics=["mu"])
before = peak()
measure(net, torch.randn(1, 8192, 64), metrics=["mu"])
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_of_long_contexts() -> None:
    """8,192 tokens in less than half of one attention matrix, the second pass included, and in what is told
    before."""
    rise = float(subprocess.check_output([sys.executable, "-c", PEAK]))
    rise *= 1 if sys.platform == "darwin" else 1024
    assert rise <= 2 * 8192**2 * 8 / 2
    arch = Architecture(layers=2, width=64, heads=2)
    assert rise <= 1.1 * pass_bytes(arch, 1, 8192, "rows", torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [({"kernel": "linear"}, None), ({"kernel": "sinkhorn:1"}, None), ({}, "logn"), ({}, "centred"), ({}, "contranorm")],
)
def test_networks_without_rows_one_by_one_are_refused(fields: dict[str, Any], remedy: str | None) -> None:
    net = Transformer.random(Architecture(layers=1, width=8, heads=2, **fields))
    net = net if remedy is None else net.with_remedy(remedy)
    assert len(list(propagate(net, normal(1, 4, 8)))) == 2
    with raises(ArchitectureError, "by_rows"):
        next(propagate(net, normal(1, 4, 8), by_rows=True))
