"""Forecasts of networks of every kind, in numbers, words and changes."""

import math
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
import torch

from rankscope import Architecture, Transformer, forecast, measure
from rankscope.errors import ArchitectureError, LabError
from rankscope.forecasts import PARTS, Design, Forecast, Mend, Plan, Recipe, changes, forecast_of, giorlandino
from rankscope.forecasts.layers import COLUMNS, SAMPLES
from rankscope.forecasts.plan import adapted_to_task
from rankscope.forecasts.verdict import sentences
from rankscope.lab import Initialisation, NextCharacter
from rankscope.nets import Mask
from rankscope.nets import mask_matrix as matrix
from rankscope_studies.dong2021.tasks import Sort

SMALL = Architecture(layers=4, width=16, heads=2, norm_place="pre", final_norm=True, mask="causal")
COLLAPSING = SMALL.replace(layers=24, norm="none", final_norm=False, attention_skip=0.0, mlp="none")
OPTIONS: dict[str, Any] = {"design": Design(tokens=12), "recipe": Recipe(steps=60)}


def forecast_with(arch: Architecture, **options: Any) -> Forecast:
    """The forecast of an architecture; each option is a field of `Design` or of `Recipe`."""
    of_design = {name: options.pop(name) for name in Design.__dataclass_fields__ if name in options}
    return forecast(arch, design=Design(**of_design), recipe=Recipe(**options))


@pytest.fixture(scope="module")
def found() -> Forecast:
    return forecast(COLLAPSING, **OPTIONS)


def test_what_collapses_is_said_to(found: Forecast) -> None:
    assert found.probability < 0.2 and found.place > 0.5
    said = " ".join(found.verdict)
    assert "will not learn" in said or "will hardly learn" in said
    assert "Tokens become the same" in said and "To blame" in said
    printed = " ".join(str(found).split())
    assert all(" ".join(sentence.split()) in printed for sentence in found.verdict)
    assert " ".join(found.verdict[0].split()) in " ".join(repr(found).split())


def test_columns_are_numbers(found: Forecast) -> None:
    for name in COLUMNS:
        assert found.table[name].dtype in (pl.Float64, pl.Int64) or name == "phase", name
    assert found.table["entropy"][1:].is_finite().all()


def test_phases_are_of_tokens_with_their_positions() -> None:
    """A table of positions is part of what the first layer reads."""
    arch = SMALL.replace(positions="absolute", length=12, layers=1)
    plan = forecast(arch, **OPTIONS).design
    model = plan.model()
    batch = plan.task.batch(plan.recipe.batch_size, 0, 0).part(slice(SAMPLES))
    net = model.network().to(torch.float64)
    X = net.run(model.tokens(batch.inputs).double()).states[0].detach()
    n, d = X.shape[1:]
    C = X @ X.mT / d
    q = float(C.diagonal(dim1=-2, dim2=-1).mean())
    p = float(((C.sum((-2, -1)) - C.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1))).mean())
    (phase,) = giorlandino(net, q, p, n)
    assert forecast_of(plan).table["boundary"][1] == pytest.approx(phase.distance, rel=1e-9)


def test_a_given_network_keeps_its_weights_and_gets_a_longer_table() -> None:
    net = Transformer.random(SMALL.replace(positions="absolute", length=4), seed=3, init="xavier")
    made = forecast(net, **OPTIONS).design.model().network()
    assert made.arch.length == 12
    query = "layers.0.attention.query.weight"
    torch.testing.assert_close(made.state_dict()[query], net.state_dict()[query].float())


def test_the_table_has_what_is_measured_beside_theory(found: Forecast) -> None:
    assert tuple(found.table.columns) == COLUMNS and found.table.height == COLLAPSING.layers + 1
    plan = found.design
    model = plan.model()
    batch = plan.task.batch(plan.recipe.batch_size, 0, 0).part(slice(SAMPLES))
    net, X = model.network().to(torch.float64), model.tokens(batch.inputs).double().detach()
    curve = measure(net, X).curve("relative_residual", "log10").mean(0)
    torch.testing.assert_close(torch.tensor(found.table["residual"].to_list(), dtype=torch.float64), curve)
    theory = found.table["residual_theory"].to_list()
    assert all(abs(a - b) < 0.5 for a, b in zip(theory, curve.tolist(), strict=True) if b > -2)


