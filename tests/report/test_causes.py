"""The verdict names a cause only where taking it out was measured."""

import math
import re

import polars as pl
import pytest

from rankscope.figures import power
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import Profile, measure
from rankscope.report import verdict
from rankscope.report.causes import removed
from tests.report.runs import NET, X, profile_of


def of(profile: Profile, variant: str) -> list[float]:
    return profile.curve("relative_residual", "log10", variant=variant).mean(0).tolist()


def test_the_part_without_which_tokens_are_the_same_is_the_cause() -> None:
    profile = profile_of(("transformer", "transformer-attention_skip", "transformer-mlp"), "deviation")
    curve = of(profile, "transformer-attention_skip")
    assert curve[-1] <= -3  # of the seeds, one that makes them the same
    below = next(k for k, value in enumerate(curve) if value <= -3)
    said = verdict(profile)
    assert "because of the attention skips: without them they are uniform to" in said
    assert f"uniform to {power(curve[below])} by layer {below} and to {power(curve[-1])} at layer 5" in said


def test_attention_alone_does_not_name_one_part() -> None:
    profile = profile_of(("transformer", "san"), "deviation")
    said = verdict(profile)
    assert "because" not in said and "was not measured" in said
    assert power(of(profile, "san")[-1]) in said


@pytest.mark.parametrize(
    ("others", "said"),
    [(("san", "san+skip", "san+mlp"), "the attention skips.* put back alone hold them apart"),
     ((), r"^Tokens stay apart \(0\..* was not measured")],
)  # fmt: skip
def test_what_a_part_put_back_does_is_said_where_it_was_measured(others: tuple[str, ...], said: str) -> None:
    assert re.search(said, verdict(profile_of(("transformer", *others), "deviation")))


def test_other_changes_are_no_cause() -> None:
    masked = measure(NET.variant("san").variant(mask="window:1"), X, variant="narrow")
    whole = measure(NET, X, variant="transformer")
    assert "because" not in verdict(Profile.join([whole, masked]))


def test_floors_are_said_not_numbers_beneath_them() -> None:
    profile = profile_of(("transformer", "san"), "float64")
    floor = profile.at_floor("relative_residual", variant="san").tolist().index(True)
    assert f"at float64's floor from layer {floor}" in verdict(profile)


def test_without_a_whole_network_the_variants_are_listed() -> None:
    profile = profile_of(("san", "san+skip"), "deviation")
    curve = of(profile, "san")
    below = next(k for k, value in enumerate(curve) if value <= -3)
    assert f"san (below 0.001 from layer {below}, {power(curve[-1])})" in verdict(profile)
    assert "tokens stay apart in san+skip" in verdict(profile)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("transformer", set()),
        ("transformer-attention_skip", {"attention_skip"}),
        ("transformer-skip", {"attention_skip", "mlp_skip"}),
        ("transformer-mlp-norm", {"mlp", "norm"}),
        ("san", {"attention_skip", "mlp", "norm"}),
        ("san+norm+skip", {"mlp"}),
    ],
)
@pytest.mark.parametrize("place", ["pre", "post"])
def test_parts_are_known_by_the_architecture(name: str, parts: set[str], place: str) -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, norm_place=place))  # type: ignore[arg-type]
    assert removed(net.arch.to_dict(), net.variant(name).arch.to_dict()) == frozenset(parts)


def test_networks_of_other_depths_are_each_taken_at_their_own_last_layer() -> None:
    deep = measure(NET.variant(layers=7), X, variant="deep")
    said = verdict(Profile.join([measure(NET, X, variant="short"), deep]))
    assert "at layer 7" in said and "at layer 5" in said and said.startswith("At the last layer of each")


def test_a_floor_above_the_threshold_hides_what_lies_beneath() -> None:
    profile = profile_of(("transformer", "san"), "bfloat16")
    assert bool(profile.at_floor("relative_residual", variant="san")[-1])
    assert "uniform" not in verdict(profile) and "bfloat16's floor" in verdict(profile)


def test_variants_that_were_measured_are_not_called_unmeasured() -> None:
    """One that ends in NaN says nothing about a cause, but it was there."""
    profile = profile_of(("transformer", "transformer-mlp"), "deviation")
    lost = pl.col("variant") == "transformer-mlp"
    table = profile.table.with_columns(pl.when(lost).then(math.nan).otherwise(pl.col("log10")).alias("log10"))
    said = verdict(Profile(table, profile.manifest))
    assert "was not measured" not in said and "without the MLPs that cannot be told (no number" in said


def test_where_no_part_makes_them_the_same_it_is_said_how_far_apart_they_end_without_each() -> None:
    """As of a causal decoder, whose attention alone does not collapse: every part that was taken out is named once."""
    ends = {"transformer": 0.88, "transformer-attention_skip": 0.201, "transformer-norm": 0.02, "san": 0.471}
    profile = profile_of(tuple(ends), "deviation")
    logs = {name: math.log10(value) for name, value in ends.items()}
    table = profile.table.with_columns(pl.col("variant").replace_strict(logs).alias("log10"))
    assert verdict(Profile(table, profile.manifest)) == (
        "Tokens stay apart (0.88 of their size at layer 5). No part that was taken out makes them the same: 0.201 "
        "without the attention skips, 0.02 without the norms and 0.471 by attention alone."
    )


def test_tokens_that_are_equal_from_the_start_are_held_apart_by_nothing() -> None:
    said = verdict(measure(NET, X[:, :1], variant="transformer"))
    assert said.startswith("Tokens are the same from the input")


def test_nearly_the_same_is_not_because_of_what_keeps_them_from_it() -> None:
    profile = profile_of(("transformer", "transformer-attention_skip"), "deviation")
    kept = pl.col("variant") == "transformer"
    value = pl.when(kept).then(-2.0).otherwise(-4.0)
    said = verdict(Profile(profile.table.with_columns(value.alias("log10")), profile.manifest))
    assert "because" not in said and "and the attention skips keep them from it" in said


def test_parts_that_hold_tokens_apart_and_those_that_do_not_are_named_once() -> None:
    """Attention alone makes them the same, and so with the MLPs put back; with the skips around it they stay apart."""
    ends = {"transformer": 0.5, "san": 1e-5, "san+skip": 0.4, "san+mlp": 1e-4}
    profile = profile_of(tuple(ends), "deviation")
    logs = {name: math.log10(value) for name, value in ends.items()}
    table = profile.table.with_columns(pl.col("variant").replace_strict(logs).alias("log10"))
    said = verdict(Profile(table, profile.manifest))
    assert said.endswith(
        "; the attention skips (0.4) put back alone hold them apart; "
        "the MLPs (uniform by layer 0) put back alone do not."
    )
