"""Gradients of weights and the size of updates, against autograd and weights taken by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import polars as pl
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from rankscope import Monitor, read, watch
from rankscope.errors import MonitorError
from rankscope.monitor.weight_gradients import GROUPS, parameter_groups
from tests.live.families import FAMILIES, HEADS, SIZES, WIDTH
from tests.raising import raises

Slices = list[tuple[str, Any]]
"""Weights of a block by their names, and what of each."""
ALL = slice(None)
FEW = slice(None, 2 * WIDTH), slice(2 * WIDTH, None)


class Nano(nn.Module):
    """A block as nanoGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(WIDTH, 3 * WIDTH), "c_proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 24), "c_proj": nn.Linear(24, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["c_attn"](x).chunk(3, -1)
        x = x + self.attn["c_proj"](nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.mlp["c_proj"](self.mlp["c_fc"](x).relu())


class Own(nn.Module):
    """A block with its attention and its MLP straight inside, as on the page about `watch`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(self.fc1(x).relu())


def _own() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Own(), Own()).double()


def _nano() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Nano(), Nano()).double()


def _encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def _by_head(which: slice) -> Tensor:
    """Rows of GPT-NeoX's fused matrix: by head, query, key, value."""
    return torch.arange(3 * WIDTH).reshape(HEADS, 3, -1)[:, which].reshape(-1)


KINDS: dict[str, tuple[Slices, Slices, Slices]] = {
    "bert": (
        [("attention.self.query.weight", ALL), ("attention.self.key.weight", ALL)],
        [("attention.self.value.weight", ALL), ("attention.output.dense.weight", ALL)],
        [("intermediate.dense.weight", ALL), ("output.dense.weight", ALL)],
    ),
    "distilbert": (
        [("attention.q_lin.weight", ALL), ("attention.k_lin.weight", ALL)],
        [("attention.v_lin.weight", ALL), ("attention.out_lin.weight", ALL)],
        [("ffn.lin1.weight", ALL), ("ffn.lin2.weight", ALL)],
    ),
    "gpt2": (
        [("attn.c_attn.weight", (ALL, FEW[0]))],
        [("attn.c_attn.weight", (ALL, FEW[1])), ("attn.c_proj.weight", ALL)],
        [("mlp.c_fc.weight", ALL), ("mlp.c_proj.weight", ALL)],
    ),
    "gpt_neox": (
        [("attention.query_key_value.weight", _by_head(slice(2)))],
        [("attention.query_key_value.weight", _by_head(slice(2, 3))), ("attention.dense.weight", ALL)],
        [("mlp.dense_h_to_4h.weight", ALL), ("mlp.dense_4h_to_h.weight", ALL)],
    ),
    "llama": (
        [("self_attn.q_proj.weight", ALL), ("self_attn.k_proj.weight", ALL)],
        [("self_attn.v_proj.weight", ALL), ("self_attn.o_proj.weight", ALL)],
        [(f"mlp.{name}_proj.weight", ALL) for name in ("gate", "up", "down")],
    ),
    "t5": (
        [("layer.0.SelfAttention.q.weight", ALL), ("layer.0.SelfAttention.k.weight", ALL)],
        [("layer.0.SelfAttention.v.weight", ALL), ("layer.0.SelfAttention.o.weight", ALL)],
        [("layer.1.DenseReluDense.wi.weight", ALL), ("layer.1.DenseReluDense.wo.weight", ALL)],
    ),
    "nano": (
        [("attn.c_attn.weight", FEW[0])],
        [("attn.c_attn.weight", FEW[1]), ("attn.c_proj.weight", ALL)],
        [("mlp.c_fc.weight", ALL), ("mlp.c_proj.weight", ALL)],
    ),
    "own": (
        [("qkv.weight", FEW[0])],
        [("qkv.weight", FEW[1]), ("proj.weight", ALL)],
        [("fc1.weight", ALL), ("fc2.weight", ALL)],
    ),
    "encoder": (
        [("self_attn.in_proj_weight", FEW[0])],
        [("self_attn.in_proj_weight", FEW[1]), ("self_attn.out_proj.weight", ALL)],
        [("linear1.weight", ALL), ("linear2.weight", ALL)],
    ),
}


def made(kind: str) -> tuple[nn.Module, list[nn.Module], Callable[[], Tensor], Any]:
    """A model, its blocks, a loss of it, and a probe."""
    if kind in FAMILIES:
        model: Any = FAMILIES[kind].model()
        batch = FAMILIES[kind].batch()
        return model, FAMILIES[kind].stack(model), lambda: model(**batch)[0].square().mean(), batch
    model = {"nano": _nano, "own": _own, "encoder": _encoder}[kind]()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    stack = list(model.layers if kind == "encoder" else model.children())
    return model, stack, lambda: (model(x) * x).square().mean(), x


def stepped(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def value(rows: pl.DataFrame, metric: str, layer: int) -> float:
    (found,) = rows.filter(metric=metric, layer=layer)["value"]
    return float(found)


def size(weights: dict[str, Tensor], slices: Slices) -> Tensor:
    return torch.cat([weights[name][which].reshape(-1) for name, which in slices]).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_updates_are_those_of_autograd(kind: str, tmp_path: Path) -> None:
    model, stack, loss, probe = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    blocks = FAMILIES[kind].blocks if kind in FAMILIES else None
    with Monitor(model, "mu", every=2, probe=probe, run=tmp_path, optimizer=optimizer, blocks=blocks) as monitor:
        stepped(model, loss, optimizer)
        monitor.step()
        before = [{name: each.detach().clone() for name, each in b.named_parameters()} for b in stack]
        optimizer.zero_grad()
        loss().backward()
        grads = [{name: each.grad.clone() for name, each in b.named_parameters() if each.grad is not None}
                 for b in stack]  # fmt: skip
        optimizer.step()
        monitor.step()
    rows = read(tmp_path).tables["training"]
    assert rows.filter(pl.col("metric").str.starts_with("grad_"))["step"].unique().to_list() == [2]
    for layer, block in enumerate(stack, 1):
        moved = {name: each.detach() - before[layer - 1][name] for name, each in block.named_parameters()}
        for group, slices in zip(GROUPS, KINDS[kind], strict=True):
            assert value(rows, f"grad_{group}", layer) == pytest.approx(
                float(size(grads[layer - 1], slices)), rel=1e-12
            )
            assert value(rows, f"update_{group}", layer) == pytest.approx(
                float(size(moved, slices) / size(before[layer - 1], slices)), rel=1e-12
            )
    assert rows.filter(metric="lr")["value"].to_list() == [1e-2]


@pytest.mark.parametrize("kind", [name for name, each in FAMILIES.items() if each.projection])
def test_queries_and_keys_change_attention_and_values_and_outputs_do_not(kind: str) -> None:
    model, stack, _, batch = made(kind)
    groups, _ = parameter_groups(stack)

    def attention() -> Tensor:
        with torch.no_grad(), watch(model, "entropy", layers=[1], blocks=FAMILIES[kind].blocks) as w:
            model(**batch)
        return torch.tensor(w.profile().table["value"].to_list())

    before = attention()
    for group, same in (("value_output", True), ("mlp", True), ("query_key", False)):
        found = groups[1, group]  # type: ignore[index]
        with torch.no_grad():
            for part in found:
                weight = part.weight
                shape = [1] * weight.ndim
                shape[part.axis] = -1
                chosen = torch.zeros(weight.shape[part.axis])
                places = torch.arange(len(chosen))
                chosen[part.choose(places)] = 1
                weight.add_(torch.randn_like(weight) * chosen.reshape(shape))
        assert torch.allclose(attention(), before) is same, group


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    weights = []
    for watched in (True, False):
        model, _, loss, probe = made("encoder")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if watched:
            monitor = Monitor(model, "mu", every=3, probe=probe, run=tmp_path, optimizer=optimizer)
        for _ in range(7):
            stepped(model, loss, optimizer)
            if watched:
                monitor.step()
        weights.append([each.detach().clone() for each in model.parameters()])
    monitor.close()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    let_go = optimizer
    assert not let_go._optimizer_step_pre_hooks and not let_go._optimizer_step_post_hooks


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_has_no_numbers_and_no_alarm(fused: bool, tmp_path: Path) -> None:
    model, _, _, probe = made("nano")
    model.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    with Monitor(model, "mu", every=1, probe=probe.float(), run=tmp_path, optimizer=optimizer) as monitor:
        scaler.scale(1e9 * model(probe.float()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step()
    rows = read(tmp_path).tables["training"].filter(pl.col("metric").is_in(["grad_mlp", "update_mlp"]), step=1)
    assert rows["value"].to_list() == [None] * 4
    assert rows["samples"].to_list() == rows["broken"].to_list() == [0] * 4


def test_what_is_not_recognised_is_said(tmp_path: Path) -> None:
    model, _, _, probe = made("t5")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, "mu", probe=probe, run=tmp_path, optimizer=optimizer) as monitor:
        assert "relative_attention_bias.weight" in monitor.notes[0]


def test_what_is_no_optimiser_is_refused(tmp_path: Path) -> None:
    model, _, _, probe = made("nano")
    with raises(MonitorError, subject="optimizer"):
        Monitor(model, "mu", probe=probe, run=tmp_path, optimizer=3)


@pytest.mark.parametrize("way", ["closure", "scaler", "fused scaler"])
def test_gradients_are_those_that_the_optimiser_takes(way: str, tmp_path: Path) -> None:
    """A closure makes them inside of the step; a scaler multiplies them, and a fused optimiser is left to
    divide."""
    model, stack, loss, probe = made("encoder")
    weights = [stack[0].get_parameter(f"linear{k}.weight") for k in (1, 2)]
    own = torch.autograd.grad(loss(), weights)
    model.float()
    x = probe.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=way == "fused scaler")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        found = (model(x) * x).square().mean()
        (found if way == "closure" else scaler.scale(found)).backward()
        return found

    with Monitor(model, "mu", every=1, probe=x, run=tmp_path, optimizer=optimizer) as monitor:
        if way == "closure":
            assert optimizer.step(closure) is not None
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()
        monitor.step()
    expected = float(torch.stack([each.norm() for each in own]).norm())
    rows = read(tmp_path).tables["training"]
    assert value(rows.filter(step=1), "grad_mlp", 1) == pytest.approx(expected, rel=1e-5)


def test_measuring_now_takes_nothing_from_the_next_measurement(tmp_path: Path) -> None:
    model = _encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    X = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    with Monitor(model, "mu", every=2, probe=X, optimizer=optimizer, run=tmp_path / "run") as monitor:
        for step in (1, 2):
            model(X).square().mean().backward()
            optimizer.step()
            monitor.step()
            measurement = monitor.measure_now()
            assert measurement is not None and measurement.step == step
            assert monitor.measure_now() is measurement
    rows = read(tmp_path / "run").tables["training"]
    assert rows.group_by("step", "layer", "metric").len()["len"].max() == 1  # each once
    assert rows.filter(step=2, metric="grad_mlp")["value"].is_not_nan().all()
    assert rows.filter(step=2, metric="grad_mlp").height == 2


def test_a_fused_matrix_in_another_order_is_left_out() -> None:
    codegen = hf.CodeGenModel(
        hf.CodeGenConfig(vocab_size=20, n_embd=32, n_layer=1, n_head=4, n_positions=8, rotary_dim=4)
    )
    groups, left_out = parameter_groups(list(codegen.h))
    assert left_out == ["attn.qkv_proj.weight"] and (1, "query_key") not in groups


@pytest.mark.parametrize("probed", [True, False])
def test_what_is_measured_of_a_block_that_is_several_layers_stands_at_the_first(probed: bool, tmp_path: Path) -> None:
    """ALBERT of six layers in two groups: the first three are one block, and so are the last three."""
    config = hf.AlbertConfig(
        vocab_size=20, embedding_size=8, hidden_size=WIDTH, num_hidden_layers=6, num_hidden_groups=2,
        num_attention_heads=HEADS, intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = hf.AlbertModel(config).double(), torch.arange(10).view(2, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = {"every": 1, "probe": ids if probed else None, "run": tmp_path, "spectra": True, "alarms": ()}
    with Monitor(model, "mu", optimizer=optimizer, **run) as monitor:  # type: ignore[arg-type]
        model(ids).last_hidden_state.square().mean().backward()
        groups: Any = model.encoder.albert_layer_groups
        mlps = [(group.albert_layers[0].ffn.weight, group.albert_layers[0].ffn_output.weight) for group in groups]
        exact = [float(torch.cat([weight.grad.flatten() for weight in pair]).norm()) for pair in mlps]
        optimizer.step()
        monitor.step()
        norms = [max(float(torch.linalg.matrix_norm(weight.detach(), 2)) for weight in pair) for pair in mlps]
        for layers in ("layers 1, 2, 3 are one block", "layers 4, 5, 6 are one block"):
            assert any(layers in note for note in monitor.notes)
    rows = read(tmp_path).tables["training"].filter(step=1)
    assert rows.filter(metric="mu")["layer"].to_list() == list(range(7))
    for metric, numbers in (("grad_mlp", exact), ("spectral_norm_mlp", norms)):
        found = rows.filter(metric=metric)
        assert found["layer"].to_list() == [1, 4] and found["value"].to_list() == pytest.approx(numbers, rel=1e-3)


def test_weights_that_several_blocks_share_are_said(tmp_path: Path) -> None:
    model, _, _, probe = made("own")
    model[1].fc1.weight = model[0].fc1.weight  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, "mu", probe=probe, run=tmp_path, optimizer=optimizer, alarms=()) as monitor:
        share = "layers 1, 2 share fc1.weight: the gradient of such a weight is of all of them, and stands at each"
        assert monitor.notes == [share]


def test_gradients_of_adapters_and_of_parametrized_weights_are_those_of_what_is_trained(tmp_path: Path) -> None:
    model = _own()
    for block in model.children():
        nn.utils.parametrizations.weight_norm(block.qkv)  # type: ignore[arg-type]
        nn.utils.parametrizations.weight_norm(block.fc1)  # type: ignore[arg-type]
    llama = hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=HEADS)).double()
    peft.get_peft_model(llama, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    parts = {"qkv.parametrizations.weight.original0": FEW[0], "qkv.parametrizations.weight.original1": FEW[0]}
    adapter = {f"self_attn.q_proj.lora_{part}.default.weight": ALL for part in "AB"}
    ids = torch.randint(5, 20, (2, 5))
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    for trained, batch, slices, block in ((model, x, parts, model[0]), (llama, ids, adapter, llama.layers[0])):  # type: ignore[index]
        optimizer = torch.optim.SGD([each for each in trained.parameters() if each.requires_grad], lr=0.1)
        run = tmp_path / type(trained).__name__
        with Monitor(trained, "mu", 1, batch, run=run, optimizer=optimizer, alarms=()) as monitor:
            output = trained(batch)
            (output if isinstance(output, Tensor) else output.last_hidden_state).square().mean().backward()
            grads = {name: each.grad.clone() for name, each in block.named_parameters() if each.grad is not None}
            optimizer.step()
            monitor.step()
        rows = read(run).tables["training"].filter(step=1)
        assert value(rows, "grad_query_key", 1) == pytest.approx(float(size(grads, [*slices.items()])), rel=1e-12)


def test_fewer_keys_than_queries_in_one_matrix() -> None:
    phi = hf.Phi3Model(hf.Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0))
    groups, left_out = parameter_groups(list(phi.layers))
    (queries_keys,) = groups[1, "query_key"]
    assert not left_out
    assert queries_keys.choose(torch.arange(2 * WIDTH)).tolist() == list(range(WIDTH + WIDTH // 2))


def test_what_cannot_be_recorded_of_a_step_does_not_end_it(tmp_path: Path) -> None:
    """Gradients of a sparse embedding have no norm: the optimiser makes its step, and the other numbers are there."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.attention = nn.Embedding(6, 8, sparse=True), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, X: Tensor) -> Tensor:
            X = X + self.attention(X, X, X)[0]
            return X + self.mlp(torch.arange(X.shape[1]))

    first: Any = Block()
    model = nn.Sequential(first, Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = first.mlp.weight.detach().clone()
    with Monitor(model, "mu", 1, torch.ones(1, 4, 8), run=tmp_path, optimizer=optimizer, alarms=()) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, 5, 8)).square().mean().backward()
            optimizer.step()
            monitor.step()
        assert len(monitor.notes) == 1
    assert not torch.equal(before, first.mlp.weight)
    rows = read(tmp_path).tables["training"]
    assert rows.filter(metric="mu", layer=1)["step"].to_list() == [0, 1, 2]
    assert rows.filter(metric="grad_mlp")["value"].null_count() == 4


def test_an_optimiser_without_a_learning_rate_is_measured(tmp_path: Path) -> None:
    class Rule(torch.optim.Optimizer):
        def __init__(self, weights: Any) -> None:
            super().__init__(weights, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for weight in self.param_groups[0]["params"]:
                weight.sub_(0.1 * weight.grad)

    model = _nano()
    optimizer = Rule(model.parameters())
    with Monitor(model, "mu", 1, torch.ones(1, 4, WIDTH).double(), run=tmp_path, optimizer=optimizer) as monitor:
        model(torch.randn(2, 5, WIDTH).double()).square().mean().backward()
        optimizer.step()
        monitor.step()
    rows = read(tmp_path).tables["training"]
    assert rows.filter(metric="grad_mlp")["value"].null_count() == 0 and not len(rows.filter(metric="lr"))