@pytest.mark.slow
def test_gradients_by_layer_are_those_of_autograd() -> None:
    """Where nothing underflows: of the loss of the task at the weights of values and queries."""
    plan = forecast(SMALL, **OPTIONS).design
    model = plan.model().double()
    batch = plan.task.batch(plan.recipe.batch_size, 0, 0).part(slice(SAMPLES))
    plan.task.loss(model(batch.inputs), batch).backward()
    table = forecast_of(plan).table
    for kind in ("query", "value"):
        norms = [
            weight.grad.norm().log10().item()
            for name, weight in model.named_parameters()
            if f"attention.{kind}.weight" in name and weight.grad is not None
        ]
        assert table[kind].to_list()[1:] == pytest.approx(norms, abs=1e-4)  # the head is in float32 there


@pytest.mark.slow
def test_the_same_network_by_any_way_in() -> None:
    """An architecture, a network with weights, a config and a model of transformers."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=50)
    torch.manual_seed(0)
    model = GPT2Model(config)
    of_config, of_model = forecast(config, **OPTIONS), forecast(model, **OPTIONS)
    assert of_config.design.arch == of_model.design.arch and of_config.design.arch.layers == 2
    assert any("weights are those given" in note for note in of_model.notes)
    assert of_config.design.arch.positions == "absolute" and not any("given" in note for note in of_config.notes)
    assert of_config.probability == pytest.approx(of_model.probability, abs=1e-6)  # the same seed, the same weights
    net = Transformer.random(SMALL, seed=0, init="xavier")
    assert forecast(net, **OPTIONS).readings["residual_last"] == pytest.approx(
        forecast(SMALL, **OPTIONS).readings["residual_last"], abs=1e-3
    )


@pytest.mark.slow
def test_depth_and_remedies_are_those_asked_for() -> None:
    deeper = forecast_with(SMALL, depth=6, remedies=["rezero"], tokens=12, steps=60)
    assert deeper.table.height == 7 and deeper.readings["remedies"] == 1.0
    assert deeper.readings["depth"] == pytest.approx(math.log2(6))


@pytest.mark.slow
def test_conditions_are_said() -> None:
    """Width and steps that no trained design had, a task that none was trained on, a mask that the task needs."""
    said = " ".join(forecast_with(SMALL.replace(mask="complete"), task="copying", tokens=6, steps=60).notes)
    assert "of copying none was trained" in said and "width 16 (trained: 64)" in said and "made causal" in said
    fields: dict[str, Any] = {"mask": "causal", "norm_place": "pre", "final_norm": True, "positions": "absolute"}
    usual = Architecture(layers=4, width=64, heads=4, length=64, **fields)
    assert not forecast(usual, design=Design(tokens=16)).notes


def test_a_part_without_a_recursion_is_named_and_the_rest_is_there() -> None:
    relative = SMALL.replace(positions="relative", layers=2)
    found = forecast(relative, **OPTIONS)
    assert any("theory has no rule" in note for note in found.notes)
    assert found.table["residual_theory"].is_nan().all() and not found.table["residual"].is_nan().any()


@pytest.mark.parametrize(
    ("options", "error", "subject"),
    [
        ({"steps": 0}, LabError, "steps"),
        ({"lr": -1.0}, LabError, "lr"),
        ({"lr": math.inf}, LabError, "lr"),
        ({"batch_size": 1.5}, LabError, "batch_size"),
        ({"tokens": 1}, LabError, "tokens"),
        ({"seed": -1}, LabError, "seed"),
        ({"task": "induction", "tokens": 6}, LabError, "tokens"),
        ({"task": "nothing"}, LabError, "task"),
        ({"task": "digits", "tokens": 3}, LabError, "tokens"),
    ],
)
def test_what_is_no_training_is_refused(options: dict[str, Any], error: type[Exception], subject: str) -> None:
    with pytest.raises(error) as caught:
        forecast_with(SMALL, **options)
    assert caught.value.subject == subject  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["design", "recipe", "module"])
def test_what_is_asked_stands_in_its_own_object(name: str) -> None:
    given: dict[str, Any] = {name: {"steps": 60}}
    with pytest.raises(LabError, match=f"{name} must be a .*; got a dict") as caught:
        forecast(SMALL, **given)
    assert caught.value.subject == name


@pytest.mark.parametrize("subject", ["a name", 3, SMALL.replace(cross_attention=True)])
def test_what_is_no_network_is_refused(subject: Any) -> None:
    with pytest.raises(ArchitectureError):
        forecast(subject, **OPTIONS)


@pytest.mark.slow
def test_changes_are_plans_that_can_be_made() -> None:
    plan = Plan(COLLAPSING, NextCharacter(12), Recipe(steps=60), Initialisation("xavier"))
    listed = dict(changes(plan))
    assert len(listed) > 15
    for said, make in listed.items():
        changed = make()
        assert changed != plan, said
        changed.model()
    assert listed["skips of weight 1"]().arch.attention_skip == 1.0
    assert not list(changes(plan, ()))
    with pytest.raises(LabError):
        list(changes(plan, ("norms",)))
    for part in PARTS:
        assert list(changes(plan, (part,))), part


@pytest.mark.slow
def test_mends_are_forecast_and_the_best_comes_first(found: Forecast) -> None:
    told: list[str] = []
    mends = found.mends(parts=("norm", "skips"), progress=lambda done, total, said: told.append(said))
    assert len(told) == 2 and mends
    chances = [round(mend.forecast.probability, 2) for mend in mends]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > found.probability and "probability" in repr(mends[0])
    least = found.least_skip()
    if least is not None:
        assert least.forecast.probability >= 0.7 and least.forecast.design.arch.attention_skip <= 1.0


def test_what_a_task_needs_of_a_network() -> None:
    arch, notes = adapted_to_task(SMALL.replace(mask="window:2", positions="absolute", length=4), NextCharacter(12), 12)
    assert arch.mask == "causal&window:2" and arch.length == 12 and len(notes) == 2
    same, none = adapted_to_task(SMALL.replace(positions="rotary"), NextCharacter(12), 12)
    assert same == SMALL.replace(positions="rotary") and not none
    encoder, none = adapted_to_task(SMALL.replace(mask="complete", positions="rotary"), Sort(), 8)
    assert encoder.mask == "complete" and not none


@pytest.mark.parametrize(
    "mask",
    ["causal;complete", "window:1;complete", "unidirectional", "prefix:2", Mask("all", lambda n: torch.ones(n, n) > 0)],
)
def test_no_layer_sees_what_comes_next(mask: Any) -> None:
    arch, notes = adapted_to_task(SMALL.replace(mask=mask, positions="alibi"), NextCharacter(12), 12)
    for layer in range(arch.layers):
        assert not matrix(arch.mask_of(layer), 12).triu(1).any()
        assert (matrix(arch.mask_of(layer), 12) <= matrix(SMALL.replace(mask=mask).mask_of(layer), 12)).all()
    assert len(notes) == (mask != "unidirectional")


def test_everything_goes_into_json(found: Forecast) -> None:
    told = found.to_dict()
    assert told["details"]["prediction"]["probability"] == found.probability
    assert len(told["tables"]["forecast"]["columns"]["layer"]) == found.table.height
    assert {"verdict", "exponents", "architecture", "readings"} <= set(told["details"])
    assert told["tables"].keys() == {"forecast", "forecast_nearest"}


@pytest.mark.slow
def test_deepest_is_deeper_with_skips() -> None:
    """By forecasts of depths: with skips and norms before branches deeper than without either."""
    apart = forecast(SMALL.replace(width=64, heads=4), design=Design(tokens=24))
    alike = replace(apart, plan=replace(apart.design, arch=COLLAPSING.replace(width=64, heads=4)))
    assert apart.deepest(most=16) > alike.deepest(most=16)
    assert isinstance(apart.table, pl.DataFrame)


USUAL = Architecture(layers=3, width=64, heads=4, length=64, mask="causal", positions="absolute")


@pytest.mark.parametrize(
    ("options", "fields", "said"),
    [
        ({"lr": 1e-6}, {}, "no trained design had rate 1e-06 (trained: 0.001 to 0.003)"),
        ({"lr": 0.1}, {}, "no trained design had rate 0.1 (trained: 0.001 to 0.003)"),
        ({}, {"parallel": True}, "no trained design had parallel True (trained: False)"),
        ({"steps": 301}, {}, "no trained design had steps 301 (trained: 300)"),
        ({"depth": 2}, {}, "no trained design had layers 2 (trained: 3 to 48)"),
        ({"task": "copying"}, {}, "of copying none was trained"),
        ({"remedies": ["rezero", "gate"]}, {}, "remedy rezero+gate"),
        ({"warmup": 0.2}, {}, "no trained design had warmup 0.2 (trained: 0.05)"),
        ({"frozen": ("gain",)}, {}, "frozen ('gain',) (trained: ())"),
        ({"lr": 3e-3}, {}, None),
        ({"remedies": ["rezero"]}, {"norm": "rms"}, None),
    ],
)
def test_the_headline_says_what_is_a_guess(options: dict[str, Any], fields: dict[str, Any], said: str | None) -> None:
    """Outside of what was trained no probability stands alone, also not in what is said of changes."""
    tokens = {} if options.get("task") == "copying" else {"tokens": 16}
    found = forecast_with(USUAL.replace(**fields), **{**options, **tokens})
    headline, mend = found.verdict[0], repr(Mend("a change", found))
    if said is None:
        assert not found.doubts and "guess" not in headline and "guess" not in mend
    else:
        assert (
            "a guess, since" in headline and said in headline and headline.index(said) < headline.index("probability")
        )
        assert mend.endswith("as a guess") and found.to_dict()["details"]["doubts"] == list(found.doubts) != []
        assert not any(said in sentence for sentence in found.verdict[1:])  # said once


def test_the_residual_is_called_by_its_name(found: Forecast) -> None:
    """In its norm it may be above 1: it is no share of a length."""
    table = pl.DataFrame({"residual": [0.0, 0.12], "gradient": [0.0, 0.0], "value": [0.0, 0.0], "query": [0.0, 0.0],
                          "key": [0.0, 0.0]})  # fmt: skip
    apart = sentences(replace(found, table=table, notes=(), doubts=()))
    assert "Tokens stay apart: after the last layer their relative residual is 1.3; 0 is all the same." in apart
    (said,) = [sentence for sentence in found.verdict if "Tokens become the same" in sentence]
    first = int(said.split("from layer ")[1].split()[0])
    logs = found.table["residual"].to_list()
    assert all(log < -2 for log in logs[first:] if not math.isnan(log)) and not logs[first - 1] < -2


def test_each_kind_of_change_is_the_one_that_is_named() -> None:
    """What is proposed for a network, by its own fields: other norms, heavier skips, fewer layers."""

    def changed(part: str, **fields: Any) -> dict[str, Plan]:
        plan = Plan(SMALL.replace(**fields), NextCharacter(12), Recipe(steps=60), Initialisation("xavier"))
        return {said: make() for said, make in changes(plan, (part,))}

    (bare,) = changed("norm", norm="none", final_norm=False).items()
    assert bare[0] == "a LayerNorm before each branch"
    assert (bare[1].arch.norm, bare[1].arch.norm_place, bare[1].arch.final_norm) == ("layer", "pre", True)
    (post,) = changed("norm", norm_place="post", final_norm=False).items()
    assert post[0] == "norms before branches, and a last one"
    assert (post[1].arch.norm, post[1].arch.norm_place, post[1].arch.final_norm) == ("layer", "pre", True)
    (pre,) = changed("norm", norm_place="pre").items()
    assert pre[0] == "norms after skips" and (pre[1].arch.norm_place, pre[1].arch.final_norm) == ("post", False)
    assert not changed("skips")
    for fields in ({"attention_skip": 0.5}, {"mlp_skip": 0.5}):
        ((said, plan),) = changed("skips", **fields).items()
        assert said == "skips of weight 1" and plan.arch.attention_skip == plan.arch.mlp_skip == 1.0
    assert list(changed("depth", layers=9)) == ["4 layers", "2 layers"] and not changed("depth", layers=3)
    assert [plan.recipe.lr for plan in changed("rate").values()] == pytest.approx([1e-3 / 3, 3e-3])
    assert [plan.arch.divisor / SMALL.divisor for plan in changed("temperature").values()] == [0.25, 4.0]
    assert "weights drawn by xavier instead of xavier" not in changed("initialisation")


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ([0.0, -1.0, -2.0], "Tokens stay apart: after the last layer their relative residual is 0.01; 0 is all the "
         "same."),
        ([0.0, -2.0, -5.0], "from layer 2 on their relative residual is below 0.01, after the last layer 1e-5."),
        ([-3.0, -1.9, -2.1, -40.0, math.nan], "from layer 2 on their relative residual is below 0.01, after layer 3, "
         "the last that is known, 1e-40."),
        ([-3.0, -4.0, -math.inf], "from layer 0 on their relative residual is below 0.01, after the last layer "
         "nothing."),
        ([math.nan, math.nan], "Rounding decided what tells tokens apart in every layer: nothing is known of it."),
    ],
)  # fmt: skip
def test_where_tokens_become_the_same_is_the_layer_after_the_last_in_which_they_are_not(
    found: Forecast, logs: list[float], said: str
) -> None:
    zeros = [0.0] * len(logs)
    table = pl.DataFrame({"residual": logs, "gradient": zeros, "value": zeros, "query": zeros, "key": zeros})
    told = sentences(replace(found, table=table, notes=(), doubts=()))
    assert [line for line in told if line.endswith(said)] and len(told) == len(set(told))
