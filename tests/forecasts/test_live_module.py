"""Modules of a person's own are forecast by what can be read of them, and left as they were."""

import copy
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope import Architecture, forecast
from rankscope.errors import ArchitectureError, LabError, RankscopeError, WatchError
from rankscope.forecasts import Design, Forecast, ModuleInputs, Predictor, Recipe, forecast_map, point_of
from rankscope.forecasts.layers import COLUMNS
from rankscope.forecasts.live_module import read_module
from rankscope.forecasts.live_passes import LiveBatch, in_dtype, passed
from rankscope.forecasts.plan import DescribedPlan
from rankscope.forecasts.weight_kinds import weight_kinds
from rankscope.lab import UNLABELLED
from tests.live.ranks import together

SYMBOLS, TOKENS, SAMPLES = 17, 12, 6


class OwnAttention(nn.Module):
    """Causal attention as people write it, queries, keys and values in one matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, token, width = x.shape
        parts = self.c_attn(x).split(width, -1)
        q, k, v = (part.view(batch, token, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, token, width))


class OwnBlock(nn.Module):
    """Pre-norm with skips, or post-norm without."""

    def __init__(self, width: int, heads: int, skips: bool) -> None:
        super().__init__()
        self.skips, self.attn = skips, OwnAttention(width, heads)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        if self.skips:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))
        x = self.ln_1(self.attn(x))
        return self.ln_2(self.mlp(x))


class OwnGPT(nn.Module):
    """A GPT in plain torch, which also counts its calls, keeps statistics in eval mode and draws random numbers."""

    def __init__(self, layers: int = 2, width: int = 16, skips: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(SYMBOLS, width), nn.Embedding(TOKENS, width)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.1)
        self.h: Any = nn.ModuleList(OwnBlock(width, 2, skips) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        self.statistics = nn.BatchNorm1d(width)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, idx: Tensor) -> Tensor:
        self.calls += 1
        self.seen.add_(1.0)
        torch.rand(1)
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        self.statistics(x.flatten(0, 1))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    drawn = [torch.randint(SYMBOLS, (SAMPLES, TOKENS + 1), generator=draw) for _ in range(2)]
    return [{"idx": ids[:, :-1], "following": ids[:, 1:]} for ids in drawn]


def cross_entropy(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["following"].flatten())


def own_gpt(**options: Any) -> OwnGPT:
    torch.manual_seed(3)
    return OwnGPT(**options)


class Reading(NamedTuple):
    """What `read_module` gives, by name."""

    plan: DescribedPlan
    point: dict[str, float]
    table: pl.DataFrame
    notes: list[str]


def read(model: nn.Module, loss: Any = cross_entropy, inputs: Any = None) -> Any:
    return Reading(*read_module(model, ModuleInputs(batches() if inputs is None else inputs, loss), Recipe(steps=60)))


class Anonymous(nn.Module):
    """Any module under another name, whose class says nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.something = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.something(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"norm_place": "pre", "final_norm": True, "positions": "absolute", "length": 12},
        {"norm_place": "post", "attention_skip": 0.5, "mlp": "gated", "positions": "rotary"},
        {"norm": "none", "mlp": "none", "attention_skip": 0.0, "layers": 5},
    ],
)
def test_a_network_of_the_lab_reads_the_same_as_any_module(fields: dict[str, Any]) -> None:
    """All readings but the numbers of its architecture, which a module does not tell."""
    arch = Architecture(**{"layers": 3, "width": 16, "heads": 2, "mask": "causal", **fields})
    plan = forecast(arch, design=Design(tokens=12), recipe=Recipe(steps=60)).plan
    model = plan.model()  # type: ignore[union-attr]
    drawn = [plan.task.batch(16, 0, step) for step in (0, 1)]  # type: ignore[union-attr]

    def loss(logits: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=UNLABELLED)

    inputs = [{"x": batch.inputs, "labels": batch.labels} for batch in drawn]
    found = read(Anonymous(model), loss, inputs).point
    known = point_of(model, plan.task, plan.recipe)  # type: ignore[union-attr]
    told = {"attention_skip", "mlp_skip", "no_norm", "norm_after", "centred_norm", "last_norm", "gated_mlp", "bounded",
            "window", "no_table", "remedies"}  # fmt: skip
    assert set(known) - set(found) == told
    assert {name: found[name] for name in found} == pytest.approx({name: known[name] for name in found}, abs=1e-5)


