"""An encoder and a decoder side by side: each is measured as if it were alone."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.errors import MonitorError, WatchError
from rankscope.figures.description import Points
from rankscope.forecasts import ModuleInputs, Recipe
from rankscope.forecasts.live_module import read_module
from rankscope.live import watch
from rankscope.live.plan import make_plans
from rankscope.monitor import Monitor
from rankscope.monitor.alarm_rules import Collapse
from rankscope.monitor.alarms import AlarmRule, Fault, MeasurementRows, RuleSet
from rankscope.monitor.writers import scalars
from rankscope.trainings import TRAINING, read_training
from rankscope.trainings.figures import layer_map
from rankscope.trainings.signals import run_signals
from tests.live import reference
from tests.live.families import WORDS
from tests.live.sequences import sequences, t5, t5_batch, translator, translator_loss
from tests.live.test_sides import bart
from tests.raising import raises

SIDES = {"encoder": 2, "decoder": 3}
METRICS = ["relative_residual", "mu", "entropy", "head_mu"]


class Learner:
    """A model, how it is called with sequences, and its loss."""

    def __init__(self, kind: str) -> None:
        self.kind, self.model = kind, (t5 if kind == "t5" else translator)()
        root = self.model if kind == "t5" else self.model.transformer
        self.blocks: dict[str, Any] = {side: getattr(root, side) for side in SIDES}
        self.blocks = {k: list(part.block if kind == "t5" else part.layers) for k, part in self.blocks.items()}
        self.path = "{}.block" if kind == "t5" else "transformer.{}.layers"

    def probe(self, source: Tensor, target: Tensor) -> Any:
        return t5_batch(source, target) if self.kind == "t5" else (source, target)

    def loss(self, source: Tensor, target: Tensor) -> Tensor:
        if self.kind == "t5":
            loss: Tensor = self.model(**t5_batch(source, target)).loss
            return loss
        return translator_loss(self.model(source, target), target)

    def padding(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        missing = target == 0
        if self.kind != "t5":  # whose mask is one of what was written, one place later
            missing = torch.cat([torch.zeros_like(missing[:, :1]), missing[:, :-1]], 1)
        return {"encoder": source == 0, "decoder": missing}


learners = pytest.mark.parametrize("kind", ["t5", "transformer"])


@learners
def test_each_stack_has_its_own_tokens_and_padding(kind: str) -> None:
    """Hidden states are caught by hooks of our own, and read by the formula. Both sides have as many tokens."""
    learner, (source, target) = Learner(kind), sequences(4, seed=1)
    caught: dict[tuple[str, int], Tensor] = {}
    hooks = []
    for side, blocks in learner.blocks.items():
        for layer, block in enumerate(blocks, start=1):

            def keep(_: nn.Module, args: Any, output: Any, at: tuple[str, int] = (side, layer)) -> None:
                if at[1] == 1:
                    caught[at[0], 0] = args[0].detach().clone()
                caught[at] = (output if isinstance(output, Tensor) else output[0]).detach().clone()

            hooks.append(block.register_forward_hook(keep))
    learner.model.train()
    with torch.no_grad(), watch(learner.model, METRICS) as both:
        learner.loss(source, target)
    for hook in hooks:
        hook.remove()
    padding = learner.padding(source, target)
    assert not torch.equal(padding["encoder"], padding["decoder"])
    profile = both.profile()
    for (side, layer), X in caught.items():
        for name, formula in {"mu": reference.mu, "relative_residual": reference.relative_residual}.items():
            found = profile.curve(name, variant=side)[:, layer]
            torch.testing.assert_close(found, formula(X, ~padding[side]), rtol=1e-11, atol=1e-12)
    for side, depth in SIDES.items():
        assert profile.curve("mu", variant=side).shape == (4, depth + 1)
        checks = both.stacks[side].profile().manifest.networks[0].checks
        assert checks["padded_tokens"] == int(padding[side].sum())
        with torch.no_grad(), watch(learner.model, METRICS, blocks=learner.path.format(side)) as alone:
            learner.loss(source, target)
        for name in METRICS:
            assert torch.equal(alone.profile().curve(name).nan_to_num(), profile.curve(name, variant=side).nan_to_num())
    assert f"decoder: {next(note for note in both.stacks['decoder'].notes if 'cross-attention' in note)}" in both.notes
    assert not any("cross-attention" in note for note in both.stacks["encoder"].notes)


def train(learner: Learner, monitors: list[Monitor], optimizer: Any, steps: int) -> list[float]:
    """Steps of two micro-batches each; the losses."""
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for part in range(2):
            loss = learner.loss(*sequences(8, seed=100 + 2 * step + part)) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        for monitor in monitors:
            monitor.step(loss=total)
        losses.append(float(total))
    return losses


@pytest.mark.parametrize(
    ("kind", "inline"),
    [
        ("transformer", "tokens"), ("t5", ""),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in
          [("t5", "tokens"), ("t5", "attention"), ("transformer", "attention"), ("transformer", "")]),
    ],
)  # fmt: skip
def test_a_monitor_measures_both_as_two_monitors_do(kind: str, inline: str, tmp_path: Path) -> None:
    """To the digit, micro-batches and gradients of weights and tokens included; the weights end as without them.
    `inline` says what is read of training batches; without it a probe is measured."""
    source, target = sequences(4, seed=1)
    metrics = ["relative_residual", "mu"] if inline == "tokens" else METRICS
    trained = {}
    for run in ("bare", "both", *SIDES):
        learner = Learner(kind)
        optimizer = torch.optim.SGD(learner.model.parameters(), 0.1)
        options: dict[str, Any] = {"every": 1, "spectra": True, "alarms": (), "optimizer": optimizer}
        if not inline:
            options |= {"probe": learner.probe(source, target), "embeddings": "mean"}
            options |= {} if kind == "t5" else {"loss": lambda scores: translator_loss(scores, target)}
        blocks = learner.path.format(run) if run in SIDES else None
        monitors = [] if run == "bare" else [
            Monitor(learner.model, metrics, run=tmp_path / run, blocks=blocks, **options)
        ]  # fmt: skip
        trained[run] = train(learner, monitors, optimizer, 1), list(learner.model.parameters())
        for monitor in monitors:
            monitor.close()
    for losses, weights in trained.values():
        assert losses == trained["bare"][0]
        assert all(map(torch.equal, weights, trained["bare"][1]))
    table = rankscope.read(tmp_path / "both").tables["training"]
    assert set(table.filter(pl.col("layer").is_null())["metric"]) == {"loss", "lr"}
    names = {name.partition("/")[0] for name in table.filter(pl.col("layer").is_not_null())["metric"]}
    assert {*metrics, "grad_mlp", "update_query_key", "stable_rank_mlp"} <= names
    assert ("grad_tokens" in names) is (inline != "attention") and ("rankme" in names) is (not inline)
    keys = ["step", "metric", "layer", "head"]
    for side in SIDES:
        own = table.filter(pl.col("metric").str.ends_with(f"/{side}"))
        plain = own.with_columns(pl.col("metric").str.strip_suffix(f"/{side}")).sort(keys)
        expected = rankscope.read(tmp_path / side).tables["training"].filter(pl.col("layer").is_not_null()).sort(keys)
        assert plain.select(keys).equals(expected.select(keys))
        for column in ("value", "spread", "floor"):
            assert plain[column].to_list() == pytest.approx(expected[column].to_list(), rel=1e-12, nan_ok=True)


def test_a_module_around_both_stacks_is_given_the_masks_of_both(tmp_path: Path) -> None:
    """BART's inner model, of whose two masks each stack has its own."""
    model, source = bart().train(), torch.randint(3, WORDS, (2, 6))
    given = {"input_ids": source, "decoder_input_ids": source.flip(1)}
    mask = torch.ones(2, 6, dtype=torch.long)
    given |= {"attention_mask": mask.clone(), "decoder_attention_mask": mask.clone()}
    given["attention_mask"][0, 3:], given["decoder_attention_mask"][1, 5:] = 0, 0
    torch.manual_seed(1)
    with torch.no_grad(), watch(model, "mu") as both:
        model(**given)
    torch.manual_seed(1)
    with Monitor(model, "mu", 1, run=tmp_path) as monitor:
        model(**given).logits.square().mean().backward()
        monitor.step()
    for side, padded in {"encoder": 3, "decoder": 1}.items():
        checks = both.stacks[side].profile().manifest.networks[0].checks
        assert checks["padded_tokens"] == padded
        found = read_training(tmp_path).grid(f"mu/{side}").value[:, 0].tolist()
        assert found == pytest.approx(both.profile().curve("mu", variant=side).mean(0).tolist(), rel=1e-6)


