"""A probe that the training does not notice, with the numbers of `watch` and the gradients of plain autograd."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope
from rankscope import Monitor, watch
from rankscope.errors import FileError, MetricError, MonitorError, RankscopeError, WatchError
from rankscope.live.processes import TensorParallel
from rankscope.monitor.measurement import MetricValues
from rankscope.monitor.probe import join_gradients
from tests.monitor.small import encoder, loss_of, tokens
from tests.monitor.training import TOKENS, batch, gpt2, probe, probed, train
from tests.monitor.training import loss_of as loss_of_logits
from tests.raising import raises

LOOPS: dict[str, dict[str, Any]] = {
    "a plain loop": {},
    "bfloat16 by autocast": {"autocast": True},
    "a loop inside one autocast": {"autocast": True, "inside": True},
    "accumulation": {"accumulate": 3},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_losses_weights_and_generators_are_those_of_a_run_without_it(loop: str, tmp_path: Path) -> None:
    metrics = ["relative_mu", "entropy", "head_mu"]
    alone, watched = train(steps=8, **LOOPS[loop]), train(probed(tmp_path, metrics=metrics, every=4), 8, **LOOPS[loop])
    assert alone.same(watched)
    assert rankscope.read(tmp_path).tables["training"]["step"].unique().sort().to_list() == [0, 4, 8]


def test_activation_checkpointing_is_as_it_was(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = gpt2()
        made.gradient_checkpointing_enable()
        return made.train()

    assert train(model=model()).same(train(probed(tmp_path), model=model()))


@pytest.mark.slow
def test_a_compiled_model_keeps_its_one_graph_and_its_losses(tmp_path: Path) -> None:
    compiled: dict[str, Any] = {"steps": 4, "compiled": "aot_eager"}
    alone = train(model=gpt2(layers=1).train(), **compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert alone.same(train(probed(tmp_path, every=2), model=gpt2(layers=1).train(), **compiled))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_numbers_are_those_of_watch(tmp_path: Path) -> None:
    metrics = ["relative_mu", "mu", "entropy", "head_mu"]
    model = gpt2()
    with Monitor(model, metrics, every=1, probe=probe(), run=tmp_path):
        pass
    with watch(model.eval(), metrics) as seen, torch.no_grad():
        model(**probe())
    keys = ["layer", "head", "metric"]
    theirs = seen.profile().table.group_by(keys, maintain_order=True).agg(
        pl.col("value").mean(), pl.col("value").min().alias("least"), pl.col("value").max().alias("most"),
        pl.col("value").std(ddof=0).alias("spread"), pl.col("value").len().alias("samples"),
    )  # fmt: skip
    ours = rankscope.read(tmp_path).tables["training"]
    both = ours.join(theirs, on=keys, nulls_equal=True, how="full", suffix="_watch", coalesce=True)
    assert len(both) == len(ours) == len(theirs)
    assert (both["samples"] == both["samples_watch"]).all()
    for name in ("value", "least", "most", "spread"):
        assert ((both[name] - both[f"{name}_watch"]).abs() < 1e-12).all()


def test_scalars_are_averaged_from_measurement_to_measurement(tmp_path: Path) -> None:
    with Monitor(gpt2(), every=4, probe=probe(), run=tmp_path) as monitor:
        for step in range(1, 9):
            monitor.step(loss=torch.tensor(float(step)), lr=0.1)
    losses = rankscope.read(tmp_path).tables["training"].filter(metric="loss")
    assert losses["step"].to_list() == [4, 8] and losses["value"].to_list() == [2.5, 6.5]
    assert losses["least"].to_list() == [1.0, 5.0] and losses["layer"].null_count() == 2


@pytest.mark.parametrize(
    ("options", "error", "subject"),
    [
        ({"probe": "text"}, MonitorError, "probe"),
        ({"probe": {"input_ids": [1, 2]}}, MonitorError, "probe"),
        ({"model": nn.Linear(2, 2)}, WatchError, None),
        ({"metrics": "mew"}, MetricError, None),
    ],
)
def test_bad_input_is_one_sentence(
    options: dict[str, Any], error: type[RankscopeError], subject: str | None, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"model": gpt2(), "probe": probe(), "run": tmp_path, **options}
    with raises(error, subject=subject) as raised:
        Monitor(**given)
    assert len(str(raised.value).splitlines()) == 1 and not (tmp_path / ".lock").exists()


def test_a_folder_has_one_monitor(tmp_path: Path) -> None:
    with Monitor(gpt2(), probe=probe(), run=tmp_path), raises(FileError, subject=str(tmp_path)):
        Monitor(gpt2(), probe=probe(), run=tmp_path)


def test_a_probe_is_a_copy(tmp_path: Path) -> None:
    given = probe()
    with Monitor(gpt2(), every=1, probe=given, run=tmp_path) as monitor:
        given["input_ids"].zero_()
        monitor.step()
    found = rankscope.read(tmp_path).tables["training"].filter(metric="mu").partition_by("step")
    assert found[0]["value"].to_list() == found[1]["value"].to_list()
    assert given["input_ids"].shape == (3, TOKENS)


def sizes(run: Path, step: int = 0) -> dict[int, float]:
    rows = rankscope.read(run).tables["training"].filter(metric="grad_tokens", step=step)
    return dict(zip(rows["layer"], rows["value"], strict=True))


def reference(model: nn.Module, ids: Tensor) -> dict[int, float]:
    """By hand: embeddings and blocks one after another, `retain_grad` on what each gives."""
    model = model.eval()
    core: Any = model.transformer
    head: Any = model.lm_head
    x = core.wte(ids) + core.wpe(torch.arange(ids.shape[1]))
    states = [x]
    for block in core.h:
        out = block(states[-1])
        states.append(out if isinstance(out, Tensor) else out[0])
    for state in states:
        state.retain_grad()
    loss_of_logits(head(core.ln_f(states[-1])), ids).backward()
    found = {}
    for layer, state in enumerate(states):
        assert state.grad is not None
        found[layer] = float(state.grad.double().flatten(1).norm(dim=1).mean() * len(ids))
    model.zero_grad()
    return found


def labelled() -> dict[str, Tensor]:
    return {**probe(), "labels": probe()["input_ids"]}


def test_gradients_are_those_of_plain_autograd(tmp_path: Path) -> None:
    ids, model = probe()["input_ids"], gpt2(layers=3)
    expected = reference(model, ids)
    ways: dict[str, dict[str, Any]] = {
        "labels": {"probe": labelled()},
        "loss": {"probe": probe(), "loss": lambda output: loss_of_logits(output.logits, ids)},
        "compiled": {"probe": labelled(), "model": torch.compile(model, backend="aot_eager")},
    }
    for name, options in ways.items():
        given = {"model": model, "metrics": ["mu", "entropy"], "every": 1, "run": tmp_path / name, **options}
        Monitor(**given).close()
        found = sizes(tmp_path / name)
        assert found.keys() == expected.keys() == {0, 1, 2, 3}
        assert all(abs(found[layer] / expected[layer] - 1) < 1e-5 for layer in expected), name
    with torch.autocast("cpu", torch.bfloat16):
        Monitor(model, "mu", every=1, probe=labelled(), run=tmp_path / "autocast").close()
        expected = reference(model, ids)
    found = sizes(tmp_path / "autocast")
    assert all(abs(found[layer] / expected[layer] - 1) < 2e-2 for layer in expected)


def test_without_a_loss_there_are_no_gradients(tmp_path: Path) -> None:
    Monitor(gpt2(), "mu", every=1, probe=probe(), run=tmp_path).close()
    assert not sizes(tmp_path)


def test_layers_that_are_not_asked_for_have_no_gradients(tmp_path: Path) -> None:
    Monitor(gpt2(), "mu", every=1, probe=labelled(), run=tmp_path, layers=[1]).close()
    assert sizes(tmp_path).keys() == {1}


def test_blocks_that_are_frozen_are_passed_by(tmp_path: Path) -> None:
    model = gpt2(layers=3)
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    Monitor(model, "mu", every=1, probe=labelled(), run=tmp_path).close()
    assert sizes(tmp_path).keys() == {2, 3}


class Several(nn.Module):
    """Blocks that give back two tensors like tokens, of which the next takes the second; and write into what
    they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, X: Tensor) -> Tensor:
        X = X * 1.0
        for layer in self.layers:
            _, X = layer(X)
        return X


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, X: Tensor) -> tuple[Tensor, Tensor]:
        added = self.linear(X.clone()).tanh()
        return added, X.add_(added)


