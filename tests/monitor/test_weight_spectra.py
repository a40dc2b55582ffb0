"""Spectral norms and stable ranks of weights, against singular values."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import GPT2Config, GPT2LMHeadModel

from rankscope import Monitor, read
from rankscope.monitor.weight_gradients import ParameterSlice, parameter_groups
from rankscope.monitor.weight_spectra import WeightSpectra, matrices, spectral_norms
from tests.monitor.small import encoder, loss_of, tokens

Matrices = dict[str, list[Tensor]]  # of each group
WIDTH = 16
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
"""Of a model of transformers with one layer."""


def applied(module: Any, inputs: int = WIDTH) -> Tensor:
    """The matrix that a module multiplies by, whatever it is made of: what it makes of each unit vector."""
    training = module.training
    unit = torch.eye(inputs, dtype=next(module.parameters()).dtype)
    unit = unit.T[None] if isinstance(module, nn.Conv1d) else unit
    with torch.no_grad():
        found = (module.eval()(unit) - module(unit * 0)).double()
    module.train(training)
    return found[0] if isinstance(module, nn.Conv1d) else found.T


def plain(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, **options)


def of_layer(layer: Any) -> Matrices:
    fused = layer.self_attn.in_proj_weight.detach().double()
    mlp = [applied(layer.linear1), applied(layer.linear2, 32)]
    value_output = [fused[2 * WIDTH :], applied(layer.self_attn.out_proj)]
    return {"query_key": [fused[: 2 * WIDTH]], "value_output": value_output, "mlp": mlp}


def _plain() -> tuple[nn.Module, Matrices]:
    return (layer := plain()), of_layer(layer)


def _changed(change: Callable[[Any], object]) -> tuple[nn.Module, Matrices]:
    layer = plain()
    with torch.no_grad():
        change(layer)
    return layer, of_layer(layer)


def _spectral_norm() -> tuple[nn.Module, Matrices]:
    layer: Any = plain()
    for part in (layer.linear1, layer.linear2):
        part.weight.data.mul_(25.0)
        parametrizations.spectral_norm(part)
    parametrizations.spectral_norm(layer.self_attn, "in_proj_weight")
    layer.eval()  # the weight is read without the power iteration of a call in train mode
    expected = of_layer(layer)
    return layer.train(), expected


def _frozen() -> tuple[nn.Module, Matrices]:
    layer = plain()
    layer.linear1.weight.requires_grad = layer.self_attn.in_proj_weight.requires_grad = False
    expected = of_layer(layer)
    return layer, {"value_output": expected["value_output"][1:], "mlp": expected["mlp"][1:]}


def _lora(merged: bool = False, off: bool = False, **options: Any) -> tuple[nn.Module, Matrices]:
    torch.manual_seed(0)
    llama = hf.LlamaModel(hf.LlamaConfig(vocab_size=20, num_key_value_heads=1, **SIZES))
    names = ["q_proj", "v_proj", "up_proj"]
    model: Any = peft.get_peft_model(llama, peft.LoraConfig(target_modules=names, r=2, **options))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    if merged:
        model.merge_adapter()
    if off:
        model.base_model.disable_adapter_layers()
        [weight.requires_grad_() for name, weight in model.named_parameters() if "lora_" in name]
    block: Any = llama.layers[0]
    parts = {"query_key": block.self_attn.q_proj, "value_output": block.self_attn.v_proj, "mlp": block.mlp.up_proj}
    return block, {group: [applied(part)] for group, part in parts.items()}


def _fused_lora() -> tuple[nn.Module, Matrices]:
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=WIDTH, n_head=1, vocab_size=16, n_positions=8))
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, init_lora_weights=False, fan_in_fan_out=True)
    peft.get_peft_model(gpt2, config)
    block: Any = gpt2.transformer.h[0]
    W = applied(block.attn.c_attn)
    return block, {"query_key": [W[: 2 * WIDTH]], "value_output": [W[2 * WIDTH :]]}


def _xlnet(heads: int) -> tuple[nn.Module, Matrices]:
    """Weights `[width, head, d_head]`, used as `einsum("ibh,hnd->ibnd", X, q)`."""
    torch.manual_seed(0)
    block: Any = hf.XLNetModel(hf.XLNetConfig(vocab_size=20, d_model=WIDTH, n_layer=1, n_head=heads, d_inner=32)).layer[
        0
    ]
    q, k, v, o = (getattr(block.rel_attn, name).detach().double().reshape(WIDTH, -1) for name in "qkvo")
    mlp = [applied(block.ff.layer_1), applied(block.ff.layer_2, 32)]
    return block, {"query_key": [q, k], "value_output": [v, o], "mlp": mlp}


def _squeezebert() -> tuple[nn.Module, Matrices]:
    """Convolutions of kernel 1 in groups: each group of outputs sees its own inputs alone."""
    torch.manual_seed(0)
    groups: dict[str, Any] = {f"{name}_groups": 4 for name in ("q", "k", "v", "intermediate", "output")}
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "embedding_size": WIDTH,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    model = hf.SqueezeBertModel(hf.SqueezeBertConfig(vocab_size=20, num_hidden_layers=1, **sizes, **groups))
    block: Any = model.encoder.layers[0]
    attention = block.attention
    mlp = [applied(block.intermediate.conv1d), applied(block.output.conv1d, 32), applied(block.post_attention.conv1d)]
    query_key = [applied(attention.query), applied(attention.key)]
    return block, {"query_key": query_key, "value_output": [applied(attention.value)], "mlp": mlp[:2]}


def _experts() -> tuple[nn.Module, Matrices]:
    torch.manual_seed(0)
    block: Any = hf.MixtralModel(hf.MixtralConfig(vocab_size=20, num_local_experts=4, **SIZES)).layers[0]
    block.self_attn.requires_grad_(False)
    experts = block.mlp.experts
    stacks = [weight.detach().double() for weight in (experts.gate_up_proj, experts.down_proj)]
    return block, {"mlp": [matrix for stack in stacks for matrix in stack] + [block.mlp.gate.weight.detach().double()]}


class OwnBlock(nn.Module):
    """Attention of one head straight in the block, as on the page about `watch`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v))


