"""What becomes of the tokens is told the same of every curve, whoever tells it."""

import math

import numpy as np
import pytest

from rankscope.profiles import CurveView, disagreement, ending, listing, undecided
from rankscope.profiles.verdict import UNIFORM, sentence

NAN = math.nan


def curve(
    *logs: float, name: str = "a", noise: str = "", floor: float = NAN, arithmetic: str = "deviation",
    metric: str = "relative_residual",
) -> CurveView:  # fmt: skip
    values = np.array(logs)
    where = np.array([k < len(noise) and noise[k] == "o" for k in range(len(logs))])
    floors, none = np.full(len(logs), floor), np.zeros(len(logs), dtype=int)
    return CurveView(metric, name, arithmetic, name, "", values, 10**values, [], [], where, floors, none, 1)


def test_uniform_means_to_the_end() -> None:
    found = ending(curve(0.0, -4.0, -0.3, -5.0, -6.0))
    assert (found.group, found.layer, found.end) == ("uniform", 3, "1.0e-06")
    back = ending(curve(0.0, -17.0, -0.3, -0.7, -0.5, noise=".o", floor=-15.0, arithmetic="float64"))
    assert (back.group, back.end) == ("apart", "0.316")
    assert curve(0.0, -8.0, -0.3, -8.0, noise=".o.o").floor_from == 3


def test_noise_is_neither_the_largest_nor_the_smallest() -> None:
    shown = curve(0.0, -1.0, name="shown", metric="mu")
    noise = curve(0.0, -9.0, name="lost", metric="mu", noise=".o", floor=-7.0, arithmetic="float32")
    said = listing([shown, noise])
    assert "0.1 in shown" in said and "lost (from layer 1)" in said and "1.0e-09" not in said
    assert "1.0e-09" not in listing([noise]) and "lost" in listing([noise])


def test_a_floor_above_the_threshold_hides_what_lies_beneath() -> None:
    hidden = ending(curve(0.0, -math.inf, noise=".o", floor=-1.2, arithmetic="bfloat16"))
    assert hidden.group == "hidden"
    beneath = ending(curve(0.0, -math.inf, noise=".o", floor=-15.0, arithmetic="float64"))
    assert (beneath.group, beneath.value) == ("uniform", "float64's floor")


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (curve(0.0, -0.1), "Tokens stay apart (0.794 of their size at layer 1)."),
        (curve(0.0, -2.0), "Tokens are nearly the same, though not uniform (0.01 of their size at layer 1)."),
        (curve(0.0, -4.0), "Tokens become the same: uniform to 1.0e-04 at layer 1."),
        (curve(0.0, -7.0, -8.0), "uniform to 1.0e-07 by layer 1 and to 1.0e-08 at layer 2."),
        (curve(0.0, -math.inf), "uniform to 0 at layer 1."),
        (curve(0.0, NAN, NAN), "There is no number from layer 1 on: an overflow, or a NaN in what was given."),
        (curve(-0.5, -5.0, -15.0, -45.0), "to 1.0e-45 at layer 3: each layer cubes the difference."),
        (
            curve(0.0, -9.0, -9.0, noise=".oo", floor=-7.0, arithmetic="float32"),
            "uniform to float32's floor from layer 1.",
        ),
    ],
)
def test_a_curve_in_a_sentence(shown: CurveView, said: str) -> None:
    assert sentence(shown).endswith(said)


