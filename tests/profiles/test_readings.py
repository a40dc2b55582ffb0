"""Readings: of a large P by blocks of rows what they are of the whole, and the floor, at which they are noise."""

import pytest
import torch

from rankscope.metrics import METRICS, Metric
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.profiles.readings import read_tensor
from tests.builders import thinned

ATTENTION = [each for each in METRICS.values() if each.of == "attention"]
TRACE = Metric("trace", lambda P, padding=None: P.diagonal(dim1=-2, dim2=-1).sum(-1), of="attention")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_say_what_the_whole_says(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    P = torch.randn(4, 3, 17, 17, dtype=torch.float64).softmax(-1).to(dtype)
    real = torch.rand(4, 17) < 0.8
    P[1, 0, int(real[1].nonzero()[0]), 3] = torch.nan
    real[3] = False
    chosen = [TRACE, *ATTENTION]
    whole, broken = read_tensor("attention", P, real, chosen, 1e-7)
    found, same = read_tensor("attention", P, real, chosen, 1e-7, whole=0, block=8 * P[:, :, :5].numel())
    assert broken.equal(same) and broken.tolist() == [False, True, False, False]
    assert [each.name for each, _ in found] == [each.name for each in chosen]
    for (_, one), (_, other) in zip(whole, found, strict=True):
        assert one.value.isnan().equal(other.value.isnan())
        assert other.value.nan_to_num().flatten().tolist() == pytest.approx(
            one.value.nan_to_num().flatten().tolist(), rel=1e-12, abs=1e-14
        )
        assert one.floor.isnan().equal(other.floor.isnan())


RESIDUALS = ("relative_residual", "relative_mu", "relative_spectral_residual", "relative_max_residual",
           "residual", "mu")  # fmt: skip


VARIANTS = ("san", "san+norm", "san+norm+mlp+mlp_skip")
SIZES = ((4, 8, 2), (64, 64, 4), (256, 32, 2))


@pytest.mark.parametrize(
    ("arithmetic", "variant", "size", "init"),
    thinned(("float64", "float32", "bfloat16"), VARIANTS, SIZES, ("bert", "xavier")),
)
def test_a_collapsed_network_is_at_its_floor(
    arithmetic: str, variant: str, size: tuple[int, int, int], init: str
) -> None:
    """Pure attention at depth 10 has a true residual far below 1e-16: whatever is read there is noise."""
    n, width, heads = size
    arch = Architecture(layers=10, width=width, heads=heads)
    net = Transformer.random(arch, seed=2, init=init).variant(variant)
    X = torch.randn(2, n, width, dtype=torch.float64)
    profile = measure(net, X, metrics=RESIDUALS, arithmetic=arithmetic)
    for name in RESIDUALS:
        assert bool(profile.curve(name, "below_floor")[:, 8:].all())


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(2))
def test_what_lies_above_the_floor_has_the_right_size(arithmetic: str, seed: int) -> None:
    """Above its floor a low-precision value is within a factor of two of float64's."""
    arch = Architecture(layers=6, width=32, heads=2)
    net = Transformer.random(arch, seed=seed, init="xavier").variant("san")
    X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    exact = measure(net, X, metrics=RESIDUALS)
    coarse = measure(net, X, metrics=RESIDUALS, arithmetic=arithmetic)
    for name in RESIDUALS:
        real = coarse.curve(name, "below_floor") == 0
        assert bool(real[:, 0].all()) and not bool(real.all())
        ratio = coarse.curve(name)[real] / exact.curve(name)[real]
        assert 0.5 < float(ratio.min()) <= float(ratio.max()) < 2