@pytest.mark.slow
@learners
def test_both_stacks_of_a_training_that_learns(kind: str, tmp_path: Path) -> None:
    """The last measurement of the probe is that of the trained model by hand."""
    learner, (source, target) = Learner(kind), sequences(6, seed=1)
    optimizer = torch.optim.AdamW(learner.model.parameters(), 1e-2)
    probe = learner.probe(source, target)
    with Monitor(learner.model, "mu", every=50, probe=probe, run=tmp_path, optimizer=optimizer) as monitor:
        losses = train(learner, [monitor], optimizer, 100)
    assert sum(losses[-10:]) / 10 < 0.85 * losses[0]
    training = read_training(tmp_path)
    assert training.steps == [0, 50, 100]
    learner.model.eval()
    with torch.no_grad(), watch(learner.model, "mu") as both:
        learner.loss(source, target)
    for side in SIDES:
        now = training.grid(f"mu/{side}").value[:, -1].tolist()
        assert now == pytest.approx(both.profile().curve("mu", variant=side).mean(0).tolist(), rel=1e-9)


def test_what_readers_of_a_run_show(tmp_path: Path) -> None:
    """Names of metrics, a chart for each stack with its own alarms, signals, and names in other tools."""
    learner, (source, target) = Learner("t5"), sequences(4, seed=1)
    with torch.no_grad():
        for block in learner.blocks["decoder"]:
            for weight in block.parameters():
                weight.mul_(0.0)
        words = learner.model.get_parameter("shared.weight")
        words[:] = words[:1]
    rules = [Collapse(patience=1, action=(raised := list[Any]()).append)]
    probe = learner.probe(source, target)
    metrics = ["relative_mu", "largest_logit"]
    with Monitor(learner.model, metrics, every=1, probe=probe, run=tmp_path, alarms=rules) as monitor:
        last = monitor.last
    training = read_training(tmp_path)
    assert training.metrics[:2] == ["relative_mu/encoder", "relative_mu/decoder"]
    assert training.of_stacks("relative_mu") == training.metrics[:2]
    assert training.grid("relative_mu/decoder").layers == [0, 1, 2, 3]
    assert last is not None and "relative_mu/decoder/layer_03" in scalars(last)
    assert {alarm.rule for alarm in raised} == {"tokens collapse/encoder", "tokens collapse/decoder"}
    assert any(alarm.sentence.startswith("Step 0, decoder: tokens collapse from layer 0 on") for alarm in raised)
    assert training.alarms["rule"].to_list() == [alarm.rule for alarm in raised]
    for side in SIDES:
        chart = layer_map(training, f"relative_mu/{side}")
        (ring,) = [mark for mark in chart.panels[0].marks if isinstance(mark, Points)]
        assert ring.hover is not None and [f", {side}:" in text for text, *_ in ring.hover] == [True]
    largest = [signal for signal in run_signals(training) if signal.name == "largest_logit/decoder"]
    most = training.table.filter(metric="largest_logit/decoder", layer=1, head=0)["most"]
    assert largest[0].values.tolist() == most.to_list()