@pytest.mark.parametrize(
    ("curves", "said"),
    [
        ([curve(0.0, -0.3, name="b"), curve(0.0, -0.1)],
         "At layer 1 tokens stay apart in a (0.794), b (0.501)."),
        ([curve(0.0, -0.1), curve(0.0, -4.0, name="b")],
         "At layer 1 tokens stay apart in a (0.794); tokens are the same in b (below 0.001 from layer 1, "
         "1.0e-04)."),
        ([curve(0.0, -5.0, -6.0), curve(0.0, -0.3, -4.0, -5.0, name="b")],
         "At the last layer of each tokens are the same in b (below 0.001 from layer 2, 1.0e-05 at layer 3), "
         "a (below 0.001 from layer 1, 1.0e-06 at layer 2)."),
        ([curve(0.0, NAN), curve(0.0, -0.3, name="b")],
         "At layer 1 tokens stay apart in b (0.501); there is no number, for an overflow or a NaN, in a (no "
         "number from layer 1)."),
        ([curve(0.0, 1.0, metric="mu"), curve(0.0, 0.0, metric="mu", name="b")],
         "At the last layer mu is largest in a (10) and smallest in b (1)."),
        ([curve(0.0, NAN, metric="mine"), curve(0.0, 0.0, metric="mine", name="b")],
         "At the last layer mine is 1 in b. There is no number, for an overflow or a NaN, in a."),
    ],
)  # fmt: skip
def test_curves_side_by_side(curves: list[CurveView], said: str) -> None:
    assert listing(curves, UNIFORM) == said


def test_the_pair_and_both_metrics_are_named() -> None:
    ends = {
        "relative_residual": {"a": math.log10(0.5), "b": math.log10(0.25), "c": -9.0},
        "relative_mu": {"a": math.log10(0.2), "b": math.log10(0.4), "c": -9.0},
        "mu": {"a": 3.0, "b": 1.0, "c": 0.0},
    }
    assert disagreement(ends) == (
        "Metrics rank them differently: by relative_residual tokens are further apart in a (0.5) than in b "
        "(0.25), by relative_mu in b (0.4 against 0.2)."
    )


def test_a_share_and_a_size_say_why_they_differ() -> None:
    said = disagreement({"relative_mu": {"a": -1.0, "b": -2.0}, "mu": {"a": 0.0, "b": 1.0}})
    assert said.endswith("by mu in b (10 against 1): mu grows with the size of the tokens, which a share leaves out.")


def test_cosines_count_the_other_way() -> None:
    same = {"mean_cosine": {"a": -1.0, "b": -0.1}, "relative_mu": {"a": -0.2, "b": -0.5}}
    assert disagreement(same) == ""
    assert "by mean_cosine" in disagreement({**same, "relative_mu": {"a": -0.5, "b": -0.2}})


def test_what_is_too_near_or_of_attention_or_of_others_is_no_disagreement() -> None:
    assert disagreement({"relative_mu": {"a": -1.0, "b": -1.001}, "mu": {"a": 0.0, "b": 1.0}}) == ""
    assert disagreement({"relative_mu": {"a": -1.0, "b": -2.0}, "entropy": {"a": 0.0, "b": 1.0}}) == ""
    assert disagreement({"relative_mu": {"a": -1.0, "b": -2.0}, "mu": {"a": 0.0, "c": 1.0}}) == ""
    assert disagreement({}) == ""


def test_the_order_of_networks_is_decided_beyond_the_spread_over_texts() -> None:
    a, b = np.array([-1.0, -2.0, -3.0]), np.array([-1.1, -2.1, -3.1])
    assert not undecided({"a": a, "b": b}, paired=True)  # on each text a tenth lower
    assert "between a and b" in undecided({"b": b, "a": a}, paired=False)  # of texts of their own
    c, d = np.array([-5.0, -5.3, -5.1]), np.array([-5.1, -5.0, -5.3])
    said = undecided({"a": a, "c": c, "d": d}, paired=True)
    assert "between c and d" in said or "between d and c" in said
    assert "a and" not in said.partition("between ")[2].partition(":")[0]
    assert not undecided({"a": a}, paired=True) and not undecided({"a": a, "b": b * np.nan}, paired=True)
    assert not undecided({"a": a, "b": np.array([-np.inf] * 3)}, paired=True)
    assert "one text" in undecided({"a": a[:1], "b": b[:1]}, paired=True)
    # Exactly the spread is not beyond it: differences 0 and 2 have mean 1 and standard deviation sqrt(2).
    assert "between" in undecided({"a": np.array([0.0, 0.0]), "b": np.array([0.0, -2.0])}, paired=True)
    assert not undecided({"a": np.array([0.0, 0.0]), "b": np.array([-1.0, -2.0])}, paired=True)