def _own() -> tuple[nn.Module, Matrices]:
    block, W = (own := OwnBlock()), applied(own.qkv)
    return block, {"query_key": [W[: 2 * WIDTH]], "value_output": [W[2 * WIDTH :], applied(block.proj)]}


BROKEN = (float("nan"), float("inf"), -float("inf"))
CASES: dict[str, Callable[[], tuple[nn.Module, Matrices]]] = {
    "plain": _plain,
    "spectral norm": _spectral_norm,
    "weight norm": lambda: _changed(lambda layer: [*map(parametrizations.weight_norm, (layer.linear1, layer.linear2))]),
    "frozen": _frozen,
    "LoRA": _lora,
    "LoRA, merged": lambda: _lora(merged=True),
    "LoRA, switched off": lambda: _lora(off=True),
    "DoRA": lambda: _lora(use_dora=True),
    "LoRA of a fused matrix": _fused_lora,
    "three axes": lambda: _xlnet(2),
    "three axes, one head": lambda: _xlnet(1),
    "convolutions in groups": _squeezebert,
    "experts": _experts,
    "attention straight in the block": _own,
    "bfloat16": lambda: _changed(lambda layer: layer.bfloat16()),
    "huge": lambda: _changed(lambda layer: [weight.mul_(1e25) for weight in layer.parameters()]),
    "tiny": lambda: _changed(lambda layer: [weight.mul_(1e-25) for weight in layer.parameters()]),
    **{
        f"an entry is {bad}": lambda bad=bad: _changed(lambda layer: layer.linear1.weight[3, 2].fill_(bad))
        for bad in BROKEN
    },
}


