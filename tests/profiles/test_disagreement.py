"""Two metrics that rank networks differently, in a sentence."""

import math

from rankscope.profiles.verdict import disagreement


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
