"""The floor: what lies at it is noise, and what lies above it is not."""

import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure

METRICS = ("relative_residual", "relative_mu", "relative_spectral_residual", "relative_max_residual",
           "residual", "mu")  # fmt: skip


@pytest.mark.parametrize("arithmetic", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["san", "san+norm", "san+norm+mlp+mlp_skip"])
@pytest.mark.parametrize(("n", "width", "heads"), [(4, 8, 2), (64, 64, 4), (256, 32, 2)])
@pytest.mark.parametrize("init", ["bert", "xavier"])
def test_a_collapsed_network_is_at_its_floor(
    arithmetic: str, variant: str, n: int, width: int, heads: int, init: str
) -> None:
    """Pure attention at depth 10 has a true residual far below 1e-16: whatever is read there is noise."""
    arch = Architecture(layers=10, width=width, heads=heads)
    net = Transformer.random(arch, seed=2, init=init).variant(variant)
    X = torch.randn(2, n, width, dtype=torch.float64)
    profile = measure(net, X, metrics=METRICS, arithmetic=arithmetic)
    for name in METRICS:
        assert bool(profile.curve(name, "below_floor")[:, 8:].all())


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_what_lies_above_the_floor_has_the_right_size(arithmetic: str, seed: int) -> None:
    """Above its floor a low-precision value is within a factor of two of float64's."""
    arch = Architecture(layers=6, width=32, heads=2)
    net = Transformer.random(arch, seed=seed, init="xavier").variant("san")
    X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    exact = measure(net, X, metrics=METRICS)
    coarse = measure(net, X, metrics=METRICS, arithmetic=arithmetic)
    for name in METRICS:
        real = coarse.curve(name, "below_floor") == 0
        assert bool(real[:, 0].all()) and not bool(real.all())
        ratio = coarse.curve(name)[real] / exact.curve(name)[real]
        assert 0.5 < float(ratio.min()) <= float(ratio.max()) < 2