def test_of_several_tensors_the_gradient_is_of_the_one_that_is_passed_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, X = Several(), torch.randn(2, 5, 4)
    Monitor(model, "mu", every=1, probe=X, run=tmp_path, loss=lambda out: out.square().mean()).close()
    states = [X.clone()]
    for layer in model.layers:
        linear: Any = layer.linear
        states.append(states[-1] + linear(states[-1]).tanh())
    for state in states[1:]:
        state.retain_grad()
    states[-1].square().mean().backward()
    found = sizes(tmp_path)
    # of the last layer nothing says which it is; layer 0 is what was given, which needs no gradient
    assert found.keys() == {1, 2}
    for layer_index, size in found.items():
        grad = states[layer_index].grad
        assert grad is not None
        assert abs(size / float(grad.flatten(1).norm(dim=1).mean() * 2) - 1) < 1e-5


class Checkpointed(nn.Module):
    """Recomputes its blocks in the old way, which takes gradients of weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = encoder().layers

    def forward(self, X: Tensor) -> Tensor:
        for layer in self.layers:
            again = torch.is_grad_enabled()
            X = checkpoint(layer, X.requires_grad_(), use_reentrant=True) if again else layer(X)
        return X


def test_code_without_gradients_is_measured_without_them(tmp_path: Path) -> None:
    given: dict[str, Any] = {"every": 1, "probe": tokens(1), "loss": lambda output: output.mean()}
    with Monitor(Checkpointed(), "mu", run=tmp_path, **given) as monitor:
        monitor.step()
        said = [each for each in monitor.notes if "gradients at the probe's tokens are not measured" in each]
    assert len(said) == 1 and "heckpoint" in said[0] and not sizes(tmp_path)
    assert rankscope.read(tmp_path).tables["training"].filter(metric="mu")["step"].to_list() == [0] * 4 + [1] * 4


GRADIENT_LOOPS: list[Any] = [{"autocast": True, "inside": True}, {"accumulate": 3}]
GRADIENT_LOOPS += [pytest.param({"compiled": "aot_eager"}, marks=pytest.mark.slow)]


@pytest.mark.parametrize("loop", GRADIENT_LOOPS)
def test_the_training_does_not_notice_gradients(loop: dict[str, Any], tmp_path: Path) -> None:
    ids = probe()["input_ids"]
    loss = {"loss": lambda output: loss_of_logits(output.logits, ids)}
    assert train(steps=6, **loop).same(train(probed(tmp_path, every=3, **loss), steps=6, **loop))
    assert sizes(tmp_path, 6).keys() == {0, 1, 2}


def test_gradients_that_wait_for_their_step_are_left_alone(tmp_path: Path) -> None:
    model, hooked = gpt2().train(), []
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda weight: hooked.append(weight))
    model(input_ids=batch(1), labels=batch(1)).loss.backward()
    before = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    places, heard = [each.grad for each in model.parameters()], len(hooked)
    with Monitor(model, "mu", every=1, probe=labelled(), run=tmp_path) as monitor:
        monitor.measure_now()
    assert len(hooked) == heard
    for each, kept, place in zip(model.parameters(), before, places, strict=True):
        assert each.grad is place and (kept is None or torch.equal(place, kept))


@pytest.mark.parametrize(
    "options",
    [
        {"loss": lambda output: output},
        {"loss": lambda output: 1.0},
        {"loss": lambda output: output.detach().mean()},
        {"loss": lambda output: output.mean(), "probe": None},
        {"loss": 3},
    ],
    ids=["a tensor of tokens", "a float", "no graph", "no probe", "no function"],
)
def test_a_loss_that_cannot_be_differentiated_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    given = {"model": encoder(), "metrics": "mu", "probe": tokens(1), "run": tmp_path, **options}
    with raises(MonitorError, subject="loss"):
        Monitor(**given)


def test_inline_and_probe_say_the_same(tmp_path: Path) -> None:
    model, X = encoder().train(), tokens(3)
    loss = lambda output: (output[:, 1:] - X[:, :-1]).square().mean()  # noqa: E731
    Monitor(model, "mu", every=1, probe=X, loss=loss, run=tmp_path / "probe").close()
    with Monitor(model, "mu", every=1, run=tmp_path / "inline") as monitor:
        loss_of(model, X).backward()
        monitor.step()
    probes, inlines = sizes(tmp_path / "probe"), sizes(tmp_path / "inline", 1)
    assert probes.keys() == inlines.keys() == {1, 2, 3}
    assert all(abs(probes[layer] / inlines[layer] - 1) < 1e-12 for layer in probes)


class Around(nn.Module):
    """A block that takes something floating before its tokens: a bias of scores, as T5's first block makes for all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        *bias, x = given
        return x + self.linear(bias[0].softmax(-1) @ x if bias else x)


