"""Deviation arithmetic against float64 where float64 can see, and on its own where it cannot."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.deviation import LOWEST, applies, finish, propagate
from rankscope.deviation.readings import read
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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(2)
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
    state = net.state_dict()
    for name, tensor in state.items():
        if name.endswith(("bias_table", "content_bias", "position_bias")):
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
            state[name] = tensor + 0.5 * noise
    net = Transformer.from_weights(net.arch, state)
    profile = measure(net, tokens(16, 32), metrics=["relative_residual"], check=False)
    log10 = profile.curve("relative_residual", "log10")[0]
    drop = log10[:-1] - log10[1:]
    assert float(drop[20:].mean()) > 0.01
    assert float(drop[20:].max()) < 4
    assert float(drop[30:].mean()) < 2 * float(drop[10:20].mean()) + 0.5
    assert float(log10[-1]) > -150


@pytest.mark.slow
def test_skips_stop_the_collapse() -> None:
    arch = Architecture(layers=60, width=16, heads=2)
    X = tokens(8, 16)
    for name in ("san+skip", "san+norm+skip"):
        net = Transformer.random(arch, seed=1).variant(name)
        curve = measure(net, X, metrics=["relative_residual"], check=False).curve("relative_residual")
        assert float(curve.min()) > 0.02


DEEP = [
    ("causal", "san+skip", 8.0, 400),  # which leaves float64's range at layer 340
    *(pytest.param(mask, name, gain, 1000, marks=pytest.mark.slow) for mask in ("complete", "causal") for name, gain in
      [("san", 1.0), ("san", 8.0), ("san+mlp", 1.0), ("san+mlp", 8.0), ("san+norm", 1.0), ("san+skip", 8.0),
       ("san+skip+mlp", 8.0), ("transformer", 1.0)]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "name", "gain", "layers"), DEEP)
def test_a_thousand_layers_stay_in_range(mask: str, name: str, gain: float, layers: int) -> None:
    """Collapse to 10^(-10^299) or growth beyond 10^308: every number stays a number."""
    arch = Architecture(layers=4, width=8, heads=2, mask=mask, biases=False)
    net = Transformer.random(arch, seed=1, init="xavier").variant(name).variant(layers=layers)
    tensors = {k: gain * v if k.endswith("weight") else v for k, v in net.state_dict().items()}
    net = Transformer.from_weights(net.arch, tensors)
    names = ["relative_residual", "mu", "mean_cosine_gap", "dobrushin", "residual_effective_rank"]
    for step in propagate(net, tokens(5, 8, batch=2)):
        for part in (step.state.x, step.state.R):
            assert bool(part.value.isfinite().all()) and bool(part.log.isfinite().all())
        if step.layer % 100 == 0:
            for reading in filter(None, (read(metric(name), step) for name in names)):
                assert not bool(reading.log10.isnan().any()) and not bool((reading.log10 == math.inf).any())
        # Tokens that differ at the start never become exactly equal, unless they fall through the lowest.
        assert bool(((step.state.R.largest() > 0) | (step.state.R.log <= LOWEST)).all())


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


def test_what_is_not_finite_from_the_start_is_in_the_manifest() -> None:
    X = tokens(4, 8)
    X[0, 1, 2] = math.inf
    profile = measure(Transformer.random(Architecture(layers=2, width=8, heads=2)), X, metrics="mu")
    assert profile.manifest.networks[0].checks["first_layer_not_finite"] == 0
    assert bool(profile.curve("mu").isnan().all())
