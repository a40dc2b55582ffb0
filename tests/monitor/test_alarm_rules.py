"""Each rule speaks of a run that has its fault, at the right layer and step, and not of one that has not."""

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rankscope import Monitor
from rankscope.errors import TrainingWarning
from rankscope.monitor import AlarmRule, default_rules
from rankscope.monitor.alarm_rules import (
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
from tests.monitor.made_up_runs import healthy, heard, otherwise, rows
from tests.monitor.small import loss_of
from tests.monitor.training import gpt2


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


class OfOneSample(LogitGrowth):
    """Of eight samples one has logits a hundred times as large as the others."""

    def faults(self, rows: Any) -> Any:
        for row in rows.by_metric["largest_logit"]:
            row["most"] = 5292.0 if row["layer"] == 2 and row["head"] == 1 else row["most"]
        return super().faults(rows)


def test_the_largest_logit_is_that_of_the_sample_that_has_it() -> None:
    (alarm,) = heard([OfOneSample()], healthy)
    assert (alarm.layer, alarm.since, alarm.step) == (2, 0, 20) and "the largest is 5.3e+03" in alarm.sentence


def heads_of(sizes: Callable[[int, int, int], float]) -> Any:
    """A run with these sizes of heads, by layer, head and measurement."""

    def size(head: int) -> Callable[[int, int], float]:
        return lambda layer, index: sizes(layer, head, index)

    return otherwise({f"head_mu/{head}": size(head) for head in range(4)})


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        (lambda at, head, k: 0.0 if at == 2 and head and k > 2 else 2.0, [(2, 1)]),  # three of four
        (lambda at, head, k: 1e-5 if at == 2 and head else 2.0, [(2, 1)]),  # from the start
        (lambda at, head, k: 0.0 if head or at > 1 else 2.0, [(1, 1)]),  # all but one in the whole network
        (lambda at, head, k: 0.0 if k > 2 else 2.0, [(1, None)]),  # all heads of all layers
        (lambda at, head, k: 1e-7 if k > 2 else 2.0, [(1, None)]),
        (lambda at, head, k: 2.0 / 8**head, []),  # of several sizes
        (lambda at, head, k: 0.0 if k < 8 else 2.0, []),  # projections that begin at zero
        (lambda at, head, k: 2.0 / 10 ** (5 * min(k, 6) / 6), []),  # tokens that come closer, in all layers
    ],
)
def test_heads_that_died_are_told_from_the_living(sizes: Any, places: list[tuple[int, int | None]]) -> None:
    rule, run = DeadHead(), heads_of(sizes)
    alarms = [alarm for k in range(13) for alarm in rule.on_measurement(rows(10 * k, run, k, heads=4), 10 * k)]
    assert [(alarm.layer, alarm.head) for alarm in alarms] == places


@pytest.mark.parametrize(
    ("tokens", "entropy", "raised"),
    [
        (1, 0.0, False), (2, 0.34, False), (2, 0.2, False), (2, 0.1, True), (2, 0.01, True), (3, 0.5, False),
        (3, 0.2, True), (5, 0.4, False), (5, 0.3, True), (None, 0.3, True), (64, 0.3, True), (64, 0.4, False),
    ],
)  # fmt: skip
def test_attention_of_few_tokens_is_compared_with_what_it_can_be(
    tokens: int | None, entropy: float, raised: bool
) -> None:
    """Even attention of two tokens under a causal mask has log(2) / 2 = 0.347 nats, of one token none."""
    rule = EntropyCollapse()
    rule.tokens = tokens
    assert bool(heard([rule], otherwise({"entropy": lambda at, k: entropy}))) is raised


def test_an_alarm_whose_fault_has_gone_is_over_until_it_comes_again() -> None:
    for rule in (Collapse(), Collapse().for_stack("decoder")):
        said = []
        for k, size in enumerate([0.7, 0.01, 0.01, 0.01, 0.7, 0.7, 0.7, 0.01, 0.01]):
            rule.on_measurement(rows(10 * k, otherwise({"relative_mu": lambda at, index, size=size: size}), k), 10 * k)
            said.append([*rule.over.values()])
            again = Collapse()
            again.load_state_dict(rule.state_dict())
            assert again.over == rule.over
        name = f"tokens collapse{'/decoder' * bool(rule.stack)}"
        over = f"the alarm {name!r} of layer 1, since step 10, is over at step 50"
        assert said == [[]] * 5 + [[over]] * 3 + [[]]


def test_a_measurement_without_a_rules_metrics_does_not_count() -> None:
    rule, alarms = Collapse(), []
    for k in range(4):
        measured = rows(10 * k, otherwise({"relative_mu": lambda at, index: 0.01}), k)
        alarms += rule.on_measurement(measured if k % 2 == 0 else measured.filter(metric="entropy"), 10 * k)
    assert [(alarm.since, alarm.step) for alarm in alarms] == [(0, 20)]


# A real training, and what is done to its network at one step of it: by the rule that must say so, and no other run.
METRICS = ["relative_mu", "mu", "entropy", "first_token_mass", "head_mu", "largest_logit"]
LENGTH, LATE_STEP = 24, 16