@pytest.fixture(scope="module")
def healthy() -> Forecast:
    return forecast(own_gpt(layers=4, width=64), module=ModuleInputs(batches(), cross_entropy))


@pytest.fixture(scope="module")
def collapsing() -> Forecast:
    return forecast(own_gpt(layers=10, width=64, skips=False), module=ModuleInputs(batches(), cross_entropy))


@pytest.mark.slow
def test_forecasts_order_a_healthy_and_a_collapsing_module(healthy: Forecast, collapsing: Forecast) -> None:
    assert healthy.probability > collapsing.probability + 0.3 and healthy.place < collapsing.place
    assert "Tokens become the same" in str(collapsing.verdict) and "Tokens stay apart" in str(healthy.verdict)


@pytest.mark.slow
def test_the_forecast_says_what_it_stands_on() -> None:
    """Of a loss that is no mean cross-entropy, whose gradients are not known."""
    found = forecast(own_gpt(), module=ModuleInputs(batches(), lambda z, batch: 2 * cross_entropy(z, batch)))
    said, prediction = " ".join(str(found).split()), found.prediction
    assert prediction.known == len(set(Predictor.shipped().names) & set(found.readings)) < prediction.entries
    assert f"Of {prediction.entries} readings {prediction.known} were known" in said
    assert f"{prediction.share_right:.0%} of our trained designs" in said
    assert "of its own loss none was trained" in said and "given following" in said and "batch 6" in said
    told = found.to_dict()
    assert told["details"]["architecture"]["module"] == "OwnGPT"
    assert told["details"]["prediction"]["known"] == prediction.known


def test_the_table_has_what_watch_and_autograd_read(healthy: Forecast) -> None:
    table = healthy.table
    assert tuple(table.columns) == COLUMNS and table.height == 5
    model, batch = own_gpt(layers=4, width=64).eval(), batches()[0]
    hidden: list[Tensor] = []
    for block in model.h:
        block.register_forward_hook(lambda module, args, output: hidden.append(output))
    loss = cross_entropy(model(batch["idx"]), batch)
    at_last = torch.autograd.grad(loss, hidden[-1], retain_graph=True)[0]
    loss.backward()
    X = hidden[1].detach().double()[:4]

    def size(A: Tensor) -> Tensor:
        """sqrt(|A|_1 |A|_inf), the norm of Dong et al. 2021."""
        return (A.abs().sum(1).amax(-1) * A.abs().sum(2).amax(-1)).sqrt()

    residual = (size(X - X.mean(1, keepdim=True)) / size(X)).log10()
    assert table["residual"][2] == pytest.approx(float(residual.mean()), abs=1e-5)
    assert table["gradient"][4] == pytest.approx(float(at_last.norm().log10()), abs=1e-4)
    fused = model.h[1].attn.c_attn.weight.grad
    assert fused is not None
    for kind, rows in (("query", fused[:64]), ("key", fused[64:128]), ("value", fused[128:])):
        assert table[kind][2] == pytest.approx(float(rows.norm().log10()), abs=1e-4)
    for name in ("residual_theory", "separation", "boundary"):
        assert table[name].is_nan().all()


@pytest.mark.parametrize("ask", [lambda f: f.mends(), lambda f: f.deepest(), lambda f: f.least_skip(), forecast_map])
def test_what_needs_an_architecture_is_refused(healthy: Forecast, ask: Callable[[Forecast], Any]) -> None:
    with pytest.raises(ArchitectureError, match="need an Architecture; OwnGPT was forecast as a module"):
        ask(healthy)


@pytest.mark.parametrize("training", [True, False])
def test_everything_is_left_as_it_was(training: bool) -> None:
    model, batch = own_gpt(), batches()[0]
    model.train(training)
    model.h[0].eval()
    model.ln_f.weight.grad = torch.randn(16)
    outstanding = cross_entropy(model(batch["idx"]), batch)  # a graph that is differentiated afterwards
    before = copy.deepcopy(model.state_dict())
    memory = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    grads = {name: None if w.grad is None else w.grad.clone() for name, w in model.named_parameters()}
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    calls, given = model.calls, copy.deepcopy(batch)
    read(model, inputs=[batch, batches()[1]])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.data_ptr() == memory[name], name
    assert [module.training for module in model.modules()] == flags and model.calls == calls
    for name, weight in model.named_parameters():
        assert (weight.grad is None) == (grads[name] is None) and weight.requires_grad
        assert grads[name] is None or torch.equal(weight.grad, grads[name]), name  # type: ignore[arg-type]
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]
    assert all(torch.equal(batch[name], given[name]) for name in given)
    outstanding.backward()