def rows(**values: float) -> pl.DataFrame:
    """A measurement of `relative_mu` at layer 1 of each side, and of the loss."""
    listed = [{"step": 1, "layer": 1, "metric": f"relative_mu/{side}", "value": x} for side, x in values.items()]
    listed.append({"step": 1, "layer": None, "metric": "loss", "value": 9.0})
    return pl.DataFrame([{**row, "samples": 1, "broken": 0, "floor": 0.0} for row in listed], schema=TRAINING)


class HighLoss(AlarmRule):
    """A rule about the whole run."""

    name, metrics, advice = "high loss", ("loss",), "Stop."

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        loss = rows.run_value("loss") or 0.0
        return {"loss": Fault(None, None, f"the loss is {loss}")} if loss > 5 else {}


def test_rules_look_at_each_stack_by_itself() -> None:
    """Each has a memory of its own, which a checkpoint holds; a fault of the whole run is one alarm."""
    kinds = [Collapse(patience=2, action="stop"), HighLoss(1, "warn")]
    rules = RuleSet(kinds, ["encoder", "decoder"])
    first = rules.on_measurement(rows(encoder=0.5, decoder=1e-4), 1)
    assert [(alarm.rule, alarm.sentence) for alarm in first] == [("high loss", "Step 1: the loss is 9.0. Stop.")]
    again = RuleSet([Collapse(patience=2, action="stop"), HighLoss(1, "warn")], ["encoder", "decoder"])
    again.load_state_dict(rules.state_dict())
    for resumed in (rules, again):
        (alarm,) = resumed.on_measurement(rows(encoder=0.5, decoder=1e-4), 2)
        assert (alarm.rule, alarm.layer, alarm.since) == ("tokens collapse/decoder", 1, 1)
        assert alarm.sentence.startswith("Step 2, since step 1, decoder: tokens collapse from layer 1 on")
        assert resumed.act([alarm], warn=False) is True
    assert rules.names == ["tokens collapse", "high loss"] and not kinds[0].baselines


