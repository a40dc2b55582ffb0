"""Each rule speaks of a run that has its fault, at the right layer and step, and not of one that has not."""

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.live.monitor import AlarmRule, default_rules
from rankscope.live.monitor.alarm_rules import (
    AttentionSink,
    Collapse,
    DeadHead,
    EntropyCollapse,
    GradientSize,
    LogitGrowth,
    StableRank,
    TokenSize,
    UpdateSize,
)
from tests.live.monitor.made_up_runs import healthy, heard, otherwise, rows


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rule", "changes", "layer", "head", "since", "step"),
    [
        # From layer 3 on and from the fifth measurement on, tokens differ by a hundredth.
        (Collapse(), {"relative_mu": lambda at, k: 0.01 if at >= 3 and k >= 4 else 0.7}, 3, None, 40, 50),
        # They never come below the threshold, and fall by three decades all the same.
        (Collapse(threshold=0.0), {"relative_mu": lambda at, k: 0.7 / 1000 ** (k >= 2),
                                   "mu": lambda at, k: 30.0 / 1000 ** (k >= 2)}, 1, None, 20, 30),
        (EntropyCollapse(), {"entropy": lambda at, k: 2.5 / (1 + k**2) if at == 2 else 2.5}, 2, None, 50, 60),
        (EntropyCollapse(), {"entropy": lambda at, k: 0.05 if at == 2 else 2.5}, 2, None, 0, 10),
        # Scores that are 300 times too large at the start: 0.3 nats, and never more.
        (EntropyCollapse(), {"entropy": lambda at, k: 0.3 if at == 2 else 2.5}, 2, None, 0, 10),
        (AttentionSink(),
         {"first_token_mass": lambda at, k: 0.05 + 0.08 * k if at == 4 else 0.1}, 4, None, 100, 120),
        (TokenSize(), {"mu": lambda at, k: 30.0 * 10 ** (3 * (k >= 5 and at >= 2))}, 2, None, 50, 60),
        (TokenSize(), {"mu": lambda at, k: 30.0 / 10 ** (3 * (k >= 5 and at == 4))}, 4, None, 50, 60),
        (TokenSize(), {"mu": lambda at, k: None if k >= 3 and at == 2 else 30.0}, 2, None, 30, 30),
        # A sixth of a decade at each measurement is no jump; it adds up.
        (TokenSize(drift=1.0), {"mu": lambda at, k: 10 ** (0.15 * k) if at == 1 else 30.0}, 1, None, 70, 80),
        (GradientSize(), {"grad_mlp": lambda at, k: 1e3 if at == 3 and k >= 2 else 0.2}, 3, None, 20, 40),
        (GradientSize(), {"grad_query_key": lambda at, k: 1e-7 if at == 4 else 0.01}, 4, None, 0, 20),
        (GradientSize(), {"grad_query_key": lambda at, k: 1e-8}, 1, None, 0, 20),
        (GradientSize(), {"grad_tokens": lambda at, k: 1e4 if k >= 6 else 1.0}, 1, None, 60, 80),
        (GradientSize(), {"grad_mlp": lambda at, k: None if k == 2 else 0.2}, 1, None, 20, 20),
        (DeadHead(), {"head_mu/1": lambda at, k: 1e-6 if at == 2 and k >= 3 else 2.0}, 2, 1, 30, 70),
        # All heads of a layer add exactly nothing.
        (DeadHead(), {f"head_mu/{head}": lambda at, k: 0.0 if at == 2 and k >= 3 else 2.0 for head in range(3)},
         2, None, 30, 70),
        # The last layer's gradient is as ever; those before it get nothing.
        (GradientSize(), {"grad_mlp": lambda at, k: 0.13 if at == 4 else 1e-6}, 1, None, 0, 20),
    ],
)  # fmt: skip
def test_a_fault_is_said_once_where_and_when_it_is(
    rule: AlarmRule, changes: Any, layer: int, head: int | None, since: int, step: int
) -> None:
    (alarm,) = heard([rule], otherwise(changes))
    assert (alarm.layer, alarm.head, alarm.since, alarm.step) == (layer, head, since, step)
    assert alarm.rule == rule.name and f"layer {layer}" in alarm.sentence and rule.advice in alarm.sentence
    assert alarm.sentence.startswith(f"Step {step}")
    assert (f"since step {since}" in alarm.sentence) is (since != step)
    others = [each for each in default_rules() if type(each) is not type(rule)]
    assert not heard(others, otherwise(changes))


