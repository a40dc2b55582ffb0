"""Deviation arithmetic against hundreds of digits, part by part and in every combination."""

import itertools
import random
from typing import Any

import mpmath as mp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import awake, normal, thinned
from tests.deviation.reference import Network, Rows, log10_residual

DIGITS = 400
WITHIN = 1e-10


class Rounded(Network):
    """The same network, every entry of each state moved by up to 1e-16 of the most that its tokens differ by.

    R loses as much when it is rounded: of clusters of tokens far apart, what differs within them."""

    def layer(self, index: int, X: Rows) -> Rows:
        draw = random.Random(index)
        spread = max(max(column) - min(column) for column in zip(*X, strict=True))
        moved = [[u + spread * mp.mpf(draw.uniform(-1e-16, 1e-16)) for u in row] for row in X]
        return super().layer(index, moved)


def compare(arch: Architecture, seed: int, scale: float = 1.0, sure: bool = True) -> float:
    """log10 of the residual at every layer, within 1e-10; answers with the smallest log10 met.

    What misses that may be off by a thousand times as much as the exact answer moves when states are rounded,
    by 1e-6 at most, or it is marked; where the comparison is `sure`, nothing is."""
    net = awake(arch, seed)
    X = scale * normal(1, 4, arch.width, seed=seed + 1)
    lowest = 0.0
    with mp.workdps(DIGITS):
        exact = [log10_residual(state) for state in Network(net).states(X[0])]
    profile = measure(net, X, metrics="residual")
    logs, marks = (profile.curve("residual", each)[0].tolist() for each in ("log10", "below_floor"))
    for layer, (mine, marked, true) in enumerate(zip(logs, marks, exact, strict=True)):
        assert not (sure and marked), (layer, arch)
        if true is None or true < -0.8 * DIGITS:
            # Exactly equal, or beyond the digits of the reference.
            assert mine < -0.8 * DIGITS or marked
            continue
        error, allowed = abs(mine - float(true)), WITHIN * max(1.0, abs(float(true)) / 100)
        if error >= allowed and not marked:
            with mp.workdps(DIGITS):
                allowed += 1000 * abs(log10_residual(Rounded(net).states(X[0])[layer]) - true)
            assert error < min(allowed, 1e-6), (layer, arch)
        lowest = min(lowest, float(true))
    return lowest


NORMS = [("none", "post"), *itertools.product(("layer", "rms", "scale"), ("pre", "post", "sandwich"))]
MLPS: tuple[Any, ...] = ("plain", "gated", "none")
SKIPS = (0.0, 0.5, 1.0)
MASKS = ("complete", "causal", "window:1")
POSITIONS = ("none", "absolute", "relative", "rotary", "bias", "alibi")
SMALL: dict[str, Any] = {"layers": 3, "width": 4, "heads": 2, "head_width": 2, "mlp_width": 8, "length": 8,
                         "bias_buckets": 8, "bias_reach": 6}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("norm", "place"), NORMS)
def test_every_combination(norm: Any, place: Any, mask: str, positions: Any) -> None:
    """Norm kind and place, MLP kind, skip weight, mask and position scheme: all 1620."""
    activations = itertools.cycle(("gelu", "silu", "gelu_tanh", "quick_gelu", "tanh", "relu"))
    for seed, (mlp, skip) in enumerate(itertools.product(MLPS, SKIPS)):
        compare(
            Architecture(**SMALL, norm=norm, norm_place=place, mask=mask, positions=positions, mlp=mlp,
                         attention_skip=skip, mlp_skip=skip, activation=next(activations)),
            seed,
        )  # fmt: skip


