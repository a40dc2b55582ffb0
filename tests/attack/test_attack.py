"""A small sample of the attack, and every network that once broke the promise."""

import math
from collections.abc import Sequence
from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.nets import Architecture, Mask, Transformer
from rankscope.profiles import measure
from tests.attack.__main__ import Line, missed, told
from tests.attack.networks import CAPPED, FEATURES, KINDS, Case, drawn
from tests.attack.verdicts import judged, line_of
from tests.builders import normal, one_head, thinned

BROKE: dict[str, tuple[Any, ...]] = {
    "a token that attention forgets beside one 1e20 times as long": ("mixed tokens", 18548),
    "a direction that the queries' matrix takes out": ("cancelling", 10761),
    "heads that say one direction, which the output takes out": ("projected", 10204),
    "columns 1e80 apart, under a norm": ("mixed columns", 11601),
    "rows that differ by a unit in the last place": ("cancelling", 36699),
    "a bias of positions beside scores of 1e40": ("mixed columns", 10017),
    "a gate of silu on tokens of 1e54 beside tokens of 1e198": ("llama", 257),
    "silu at -1000 without a skip, through a norm": ("saturated", 10598),
    "gelu at -50, through a norm": ("saturated", 13010),
    "a weight of e^-743 that one row alone sees": ("clustered, sharp", 16337),
    "scores that differ by 1e83 beside one of 1e109": ("mixed tokens", 90980),
    "queries that a norm makes equal but for rounding": ("mixed columns", 99045),
    "tokens that a norm makes equal but for rounding": ("mixed columns", 69345),
    "tokens of which one fades 70 decades before the others": ("saturated", 44330),
    "a step of 1e-321 in a tail": ("saturated", 513014),
    "a step that is small beside silu at 113": ("saturated", 511124),
    "rows that differ by roundings of scores of 684": ("clustered, sharp", 521543),
    "gelu's tanh form at -22": ("saturated", 546404),
    "a zero token that sees others at 1e-400 000, under a norm without eps": ("zero tokens, sharp", 103),
    "a zero token that takes the direction of others, from 1e-8000 on": ("zero tokens, sharp", 1019),
    "a head that adds 1e-665": ("zero tokens", 1015),
    "gates shut at e^-10000, under a norm without eps": ("olmo", 10, "gates"),
    "gates of heads that are open to zeros alone": ("cancelling", 901215, "gates"),
    "gates of heads beside zero tokens": ("zero tokens, sharp", 901129, "gates"),
    "rows that differ by 1e-1275, since scores are at their cap": ("equal", 900523, "caps"),
    "scores of both signs at their cap": ("mixed columns", 901689, "caps"),
    "scores at their cap, beside an infinite weight": ("broken weight", 900954, "caps"),
    "an infinity among the weights of queries": ("broken weight", 52, "remedies"),
    "an infinity in one head's queries, beside the other head's": ("broken weight", 716424),
    "an infinite key bias, which drops out of the softmax": ("broken weight", 703224),
    "outputs of 1e-8844394 before a relu": ("zero tokens, sharp", 715699),
    "rows of a differential pattern that sum to zero": ("mixed columns", 901869, "remedies"),
    "columns of Sinkhorn attention beside scores of 1e22": ("mixed tokens", 901748, "remedies"),
    "groups of experts whose best sigmoids are one": ("huge gains", 900172, "experts"),
    "groups of experts whose sums of two sigmoids are one": ("cancelling", 900225, "experts"),
    "experts that are cut off, of tokens that are close": ("close", 901662, "experts"),
    "tokens of 1e-576 that choose experts": ("positions", 900767, "experts"),
    "a pattern scaled about its average, of scores with a scale": ("clustered, sharp", 3100001, "remedies"),
    "shaped attention whose identity cancels, but for 1e-868": ("width one", 1310426, "remedies"),
    "a head shut to 1e-906 beside one at 1e-609": ("width one", 900026, "gates"),
    "rows that differ by units in the last place, as many in float64": ("width one, signs", 1002838),
    "the same in a second layer": ("width one, signs", 1006858),
    "the same under a norm, beside padding": ("width one, signs", 1011118),
    "a rank that rounding makes one less": ("clustered, sharp", 1004441),
    "rows that differ by 1e-482, beside scores of a gaussian kernel": ("zero tokens, sharp", 1700028),
    "a share of tokens of 1e-1e13": ("zero tokens, sharp", 1010509),
    "outputs of 1e-318, of which float64 has six digits": ("zero tokens, sharp", 2101579, "latents"),
    "a key of the memory that is zero but for rounding": ("width one, signs", 2101798, "cross"),
    "directions of 1e-23, read off rounded tokens": ("width one, signs", 2110498, "none", True),
    "lengths of 1e10 that a rounded rotation changes": ("positions", 2100677, "latents"),
    "what is left of one where a sigmoid lacks 1e-26920 of it": ("cancelling", 2100045, "remedies"),
    "a weight that lacks 1e-20 of one, in float64 and float32 alike": ("clustered, sharp", 3000011),
    "directions that are the same but for rounding, by chance in both passes": ("width one", 4002356),
    "outputs of heads that are zero in float64 and float32, behind shut gates": ("gates underflow", 5000273, "gates"),
    "a weight of an expert of 1e-51, beside that of the token that it is told by": ("cancelling", 7300065, "experts"),
    "a branch of 1e-225 before a norm without eps": ("gates underflow", 7001603),
    "an output of e^-897 beside another that a gate shuts to e^-1817": ("zero tokens", 5000298, "gates"),
}


