"""Random networks that try to break every bound, the ladder of bounds, and bounds at any depth."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

import polars as pl
import pytest
import torch
from hypothesis import given, settings

from rankscope.errors import TheoremError
from rankscope.nets import ACTIVATIONS, KERNELS, Architecture
from rankscope.nets.fields import MLP, NormPlace, Positions
from rankscope.nets.masks import RULES
from rankscope.nets.norms import NORMS
from rankscope.remedies import REMEDIES
from rankscope.theory import THEOREMS, certify
from sitegen.coverage import COVERAGE, refusing
from tests.builders import normal
from tests.raising import raises
from tests.theory.families import FAMILIES, SAN, SPHERE, Case, net_of
from tests.theory.features import BASES, VALUES, Feature, features
from tests.theory.plain import apart, mu, residual


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draws", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_random_network_breaks_a_bound(family: str, draws: int) -> None:
    """All theorems on every family; those that it is made for are met, and say something, in a good share of
    twenty draws."""
    strategy, theorems = FAMILIES[family]
    seen: Counter[str] = Counter()

    @settings(max_examples=draws, derandomize=True)  # shares of a few draws would come and go by chance
    @given(strategy)
    def attempt(case: Case) -> None:
        found = certify(*case)
        assert found.broken().is_empty(), found.broken()
        unmet = found.table.filter(~found.table["met"])
        assert unmet["log10_bound"].is_null().all() and unmet["slack"].is_null().all()
        assert unmet["why"].is_not_null().all()
        seen["cases"] += 1
        seen.update(found.guarantees()["theorem"].unique().to_list())

    attempt()
    assert len(seen) > 1  # some theorem guaranteed something
    for theorem in theorems if draws >= 20 else ():
        assert seen[theorem] >= 0.1 * seen["cases"], f"{theorem} says too little: {dict(seen)}"


def test_every_theorem_is_strained_by_some_family() -> None:
    assert set(THEOREMS) == {name for _, theorems in FAMILIES.values() for name in theorems}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kernel", "scale"),
    [("softmax", 1e-6), ("gaussian", 1e6), ("uniform", 1.0), ("sigmoid", 1.0), ("linear", 1e-6), ("linformer:3", 1e6)],
)
def test_kernels_and_scales_with_all_theorems(kernel: str, scale: float) -> None:
    net = net_of(layers=2, kernel=kernel, length=16, **SAN)
    X = scale * normal(1, 5, 4, seed=1)
    assert certify(net, X).broken().is_empty()
    with_skip = certify(net.variant(skip=1.0), X)
    assert with_skip.broken().is_empty()
    assert {"aligned-skip", "elementary-skip"} <= set(with_skip.table.filter("met")["theorem"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mask", "variant"),
    [("longformer:1:1", "san"), ("causal", "skip"), ("window:2", "sphere")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("complete", "san"), ("causal", "sphere"))],
)
def test_a_hundred_tokens(mask: str, variant: str) -> None:
    """Bounds hold among many tokens, where column sums of attention part from its row sums."""
    sphere = variant == "sphere"
    fields = SPHERE if sphere else {**SAN, "attention_skip": float(variant == "skip"), "biases": False}
    net = net_of("orthogonal" if sphere else "xavier", 3, width=8, mask=mask, **fields)
    X = normal(1, 100, 8, seed=4)
    found = certify(net, X.abs() if sphere else X)
    assert found.broken().is_empty()
    met = set(found.table.filter("met")["theorem"])
    assert met >= {"san": {"attention-factors", "wu2024-1"}, "skip": {"aligned-skip", "dobrushin"},
                   "sphere": {"norm-rank", "hemisphere", "wu2024-cor1"}}[variant]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["san", "transformer", "sphere", "san + MLP", "san + skip", "lambda"])
def test_many_layers(kind: str, layers: int) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "san": SAN,
        "san + MLP": {**SAN, "mlp": "plain"},
        "san + skip": {**SAN, "attention_skip": 1.0},
        "transformer": {"layers": min(layers, 12)},
        "sphere": {**SPHERE, "mask": "causal"},
        "lambda": {**SAN, "norm": "rms", "attention_skip": 20.0},
    }
    net = net_of("orthogonal", 1, **{"layers": layers, "norm_eps": 0.0, "biases": False, **kinds[kind]})
    X = 0.1 * normal(1, 5, 4, seed=5)
    found = certify(net, X.abs() if kind == "sphere" else X)
    assert found.broken().is_empty()
    assert not found.guarantees().filter(layer=net.arch.layers).is_empty()


@pytest.mark.slow
def test_the_smallest_inputs() -> None:
    """One token, equal tokens, zeros: upper bounds are zero or say so, lower bounds are zero."""
    for skip in (0.0, 1.0):
        net = net_of(**{**SAN, "attention_skip": skip}, biases=False)
        for X in (normal(1, 1, 4), normal(1, 1, 4).expand(1, 5, 4), torch.zeros(1, 5, 4).double()):
            found = certify(net, X)
            assert found.broken().is_empty()
            met = found.table.filter("met")
            assert set(met["log10_measured"]) == {-math.inf}
            for quantity in ("residual", "diameter"):
                assert set(met.filter(quantity=quantity)["log10_bound"]) == {-math.inf}
            assert set(met.filter(kind="lower")["log10_bound"]) <= {-math.inf}


def test_weights_whose_products_leave_floating_point() -> None:
    """Weights of 1e-92: the product of four of them is no float64, the residual in logs is."""
    net = net_of("bert", times=1e-90, layers=2, biases=False, **SAN)
    for skip in (0.0, 1.0):
        found = certify(net.variant(skip=skip), normal(1, 5, 4))
        assert found.broken().is_empty()
        assert found.table.filter("met")["log10_bound"].is_finite().all()


# Beyond what floating point resolves


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mask", ["complete", "causal", "strided:2"])
def test_attention_whose_scores_are_beyond_rounding(mask: str) -> None:
    """Scores of 1e16 and more pick one token: no weight is above one, and tokens are as large as float64 has
    them (their logs were off by 1e8)."""
    fields = {**SAN, "attention_skip": 1.0, "layers": 2, "heads": 4, "head_width": 3, "biases": False}
    for seed in range(2):
        net, X = net_of(seed=seed, times=1e3, mask=mask, **fields), 1e3 * normal(1, 5, 4, seed=seed)
        found = certify(net, X, theorems=["aligned-skip", "elementary-skip"])
        size = found.of("aligned-skip")["log10_size"][1]
        assert size == pytest.approx(math.log10(float(net.run(X).output.norm())), abs=0.3)
        assert found.broken().is_empty()


@pytest.mark.slow
def test_gated_networks_that_leave_floating_point_have_no_factor() -> None:
    """Squared by every layer, tokens pass 1e261: what is cut off there must not bound them."""
    net = net_of(seed=7, times=1e3, layers=7, mlp="gated", mlp_width=5, norm="none", biases=False)
    found = certify(net, 1e6 * normal(1, 2, 4, seed=7), theorems="dobrushin")
    assert float(found.table["log10_size"].max()) > 300  # type: ignore[arg-type]
    assert found.broken().is_empty() and found.table["log10_bound"][-1] == math.inf


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
    assert refusing("mask=causal") - refusing("mask=window") == {"wu2024-2"}
    assert entries == set(COVERAGE)  # nor is anything told that was not tried
    tried = [theorem for _, theorems in BASES.values() for theorem in theorems]
    assert sorted(tried) == sorted(THEOREMS)
