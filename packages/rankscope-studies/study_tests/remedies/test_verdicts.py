"""Published claims and the words that come of them."""

from rankscope_studies.remedies.measurements import RemedyMeasurements
from rankscope_studies.remedies.verdicts import AGREES, NOT, NOTHING, UNTOLD, lasting, learns, spread_out, weighed
from study_tests.remedies.builders import ByDepth, of_trainings


def test_that_deep_networks_learn_is_judged_by_the_depth_at_which_they_do(tables: RemedyMeasurements) -> None:
    plain = {6: (2.0, 2.0), 12: (3.1, 3.1)}
    both = of_trainings(tables, "loss", {"none": plain, "gate": {6: (2.1, 2.1), 12: (2.2, 2.2)}})
    came = learns(both, "gate", "post")
    assert came.word == AGREES and came.ours == "the deepest that learn, post: 12 layers, 6 without"
    worse = of_trainings(tables, "loss", {"none": plain, "gate": {6: (2.1, 2.1), 12: (2.2, 3.0)}})
    assert learns(worse, "gate", "post").word == NOT
    assert learns(both, "gate", "no skips").word == UNTOLD


def test_a_fall_with_depth_that_is_not_there_without_a_remedy_is_nothing_to_prevent(tables: RemedyMeasurements) -> None:
    falling, level = {6: (0.0, 0.1), 48: (-5.0, -4.0)}, {6: (0.2, 0.1), 48: (-0.2, 0.1)}

    def word(**values: ByDepth) -> str:
        measured = of_trainings(tables, "gradient_first_end", values)
        return lasting(measured, "gate", "gradient_first_end", "post").word

    assert word(none=falling, gate=level) == AGREES
    assert word(none=falling, gate=falling) == NOT
    assert word(none=level, gate=level) == word(none=level, gate=falling) == word(none=falling) == UNTOLD


def test_entropy_that_stays_without_a_remedy_says_nothing_of_it(tables: RemedyMeasurements) -> None:
    def word(mine: float, plain: float) -> str:
        given = {"none": {6: (plain, 2.0)}, "gate": {6: (mine, 2.0)}}
        return spread_out(of_trainings(tables, "entropy", given), "gate", "post").word

    # Attention that is even has the mean of log 1 ... log 64, 3.2 nats: a tenth is where it has collapsed.
    assert (word(1.0, 0.1), word(0.1, 0.1), word(1.0, 1.0), word(0.1, 1.0)) == (AGREES, NOT, UNTOLD, UNTOLD)


def test_words_for_what_seeds_say() -> None:
    noise = {"pre 2": 0.1, "pre 4": 0.1}
    low, high = {0: -0.2, 1: -0.3}, {0: 0.2, 1: 0.3}
    mixed = {0: -0.01, 1: 0.02}
    assert weighed({"pre 2": low, "pre 4": mixed}, noise, -1, "loss").word == AGREES
    assert weighed({"pre 2": high}, noise, -1, "loss").word == NOT
    assert weighed({"pre 2": mixed, "pre 4": mixed}, noise, -1, "loss").word == NOTHING
    assert weighed({"pre 2": {0: -0.02, 1: -0.03}}, noise, -1, "loss").word == NOTHING  # all, and too little
    unmoved = {
        "pre 2": {0: 0.0, 1: 0.0},
        "pre 4": {0: -0.02, 1: 0.16},
    }  # where seeds agree to the last bit, and so does the remedy
    assert weighed(unmoved, {"pre 2": 0.0, "pre 4": 0.1}, -1, "loss").word == NOTHING
    assert weighed(unmoved, {"pre 2": 0.0, "pre 4": 0.001}, -1, "loss").word == UNTOLD
    assert weighed({"pre 2": low, "pre 4": high}, noise, -1, "loss").word == UNTOLD
    assert weighed({"pre 2": {0: -9.0}}, noise, -1, "loss").word == UNTOLD
    assert weighed({}, noise, -1, "loss", "it is too deep").because == "it is too deep"
    said = weighed({"pre 2": low}, noise, -1, "loss").ours
    assert said == "loss pre 2: -0.250 (-0.300 to -0.200)"