@given(
    st.fixed_dictionaries({
        "norm": st.sampled_from(["layer", "rms", "scale", "none"]),
        "norm_place": st.sampled_from(["pre", "post", "sandwich"]),
        "mask": st.sampled_from(["complete", "causal", "window:1", "edges:0>1,0>2,0>3"]),
        "positions": st.sampled_from(POSITIONS),
        "kernel": st.sampled_from(["softmax", "gaussian", "uniform"]),
        "mlp": st.sampled_from(MLPS),
        "activation": st.sampled_from(["gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "identity"]),
        "attention_skip": st.sampled_from([0.0, 0.5, 1.0, -0.3]),
        "parallel": st.booleans(),
        "key_heads": st.sampled_from([1, 2]),
        "biases": st.sampled_from([True, False]),
        "shared": st.booleans(),
        "rotary_pairs": st.sampled_from(["half", "adjacent"]),
        "rotary_frequencies": st.sampled_from([(), ((0.7,),), ((1.0,), (0.01,))]),
        "rotary_scales": st.sampled_from([(), (1.2,), (1.3, 0.7)]),
        "score_cap": st.sampled_from([0.0, 0.3, 2.0, 50.0]),
        "query_norm": st.booleans(),
    }),
    st.integers(0, 10**6),
)  # fmt: skip
def test_random_networks(fields: dict[str, Any], seed: int) -> None:
    if fields["kernel"] == "gaussian":
        fields["score_cap"] = 0.0
    compare(Architecture(**SMALL, **fields), seed, sure=False)


@pytest.mark.parametrize(("positions", "kernel", "skip"), thinned(POSITIONS, ("softmax", "gaussian"), (0.0, 1.0)))
def test_normed_queries_and_layers_without_a_norm(positions: Any, kernel: str, skip: float) -> None:
    """A norm on queries and keys, angles by layer, and a first layer that reads its input as it is."""
    for seed, mask in enumerate(MASKS):
        arch = Architecture(
            **SMALL, norm="rms", norm_place="pre", mask=mask, positions=positions, kernel=kernel,
            attention_skip=skip, query_norm=True, norm_eps=1e-6, bare_layers=(0, 2),
            rotary_frequencies=((1.0,), (0.01,)),
        )  # fmt: skip
        compare(arch, seed)


@pytest.mark.parametrize(("positions", "cap"), [*itertools.product(POSITIONS, (0.1, 5.0))])
def test_capped_scores(positions: Any, cap: float) -> None:
    """Below the scores' size and above it, with biases in queries and keys, skips and none."""
    for seed, mask in enumerate(MASKS):
        skip = float((seed + POSITIONS.index(positions)) % 2)
        arch = Architecture(**SMALL, norm="rms", norm_place="pre", mask=mask, positions=positions,
                            attention_skip=skip, score_cap=cap, norm_eps=1e-6)  # fmt: skip
        compare(arch, seed)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_capped_pure_attention_far_below_floating_point(scale: float) -> None:
    """Six layers without skips, scores within the cap and far beyond it, where all of them are the cap's."""
    arch = Architecture(**{**SMALL, "layers": 6}, norm="none", mlp="none", attention_skip=0.0, score_cap=0.5)
    assert min(compare(arch, seed, scale, sure=False) for seed in range(4)) < -100


def test_a_rotation_with_a_scale_changes_lengths() -> None:
    """Which a gaussian kernel sees."""
    for seed, share in enumerate((1.0, 0.5)):
        arch = Architecture(**SMALL | {"head_width": 4}, norm="rms", kernel="gaussian", positions="rotary",
                            rotary_share=share, rotary_scales=(1.5, 0.6, 1.0))  # fmt: skip
        compare(arch, seed)


@pytest.mark.parametrize("norm", ["none", "layer", "rms", "scale"])
def test_pure_attention_far_below_floating_point(norm: Any) -> None:
    """Six layers without skips: the residual passes 1e-150 and still agrees."""
    arch = Architecture(**{**SMALL, "layers": 6}, norm=norm, mlp="none", attention_skip=0.0, biases=False)
    assert min(compare(arch, seed) for seed in range(4)) < -150


@pytest.mark.parametrize("mask", ["complete", "causal"])
@pytest.mark.parametrize("divisor", [0.05, 0.3])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_sharp_attention(mask: str, divisor: float, scale: float) -> None:
    """Rows that all look at one token: the rest of their weights is e^-30 and less, and still counts."""
    arch = Architecture(layers=3, width=4, heads=1, norm="none", mlp="none", attention_skip=0.0, mask=mask,
                        divisor=divisor)  # fmt: skip
    for seed in range(5):
        compare(
            arch, seed, scale, sure=scale == 1 and (mask, divisor) != ("causal", 0.05)
        )  # some of the others form clusters that R cannot hold


def test_differences_within_a_cluster_are_marked_when_they_are_lost() -> None:
    """Two pairs of tokens, each equal to 1e-19, far from one another: R cannot hold what differs within a
    pair, and when attention next looks at one pair alone the residual is unknown. It is said to be."""
    arch = Architecture(layers=3, width=4, heads=1, norm="none", mlp="none", attention_skip=0.0)
    net = Transformer.random(arch, seed=20, init="xavier")
    X = 10 * normal(1, 4, 4, seed=20)
    with mp.workdps(DIGITS):
        exact = [log10_residual(state) for state in Network(net).states(X[0])]
    profile = measure(net, X, metrics="residual")
    assert profile.curve("residual", "below_floor").tolist() == [[0, 0, 1, 1]]
    assert profile.curve("residual", "log10")[0, :2].tolist() == pytest.approx([float(e) for e in exact[:2]])


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3])
@pytest.mark.parametrize("norm", ["layer", "rms", "scale"])
def test_norms_at_any_scale_of_tokens(norm: Any, scale: float, eps: float) -> None:
    arch = Architecture(**SMALL, norm=norm, norm_place="pre", norm_eps=eps, attention_skip=0.5)
    for seed in range(2):
        compare(arch, seed, scale)