@pytest.mark.parametrize("samples", [(3,), ()])
def test_tokens_are_found_among_what_the_first_block_takes(samples: tuple[int, ...], tmp_path: Path) -> None:
    """Of several floating arguments the one with three axes; where none has three, as of a single text, the first."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.bias, self.embed = nn.Parameter(torch.randn(5, 5)), nn.Linear(1, 8)
            self.blocks = nn.ModuleList(Around() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.states = [self.embed(x)]
            for block in self.blocks:
                given = (self.bias, self.states[-1]) if samples else (self.states[-1],)
                self.states.append(block(*given))
            return self.states[-1]

    net, X = Net().double(), torch.randn(*samples, 5, 1, dtype=torch.float64)
    with Monitor(net, "mu", probe=X, loss=lambda output: output.pow(3).sum(), run=tmp_path, blocks="blocks"):
        pass
    found = rankscope.read(tmp_path).tables["training"].filter(metric="grad_tokens").sort("layer")["value"].to_list()
    loss = net(X)
    for state in net.states:
        state.retain_grad()
    loss.pow(3).sum().backward()
    sizes = [state.grad.reshape(*samples or (1,), -1).norm(dim=1).sum().item() for state in net.states]
    assert found == pytest.approx(sizes, rel=1e-9)


def test_gradients_of_tokens_that_processes_share_are_joined_and_nothing_else_is(tmp_path: Path) -> None:
    """In a group of one process, each norm is its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        values, together = MetricValues(), TensorParallel(dist.group.WORLD, {}, keeps_copies=False)
        floor = torch.full((2,), 0.25)
        values.add(1, "grad_tokens", torch.tensor([3.0, 4.0]), floor)
        values.add(1, "mu", torch.tensor([-1.0, 2.0]), floor)
        for tokens_of_each, of_gradients in ((None, 0.25), ([6], 0.0)):
            together.tokens = tokens_of_each
            join_gradients(values, together)
            (gradient,), (mu,) = values.parts[1, "grad_tokens", False], values.parts[1, "mu", False]
            assert gradient[0].tolist() == [3.0, 4.0] and gradient[1].tolist() == [of_gradients] * 2
            assert mu[0].tolist() == [-1.0, 2.0] and torch.equal(mu[1], floor)
    finally:
        dist.destroy_process_group()