def test_nothing_is_done_to_the_weights_themselves() -> None:
    """What hangs on them stays (DDP's hooks do), a graph that was made before is still that of the same weights, and
    hooks of gradients are not called by gradients that nobody asked for."""
    model, called = own_gpt(), []
    weight = model.ln_f.weight
    accumulator: Any = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulator.register_hook(lambda *_: called.append("accumulated"))
    weight.register_hook(lambda gradient: called.append("gradient"))
    before = cross_entropy(model(batches()[0]["idx"]), batches()[0])
    expected = torch.autograd.grad(before, list(model.h.parameters()), retain_graph=True)
    weight.grad = torch.ones(16)
    read(model)
    assert not called and torch.equal(weight.grad, torch.ones(16))
    assert weight.view_as(weight).grad_fn.next_functions[0][0] is accumulator  # type: ignore[union-attr]
    assert all(map(torch.equal, torch.autograd.grad(before, list(model.h.parameters()), retain_graph=True), expected))
    before.backward()
    assert called == ["gradient", "accumulated"]


@pytest.mark.slow  # starts processes
def test_a_training_under_ddp_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    from tests.forecasts import ddp_worker

    said = together(ddp_worker, 2, tmp_path / "meeting")
    assert all("are sharded or split over devices" in sentence for sentence in said)


