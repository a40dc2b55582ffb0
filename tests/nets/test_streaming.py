"""Long contexts: what is read a block of rows at a time is what is read off the whole matrix."""

from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

from rankscope import Architecture, Transformer, measure
from rankscope.metrics import Metric
from rankscope.nets.streaming import AttentionRows
from rankscope.profiles import Profile, measure_together
from tests.builders import normal

METRICS = ["relative_residual", "mu", "entropy", "first_token_mass", "row_sum_defect", "head_mu", "dobrushin",
           "second_singular_value", "spectral_gap"]  # fmt: skip
NETWORKS: dict[str, dict[str, Any]] = {
    "causal, rotary": {"mask": "causal", "positions": "rotary"},
    "windows by layer": {"mask": "causal&window:3;complete"},
    "longformer, one head silent": {"mask": "longformer:2:1", "kept_heads": ((0,), (0, 1))},
    "gaussian": {"kernel": "gaussian"},
    "sigmoid": {"kernel": "sigmoid"},
    "linear": {"kernel": "linear", "mask": "causal"},
    "uniform": {"kernel": "uniform", "mask": "strided"},
    "capped": {"score_cap": 5.0, "mask": "causal"},
    "sharp": {"divisor": 0.01, "mask": "causal"},
    "alibi": {"positions": "alibi", "mask": "causal"},
    "bias by offset": {"positions": "bias", "bias_buckets": 8, "bias_reach": 6},
    "capped, bias of those behind": {"positions": "bias", "bias_ahead": False, "score_cap": 2.0},
    "gaussian, alibi": {"kernel": "gaussian", "positions": "alibi"},
    "sigmoid, alibi": {"kernel": "sigmoid", "positions": "alibi"},
    "relative": {"positions": "relative", "norm": "layer"},
    "cross-attention": {"cross_attention": True, "mask": "causal"},
    "grouped": {"heads": 4, "key_heads": 2, "head_gate": True},
}


def streamed(
    net: Transformer, X: torch.Tensor, padding: torch.Tensor | None, metrics: Sequence[str | Metric], rows: int = 3
) -> Profile:
    """What is measured in blocks of so many rows, with no pattern held whole."""
    options: dict[str, Any] = {"most_held": 0, "block_bytes": 8 * len(X) * X.shape[1] * rows}
    (profile,) = measure_together({"as given": (net, X, padding)}, metrics, "float64", **options)
    return profile


