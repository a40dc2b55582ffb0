"""Rows of attention in blocks, against the softmax of all scores at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rankscope.nets import Architecture
from rankscope.nets.rows import AttentionRows
from tests.builders import normal

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