class Recurrent(nn.Module):
    """A module whose torch layer keeps a list of its weights beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.lstm = own_gpt(), nn.LSTM(16, 16, batch_first=True)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.gpt.wte(idx) + self.gpt.wpe.weight[: idx.shape[1]]
        for block in self.gpt.h:
            x = block(x)
        return self.gpt.lm_head(self.lstm(x)[0])


def test_lists_of_weights_are_followed() -> None:
    model = Recurrent()
    listed = list(model.lstm._flat_weights)
    found = forecast(model, module=ModuleInputs(batches(), cross_entropy, "gpt.h"), recipe=Recipe(steps=60))
    assert all(a is b for a, b in zip(model.lstm._flat_weights, listed, strict=True))
    with torch.enable_grad():
        cross_entropy(model.eval()(batches()[0]["idx"]), batches()[0]).backward()
    total = sum(float(weight.grad.abs().sum()) for name, weight in model.named_parameters() if ".h." in name)  # type: ignore[union-attr]
    assert found.readings["reach_blocks"] < math.log10(60 * 1e-3 * total) + 1e-3 and "share_batch" in found.readings


def test_what_copies_cannot_stand_for_is_refused() -> None:
    hidden = own_gpt()
    norm = hidden.ln_f.weight
    hidden.ln_f.forward = lambda x: F.layer_norm(x, (16,), norm)  # type: ignore[assignment, method-assign]
    wrapped, empty = own_gpt(), own_gpt().to("meta")
    wrapped.lm_head = type("DistributedDataParallel", (nn.Linear,), {})(16, SYMBOLS)
    for model, said in ((hidden, "keeps ln_f.weight in another place"), (wrapped, "partly wrapped"), (empty, "meta")):
        with pytest.raises(LabError, match=said) as caught:
            read(model)
        assert caught.value.subject == "model"


def test_streams_of_a_token_are_not_taken_for_tokens() -> None:
    """Hidden states `[batch, token, n, d]` of hyper-connections; a grid of tokens has as many axes, and is read."""

    class Streams(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return x + self.block(x.mean(2))[:, :, None]

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = own_gpt()
            self.h = nn.ModuleList(map(Streams, self.gpt.h))

        def forward(self, idx: Tensor) -> Tensor:
            x = (self.gpt.wte(idx) + self.gpt.wpe.weight[: idx.shape[1]])[:, :, None].repeat(1, 1, 4, 1)
            for block in self.h:
                x = block(x)
            return self.gpt.lm_head(x.sum(2))

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.head = nn.Linear(3, 16), nn.Linear(16, 5)
            self.h = nn.ModuleList(Anonymous(nn.Linear(16, 16)) for _ in range(2))

        def forward(self, pixels: Tensor) -> Tensor:
            x = self.into(pixels)
            for block in self.h:
                x = block(x)
            return self.head(x.mean((1, 2)))

    with pytest.raises(WatchError, match=r"received \(6, 12, 4, 16\), 12 tokens in 4 streams"):
        forecast(Several(), module=ModuleInputs(batches(), cross_entropy, "h"))
    torch.manual_seed(0)
    images, labels = [torch.randn(6, 4, 4, 3) for _ in range(2)], torch.arange(6) % 5
    found = forecast(Grid(), module=ModuleInputs(images, lambda z, _: F.cross_entropy(z, labels), "h"))
    assert isinstance(found.plan, DescribedPlan) and found.plan.layers == 2


def test_a_forecast_of_a_module_is_a_guess_and_says_so_first() -> None:
    """Its blocks may have any form, and its optimiser may be any."""
    found = forecast(own_gpt(width=64, layers=3), module=ModuleInputs(batches(), cross_entropy))
    assert "a guess, since" in found.verdict[0] and any("AdamW" in doubt for doubt in found.doubts)


def test_floating_inputs_alone_are_cast() -> None:
    taken: list[Any] = []

    class Takes(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            taken[:] = [*args, *kwargs.values()]

    batch = LiveBatch.of((torch.ones(2), torch.ones(2, dtype=torch.long), "a word"), Takes())
    for dtype, floating in ((torch.float64, torch.float64), (None, torch.float32)):
        batch.called(Takes(), dtype)
        assert taken[0].dtype == floating and taken[1].dtype == torch.int64 and taken[2] == "a word"


def test_a_failure_leaves_everything_as_it_was_too() -> None:
    model, calls = own_gpt(), []

    def fails_late(logits: Tensor, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 6:  # within the drift
            raise ValueError("no more")
        return cross_entropy(logits, batch)

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RankscopeError, match="no more"):
        read(model, fails_late)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()) and model.training


@pytest.mark.parametrize(
    ("inputs", "loss", "said"),
    [
        ([batches()[0]], cross_entropy, "list of two batches; got a list of 1"),
        (tuple(batches()), cross_entropy, "got a tuple, which is one batch"),
        ([batches()[0], batches()[0]], cross_entropy, "the same one twice"),
        ([3, 4], cross_entropy, "must be a tensor, a tuple or a dictionary; received a int"),
        ([{"idx": 3}, {"idx": 4}], cross_entropy, "must hold a tensor"),
        ([torch.randn(2, 3), torch.randn(2, 3)], cross_entropy, "called with one, OwnGPT raised"),
        (batches(), lambda z, batch: z, "one number, with a gradient; got a tensor"),
        (batches(), lambda z, batch: z.detach().mean(), "that no weight has a part in"),
        (batches(), lambda z, batch: 3.0, "got a float"),
        (batches(), lambda z, batch: z.nothing, "it raised AttributeError"),
        (batches(), "mse", "loss must be a function of output and batch; got a str"),
        (batches(), None, r"returned a Tensor without a \.loss"),
    ],
)
def test_bad_inputs_get_one_clear_sentence(inputs: Any, loss: Any, said: str) -> None:
    with pytest.raises(RankscopeError, match=said) as caught:
        forecast(own_gpt(), module=ModuleInputs(inputs, loss))
    assert caught.value.subject in ("inputs", "loss") and "\n" not in str(caught.value)


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ArchitectureError, match="give two batches and a loss") as caught:
        forecast(own_gpt())
    assert caught.value.subject == "module"
    for recipe in (Recipe(batch_size=8), Recipe(frozen=("gain",))):
        with pytest.raises(LabError, match="is of networks that are drawn"):
            forecast(own_gpt(), module=ModuleInputs(batches(), cross_entropy), recipe=recipe)
    with pytest.raises(LabError, match="leave design out"):
        forecast(own_gpt(), module=ModuleInputs(batches(), cross_entropy), design=Design(depth=3))
    with pytest.raises(ArchitectureError, match="module is of a torch module; got a Architecture"):
        forecast(Architecture(layers=1, width=8, heads=2), module=ModuleInputs(batches(), cross_entropy))
    frozen = own_gpt().requires_grad_(False)
    with pytest.raises(LabError, match="no weights to train"):
        read(frozen)


def test_labels_are_found_in_the_loss_alone() -> None:
    """Also where some tokens have none; not where the loss is another one."""
    model, batch = own_gpt().eval(), LiveBatch.of(batches()[0], own_gpt())
    labels = batch.given["following"].clone()
    labels[:, ::3] = -100

    def some(z: Tensor, given: Any) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), labels.flatten())

    found = passed(model, batch, some)
    assert torch.equal(found.labelled, labels.flatten() != -100)
    assert torch.equal(found.labels, labels.flatten()[labels.flatten() != -100])
    assert found.head is model.lm_head and found.head_input is not None
    smoothed = passed(
        model, batch, lambda z, b: F.cross_entropy(z.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    )
    summed = passed(model, batch, lambda z, b: 2 * some(z, b))
    assert smoothed.logits is None and summed.logits is None


@pytest.mark.slow
def test_another_loss_leaves_out_what_it_does_not_give() -> None:
    """Twice the cross-entropy: its gradients are no input gradients of nats; what has no unit stays."""
    whole, twice = read(own_gpt()), read(own_gpt(), lambda z, batch: 2 * cross_entropy(z, batch))
    assert not any(name.startswith(("reach_", "agreement_", "logits_", "share_", "start_")) for name in twice.point)
    assert "curvature" not in twice.point and twice.point["edge"] == pytest.approx(whole.point["edge"], abs=1e-4)
    for name in ("residual_last", "entropy_mean", "weights_query", "depth", "drift_residual_worst"):
        assert twice.point[name] == whole.point[name]
    assert any("not the mean cross-entropy" in note for note in twice.notes)
    assert twice.table["query"][1] == pytest.approx(whole.table["query"][1] + math.log10(2), abs=1e-5)


def test_more_than_a_cross_entropy_is_read_as_that_part() -> None:
    def penalised(z: Tensor, batch: Any) -> Tensor:
        return cross_entropy(z, batch) + 0.5

    found, whole = read(own_gpt(), penalised), read(own_gpt())
    assert found.point == whole.point and any("cross-entropy: readings are of that part" in n for n in found.notes)


def test_shared_and_unnamed_weights_are_not_known() -> None:
    tied = read(own_gpt(tied=True)).point
    assert "reach_embedding" not in tied and "weights_head" not in tied and "reach_query" in tied
    model = own_gpt()
    for block in model.h:
        block.odd, block.mlp = block.mlp, None
        block.forward = lambda x, b=block: x + b.odd(b.ln_2(x + b.attn(b.ln_1(x))))
    strange = read(model).point
    assert "weights_mlp" not in strange and "no_mlp" not in strange and "weights_query" in strange
    model.h[0].attn.extra = nn.Parameter(torch.zeros(3, 3))
    kinds = weight_kinds(model, list(model.h), dict(model.named_parameters()), model.lm_head)
    assert kinds["query"] is None and kinds["output"] is None and kinds["head"] is not None


def test_gradients_of_fused_weights_and_biases_go_to_their_kinds() -> None:
    model = own_gpt()
    weights = dict(model.named_parameters())
    kinds = weight_kinds(model, list(model.h), weights, model.lm_head)
    fused = model.h[1].attn.c_attn
    for k, kind in enumerate(("query", "key", "value")):
        parts = {part.name: part for part in kinds[kind] or () if part.layer == 2}
        assert set(parts) == {"h.1.attn.c_attn.weight", "h.1.attn.c_attn.bias"}
        rows = slice(16 * k, 16 * (k + 1))
        assert torch.equal(parts["h.1.attn.c_attn.weight"].choose(fused.weight), fused.weight[rows].flatten())
        assert torch.equal(parts["h.1.attn.c_attn.bias"].choose(fused.bias), fused.bias[rows])
    assert {part.name for part in kinds["mlp"] or ()} == {n for n in weights if ".mlp." in n}
    assert {part.name for part in kinds["embedding"] or ()} == {"wte.weight", "wpe.weight"}


class BareBlock(nn.Module):
    """Attention and MLP straight in the block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