def both(
    net: Transformer, X: torch.Tensor, padding: torch.Tensor | None, metrics: Sequence[str | Metric] = METRICS
) -> tuple[pl.DataFrame, pl.DataFrame]:
    return measure(net, X, padding, metrics, "float64").table, streamed(net, X, padding, metrics).table


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "padded"), [*((kind, True) for kind in NETWORKS), ("causal, rotary", False)])
def test_rows_give_what_the_matrix_gives(kind: str, padded: bool) -> None:
    torch.manual_seed(0)
    net = Transformer.random(Architecture(**{"layers": 2, "width": 8, "heads": 2, **NETWORKS[kind]}))
    X = torch.randn(3, 11, 8, dtype=torch.float64)
    if net.arch.cross_attention:
        M, hidden = torch.randn(3, 7, 8, dtype=torch.float64), torch.zeros(3, 7, dtype=torch.bool)
        hidden[1, 4:] = padded
        net = net.with_memory(M, hidden)
    padding = torch.zeros(3, 11, dtype=torch.bool)
    padding[0, :4] = padding[1, 9:] = padded
    whole, rows = both(net, X, padding)
    assert whole.drop("value", "log10", "floor").equals(rows.drop("value", "log10", "floor"))
    for one, other in zip(whole["value"], rows["value"], strict=True):
        assert other == pytest.approx(one, rel=1e-12, abs=1e-13, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rotary", "alibi"])
@pytest.mark.parametrize("mask", ["causal", "complete", "causal&window:64"])
def test_a_thousand_tokens(mask: str, positions: Any) -> None:
    torch.manual_seed(0)
    arch = Architecture(layers=2, width=64, heads=2, mask=mask, positions=positions)
    net, X = Transformer.random(arch), torch.randn(1, 1024, 64, dtype=torch.float64)
    whole = measure(net, X, None, METRICS, "float64").table
    rows = streamed(net, X, None, METRICS, rows=512).table
    for name, one, other in zip(whole["metric"], whole["value"], rows["value"], strict=True):
        assert other == pytest.approx(one, rel=1e-12, abs=1e-12 if name == "row_sum_defect" else 0.0)


def test_tokens_alone_are_read_through_fused_attention() -> None:
    torch.manual_seed(0)
    for mask in ("complete", "causal"):
        net = Transformer.random(Architecture(layers=3, width=8, heads=2, mask=mask, kept_heads=((0,), (1,), (0, 1))))
        X = torch.randn(2, 13, 8, dtype=torch.float64)
        whole, rows = both(net, X, None, ["residual", "mu"])
        assert rows["value"].to_list() == pytest.approx(whole["value"].to_list(), rel=1e-12)


SAMPLES, HEADS, TOKENS, WIDTH = 3, 2, 7, 4


@pytest.mark.parametrize(("kernel", "cap"), [("softmax", 0.0), ("softmax", 1.5), ("gaussian", 0.0)])
@pytest.mark.parametrize("ndim", [0, 3, 4])
@pytest.mark.parametrize("seen", ["all", "behind", "some"])
def test_a_block_is_a_part_of_the_whole_softmax(kernel: str, cap: float, ndim: int, seen: str) -> None:
    """Of some samples, some heads and some rows; positions add the same to all samples, or to each its own."""
    arch = Architecture(layers=1, width=8, heads=HEADS, score_cap=cap, kernel=kernel)
    q, k = (3 * normal(SAMPLES, HEADS, TOKENS, WIDTH, seed=seed) for seed in (1, 2))
    bias = normal(*(SAMPLES, HEADS, TOKENS, TOKENS)[4 - ndim :], seed=3) if ndim else None
    hidden = torch.zeros(SAMPLES, 1, TOKENS, TOKENS, dtype=torch.bool)
    if seen == "behind":
        hidden = hidden | torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    elif seen == "some":
        hidden[1, :, :, 4:] = hidden[2, :, 3, :] = True  # padding, and a row that sees nothing
    scores = q @ k.mT
    if kernel == "gaussian":
        scores = -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / 2
    scores = scores / arch.divisor + (0.0 if bias is None else bias)
    scores = cap * (scores / cap).tanh() if cap else scores
    whole = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    added: Callable[[slice, int, int], Tensor] | None = None
    if bias is not None:
        added = lambda heads, start, stop: bias[..., heads, start:stop, :]  # noqa: E731
    visible = (lambda start, stop: ~hidden[:, :, start:stop]) if seen == "some" else None
    rows = AttentionRows(arch, q, k, visible, seen == "behind", added)
    for samples, heads, start, stop in (
        (slice(0, 3), slice(0, 2), 0, 7), (slice(1, 3), slice(1, 2), 2, 5), (slice(2, 3), slice(0, 2), 3, 4),
    ):  # fmt: skip
        true = whole[samples, heads, start:stop]
        found = rows.pattern(samples, heads, start, stop)
        left = true[..., found.shape[-1] :]
        assert found.shape[-1] == (stop if seen == "behind" else TOKENS) and not bool(left.any())
        torch.testing.assert_close(found, true[..., : found.shape[-1]], rtol=1e-12, atol=1e-15)
        entropy = rows.softmaxed(samples, heads, start, stop, entropy=True).entropy
        torch.testing.assert_close(entropy, torch.special.entr(true).sum(-1), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(rows.whole_rows(1, 1, 2, 6), whole[1, 1, 2:6], rtol=1e-12, atol=1e-15)
