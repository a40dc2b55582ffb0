"""Shares with one layer in memory, held against the terms of all layers side by side and a graph of the whole."""

from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

from rankscope.depths.passes import LayerShares, TwoPasses
from rankscope.errors import ClosureError
from rankscope.nets import Architecture, Transformer, traverse
from rankscope.paths import FreezingRules, decompose
from tests.builders import awake

SIZE: dict[str, Any] = {"layers": 3, "width": 16, "heads": 4, "mlp_width": 24}
KINDS: dict[str, dict[str, Any]] = {
    "pre": {"norm_place": "pre", "final_norm": True},
    "post": {"norm_place": "post"},
    "sandwich": {"norm_place": "sandwich", "norm": "rms"},
    "output": {"norm_place": "output", "norm": "rms"},
    "parallel": {"parallel": True},
    "attention alone": {"mlp": "none", "norm": "none"},
    "grouped and gated": {"key_heads": 2, "mlp": "gated", "mask": "causal"},
    "some heads": {"kept_heads": ((0, 1), (2,), (0, 3))},
    "no skips": {"attention_skip": 0.0, "mlp_skip": 0.5},
}


def shares(net: Transformer, X: Tensor, padding: Tensor) -> tuple[dict[int, tuple[LayerShares, LayerShares]], float]:
    X, valid, _ = net.prepared(X, padding)
    passes = TwoPasses(net, X, valid)
    for block in net.blocks:
        rules = FreezingRules(net.arch, passes.settings)
        after = traverse(block, rules, X).state * valid[..., None]
        passes.forward(rules.layers[block.index], X)
        X = after
    return {layer: both for layer, *both in passes.back(X)}, passes.closure


def padded() -> tuple[Tensor, Tensor]:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, :2] = True
    return torch.randn(2, 6, 16, dtype=torch.float64), padding


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_mlps_have_the_shares_of_by_head_and_by_layer(kind: str) -> None:
    net = awake(Architecture(**SIZE, **KINDS[kind]))
    X, padding = padded()
    found, closure = shares(net, X, padding)
    whole = decompose(net, X, padding)
    heads, layers = whole.by_head(), whole.by_layer()
    assert closure < 1e-12 and set(found) == {1, 2, 3}
    for layer, (of_output, of_residual) in found.items():
        mine = heads.filter(pl.col("layer") == layer).sort("sample", "head")
        for column, part in (("share", of_output), ("residual_share", of_residual)):
            expected = torch.tensor(mine[column].to_list(), dtype=torch.float64).view(2, 4)
            torch.testing.assert_close(part.heads.sum(0), expected, rtol=1e-9, atol=1e-12)
            mlp = layers.filter(pl.col("layer") == layer, pl.col("part") == "mlp").sort("sample")[column].to_list()
            expected = torch.tensor(mlp or [0.0, 0.0], dtype=torch.float64)
            torch.testing.assert_close(part.mlp.sum(0), expected, rtol=1e-9, atol=1e-12)


def test_a_residual_that_is_rounding_has_no_shares() -> None:
    net = Transformer.random(Architecture(**SIZE))
    X = torch.randn(1, 1, 16, dtype=torch.float64).expand(2, 6, 16).clone()
    found, _ = shares(net, X, torch.zeros(2, 6, dtype=torch.bool))
    for of_output, of_residual in found.values():
        assert bool(of_output.layer.isfinite().all())
        assert all(bool(part.isnan().all()) for part in of_residual)


def test_terms_that_do_not_add_up_are_refused() -> None:
    net = Transformer.random(Architecture(**SIZE))
    X, valid, _ = net.prepared(padded()[0], None)
    with pytest.raises(ClosureError, match="must add up"):
        next(TwoPasses(net, X, valid).back(X + 1))
