"""The table of certificates: kept in a file, summed up, drawn, asked for a depth; and bad questions."""

import math
from functools import partial
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.deviation.decisions import Presuming, Recording, answering
from rankscope.errors import FileError, MaskError, MetricError, RankscopeError, TheoremError, TokensError
from rankscope.figures import power
from rankscope.nets import Architecture, Kernel, Mask, Transformer, active_heads
from rankscope.nets.fields import Positions
from rankscope.nets.kernels import KernelContext, masked_softmax
from rankscope.nets.masks import from_matrix
from rankscope.theory import THEOREMS, Certificates, MLPNorms, WeightNorms, certify, collapse_depth
from rankscope.theory.certificates import SCHEMA
from rankscope.theory.depth import depth_of
from rankscope.theory.weight_norms import HeadNorms
from tests.builders import normal
from tests.raising import raises

NET = Transformer.random(Architecture(layers=4, width=8, heads=2), init="bert")
SAN = NET.variant("san")
SKIP = NET.variant(mlp=False, norm=False)
X = 0.1 * normal(2, 5, 8)
FOUND = certify(SAN, X)


def test_one_row_per_theorem_sample_and_layer() -> None:
    assert FOUND.theorems == list(THEOREMS)
    assert len(FOUND.table) == len(THEOREMS) * 2 * 4
    assert dict(FOUND.table.schema) == dict(pl.DataFrame(schema=SCHEMA).schema)
    assert FOUND.of("oscillation", 1)["layer"].to_list() == [1, 2, 3, 4]
    for row in FOUND.table.iter_rows(named=True):
        unmet = [each for each in row["hypotheses"] if not each["met"]]
        assert row["met"] is (not unmet) and (row["why"] is None) is row["met"]
        for each in unmet:
            assert f"{each['says']}: {each['number']:.6g}, must be {each['limit']}" in row["why"]
        if row["met"]:
            sign = 1 if row["kind"] == "upper" else -1
            assert row["slack"] == pytest.approx(sign * (row["log10_bound"] - row["log10_measured"]))
    assert "18 theorems" in repr(FOUND) and "2 samples" in repr(FOUND)


@pytest.mark.slow
def test_padding_is_left_out() -> None:
    padding = torch.tensor([[False] * 5 + [True] * 2] * 2)
    padded = certify(SAN, torch.cat([X, 7 + normal(2, 2, 8, seed=1)], 1), padding, theorems="dong2021-2.3")
    alone = FOUND.of("dong2021-2.3")
    for name in ("log10_bound", "log10_measured"):
        assert padded.table[name].to_list() == pytest.approx(alone[name].to_list())


