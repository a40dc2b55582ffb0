"""A small sample of the attack, and every network that once broke the promise."""

import math

import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.attack.networks import CAPPED, KINDS, drawn
from tests.attack.verdicts import judged
from tests.builders import normal, one_head

BROKE = {
    "a token that attention forgets beside one 1e20 times as long": 18548,
    "a direction that the queries' matrix takes out": 10761,
    "heads that say one direction, which the output takes out": 10204,
    "columns 1e80 apart, under a norm": 11601,
    "rows that differ by a unit in the last place": 36699,
    "a bias of positions beside scores of 1e40": 10017,
    "a gate of silu on tokens of 1e54 beside tokens of 1e198": 257,
    "silu at -1000 without a skip, through a norm": 10598,
    "gelu at -50, through a norm": 13010,
    "a weight of e^-743 that one row alone sees": 16337,
    "scores that differ by 1e83 beside one of 1e109": 90980,
    "queries that a norm makes equal but for rounding": 99045,
    "tokens that a norm makes equal but for rounding": 69345,
    "tokens of which one fades 70 decades before the others": 44330,
    "a step of 1e-321 in a tail": 513014,
    "a step that is small beside silu at 113": 511124,
    "rows that differ by roundings of scores of 684": 521543,
    "gelu's tanh form at -22": 546404,
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_sample_of_every_kind(kind: str) -> None:
    for seed in (10**6, 10**6 + 1, 10**6 + 2, CAPPED, CAPPED + 1):
        found = judged(drawn(seed, kind))
        assert not found.wrong, (kind, seed, found.wrong)
        assert found.counts["right"] + found.counts["marked"] > 0


@pytest.mark.parametrize("name", list(BROKE))
def test_networks_that_once_broke_it(name: str) -> None:
    found = judged(drawn(BROKE[name]))
    assert not found.wrong, found.wrong


def test_ordinary_networks_are_not_marked() -> None:
    """Of 12 layers, width 32 and 24 tokens, as they start: nothing is in doubt."""
    for place in ("pre", "post"):
        arch = Architecture(layers=12, width=32, heads=4, norm_place=place)
        net, X = Transformer.random(arch, seed=1), normal(2, 24, 32, seed=2)
        ours, plain = (measure(net, X, arithmetic=each) for each in ("deviation", "float64"))
        assert not ours.table["below_floor"].any()
        assert float(ours.table["digits"].to_torch().min()) > 11  # as two arithmetics agree
        for name in ours.metrics:
            logs = (each.curve(name, "log10") for each in (ours, plain))
            torch.testing.assert_close(*logs, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_norm_free_llama_blocks_are_marked_where_rounding_decides() -> None:
    """16 layers at Xavier's scale: scores grow until their rounding decides who is looked at."""
    arch = Architecture(
        layers=16, width=32, heads=4, key_heads=2, norm="none", mlp="gated", activation="silu", mask="causal",
        positions="rotary", biases=False,
    )  # fmt: skip
    marked = 0
    for seed in (1, 4):
        net = Transformer.random(arch, seed=seed, init="xavier")
        X = normal(1, 8, 32, seed=seed)
        ours = measure(net, X, metrics="relative_mu")
        sure = measure(net, X, metrics="relative_mu", confirm=True)
        marks = ours.curve("relative_mu", "below_floor")[0] == 1
        settled = sure.curve("relative_mu", "below_floor")[0] == 0
        apart = (ours.curve("relative_mu", "log10") - sure.curve("relative_mu", "log10"))[0].abs()
        assert bool((apart[settled & ~marks] < 1e-6).all())
        marked += int(marks.any())
    assert marked > 0


def test_a_token_a_million_times_longer_is_read_as_float64_reads_it() -> None:
    told = 0
    for seed in range(6):
        for long in (1e6, 1e8):
            arch = Architecture(layers=3, width=8, heads=2, attention_skip=0.0, mlp="none", norm_place="post")
            net, X = Transformer.random(arch, seed=seed, init="xavier"), normal(1, 6, 8, seed=seed)
            X[0, 2] *= long
            ours, plain = (measure(net, X, metrics="relative_mu", arithmetic=each) for each in ("deviation", "float64"))
            apart = ours.curve("relative_mu", "log10") - plain.curve("relative_mu", "log10")
            sure = (plain.curve("relative_mu") > 1e-6) & (ours.curve("relative_mu", "below_floor") == 0)
            assert bool((apart[sure].abs() < 1e-6).all())
            told += int(sure.sum())
    assert told > 36  # of 48 readings


def test_a_matrix_that_takes_out_the_main_direction_is_marked_and_confirmed() -> None:
    """Tokens along u but for 1e-20 of it, and values without u: 16 digits hold nothing of what is left."""
    X = normal(1, 5, 4, seed=3)
    u = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    X = X[..., :1] * u + 1e-20 * X * (1 - u)
    turn = torch.linalg.qr(normal(4, 4, seed=4))[0]
    arch = Architecture(layers=1, width=4, heads=1, norm="none", mlp="none", attention_skip=0.0, biases=False)
    net = one_head(arch, value=turn.T @ torch.diag(1 - u), query=0.1 * turn, key=turn)
    found = measure(net, X @ turn, metrics="mu")
    assert found.curve("mu", "below_floor")[0, 1] == 1
    sure = measure(net, X @ turn, metrics="mu", confirm=True)
    assert sure.curve("mu", "below_floor")[0, 1] == 0 and sure.curve("mu", "digits")[0, 1] < 9


def test_columns_of_attention_and_ranks_are_marked_with_what_they_are_read_off() -> None:
    """Scores of 1e12 whose ties rounding decides: the tokens, and whom they look at."""
    arch = Architecture(layers=2, width=8, heads=2, divisor=1e-12, norm="none", mlp="none", attention_skip=0.0)
    marks = []
    for seed in range(8):
        net, X = Transformer.random(arch, seed=seed, init="xavier"), normal(1, 6, 8, seed=seed)
        X[0, 3] = X[0, 2] * (1 + 1e-15)
        table = measure(net, X, metrics=["mu", "dobrushin", "entropy", "affine_rank"]).table.filter(layer=2)
        marks += [table.filter(metric=each)["below_floor"].any() for each in ("mu", "dobrushin", "entropy")]
    assert any(marks)


def test_positions_beside_large_tokens_keep_their_digits() -> None:
    arch = Architecture(layers=1, width=4, heads=1, positions="absolute", length=8, norm="none", mlp="none")
    net = Transformer.random(arch, seed=2, init="xavier")
    table = net.weights.positions
    assert table is not None
    X = torch.full((1, 5, 4), 1e12, dtype=torch.float64)
    expected = (table[:5] - table[:5].mean(0)).norm()
    assert float(measure(net, X, metrics="mu").curve("mu")[0, 0]) == pytest.approx(float(expected), rel=1e-12)


def test_a_saturated_tanh_without_its_skip_has_a_residual() -> None:
    arch = Architecture(
        layers=1, width=4, heads=1, activation="tanh", mlp_skip=0.0, norm="none", attention_skip=1.0, mlp_width=4
    )
    tensors = Transformer.random(arch, seed=0, init="xavier").state()
    tensors["layers.0.mlp.up.bias"] = torch.full_like(tensors["layers.0.mlp.up.bias"], 25.0)
    net = Transformer.from_weights(arch, tensors)
    found = measure(net, 0.1 * normal(1, 4, 4), metrics="mu").curve("mu", "log10")[0, 1]
    assert math.isfinite(found) and -25 < found < -20