def test_weights_of_attention_that_stands_straight_in_a_block_have_their_kinds() -> None:
    model = nn.Sequential(BareBlock(8), BareBlock(8))
    kinds = weight_kinds(model, list(model), dict(model.named_parameters()), None)
    names = {kind: {part.name for part in kinds[kind] or ()} for kind in ("query", "key", "value", "output", "mlp")}
    for kind in ("query", "key", "value"):
        assert names[kind] == {f"{k}.qkv.{leaf}" for k in range(2) for leaf in ("weight", "bias")}
    assert names["output"] == {f"{k}.proj.{leaf}" for k in range(2) for leaf in ("weight", "bias")}
    assert names["mlp"] == {f"{k}.fc{n}.{leaf}" for k in range(2) for n in (1, 2) for leaf in ("weight", "bias")}


def test_the_example_of_the_page_runs() -> None:
    """Its mask is in float32, which attention that is computed again in float64 does not take."""
    page = (Path(__file__).parents[2] / "docs" / "forecast.md").read_text(encoding="utf-8")
    example, *_ = re.findall(r"```python\n(.*?)```", page.partition("## Your own module")[2], re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    found = names["mine"]
    assert isinstance(found, Forecast) and found.table["entropy"][1:].is_finite().all()
    assert {"residual_last", "entropy_mean", "reach_query", "share_current", "depth", "weights_head"} <= set(
        found.readings
    )


class Rounding(nn.Module):
    """A block that rounds to float32 on its way, as norms of Hugging Face do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float().to(x.dtype))


def test_rounding_is_cut_or_left_out() -> None:
    """In float64 a residual is cut at its floor; of a module that rounds to float32 it is not known."""

    class Bare(nn.Module):
        """Averaging attention alone: equal tokens after one layer."""

        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.value(x.mean(1, keepdim=True).expand_as(x))

    def collapsed(around: Callable[[nn.Module], nn.Module]) -> nn.Module:
        model = own_gpt()
        model.h = nn.ModuleList(around(Bare()) for _ in range(3))
        return model

    cut = read(collapsed(lambda block: nn.Sequential(block)))
    assert -16 < cut.point["residual_last"] < -13 and any("are cut at" in note for note in cut.notes)
    assert cut.table["residual"].is_nan().to_list() == [False, True, True, True]
    rounded = read(collapsed(Rounding))
    assert "residual_last" not in rounded.point and any("float32 shows" in note for note in rounded.notes)


def test_half_precision_is_read_in_float32() -> None:
    model = own_gpt().bfloat16()
    before = copy.deepcopy(model.state_dict())
    found = read(model)
    whole = own_gpt()
    whole.load_state_dict(before)
    expected = read(whole).point
    assert found.point == pytest.approx(expected, abs=1e-6) and any("float32" in note for note in found.notes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    memory = model.wte.weight.data_ptr()
    with in_dtype(model, torch.float64):
        assert model.wte.weight.dtype == torch.float64
    assert model.wte.weight.data_ptr() == memory and model.wte.weight.dtype == torch.bfloat16


@pytest.mark.slow
def test_models_of_transformers_bring_their_loss() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=SYMBOLS, tie_word_embeddings=False,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    ids = [batch["idx"] for batch in batches()]
    found = read(model, None, [{"input_ids": x, "labels": x} for x in ids])
    assert {"reach_query", "share_current", "entropy_mean", "reach_head", "curvature"} <= set(found.point)
    with torch.no_grad():
        loss = model.eval()(ids[0], labels=ids[0]).loss
    assert found.point["start_loss"] == pytest.approx(float(loss), abs=1e-5)


def test_layers_of_two_blocks_are_one_layer() -> None:
    """As x-transformers has them: attention and MLP are blocks of their own."""

    class Half(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            if isinstance(part, OwnAttention):
                self.attn = part
            else:
                self.mlp = part

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.attn if hasattr(self, "attn") else self.mlp)(self.norm(x))

    whole, split = own_gpt(), own_gpt()
    halves = []
    for block in split.h:
        halves += [Half(block.attn), Half(block.mlp)]
    split.h = nn.ModuleList(halves)
    one, two = read(whole), read(split)
    assert two.plan.layers == 4 and one.plan.layers == 2
    drawn_otherwise = {name for name in one.point if name.startswith("drift_")}  # weights stand in another order
    assert {n: v for n, v in two.point.items() if n not in drawn_otherwise} == pytest.approx(
        {n: v for n, v in one.point.items() if n not in drawn_otherwise}, abs=1e-5
    )


@pytest.mark.parametrize("factor", [0.0, 1e30])
def test_gradients_that_leave_the_range_of_numbers_are_not_known(factor: float) -> None:
    """Those of a loss that is constant are zero, and squares of those of a huge one are infinite in float32."""
    table = read(own_gpt(), lambda z, batch: factor * cross_entropy(z, batch)).table
    assert all(table[kind].is_nan().all() for kind in ("query", "key", "value"))
