"""Layers that are read together are read as each by itself."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.deviation.second_pass import DifferentLayersError, joined
from rankscope.metrics import METRICS, Metric
from rankscope.metrics.residuals import mu
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import Profile, measure, propagation
from rankscope.profiles.agreement import AGREED
from rankscope.profiles.layer_stack import LayerStack
from rankscope.profiles.steps import LayerStep
from tests.builders import normal
from tests.strategies import architectures

NAMES = [name for name, each in METRICS.items() if each.of in ("tokens", "attention")]
CHOSEN: list[Any] = [*NAMES, Metric("said_by_heads", mu, of="heads")]


def apart_and_together(monkeypatch: pytest.MonkeyPatch, *given: Any, **options: Any) -> tuple[Profile, Profile]:
    """The same network measured layer by layer, and as it is where all layers are made at once."""
    apart, steps = measure(*given, **options), propagation._layer_steps

    def held(*given: Any) -> Iterator[LayerStep]:
        every = list(steps(*given))
        together = LayerStack(every)
        return iter([replace(step, stacked=together.readings) for step in every])

    with monkeypatch.context() as patched:
        patched.setattr(propagation, "_layer_steps", held)
        return apart, measure(*given, **options)


def assert_same(apart: Profile, together: Profile) -> None:
    one, other = apart.table, together.table
    numbers = ("value", "log10", "floor", "digits", "below_floor")
    assert one.drop(*numbers).equals(other.drop(*numbers))
    # A mark stands where two passes agree to fewer than 9 digits. What they agree to changes with the order of sums by
    # a digit or so, and with it marks that are next to that line, and no others.
    assert -math.log10(AGREED) == pytest.approx(9)
    for row, same in zip(one.iter_rows(named=True), other.iter_rows(named=True), strict=True):
        near = all(7.5 < each["digits"] < 10.5 for each in (row, same) if row["below_floor"] != same["below_floor"])
        assert near, (row, same)
    # A sum over one axis may be taken in another order where there are more samples.
    for name in ("value", "log10"):
        a, b = (torch.tensor(each[name].fill_null(torch.nan).to_list()) for each in (one, other))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


SLOWER = ("transformer", "san", "san+norm+skip")


@settings(max_examples=4)
@given(architectures(), st.integers(1, 5), st.integers(0, 2), st.integers(0, 999), st.sampled_from((1.0, 1e-3, 1e-12)))
def test_of_any_network(arch: Architecture, n: int, padded: int, seed: int, close: float) -> None:
    arch = arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch
    net = Transformer.random(arch, seed=seed, init="xavier")
    padding = torch.zeros(2, n + padded, dtype=torch.bool)
    padding[1, :padded] = True
    X: Tensor = close * normal(2, n + padded, 8, seed=seed) + (1 - close) * normal(1, 1, 8, seed=seed + 7)
    with pytest.MonkeyPatch.context() as patch:
        assert_same(*apart_and_together(patch, net, X, padding, metrics=CHOSEN))


@pytest.mark.parametrize(
    ("variant", "check"),
    [("san", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("san+mlp", *SLOWER))],
)
def test_through_collapse(variant: str, check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float64 sees some layers and some samples, not others, and marks stand where they stood."""
    arch = Architecture(layers=8, width=16, heads=2, mlp_width=32, norm="layer")
    net = Transformer.random(arch, seed=3).variant(variant)
    X = normal(3, 6, 16, seed=1)
    X[1] = 1e-3 * X[1] + normal(1, 16, seed=2)
    X[2] = X[2, :1]
    apart, together = apart_and_together(monkeypatch, net, X, metrics=NAMES, check=check)
    assert_same(apart, together)
    if variant == "san":
        assert float(apart.curve("mu", "log10").min()) < -300
    if check:
        digits = pl.concat([each.table.select(pl.col("digits").alias(name)) for each, name in
                            ((apart, "one"), (together, "other"))], how="horizontal")  # fmt: skip
        assert digits["one"].is_null().equals(digits["other"].is_null())


def test_layers_without_a_common_form_are_not_joined() -> None:
    with pytest.raises(DifferentLayersError):
        joined([(torch.ones(2, 3), None), (torch.ones(2, 3), torch.ones(2))])
    with pytest.raises(DifferentLayersError):
        joined([torch.ones(()), torch.ones(())])
    assert joined([(torch.ones(2, 3), 4), (torch.zeros(2, 3), 4)])[0].shape == (4, 3)