def test_options_of_each_stack() -> None:
    model = translator()
    with torch.no_grad(), watch(model, "mu", layers={"decoder": [3]}, keep="states") as w:
        model(*sequences(2, seed=1))
    assert set(w.stacks["encoder"].states) == {0, 1, 2} and set(w.stacks["decoder"].states) == {3}
    with raises(WatchError, subject="stacks"):
        _ = w.states
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[:, 3:] = True
    with torch.no_grad(), watch(model, "mu", padding={"decoder": hidden}) as w:
        model(*sequences(2, seed=1))
    assert w.stacks["decoder"].profile().manifest.networks[0].checks["padded_tokens"] == 6
    for options in ({"padding": hidden}, {"padding": {"deocder": hidden}}, {"layers": {"decode": [1]}}):
        with raises(WatchError, subject=next(iter(options))):
            watch(model, "mu", **options)
    with raises(WatchError, subject="blocks"):
        watch(model, "mu", blocks={"a/b": "transformer.encoder"})
    named = {"reads": "transformer.encoder", "dec": list(model.transformer.decoder.layers)}
    with torch.no_grad(), watch(model, "mu", blocks=named, variant="mine") as w:
        model(*sequences(2, seed=1))
    assert set(w.profile().table["variant"]) == {"mine: reads", "mine: dec"}


def test_what_several_stacks_do_not_have(tmp_path: Path) -> None:
    batches = [t5_batch(*sequences(2, seed=seed)) for seed in (1, 2)]
    with raises(WatchError, subject="blocks"):
        read_module(t5(), ModuleInputs(batches), Recipe(steps=10))
    with raises(MonitorError, subject="paths_every"):
        Monitor(t5(), probe=t5_batch(*sequences(2, seed=1)), paths_every=100, run=tmp_path / "a")
    three = nn.ModuleDict({name: nn.Sequential(*nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False).layers) for name in "abc"})  # fmt: skip
    with raises(WatchError, subject="blocks") as caught:
        watch(three)
    assert "take several, {'one': 'a', 'two': 'b'}" in str(caught.value)
    assert list(make_plans(three, blocks={"one": "a", "two": "c"})) == ["one", "two"]


def test_parts_are_left_out_of_one_stack() -> None:
    model = t5().eval()
    with raises(WatchError, subject="stacks") as caught:
        watch(model, "mu").without(layers=[2])
    assert "blocks='encoder'" in str(caught.value)
    with torch.no_grad(), watch(model, "mu", blocks="decoder").without(layers=[2]) as w:
        model(**t5_batch(*sequences(2, seed=1)))
    mu = w.profile().curve("mu")
    assert torch.equal(mu[:, 1], mu[:, 2]) and not torch.equal(mu[:, 2], mu[:, 3])


@pytest.mark.parametrize("probed", [True, False])
def test_a_decoder_without_a_mask_is_said_to_have_none(probed: bool, tmp_path: Path) -> None:
    """As models of transformers are called with labels alone."""
    for masked in (True, False):
        model, batch = t5(), t5_batch(*sequences(2, seed=1))
        batch |= {} if masked else {"decoder_attention_mask": None}  # type: ignore[dict-item]
        with Monitor(model, "mu", 1, batch if probed else None, run=tmp_path / str(masked)) as monitor:
            model(**batch).loss.backward()
            monitor.step()
        assert any("decoder_attention_mask" in note for note in monitor.notes) is not masked


def test_a_decoder_that_did_not_run_is_left_out_of_a_profile() -> None:
    """`generate` calls it token by token."""
    model, source = t5(decoder_layers=2).eval(), sequences(2, seed=1)[0]
    with watch(model, "mu") as w:
        model.generate(source, attention_mask=(source != 0).long(), max_new_tokens=3)
    assert set(w.profile().table["variant"]) == {"encoder"}
    assert "decoder: 1 call was left out: it had a single token." in w.notes