def of_block(block: nn.Module) -> Any:
    """Spectra of the weights of one block, which stands in no model."""
    spectra: Any = WeightSpectra()
    plan = SimpleNamespace(name="", blocks=[block], called={})
    spectra.monitor = SimpleNamespace(plans={"": plan}, stage=SimpleNamespace(counts=True))
    spectra.attach()
    return spectra


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_spectra_are_those_of_the_weights_that_are_applied(case: str, autocast: bool) -> None:
    block, expected = CASES[case]()
    before = {name: each.clone() for name, each in block.state_dict().items()}
    modes = [part.training for part in block.modules()]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        spectra = of_block(block)
        for _ in range(2):
            values = spectra.read(0)
    found = {key.metric: row for key, row in zip(values.keys(), values.sums(), strict=True)}
    assert found.keys() == {f"{kind}_{group}" for kind in ("spectral_norm", "stable_rank") for group in expected}
    for group, weights in expected.items():
        norm, rank = found[f"spectral_norm_{group}"], found[f"stable_rank_{group}"]
        if all(bool(weight.isfinite().all()) for weight in weights):
            sizes = [np.linalg.svd(weight.numpy(), compute_uv=False) for weight in weights]
            assert float(norm[1]) == pytest.approx(max(s[0] for s in sizes), rel=5e-3)
            assert float(rank[1]) == pytest.approx(min((s**2).sum() / s[0] ** 2 for s in sizes), rel=1e-2)
        else:
            assert (norm[0], norm[6], rank[0], rank[6]) == (0, 1, 0, 1)  # counted as broken
    after = block.state_dict()
    assert all(torch.equal(each, after[name]) or bool((each != each).any()) for name, each in before.items())
    assert modes == [part.training for part in block.modules()] and not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_weights_that_cannot_be_told_are_left_out_and_said() -> None:
    layer = plain()
    torch.nn.utils.weight_norm(layer.linear1)
    layer.linear2 = nn.Conv1d(32, WIDTH, 3)  # type: ignore[assignment]
    spectra = of_block(layer)
    assert "spectral_norm_mlp" not in spectra.metrics
    assert all(name in spectra.notes[0] for name in ("linear1.weight_g", "linear1.weight_v", "linear2.weight"))


def test_after_a_resume_spectra_are_those_of_a_training_that_was_not_interrupted(tmp_path: Path) -> None:
    def trained(run: Path, stop: int) -> list[float]:
        model = encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
        options: dict[str, Any] = {"probe": tokens(99), "every": 1, "run": run, "spectra": True, "alarms": ()}
        monitor = Monitor(model, "mu", **options)
        for step in range(6):
            if step == stop:
                torch.save({"monitor": monitor.state_dict()}, run / "checkpoint.pt")
                monitor.close()
                monitor = Monitor(model, "mu", **options)
                monitor.load_state_dict(torch.load(run / "checkpoint.pt", weights_only=True)["monitor"])
            loss_of(model, tokens(step)).backward()
            optimizer.step()
            monitor.step()
        monitor.close()
        return read(run).tables["training"].filter(metric="spectral_norm_query_key")["value"].to_list()

    assert trained(tmp_path / "resumed", 3) == trained(tmp_path / "whole", -1)


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (20, 300), (3, 3), (1, 7), (4, 40, 30), (512, 512)])
def test_norms_come_from_below_to_within_a_part_in_a_thousand(shape: tuple[int, ...]) -> None:
    W = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = torch.linalg.matrix_norm(W.double(), 2)
    found, V = spectral_norms(W)
    assert bool((found <= exact * (1 + 1e-6)).all()) and bool((found >= exact * (1 - 1e-3)).all())
    moved = W + 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    exact = torch.linalg.matrix_norm(moved.double(), 2)
    found, _ = spectral_norms(moved, V, 2)
    assert bool((found <= exact * (1 + 1e-6)).all()) and bool((found >= exact * (1 - 5e-3)).all())


