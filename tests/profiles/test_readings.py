"""Readings: of a large P by blocks of rows what they are of the whole, and the floor, at which they are noise."""

import math
from typing import Any

import polars as pl
import pytest
import torch

from rankscope.metrics import METRICS, Metric
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure, measuring, read_tensor
from tests.builders import normal, thinned

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


@pytest.mark.sampled(2)
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


@pytest.mark.sampled(2)
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


EVERYTHING = Architecture(
    layers=2, width=8, heads=2, norm="layer", norm_place="sandwich", mlp="gated", activation="silu", query_norm=True,
    head_gate=True, positions="absolute", length=4,
)  # fmt: skip
OF_ALL_KINDS = ["relative_mu", "spectral_residual", "mean_cosine_gap", "affine_rank", "entropy", "dobrushin",
                "second_singular_value", "head_mu"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_broken_in_the_network_is_broken_in_its_readings(bad: float) -> None:
    """NaN or infinity in any of its tensors: from where the plain network is not finite readings are NaN, and marked;
    before that they are what they were."""
    net, X = Transformer.random(EVERYTHING, init="xavier"), normal(1, 3, 8)
    whole = measure(net, X, metrics=OF_ALL_KINDS).table
    for name, tensor in net.state_dict().items():
        broken = tensor.clone()
        broken.flatten()[0] = bad
        worse = Transformer.from_weights(EVERYTHING, {**net.state_dict(), name: broken})
        found = measure(worse, X, metrics=OF_ALL_KINDS).table
        assert found.filter(pl.col("value").is_nan())["below_floor"].all()
        for step in worse.steps(X):
            here = found.filter((pl.col("layer") == step.layer) & pl.col("head").is_null())
            if not step.state.isfinite().all():
                assert here["value"].is_nan().all(), (name, step.layer)
            elif math.isnan(bad):
                before = whole.filter((pl.col("layer") == step.layer) & pl.col("head").is_null())
                assert here["value"].to_list() == pytest.approx(before["value"].to_list(), rel=1e-12), name
            for head in range(2 if step.layer else 0):
                rows = found.filter((pl.col("layer") == step.layer) & (pl.col("head") == head))
                assert step.attention is not None
                if not step.attention[0, head].isfinite().all():
                    assert rows["value"].is_nan().all(), (name, step.layer, head)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arithmetic", ["deviation", "float64", "float32", "bfloat16"])
@pytest.mark.parametrize("way", ["whole", "by rows", "unchecked", pytest.param("confirmed", marks=pytest.mark.slow)])
def test_an_infinite_token_leaves_no_number_in_its_sample(
    arithmetic: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the network runs; the sample beside it is read as it is alone."""
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, mask="causal"), init="xavier")
    X = normal(2, 3, 8)
    X[0, 2, 1] = math.inf
    if way == "by rows":
        monkeypatch.setattr(measuring, "_large", lambda *_: True)
    options: dict[str, Any] = {"check": way != "unchecked", "confirm": way == "confirmed"}
    metrics = ["relative_mu", "mean_cosine_gap", "entropy", "dobrushin", "first_token_mass"]
    found = measure(net, X, metrics=metrics, arithmetic=arithmetic, **options).table
    alone = measure(net, X[1:], metrics=metrics, arithmetic=arithmetic, **options).table
    first = found.filter(pl.col("sample") == 0)
    assert first["value"].is_nan().all() and first["below_floor"].all()
    second = found.filter(pl.col("sample") == 1)
    assert second["value"].to_list() == pytest.approx(alone["value"].to_list(), rel=1e-6, abs=1e-12)