def scale(by: float, *names: str) -> Callable[[Any], object]:
    """Multiply these weights, of every layer."""

    def change(model: Any) -> None:
        for layer in model.layers:
            for name in names:
                layer.get_parameter(name).data.mul_(by)

    return change


def scale_queries(by: float) -> Callable[[Any], object]:
    return lambda model: [layer.self_attn.in_proj_weight.data[:32].mul_(by) for layer in model.layers]


def look_at_the_first(model: Any) -> None:
    """Queries are one vector, which the first token's key meets: its first entry is large."""
    for layer in model.layers[:1]:
        weight, bias = layer.self_attn.in_proj_weight.data, layer.self_attn.in_proj_bias.data
        weight[:32] = 0.0
        bias[:16], weight[16:32, 0] = 5.0, 1.0


def drop_heads(*heads: int, layers: slice = slice(1, 2)) -> Callable[[Any], object]:
    """Values and outputs of these heads, of two, are zero, and so get no gradient."""

    def change(model: Any) -> None:
        for layer in model.layers[layers]:
            for head in heads:
                values = slice(32 + 8 * head, 40 + 8 * head)
                layer.self_attn.out_proj.weight.data[:, 8 * head : 8 * head + 8] = 0.0
                layer.self_attn.in_proj_weight.data[values] = layer.self_attn.in_proj_bias.data[values] = 0.0

    return change


def one_direction(model: Any) -> None:
    model.layers[0].linear1.weight.data[0] += 2.0


def same_tokens(model: Any) -> None:
    for layer in model.layers:
        layer.norm2.weight.data.mul_(1e-3)
        layer.norm2.bias.data.fill_(1.0)


FAULTS: dict[str, tuple[AlarmRule, Callable[[Any], object]]] = {
    "equal tokens": (Collapse(), same_tokens),
    "large queries and keys": (EntropyCollapse(), scale_queries(60.0)),
    "a first token that takes all": (AttentionSink(), look_at_the_first),
    "large norms": (TokenSize(), scale(1e3, "norm2.weight", "norm2.bias")),
    "a weight is NaN": (TokenSize(), scale(float("nan"), "linear1.weight")),
    "MLPs that pass next to nothing": (GradientSize(), scale(1e-5, "linear1.weight", "linear1.bias", "linear2.weight")),
    "a head of zeros": (DeadHead(), drop_heads(0)),
    "heads of zeros in a layer": (DeadHead(), drop_heads(0, 1)),
    "heads of zeros everywhere": (DeadHead(), drop_heads(0, 1, layers=slice(None))),
    "larger queries and keys": (LogitGrowth(), scale_queries(3.0)),
    "a large step": (UpdateSize(), lambda model: None),
    "a row of a weight": (StableRank(), one_direction),
}


def trained(
    rules: list[AlarmRule], change: Callable[[Any], object] | None, large_steps: bool = False, length: int = LENGTH
) -> Any:
    """The alarms of a training of a small post-norm encoder, whose first token has a large first entry."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    optimizer, alarms = torch.optim.SGD(model.parameters(), lr=1e-2), list[Any]()

    def batch(step: int) -> Tensor:
        X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        X[:, 0, 0] += 10.0
        return X

    options: Any = {"probe": batch(-1), "spectra": True, "alarms": rules, "run": tempfile.mkdtemp()}
    with Monitor(model, METRICS, 1, optimizer=optimizer, writers=[lambda m: alarms.extend(m.alarms)], **options) as m:
        for step in range(length):
            if change is not None and step == LATE_STEP:
                change(model)
                optimizer.param_groups[0]["lr"] *= 300.0 if large_steps else 1.0
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            m.step()
    return alarms


def test_a_healthy_training_raises_nothing() -> None:
    assert not trained(default_rules(), None, length=52)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::rankscope.errors.TrainingWarning")
def test_a_training_with_a_fault_raises_its_alarm(fault: str) -> None:
    rule, change = FAULTS[fault]
    kind: Any = type(rule)
    fresh = kind()
    fresh.REFERENCE = 8  # a shorter past
    alarms = trained([fresh], change, large_steps=isinstance(rule, UpdateSize))
    assert alarms and {alarm.rule for alarm in alarms} == {rule.name} and alarms[0].since == LATE_STEP + 1


@pytest.mark.parametrize("tokens", [2, 3, 12])
def test_attention_of_a_probe_of_few_tokens_raises_nothing_unless_it_collapses(tokens: int) -> None:
    ids = torch.randint(30, (1, tokens), generator=torch.Generator().manual_seed(0))
    for sharp in (False, True):
        model: Any = gpt2()
        for block in model.transformer.h:
            block.attn.c_attn.weight.data[:, :32].mul_(300.0 if sharp else 1.0)
        rule = EntropyCollapse()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", TrainingWarning)
            with Monitor(model, "entropy", 1, ids, run=tempfile.mkdtemp(), alarms=[rule]) as monitor:
                for _ in range(3):
                    monitor.step()
        assert bool([each for each in warned if each.category is TrainingWarning]) is sharp
        assert rule.tokens == tokens
