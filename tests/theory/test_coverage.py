"""Every theorem against every feature of a network: what is not refused holds for what plain float64 runs.

One test for each feature walks through the networks of all theorems. Who refuses it is written out by hand
(`COVERAGE`), from what proofs use.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import get_args

import polars as pl
import pytest
import torch

from rankscope.errors import TheoremError
from rankscope.nets import Architecture
from rankscope.nets.fields import MLP, NormPlace, Positions
from rankscope.nets.kernels import KERNELS
from rankscope.nets.masks import RULES
from rankscope.nets.mlp import ACTIVATIONS
from rankscope.nets.norms import NORMS
from rankscope.remedies.catalogue import REMEDIES
from rankscope.theory import THEOREMS, certify
from rankscope.theory.coverage import COVERAGE, refusing
from tests.raising import raises
from tests.theory.features import BASES, VALUES, Feature, features
from tests.theory.plain import apart, mu, residual

MEASURES = {"residual": residual, "mu": mu, "diameter": apart}
ALL = list(features())
OUTSIDE = ("query_latent", "key_latent", "log_gain", "cross_attention", "remedy=logn")


def outside(feature: Feature) -> bool:
    return feature.field in OUTSIDE or str(feature) in OUTSIDE


FIRST = {feature.field: index for index, feature in reversed(list(enumerate(ALL)))}
ALWAYS = {(FIRST[name], list(BASES)[k % len(BASES)]) for k, name in enumerate(VALUES)}
"""Of each field one case, and of every network some; the others are slow."""
CASES = [
    pytest.param(
        feature, base, id=f"{feature} ({index}), {base}", marks=() if (index, base) in ALWAYS else pytest.mark.slow
    )
    for index, feature in enumerate(ALL)
    for base in BASES
    if not outside(feature)
]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("feature", [feature for feature in ALL if outside(feature)], ids=str)
def test_what_no_theorem_covers_is_refused_before_anything_runs(feature: Feature, base: str) -> None:
    assert refusing(str(feature)) == set(THEOREMS)
    with raises(TheoremError, "architecture"):
        certify(*feature.example(base))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("feature", "base"), CASES)
def test_a_feature_is_refused_or_what_is_guaranteed_holds(feature: Feature, base: str) -> None:
    """Against a plain float64 pass over the padded sample, which shares nothing with certificates."""
    (net, X, padding), theorems = feature.example(base), set(BASES[base][1])
    table = certify(net, X, padding).table
    assert table["met"].eq(table["why"].is_null()).all()
    assert theorems & set(table.filter(~pl.col("met"))["theorem"]) == theorems & refusing(str(feature))
    valid = torch.ones(X.shape[:2], dtype=torch.bool) if padding is None else ~padding
    states = [state[0][valid[0]] for state in net.to(torch.float64).run(X, padding).states]
    for row in table.filter("met", pl.col("quantity").is_in(list(MEASURES))).iter_rows(named=True):
        tokens = states[row["layer"]]
        found = float(MEASURES[row["quantity"]](tokens))
        rounding = 1e-7 * found + 1e-14 * float(tokens.norm())
        bound = 10 ** min(row["log10_bound"], 300.0)
        assert found <= bound + rounding if row["kind"] == "upper" else found >= bound - rounding, row
        if not row["below_floor"]:
            assert math.isclose(10 ** row["log10_measured"], found, abs_tol=rounding), row


def test_every_field_and_every_name_is_tried() -> None:
    """A new field, kernel, mask, norm, activation or remedy without an entry fails here."""
    assert {field.name for field in dataclasses.fields(Architecture)} == set(VALUES) - {"padding", "dtype"}
    default = {field.name: field.default for field in dataclasses.fields(Architecture)}
    registered: dict[str, Iterable[str]] = {
        "kernel": KERNELS, "mask": RULES, "norm": (*NORMS, "none"), "activation": ACTIVATIONS, "parts": REMEDIES,
        "mlp": get_args(MLP), "norm_place": get_args(NormPlace), "positions": get_args(Positions),
    }  # fmt: skip
    for name, known in registered.items():
        named = {str(value).partition(":")[0] for value in VALUES[name] if isinstance(value, str)}
        assert set(known) <= named | {default[name], "none"}, name
    entries = {name if name in COVERAGE else name.partition("=")[0] for name in map(str, ALL)}
    assert entries == set(COVERAGE)  # nor is anything told that was not tried
    tried = [theorem for _, theorems in BASES.values() for theorem in theorems]
    assert sorted(tried) == sorted(THEOREMS)