LATE = 60  # A measurement with a past
GROWS = lambda at, k: 4.0 if at == 3 and k >= LATE else 1.0  # noqa: E731  a factor that comes late, in one layer


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (LogitGrowth(), {"largest_logit": lambda at, k: 5.0 * GROWS(at, k)}),
        # Slow growth is none, until a logit is larger than any healthy one.
        (LogitGrowth(), {"largest_logit": lambda at, k: 5.0 * 1.02**k if at == 3 and k < LATE else 1e3 + 1
                         if at == 3 else 5.0}),
        (UpdateSize(), {"update_mlp": lambda at, k: 2e-3 * GROWS(at, k)}),
        # The learning rate rises as much, and the share becomes large.
        (UpdateSize(), {"update_query_key": lambda at, k: 0.01 * GROWS(at, k), "lr": lambda at, k: GROWS(3, k)}),
        (StableRank(), {"spectral_norm_mlp": lambda at, k: 3.0 * GROWS(at, k)}),
        (StableRank(), {"stable_rank_query_key": lambda at, k: 8.0 / GROWS(at, k)}),
    ],
)  # fmt: skip
def test_what_leaves_its_recent_past_is_said_once(rule: AlarmRule, changes: Any) -> None:
    (alarm,) = heard([rule], otherwise(changes), LATE + 5)
    assert (alarm.layer, alarm.since, alarm.step) == (3, 10 * LATE, 10 * LATE + 20)
    others = [each for each in default_rules() if type(each) is not type(rule)]
    assert not heard(others, otherwise(changes), LATE + 5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        # A warm-up over 50 measurements: updates grow with the learning rate.
        {name: lambda at, k: 2e-3 * min(1.0, (k + 1) / 50) for name in (*UpdateSize.metrics, "lr")},
        # A learning rate that falls, and one that is made ten times as large: the share stays small.
        {"lr": lambda at, k: 1e-3 * 0.95**k, "update_mlp": lambda at, k: 2e-3 * 0.95**k},
        {"lr": lambda at, k: 1e-3 * (10 if k > 50 else 1), "update_mlp": lambda at, k: 2e-3 * (10 if k > 50 else 1)},
        # Everything grows by a factor of 3 in a hundred measurements, and stable ranks fall so.
        {name: lambda at, k: 5.0 * 3 ** (k / 100) for name in ("largest_logit", "spectral_norm_mlp")},
        {"stable_rank_mlp": lambda at, k: 20.0 / 3 ** (k / 100)},
        # One measurement, or two, far away.
        {"largest_logit": lambda at, k: 500.0 if k in (60, 61) else 5.0},
    ],
)
def test_slow_changes_and_known_causes_raise_nothing(changes: Any) -> None:
    assert not heard(default_rules(), otherwise(changes), 120)


@pytest.mark.slow
@given(st.lists(st.floats(0.5, 2.0), min_size=200, max_size=200), st.integers(1, 3))
def test_a_run_that_stays_about_its_start_raises_nothing(band: list[float], heads: int) -> None:
    def run(name: str, layer: int, index: int) -> float:
        drawn = band[hash((name, layer, index)) % len(band)]
        return (
            min(1.0, drawn * healthy(name, layer, index)) if "relative" in name else drawn * healthy(name, layer, index)
        )

    rules = default_rules()
    for index in range(8):
        table = rows(index, run, index, heads)
        assert not [alarm for rule in rules for alarm in rule.on_measurement(table, index)]


def test_a_gradient_that_stays_is_not_said_to_blow_up_where_the_others_vanish() -> None:
    (alarm,) = heard([GradientSize()], otherwise({"grad_mlp": lambda at, k: 0.13 if at == 4 else 1e-6}))
    assert "layer 1 vanish" in alarm.sentence and "layer 4" not in alarm.sentence and "blow" not in alarm.sentence


def test_layers_whose_heads_all_begin_at_zero_have_not_died() -> None:
    """As output projections that are initialised at zero give them: no layer differs from the others."""
    zeros = {f"head_mu/{head}": lambda at, k: 0.0 for head in range(3)}
    assert not heard([DeadHead()], otherwise(zeros))


@pytest.mark.parametrize(("value", "is_noise"), [(6e-8, True), (9.5e-7, True), (2e-6, False)])
def test_what_lies_below_its_floor_is_not_said_as_a_result(value: float, is_noise: bool) -> None:
    rule, floor, alarms = Collapse(), 9.5e-7, []
    for k in range(4):
        run = otherwise({"relative_mu": lambda at, index: value if at >= 3 and index >= 1 else 0.7})
        alarms += rule.on_measurement(rows(10 * k, run, k).with_columns(floor=pl.lit(floor)), 10 * k)
    (alarm,) = alarms
    assert alarm.layer == 3 and (f"{value:.2g} of" in alarm.sentence) is not is_noise
    assert (f"{floor:.2g}" in alarm.sentence) is is_noise


def test_what_lay_below_its_floor_at_first_is_not_said_as_a_result_either() -> None:
    rule, alarms = Collapse(), []
    for k in range(3):
        made_up = otherwise({"relative_mu": lambda at, index: 6e-8 if at >= 3 else 0.7})
        alarms += rule.on_measurement(rows(10 * k, made_up, k).with_columns(floor=pl.lit(9.5e-7)), 10 * k)
    (alarm,) = alarms
    less = "less than rounding shows (9.5e-07)"
    assert f"({less} and {less} at the first measurement)" in alarm.sentence


@pytest.mark.parametrize(
    "changes",
    [
        # Measured in a healthy GPT-2 of 4 layers and width 64 without clipping, steps 10 to 60.
        {"grad_query_key": lambda at, k: 0.1 / 10 ** [3.8, 3.6, 3.0, 2.4, 1.8, 1.6][min(k, 5)]},
        {"grad_query_key": lambda at, k: 0.1 / 10**4.3},
        # In one of 6 layers and width 48, measured every 5 steps: attention begins to learn at step 25, and goes on.
        {
            "grad_query_key": lambda at, k: (
                0.1 / 10 ** [5.4, 5.3, 5.0, 4.6, 3.8, 2.2, 1.9, 1.6, 1.2, 0.8, 0.3, 0.0, -0.2][min(k, 12)]
            )
        },
        # Its first layer begins before the others.
        {"grad_query_key": lambda at, k: 0.1 / 10 ** (1.5 if at == 1 else 5.0 if k < 5 else 1.8)},
        # A head that learns to look at one token.
        {"entropy": lambda at, k: 0.3 if at == 2 and k > 3 else 2.5},
    ],
)
def test_what_healthy_networks_do_raises_nothing(changes: Any) -> None:
    assert not heard(default_rules(), otherwise(changes))