EVEN = Mask("even", lambda n: torch.eye(n, dtype=torch.bool) | (torch.arange(n)[:, None] * 2 % n == torch.arange(n)))
PADDED = torch.tensor([[True, False, False, True, False, False, False, True, False]])
"""At the front, in the middle and near the end."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", ["bigbird:0:0:2:3", "strided", from_matrix(torch.ones(9, 9).bool().triu()), EVEN])
def test_masks_are_those_of_the_run_with_its_padding(mask: str | Mask) -> None:
    """Such masks depend on the number of positions. Wu et al.'s Thm 1 by hand, from the patterns of a plain run."""
    arch = Architecture(layers=4, width=8, heads=1, mlp="none", norm="none", attention_skip=0.0, mask=mask)
    net, tokens = Transformer.random(arch, init="xavier"), normal(1, 9, 8, seed=4)
    found = certify(net, tokens, PADDED).of("wu2024-1")
    run, at = net.run(tokens, PADDED, attention=True), ~PADDED[0]
    patterns = [P[0, 0][at][:, at] for P in run.attention]
    start = tokens[0][at]
    reached, radius = torch.eye(6, dtype=torch.bool), 0
    while not bool(reached.all(0).any()) and radius < 6:
        reached, radius = (patterns[0] > 0).double() @ reached.double() > 0, radius + 1
    assert found["met"].all() == bool(reached.all(0).any())  # a centre reaches all
    product = torch.eye(8, dtype=torch.float64)
    for layer, row in enumerate(found.iter_rows(named=True), 1):
        after = run.states[layer][0][at]
        assert row["log10_measured"] == pytest.approx(float((after - after.mean(0)).norm().log10()), abs=1e-9)
        weights = net.weights.layers[layer - 1].attention
        product = product @ weights.value.weight[:, 0] @ weights.output.weight[0]
        eps = min(float(P[P > 0].min()) for P in patterns[:layer])
        width = math.sqrt(6) / 2 * float((start.amax(0) - start.amin(0)).norm() * torch.linalg.matrix_norm(product, 2))
        if row["met"]:
            bound = math.log10(width * (1 - eps**radius) ** (layer // radius))
            assert row["log10_bound"] == pytest.approx(bound, abs=1e-9) and row["slack"] > 0


POSITIONS: list[dict[str, Any]] = [
    *({"positions": positions} for positions in get_args(Positions)),
    {"positions": "rotary", "rotary_grid": (2, 4, 1)},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", POSITIONS, ids=str)
def test_positions_are_those_of_the_run_with_its_padding(fields: dict[str, Any]) -> None:
    arch = Architecture(layers=2, width=8, heads=2, mlp="none", norm="none", mask="bigbird:0:0:2:3", **fields)
    net, tokens = Transformer.random(arch, init="xavier"), normal(1, 9, 8, seed=4)
    found = certify(net, tokens, PADDED, theorems="aligned-skip").table
    for row, state in zip(found.iter_rows(named=True), net.run(tokens, PADDED).states[1:], strict=True):
        after = state[0][~PADDED[0]]
        assert row["log10_measured"] == pytest.approx(float((after - after.mean(0)).norm().log10()), abs=1e-9)


def test_padding_that_leaves_a_token_nothing_to_see_is_refused_as_the_run_refuses_it() -> None:
    net = SAN.variant(mask=torch.eye(5, dtype=torch.bool).roll(1, 1))
    padding = torch.tensor([[False, False, False, True, False]])
    for run in (net.run, partial(certify, net)):
        with raises(MaskError, "mask"):
            run(X[:1], padding)


@pytest.mark.slow
def test_padding_is_refused_where_objects_of_the_users_own_may_count_it() -> None:
    """A kernel of one's own, here one that divides by the number of positions."""

    def pattern(q: torch.Tensor, k: torch.Tensor, context: KernelContext) -> torch.Tensor:
        return masked_softmax(q @ k.mT / k.shape[-2], context.visible)

    net = SAN.variant(kernel=Kernel("by length", pattern, averages=True))
    padding = torch.tensor([[False] * 4 + [True]] * 2)
    with raises(TheoremError, "padding"):
        certify(net, X, padding)
    assert "dobrushin" in set(certify(net, X).table.filter("met")["theorem"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_certified_is_the_float64_network_of_these_weights(dtype: torch.dtype) -> None:
    rounded, tokens = SAN.to(dtype), X[:1].to(dtype)
    found = certify(rounded, tokens)
    assert found.table.equals(certify(rounded.to(torch.float64), tokens.double()).table)
    last = rounded.to(torch.float64).run(tokens.double()).states[1][0]
    row = found.of("dobrushin").filter(layer=1).row(0, named=True)
    assert row["log10_measured"] == pytest.approx(math.log10(float(torch.pdist(last).max())), abs=1e-6)
    assert found.manifest.networks[0].checks["network_dtype"] == str(dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="certifies on a GPU")
def test_a_gpu_certifies_the_same_network() -> None:
    there, here = (certify(SAN, X, device=device).table for device in ("cuda", "cpu"))
    assert there["met"].equals(here["met"])
    for name in ("log10_bound", "log10_measured"):
        assert there[name].drop_nulls().to_list() == pytest.approx(here[name].drop_nulls().to_list(), rel=1e-9)


def test_saved_and_read_again(tmp_path: Path) -> None:
    again = Certificates.read(FOUND.save(tmp_path / "found.parquet"))
    assert again.table.equals(FOUND.table)
    assert again.manifest == FOUND.manifest
    with raises(FileError, str(tmp_path / "other.parquet")):
        Certificates.read(tmp_path / "other.parquet")


@pytest.mark.slow
def test_the_manifest_says_which_network_ran_where() -> None:
    about = certify(SAN, X, theorems="dobrushin", variant="san", device="cpu").manifest
    assert about.device == "cpu" and about.networks[0].variant == "san"
    assert about.networks[0].checks["network_device"] == "cpu"


def test_the_summary_tells_how_far_each_theorem_goes() -> None:
    summary = FOUND.summary()
    assert summary["theorem"].to_list() == list(THEOREMS)
    rows = {row["theorem"]: row for row in summary.iter_rows(named=True)}
    assert rows["dong2021-2.3"]["met_to"] == 4 and rows["dong2021-2.3"]["why"] is None
    assert rows["dong2021-2.2"]["met_to"] == 0 and "heads: 2" in rows["dong2021-2.2"]["why"]
    assert rows["dong2021-2.2"]["log10_bound"] is None
    last = FOUND.of("dong2021-2.3").filter(layer=4)
    assert rows["dong2021-2.3"]["slack"] == pytest.approx(last["slack"].max())


@pytest.mark.parametrize(("net", "quantity"), [(SAN, "largest distance"), (NET, "‖res X‖F")])
def test_printed_certificates_say_what_is_proved_and_every_reason_whole(net: Transformer, quantity: str) -> None:
    """In 80 columns; the bound is the weakest over samples of the best theorem, here looked up by a loop."""
    found = certify(net, X)
    printed = str(found)
    assert printed.splitlines()[1].startswith("Proved of each of 2 samples")
    assert max(map(len, printed.splitlines())) <= 80
    unwrapped = " ".join(printed.split())
    weakest = []
    for name in set(found.theorems) - {"exact-factors"}:
        rows = found.of(name).filter(layer=4).to_dicts()
        says = all(row["met"] and not row["vacuous"] and not row["below_floor"] for row in rows)
        if says and rows[0]["quantity"] == {"largest distance": "diameter", "‖res X‖F": "mu"}[quantity]:
            bounds = [row["log10_bound"] for row in rows]
            weakest.append(max(bounds) if rows[0]["kind"] == "upper" else -min(bounds))
    best = f"most {power(min(weakest))}" if net is SAN else f"least {power(-min(weakest))}"
    assert f"{quantity} is at {best} after layer 4" in unwrapped
    for reason in found.table.filter(pl.col("why").is_not_null())["hypotheses"].explode().to_list():
        assert reason["met"] or f"{reason['says']}: " in unwrapped


def test_printed_certificates_that_prove_nothing_say_so() -> None:
    for theorems in ("exact-factors", "dong2021-2.2"):  # the measurement itself; a hypothesis that fails
        printed = str(certify(SAN, X, theorems=theorems))
        assert printed.splitlines()[1].startswith("Nothing is proved of these tokens")


@pytest.mark.slow
def test_guarantees_say_something() -> None:
    said = FOUND.guarantees()
    assert said["met"].all() and not said["vacuous"].any()
    assert (said.filter(kind="upper")["log10_bound"] < said.filter(kind="upper")["log10_size"]).all()
    large = certify(SAN, 1e3 * X, theorems="dong2021-2.3")
    assert large.table["met"].all() and large.table["vacuous"].all() and large.guarantees().is_empty()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("net", "quantities"),
    [(SAN, 3), (NET, 2), (SAN.variant(kernel="sigmoid"), 1)]
    + [pytest.param(net, 3, marks=pytest.mark.slow) for net in (SKIP, SAN.variant(mask="causal"))],
)
def test_plots_have_a_panel_per_quantity(net: Transformer, quantities: int) -> None:
    found = certify(net, X)
    figure = found.plot(1)
    assert isinstance(figure, Figure) and len(figure.axes) == quantities
    assert all(axes.get_xlabel() == "layer" and axes.get_title(loc="left") for axes in figure.axes)
    met = set(found.table.filter("met").filter(pl.col("quantity") != "affine_rank")["theorem"])
    shared = figure.legends or [axes.get_legend() for axes in figure.axes]
    labels = [text.get_text() for legend in shared if legend is not None for text in legend.get_texts()]
    assert {label.removesuffix(" (vacuous)").rstrip(" ≤≥") for label in labels} == met | {
        "measured",
        "tokens' own size",
    }
    figure.savefig("/dev/null", format="png")


@pytest.mark.slow
def test_what_cannot_be_drawn() -> None:
    with raises(TheoremError, "sample"):
        FOUND.plot(7)
    with raises(TheoremError, "theorems"):
        certify(NET, X, theorems="norm-rank").plot()


# Depth


def test_tokens_collapse_no_later_than_is_guaranteed() -> None:
    depth = collapse_depth(SAN, X, 1e-6)
    measured = dict(depth.measured.iter_rows())
    upper = depth.guaranteed.filter(kind="upper").drop_nulls("layer")
    assert {"dong2021-2.3", "oscillation", "attention-factors"} <= set(upper["theorem"])
    for theorem, sample, _, layer, says in upper.iter_rows():
        if THEOREMS[theorem].quantity == "residual":
            assert measured[sample] <= layer and f"by layer {layer}" in says
    assert depth.threshold == 1e-6
    # Read off the table by hand.
    rows = FOUND.of("dong2021-2.3", 0)
    below = [r["layer"] for r in rows.iter_rows(named=True) if r["log10_measured"] - r["log10_size"] < -6]
    assert measured[0] == min(below)


@pytest.mark.slow
def test_lower_bounds_exclude_collapse() -> None:
    depth = collapse_depth(SKIP, X, 1e-6)
    assert depth.measured["layer"].to_list() == [None, None]
    excluded = depth.guaranteed.filter(theorem="aligned-skip")
    assert excluded["layer"].to_list() == [4, 4]
    assert excluded["says"][0] == "not uniform to 1e-06 up to layer 4"
    unmet = depth.guaranteed.filter(theorem="untouched")
    assert unmet["layer"].to_list() == [None, None] and unmet["says"][0] == "excludes nothing"


def test_zero_tokens_are_uniform_and_nothing_is_excluded() -> None:
    """Zero of zero: neither a share above every threshold nor NaN."""
    depth = collapse_depth(SKIP, torch.zeros(1, 4, 8, dtype=torch.float64))
    assert depth.measured["layer"].to_list() == [1]
    assert depth.guaranteed.filter(theorem="dong2021-skip")["layer"].to_list() == [1]
    assert depth.guaranteed.filter(kind="lower")["layer"].to_list() == [None] * 4


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.inf, math.nan])
def test_a_threshold_is_a_positive_number(threshold: float) -> None:
    with raises(TheoremError, "threshold"):
        depth_of(FOUND, threshold)


def test_bad_questions_are_answered_in_one_sentence() -> None:
    none = torch.ones(2, 5, dtype=torch.bool)
    wrong: list[tuple[dict[str, Any], type[RankscopeError], str]] = [
        ({"theorems": "dong"}, TheoremError, "theorem"),
        ({"theorems": ["oscilation"]}, TheoremError, "theorem"),
        ({"theorems": []}, TheoremError, "theorems"),
        ({"centre": "middle"}, MetricError, "centre"),
        ({"X": X[0]}, TokensError, "X"),
        ({"X": torch.ones(1, 5, 8, dtype=torch.long)}, TokensError, "X"),
        ({"padding": none}, TokensError, "padding"),
    ]
    for options, error, subject in wrong:
        with raises(error, subject):
            certify(SAN, **{"X": X, **options})
    with raises(TheoremError, "theorem"):
        certify(SAN, X, theorems="dong2021-2.3").of("oscillation")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_network_without_numbers_is_refused(bad: float) -> None:
    tensors = NET.state_dict()
    tensors["layers.2.attention.value.weight"] = torch.full_like(tensors["layers.2.attention.value.weight"], bad)
    with raises(TokensError, "X"):
        certify(Transformer.from_weights(NET.arch, tensors), X)
    with raises(TokensError, "X"):
        certify(NET, X + bad)


@pytest.mark.slow
def test_progress_is_told_by_sample() -> None:
    told: list[tuple[int, int]] = []
    certify(SAN, X, theorems="dobrushin", progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize("net", [NET, SAN, SKIP], ids=["whole", "san", "skip"])
def test_a_pass_whose_questions_are_answered_beforehand_gives_the_same(net: Transformer) -> None:
    """As on a GPU, where a pass waits for no answer: the same shortcuts, the same bits, and no answer was wrong."""
    with answering(Recording()) as asked:
        before = certify(net, X).table
    with answering(Presuming(asked.answers)) as presumed:
        after = certify(net, X).table
    assert after.equals(before) and not presumed.violations(X).any() and len(asked.answers) > 50


def test_presumed_answers_that_are_wrong_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, without its graph: recorded, presumed, and with tokens of another kind recorded anew."""
    inputs = [X, X, X, 1e3 * X, 1e3 * X, X, torch.zeros_like(X), X]
    expected = [certify(NET, tokens).table for tokens in inputs]
    monkeypatch.setattr("rankscope.deviation.replay.waits", lambda like: True)
    for tokens, table in zip(inputs, expected, strict=True):
        found = certify(NET, tokens).table
        for name in ("met", "vacuous", "below_floor"):
            assert found[name].equals(table[name])
        for name in ("log10_bound", "log10_measured"):
            assert found[name].drop_nulls().to_list() == pytest.approx(table[name].drop_nulls().to_list(), rel=1e-9)


class Decompositions(TorchDispatchMode):
    """Counts what norms of weights are made of: triangles and eigenvalues of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.name() in ("aten::linalg_qr", "aten::_linalg_eigh")
        return func(*args, **(kwargs or {}))


def decompositions(net: Transformer, **given: Any) -> int:
    with Decompositions() as counted:
        certify(net, torch.ones(1, 3, 8) + torch.eye(3, 8), **given)
    return counted.number


@pytest.mark.slow
def test_norms_are_taken_once_for_the_same_weights() -> None:
    net = Transformer.random(Architecture(layers=1, width=8, heads=2), seed=20)
    number = 1 + 2  # eigenvalues for all heads together, and for each matrix of an MLP
    assert decompositions(net) == number
    assert decompositions(net, theorems="dobrushin") == 0
    again = Transformer.from_weights(net.arch, {name: each.clone() for name, each in net.state_dict().items()})
    assert decompositions(again.variant(skip=0.5, layers=2), theorems="dobrushin") == 0
    assert decompositions(net.to(torch.float32), theorems="dobrushin") == number  # rounded: other weights
    one = Transformer.random(Architecture(layers=2, width=8, heads=1, mlp="none", norm="none"), seed=21)
    assert decompositions(one.variant(skip=0.0), theorems="wu2024-1") == 2 * 1 + 2  # and the products of the layers'
    assert decompositions(one.variant(skip=0.0), theorems="wu2024-1") == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["in place", "through data", "through numpy", "rows swapped"])
def test_norms_of_weights_that_were_changed_in_place_are_taken_again(way: str) -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, mlp="none", norm="none"), seed=22)
    before = certify(net, X[:1]).table
    value = net.weights.layers[1].attention.value.weight
    if way == "in place":
        value.mul_(2)
    elif way == "through data":
        value.data.mul_(2)
    elif way == "through numpy":
        value.numpy()[:] *= 2
    else:
        value.data[:] = value.data.flip(0)
    after = certify(net, X[:1]).table
    fresh = Transformer.from_weights(net.arch, {name: each.clone() for name, each in net.state_dict().items()})
    assert after.equals(certify(fresh, X[:1]).table) and not after.equals(before)


