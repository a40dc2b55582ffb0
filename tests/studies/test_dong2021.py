"""Studies of the 2021 paper, at sizes that tests can afford."""

import math
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
import torch

from rankscope.metrics import relative_residual
from rankscope.nets import Architecture, Transformer
from rankscope.studies import Setup, chosen, reproduce
from rankscope.studies.dong2021 import fig2, networks, rate
from rankscope.studies.dong2021.networks import Subject


def test_path_lengths_agree_with_all_that_was_published(tmp_path: Path) -> None:
    (study,) = chosen("dong2021", "lengths")
    found = reproduce(study, Setup(folder=tmp_path))
    assert len(found.comparisons) == 8 and all(each.agrees for each in found.comparisons)
    shares = found.tables["lengths"].group_by("architecture").agg(pl.col("share").sum())
    assert shares["share"].to_list() == pytest.approx([1.0] * 7)


def subject(family: str) -> Subject:
    arch = Architecture(layers=3, width=16, heads=2, shared=family == "albert", mlp_width=32)
    X = torch.randn(2, 6, 16, dtype=torch.float64)
    return Subject("small", family, False, Transformer.random(arch), X, torch.zeros(2, 6).bool(), "noise")


def test_no_mlp_in_albert_leaves_the_activation_alone() -> None:
    """norm(gelu(a) + a), a = norm(X + attention), as the published code computes it."""
    each = subject("albert")
    net = networks.published_variant(each, "san+skip")
    X = each.X
    layer = each.net.weights.layers[0]
    state = each.net.variant(mlp=False, layers=1).run(X).output  # norm(X + attention)
    expected = torch.nn.functional.layer_norm(
        torch.nn.functional.gelu(state) + state, (16,), layer.mlp_norm.gain, layer.mlp_norm.bias, 1e-12
    )
    torch.testing.assert_close(net.run(X).states[1], expected)
    bare = networks.published_variant(each, "san")
    assert bare.arch.attention_skip == 0.0 and bare.arch.mlp_skip == 1.0


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_figure_2_measures_every_curve_in_both_readings(family: str) -> None:
    each = subject(family)
    table = fig2._curves(each, seed=0)
    seen = table.select("mode", "curve", "arithmetic").unique()
    assert len(seen) == 2 * (4 + 3)
    whole = table.filter(mode="published", curve="transformer", arithmetic="float32")
    states = each.net.run(each.X).states
    by_hand = torch.stack([relative_residual(state) for state in states], 1)  # [excerpt, layer]
    singles = whole.sort("excerpt", "layer")["value"].to_list()
    assert singles == pytest.approx(by_hand.flatten().tolist(), rel=1e-4)
    assert fig2._by_layer(whole) == pytest.approx(by_hand.mean(0).tolist(), rel=1e-4)
    san = table.filter(mode="defined", curve="san", arithmetic="deviation").sort("layer")
    assert san["log10"][-1] < -6 < min(whole["log10"].to_list())


def test_words_become_ids_that_repeat_where_words_do() -> None:
    (ids,) = networks.hashed(["the whale and the sea and the whale"], 30000, 128)
    assert ids[0] == 101 and ids[-1] == 102
    words = ids[1:-1].tolist()
    assert words[0] == words[3] == words[6] and words[1] == words[7] and len(set(words)) == 4
    assert min(words) >= 1000 and max(words) < 30000


def test_the_rate_is_three_and_small_tokens_prove_it() -> None:
    law = rate._law("bert-tiny", 8)
    usual = law.filter(size="usual", theorem="dobrushin").sort("layer")["log10_measured"].to_list()
    assert rate.slopes(usual)[-1] == pytest.approx(3.0, abs=1e-3)
    small = law.filter(size="small", theorem="dong2021-2.3").sort("layer")
    assert small["met"].all() and not small["vacuous"][-1]
    # base r^2 = 0.1: the bound's log is 3^l (log r + log base / 2) - log base / 2.
    logs = small["log10_bound"].to_list()
    assert all(after < 3 * before + 2 * math.log10(1e3) for before, after in pairwise(logs))
    assert rate.slopes(logs)[-1] == pytest.approx(3.0, abs=1e-2)