def test_the_matrices_of_fused_weights_are_those_of_queries_and_keys() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=24, n_head=3, vocab_size=16, n_positions=8)
    block: Any = GPT2LMHeadModel(config).transformer.h[0]
    groups, _ = parameter_groups([block], applied=True)
    fused = block.attn.c_attn.weight.detach()  # [input, queries then keys then values]
    (query_key,) = groups[1, "query_key"]
    assert torch.equal(matrices(query_key, fused, "query_key"), fused[:, :48].mT)
    parts = groups[1, "value_output"]
    assert any(torch.equal(matrices(part, part.applied, "value_output"), fused[:, 48:].mT) for part in parts)


@pytest.mark.parametrize(("heads", "outputs", "axis"), [(3, (8, 16), 0), (3, (8, 16), 1), (1, (None, None), 1)])
def test_a_slice_is_cut_out_of_every_head_and_a_stack_is_left_whole(
    heads: int, outputs: tuple[int | None, int | None], axis: int
) -> None:
    """Fused weights come head by head, each with its queries, keys and values (BLOOM, GPT-NeoX)."""
    owner = nn.Module()
    fused = torch.randn(3 * 3 * 8, 10, generator=torch.Generator().manual_seed(0))
    owner.weight = nn.Parameter(fused if axis == 0 else fused.mT.contiguous())
    rows = fused.numpy().reshape(heads, -1, 10)[:, slice(*outputs)].reshape(-1, 10)
    found = spectral_norms(
        matrices(ParameterSlice(owner, "weight", axis, heads, outputs), owner.weight.detach(), "query_key")
    )[0]
    assert float(found) == pytest.approx(np.linalg.norm(rows, 2), rel=1e-3)
    owner.weight = nn.Parameter(torch.stack([fused, 2 * fused]))  # experts
    found = spectral_norms(matrices(ParameterSlice(owner, "weight"), owner.weight.detach(), "mlp"))[0]
    exact = np.linalg.norm(fused.numpy(), 2)
    assert found.tolist() == pytest.approx([exact, 2 * exact], rel=1e-3)


def test_a_zero_weight_has_rank_zero_and_stacks_give_their_extremes() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    with torch.no_grad():
        layer.linear1.weight.zero_()
        layer.linear2.weight.copy_(torch.eye(8, 16))
    found = of_block(layer).read(0)
    numbers = {key.metric: float(value) for key, value in zip(found.keys(), found.sums()[:, 1], strict=True)}
    assert numbers["spectral_norm_mlp"] == pytest.approx(1.0) and numbers["stable_rank_mlp"] == 0.0


def test_a_monitor_writes_them_and_training_is_the_same_to_the_last_bit() -> None:
    def trained(spectra: bool) -> tuple[list[torch.Tensor], str]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=24, n_head=3, vocab_size=16, n_positions=8))
        optimizer, folder = torch.optim.AdamW(model.parameters(), lr=1e-2), tempfile.mkdtemp()
        ids = torch.randint(0, 16, (4, 8))
        with Monitor(model, "relative_mu", every=2, probe=ids, run=folder, spectra=spectra, alarms=()) as monitor:
            for _ in range(4):
                loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss=loss)
        return [weight.detach() for weight in model.parameters()], folder

    plain, _ = trained(False)
    weights, folder = trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    table = read(folder).tables["training"].filter(metric="spectral_norm_mlp", layer=2, step=4)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=24, n_head=3, vocab_size=16, n_positions=8))
    for weight, value in zip(model.parameters(), weights, strict=True):
        weight.data.copy_(value)
    mlp: Any = model.transformer.h[1].mlp
    exact = max(float(torch.linalg.matrix_norm(part.weight.detach(), 2)) for part in (mlp.c_fc, mlp.c_proj))
    assert table["value"].item() == pytest.approx(exact, rel=1e-3)