@pytest.mark.slow
def test_norms_that_are_kept_change_nothing() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    X, norms = torch.randn(1, 4, 8, dtype=torch.float64), WeightNorms()
    for changes in ({}, {"skip": 0.0, "mlp": False}, {"kernel": "uniform"}, {"heads": [1]}, {"layers": 3}):
        variant = net.variant(**changes)
        given = certify(variant, X, norms=norms).table
        assert given.equals(certify(variant, X).table)
        layers = [(HeadNorms.of_layers(variant.arch, active_heads(variant.arch, k), [each])[0],
                   MLPNorms.of_layers(variant.arch, [each])[0])
                  for k, each in enumerate(variant.weights.layers)]  # fmt: skip
        for k, (heads, mlp) in enumerate(layers):
            kept = norms.of(variant, k)
            assert kept[1] == mlp
            assert all(torch.equal(getattr(kept[0], name), getattr(heads, name)) for name in
                       ("scores", "columns", "rows", "spectral"))  # fmt: skip


def test_samples_are_the_same_however_many_go_together() -> None:
    X = normal(4, 5, 8, seed=3)
    together = certify(SAN, X, theorems=["dong2021-2.3", "dobrushin"]).table
    for batch_size in (1, 3):
        apart = certify(SAN, X, theorems=["dong2021-2.3", "dobrushin"], batch_size=batch_size).table
        assert apart["met"].equals(together["met"]) and apart["sample"].equals(together["sample"])
        for column in ("log10_bound", "log10_measured"):
            assert apart[column].to_list() == pytest.approx(together[column].to_list(), abs=1e-9)


def test_an_option_that_does_not_exist_is_a_sentence() -> None:
    X, unknown = normal(1, 3, 8), {"center": "mean"}
    for call in (certify, collapse_depth):
        with raises(TheoremError, subject="options"):
            call(SAN, X, **unknown)  # type: ignore[arg-type]
    with raises(TheoremError, subject="batch_size"):
        certify(SAN, X, batch_size=0)
