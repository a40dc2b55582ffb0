"""Deviation arithmetic against float64 where float64 can see, and on its own where it cannot."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.deviation import Scaled, State, applies, finish, propagate
from rankscope.deviation.mlp import mlp
from rankscope.deviation.readings import read
from rankscope.deviation.scaled import LOWEST
from rankscope.deviation.state import ValidTokens
from rankscope.errors import ArchitectureError
from rankscope.metrics import metric
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import normal
from tests.raising import raises
from tests.strategies import architectures


def tokens(n: int, width: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return normal(batch, n, width, seed=seed)


@given(architectures(), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2), st.integers(0, 999))
def test_states_and_attention_equal_float64_where_that_can_see(
    arch: Architecture, n: int, before: int, after: int, seed: int
) -> None:
    """Any block, any padding: tokens and attention equal to 1e-10 of their size."""
    if arch.kernel == "sigmoid":
        arch = arch.replace(kernel="softmax")
    net = Transformer.random(arch, seed=seed, init="xavier")
    X = tokens(before + n + after, 8, batch=2, seed=seed)
    padding = torch.zeros(X.shape[:2], dtype=torch.bool)
    padding[1, :before], padding[1, before + n :] = True, True
    state = None
    for plain, step in zip(net.steps(X, padding), propagate(net, X, padding), strict=True):
        size = float(plain.state.abs().max())
        assert torch.allclose(step.state.tokens(), plain.state, rtol=0, atol=1e-10 * size)
        assert (plain.attention is None) == (step.attention is None) == (step.layer == 0)
        if plain.attention is not None and step.attention is not None:
            rows = ~padding[:, None, :, None]
            assert torch.allclose(step.attention.matrix() * rows, plain.attention * rows, atol=1e-10)
        state = step.state
    assert state is not None
    output, mine = net.run(X, padding).output, finish(net, state).tokens()
    assert torch.allclose(mine[~padding], output[~padding], rtol=0, atol=1e-9 * float(output.abs().max()))


@pytest.mark.parametrize(("seed", "heads"), [(0, 1), (1, 4)])
def test_pure_attention_cubes_its_residual(seed: int, heads: int) -> None:
    """Dong et al. 2021, Thm 2.3: log res grows by 3 a layer. Measured to layer 12, at 1e-100000."""
    arch = Architecture(layers=12, width=32, heads=heads)
    net = Transformer.random(arch, seed=seed, init="xavier").variant("san")
    log10 = measure(net, 0.5 * tokens(16, 32, seed=seed), metrics=["residual"]).curve("residual", "log10")[0]
    assert log10[2] < log10[1] < log10[0]
    ratio = log10[1:] / log10[:-1]
    assert abs(float(ratio[6]) - 3) < 0.02
    assert float((ratio[8:] - 3).abs().max()) < 0.005
    assert log10[12] < -1e4


@pytest.mark.parametrize(
    "change",
    [{"mask": "causal"}, {"mask": "window:2"}, {"mask": "unidirectional"}, {"positions": "alibi"},
     {"positions": "bias"}, {"positions": "relative"}],
)  # fmt: skip
def test_masks_and_relative_positions_make_the_fall_exponential(change: dict[str, Any]) -> None:
    """Wu et al. 2024, Thm 1: relative residual falls by a bounded factor a layer, and does not cube.

    The factor is bounded away from 0: over 40 layers its log varies, but does not grow."""
    arch = Architecture(layers=40, width=32, heads=2, **change)
    net = Transformer.random(arch, seed=1, init="xavier").variant("san")
    state = net.state()
    for name, tensor in state.items():
        if name.endswith(("bias_table", "content_bias", "position_bias")):
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
            state[name] = tensor + 0.5 * noise
    net = Transformer.from_weights(net.arch, state)
    log10 = measure(net, tokens(16, 32), metrics=["relative_residual"]).curve("relative_residual", "log10")[0]
    drop = log10[:-1] - log10[1:]
    assert float(drop[20:].mean()) > 0.01
    assert float(drop[20:].max()) < 4
    assert float(drop[30:].mean()) < 2 * float(drop[10:20].mean()) + 0.5
    assert float(log10[-1]) > -150


def test_skips_stop_the_collapse() -> None:
    arch = Architecture(layers=100, width=32, heads=2)
    X = tokens(16, 32)
    for name in ("san+skip", "san+norm+skip"):
        net = Transformer.random(arch, seed=1).variant(name)
        curve = measure(net, X, metrics=["relative_residual"]).curve("relative_residual")
        assert float(curve.min()) > 0.02


THOUSANDS = [
    ("causal", "san+skip", 8.0),
    *(pytest.param(mask, *each, marks=pytest.mark.slow) for mask in ("complete", "causal") for each in
      [("san", 8.0), ("san+mlp", 1.0), ("san+mlp", 8.0), ("san+norm", 1.0), ("san+skip+mlp", 8.0)]),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in
      [("complete", "san", 1.0), ("causal", "san", 1.0), ("complete", "san+skip", 8.0),
       ("complete", "transformer", 1.0), ("causal", "transformer", 1.0)]),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "name", "gain"), THOUSANDS)
def test_a_thousand_layers_stay_in_range(mask: str, name: str, gain: float) -> None:
    """Collapse to 10^(-10^299) or growth beyond 10^308: every number stays a number."""
    arch = Architecture(layers=4, width=8, heads=2, mask=mask, biases=False)
    net = Transformer.random(arch, seed=1, init="xavier").variant(name).variant(layers=1000)
    tensors = {k: gain * v if k.endswith("weight") else v for k, v in net.state().items()}
    net = Transformer.from_weights(net.arch, tensors)
    names = ["relative_residual", "mu", "mean_cosine_gap", "dobrushin", "residual_effective_rank"]
    for step in propagate(net, tokens(5, 8, batch=2)):
        for part in (step.state.x, step.state.R):
            assert bool(part.value.isfinite().all()) and bool(part.log.isfinite().all())
        if step.layer % 100 == 0:
            for reading in filter(None, (read(metric(each), step) for each in names)):
                assert not bool(reading.log10.isnan().any()) and not bool((reading.log10 == math.inf).any())
        # Tokens that differ at the start never become exactly equal, unless they fall through the lowest.
        assert bool(((step.state.R.largest() > 0) | (step.state.R.log <= LOWEST)).all())


def test_what_falls_through_the_lowest_scale_is_at_the_floor() -> None:
    net = Transformer.random(Architecture(layers=1, width=8, heads=1), init="xavier").variant("san")
    profile = measure(net.variant(layers=700), tokens(5, 8), metrics=["residual"], check=False)
    marked = profile.curve("residual", "below_floor")[0]
    assert marked[-1] == 1 and marked[300] == 0
    assert float(profile.curve("residual", "log10")[0, 300]) < -1e100


@pytest.mark.parametrize("name", ["san", "san+norm", "san+mlp", "transformer"])
def test_equal_tokens_stay_exactly_equal(name: str) -> None:
    net = Transformer.random(Architecture(layers=3, width=8, heads=2), init="xavier").variant(name)
    X = tokens(1, 8).expand(2, 6, 8).clone()
    profile = measure(net, X, metrics=["residual", "relative_mu", "mean_cosine_gap", "affine_rank"])
    for each in profile.metrics:
        assert not profile.curve(each).any()
        assert bool((profile.curve(each, "log10") == -math.inf).all())
        assert not profile.curve(each, "below_floor").any()


def test_positions_tell_equal_tokens_apart() -> None:
    arch = Architecture(layers=2, width=8, heads=2, positions="absolute")
    net = Transformer.random(arch, init="xavier")
    profile = measure(net, tokens(1, 8).expand(1, 6, 8), metrics=["residual"])
    assert bool((profile.curve("residual") > 0).all())


def test_one_token_only_padding_and_silent_heads() -> None:
    net = Transformer.random(Architecture(layers=3, width=8, heads=2), init="xavier")
    assert not measure(net, tokens(1, 8)).curve("residual").any()
    nothing = measure(net, tokens(4, 8), torch.ones(1, 4, dtype=torch.bool))
    assert bool(nothing.curve("residual").isnan().all())
    assert bool(nothing.curve("residual", "log10").isnan().all())
    state = {k: torch.zeros_like(v) if ".query." in k else v for k, v in net.state().items()}
    for silent in (net.variant(heads=[]), Transformer.from_weights(net.arch, state)):
        X = tokens(5, 8)
        for plain, step in zip(silent.steps(X), propagate(silent, X), strict=True):
            assert torch.allclose(step.state.tokens(), plain.state, atol=1e-12)
    # Zero queries without skips: one layer averages everything, exactly.
    san = Transformer.from_weights(net.arch, state).variant("san")
    assert measure(san, tokens(5, 8), metrics=["residual"]).curve("residual", "log10")[0, 1] == -math.inf


@settings(max_examples=8)
@given(st.floats(0.01, 3), st.integers(0, 99))
def test_metrics_agree_with_float64s_where_it_can_see(scale: float, seed: int) -> None:
    """Every metric but those of routing, on a transformer that does not collapse."""
    from rankscope.metrics import METRICS

    net = Transformer.random(Architecture(layers=2, width=8, heads=2, mask="causal"), seed=seed, init="xavier")
    X = scale * tokens(6, 8, batch=2, seed=seed)
    names = [name for name, each in METRICS.items() if each.of != "routing"]
    padding = torch.arange(6)[None] >= torch.tensor([[6], [4]])
    fine, plain = (measure(net, X, padding, names, a) for a in ("deviation", "float64"))
    for name in names:
        mine, theirs = fine.curve(name), plain.curve(name)
        size = theirs.nan_to_num(0).abs().clamp(min=1e-6)
        assert torch.allclose(mine / size, theirs / size, rtol=1e-7, atol=1e-7, equal_nan=True), name


@pytest.mark.parametrize("name", ["residual@argmin", "relative_residual@argmin", "max_residual@argmin"])
def test_other_centres_work_at_any_scale(name: str) -> None:
    net = Transformer.random(Architecture(layers=5, width=6, heads=1), init="xavier").variant("san")
    X = tokens(4, 6)
    log10 = measure(net, X, metrics=[name]).curve(name, "log10")[0]
    mean = measure(net, X, metrics=[name.partition("@")[0]]).curve(name.partition("@")[0], "log10")[0]
    assert log10[-1] < -30
    assert bool((log10 <= mean + 1e-9).all()) and bool((mean - log10 < math.log10(2)).all())
    first = metric(name).compute(X)
    assert float(log10[0]) == pytest.approx(math.log10(float(first)))


def test_other_kernels_fall_back_to_float64_and_say_so() -> None:
    for kernel in ("sigmoid", "linformer:3"):
        net = Transformer.random(Architecture(layers=2, width=8, heads=2, kernel=kernel))
        assert not applies(net)
        profile = measure(net, tokens(4, 8))
        assert profile.arithmetics == ["float64"]
        assert bool((profile.curve("mu", "floor") > 0).all())
        assert profile.manifest.networks[0].checks["arithmetic_asked"] == "deviation"
        with raises(ArchitectureError, subject="arithmetic"):
            next(propagate(net, tokens(4, 8)))


@pytest.mark.parametrize("norm", ["layer", "rms", "scale"])
def test_zero_tokens_stay_zero_under_a_norm_without_eps(norm: Any) -> None:
    arch = Architecture(layers=2, width=8, heads=2, norm=norm, norm_place="pre", norm_eps=0.0, biases=False)
    profile = measure(Transformer.random(arch), torch.zeros(1, 4, 8), metrics=["mu", "relative_mu"])
    assert not profile.curve("mu").any() and not profile.curve("relative_mu").any()


def test_no_token_at_all_has_no_value() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    names = ["mu", "relative_residual", "max_cosine_gap", "residual_effective_rank", "dobrushin", "stable_rank"]
    profile = measure(net, torch.randn(2, 0, 8), metrics=names)
    for name in names:
        assert bool(profile.curve(name).isnan().all())


def test_scores_beyond_the_range_are_cut_alike() -> None:
    """Tokens of 1e140: attention is an argmax, the same that float64 finds."""
    net = Transformer.random(Architecture(layers=1, width=8, heads=1, norm="none", mlp="none"), init="xavier")
    for seed in range(20):
        X = 1e140 * (tokens(1, 8, seed=seed) + 0.1 * tokens(5, 8, seed=seed + 100))
        *_, plain = net.steps(X)
        *_, step = propagate(net, X)
        assert torch.allclose(step.state.tokens(), plain.state, rtol=1e-9, atol=0)


def test_attention_is_never_negative_and_has_its_entropy() -> None:
    arch = Architecture(layers=2, width=8, heads=2, norm="rms", norm_place="pre", divisor=0.02)
    for seed in range(20):
        net = Transformer.random(arch, seed=seed, init="xavier")
        entropy = measure(net, tokens(5, 8, seed=seed), metrics="entropy").curve("entropy")[:, 1:]
        plain = measure(net, tokens(5, 8, seed=seed), metrics="entropy", arithmetic="float64").curve("entropy")
        assert torch.allclose(entropy, plain[:, 1:], atol=1e-10)


def test_value_and_log10_say_the_same_or_the_value_is_out_of_range() -> None:
    arch = Architecture(layers=200, width=8, heads=2, biases=False)
    shrinking = Transformer.random(arch).variant("san")
    profile = measure(shrinking, tokens(5, 8), metrics=["mu", "sigma_min", "max_residual"])
    for name in profile.metrics:
        value, log10 = profile.curve(name), profile.curve(name, "log10")
        assert bool((value[log10 < -330] == 0).all()) and bool((log10 < -330).any())
        inside = (log10 > -300) & (value > 0)
        assert torch.allclose(value[inside].log10(), log10[inside], rtol=1e-9)


def test_what_is_not_finite_from_the_start_is_in_the_manifest() -> None:
    X = tokens(4, 8)
    X[0, 1, 2] = math.inf
    profile = measure(Transformer.random(Architecture(layers=2, width=8, heads=2)), X, metrics="mu")
    assert profile.manifest.networks[0].checks["first_layer_not_finite"] == 0
    assert bool(profile.curve("mu").isnan().all())


@pytest.mark.parametrize("scale", [1e4, 1e8, 1e10, 1e13])
def test_huge_scores_leave_shares_at_most_one(scale: float) -> None:
    """Scores of 1e12 and more: what is summed cancels, and a share of attention stays a share."""
    arch = Architecture(layers=1, width=16, heads=2, norm="none", mlp="none", attention_skip=0.0)
    net = Transformer.random(arch, init="xavier")
    for seed in range(5):
        X = scale * tokens(6, 16, seed=seed)
        *_, plain = net.steps(X)
        found = measure(net, X, metrics="mu").curve("mu", "log10")[0, 1]
        centred = plain.state - plain.state.mean(1, keepdim=True)
        assert float(found) == pytest.approx(math.log10(float(centred.norm())), abs=1e-6)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "identity"])
def test_an_mlp_far_out_in_its_tails_does_not_lose_what_tokens_differ_by(activation: str) -> None:
    """Tokens of 1e20 that differ by one: the MLP is linear there, and their difference passes through it."""
    arch = Architecture(layers=1, width=8, heads=1, norm="none", biases=False, activation=activation)
    layer = Transformer.random(arch, init="xavier").weights.layers[0]
    x, R = 1e20 * tokens(1, 8)[:, 0], tokens(4, 8, seed=3)
    real = ValidTokens(torch.ones(1, 4, dtype=torch.bool))
    assert layer.mlp is not None
    found = mlp(arch, layer.mlp, State(Scaled.plain(x), Scaled.plain(R), real)).R.explicit()
    opened = torch.ones(1, 32) if activation == "identity" else x @ layer.mlp.up.weight > 0
    expected = ((R @ layer.mlp.up.weight) * opened[:, None]) @ layer.mlp.down.weight
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["layer", "rms", "scale"])
@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("query_norm", [False, True])
def test_padding_casts_no_doubt_on_real_tokens(norm: Any, place: Any, query_norm: bool) -> None:
    """A padded token has no length, and a norm of a small epsilon would draw out its rounding without end."""
    arch = Architecture(layers=4, width=16, heads=2, norm=norm, norm_place=place, query_norm=query_norm, norm_eps=1e-12)
    net = Transformer.random(arch, init="xavier")
    X = tokens(9, 16)
    padding = (torch.arange(9) >= 5)[None]
    assert not measure(net, X, padding).table["below_floor"].any()