def check(seeds: Sequence[int], kind: str, feature: str = "none", confirm: bool = False) -> None:
    """Nothing is wrong and nothing is refused."""
    for seed in seeds:
        found = judged(drawn(seed, kind, feature), confirm)
        assert not found.wrong and not found.refused, (kind, seed, feature, found.wrong, found.refused)
        assert found.counts["right"] + found.counts["marked"] > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_sample_of_every_kind(kind: str) -> None:
    place = list(KINDS).index(kind)
    check(((10**6, CAPPED)[place % 2] + place,), kind)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("feature", list(FEATURES)[1:])
def test_a_sample_of_every_feature(feature: str, number: int) -> None:
    place = list(FEATURES).index(feature)
    check((10**6 + number,), list(KINDS)[(4 * place + number) % len(KINDS)], feature)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_more_of_every_kind_and_feature(kind: str) -> None:
    check(range(10**6 + 1, 10**6 + 12), kind)
    for feature in list(FEATURES)[1:]:
        check(range(10**6 + 20, 10**6 + 23), kind, feature)
    check((10**6 + 30,), kind, confirm=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", thinned(list(BROKE)))
def test_networks_that_once_broke_it(name: str) -> None:
    kind, seed, *feature = BROKE[name]
    check((seed,), kind, *feature)


@pytest.mark.slow  # ten seconds of reference
def test_weights_of_1e_minus_6e219_beside_scores_of_1e386() -> None:
    check((1007885,), "llama")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("zero tokens, sharp", 187),
        ("sharp", 900213),  # tokens that differ by 1e-73 of their size
        ("zero tokens, sharp", 900349),  # rows that differ by 1e-2164
        ("zero tokens, sharp", 901939),
    ],
)
def test_doubled_precision_where_it_once_broke(kind: str, seed: int) -> None:
    check((seed,), kind, confirm=True)


def line(**fields: Any) -> Line:
    """A line of the file of verdicts."""
    nothing = {"wrong": [], "needless": {}, "refused": "", "left": False, "failed": "", "seconds": 0.1}
    return {"kind": "ordinary", "seed": 0, "counts": {"right": 999, "marked": 1}, **nothing, **fields}


def test_bars_are_missed_by_what_is_wrong_needless_or_refused() -> None:
    good = [line(seed=seed) for seed in range(1000)]
    assert missed(good) == [] and "100.00%" not in told(good)
    assert missed([*good[1:], line(kind="large", needless={"mu": 900})]) == []  # of harsh networks there may be many
    assert len(missed([line(needless={"mu": 1})])) == 1
    assert len(missed([*good[2:], line(refused="no"), line(refused="no")])) == 1
    assert len(missed([*good, line(wrong=[(1, None, "mu", 0.0, 1.0)])])) == 1
    assert len(missed([*good, line(failed="Traceback")])) == 1
    table = told([line(kind="sharp", wrong=[(1, None, "mu", 0.0, 1.0)], counts={"wrong": 1})])
    assert "sharp, seed 0: wrong (1, None, 'mu', 0.0, 1.0)" in table


def test_what_is_wrong_is_found_and_what_is_refused_is_counted() -> None:
    """A mask that is causal where many digits are taken, and complete where they are not."""
    mask = Mask("of two minds", lambda n: torch.ones(n, n).tril(0 if mp.mp.dps > 40 else n).bool())
    net, X = Transformer.random(Architecture(layers=2, width=4, heads=2, mask=mask), init="xavier"), normal(1, 4, 4)
    found = judged(Case("any", 0, net, X, torch.zeros(1, 4, dtype=torch.bool)))
    assert {layer for layer, *_ in found.wrong} == {1, 2} and found.counts["wrong"] == len(found.wrong) > 10
    assert found.counts["right"] >= 6 and not found.refused  # of layer 0
    lonely = Transformer.random(Architecture(layers=2, width=4, heads=2, cross_attention=True))
    found = judged(Case("any", 0, lonely, X, torch.zeros(1, 4, dtype=torch.bool)))
    assert found.refused.startswith("TokensError") and not found.counts


def test_what_takes_too_long_is_noted_and_left() -> None:
    found = line_of(10**6, "any", seconds=1e-3)
    assert found["left"] and not found["counts"] and not found["wrong"]
    assert line_of(10**6, "any")["counts"]["right"] > 0


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


@pytest.mark.slow
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
    tensors = Transformer.random(arch, seed=0, init="xavier").state_dict()
    tensors["layers.0.mlp.up.bias"] = torch.full_like(tensors["layers.0.mlp.up.bias"], 25.0)
    net = Transformer.from_weights(arch, tensors)
    found = measure(net, 0.1 * normal(1, 4, 4), metrics="mu").curve("mu", "log10")[0, 1]
    assert math.isfinite(found) and -25 < found < -20


def test_floating_point_is_right_within_its_floor() -> None:
    """Tokens of which 1e-9 is their own: float64 has seven digits of that and float32 none, as their floors say."""
    arch = Architecture(layers=3, width=4, heads=1, positions="rotary", norm="none", mlp="none", attention_skip=0.0)
    X = normal(1, 1, 4, seed=1) + 1e-9 * normal(1, 4, 4, seed=2)
    case = Case("any", 0, Transformer.random(arch, seed=2, init="xavier"), X, torch.zeros(1, 4, dtype=torch.bool))
    plain, coarse = (judged(case, arithmetic=each) for each in ("float64", "float32"))
    assert not plain.wrong and not coarse.wrong
    assert sum(plain.counts.values()) == sum(coarse.counts.values()) and plain.counts["right"] > plain.counts["marked"]
    assert coarse.counts["marked"] > plain.counts["marked"] > 0  # three layers are below what either holds
