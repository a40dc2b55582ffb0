"""Recurrent blocks, alone and among attention: tokens as the next block takes them, and no attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import rankscope
from rankscope.errors import MonitorError, WatchError
from rankscope.live.modules import stacks
from rankscope.monitor import Monitor
from tests.live import reference
from tests.live.families import LAYERS, NAMED, WIDTH, checks, seen, tiny
from tests.live.gpt import words
from tests.raising import raises

IDS = words()
ALL = torch.ones(2, 6, dtype=torch.bool)
STATE = NAMED | {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 4}
GATED: dict[str, Any] = {"num_key_value_heads": 2, "num_experts": 2}
RECURRENT = {
    "mamba": tiny(hf.MambaModel, **STATE),
    "mamba2": tiny(hf.Mamba2Model, **STATE, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
    "falcon_mamba": tiny(hf.FalconMambaModel, **STATE),
    "rwkv": tiny(hf.RwkvModel, **STATE | {"state_size": None}),
}
HYBRID = {
    "recurrent_gemma": tiny(
        hf.RecurrentGemmaModel, num_key_value_heads=1, lru_width=WIDTH, attention_window_size=4,
        block_types=["recurrent", "attention", "recurrent"],
    ),
    "jamba": tiny(
        hf.JambaModel, **GATED, attn_layer_period=3, attn_layer_offset=1, mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    "qwen3_next": tiny(
        hf.Qwen3NextModel, **GATED, head_dim=8, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, linear_key_head_dim=4, linear_value_head_dim=4,
        linear_num_key_heads=2, linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}  # fmt: skip


def taken(model: Any) -> tuple[Tensor, Tensor]:
    """What every block takes: mu of each sample; and mu of what the last gives."""
    (stack,) = stacks(model).values()
    found: list[Tensor] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    def after(module: Any, args: Any, output: Any) -> None:
        found.append(output if isinstance(output, Tensor) else output[0])

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in stack]
    hooks.append(stack[-1].register_forward_hook(after))
    with torch.no_grad():
        output = model(IDS)[0]
    for hook in hooks:
        hook.remove()
    return torch.stack([reference.mu(x, ALL) for x in found], 1), output


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*RECURRENT, *HYBRID])
def test_tokens_are_what_each_block_takes(name: str, tmp_path: Path) -> None:
    """By watch, and by a monitor of a fixed batch and of training batches."""
    torch.manual_seed(0)
    model = (RECURRENT | HYBRID)[name]().eval()
    expected, plain = taken(model)
    with torch.no_grad(), rankscope.watch(model, "mu") as w:
        assert torch.equal(model(IDS)[0], plain)
    torch.testing.assert_close(w.profile().curve("mu"), expected)
    for probe in (None,) if name == "rwkv" else ({"input_ids": IDS}, None):
        run = tmp_path / ("probe" if probe else "batches")
        with Monitor(model, "mu", every=1, probe=probe, run=run, alarms=()) as monitor:
            model.train()(IDS)[0].square().mean().backward()
            monitor.step()
        rows = rankscope.read(run).tables["training"].filter(metric="mu")
        first = rows.filter(step=rows["step"].min()).sort("layer")
        assert first["value"].to_list() == pytest.approx(expected.mean(0).tolist(), rel=1e-5)


def test_a_probe_of_rwkv_is_refused_since_eval_mode_rescales_its_weights(tmp_path: Path) -> None:
    with raises(MonitorError, subject="model"):
        Monitor(RECURRENT["rwkv"]().train(), "mu", every=1, probe={"input_ids": IDS}, run=tmp_path, alarms=())


@pytest.mark.parametrize("name", RECURRENT)
def test_there_is_no_attention_to_read(name: str) -> None:
    with raises(WatchError, subject="attention"):
        seen(RECURRENT[name]().eval(), "entropy", IDS)


@pytest.mark.parametrize("name", HYBRID)
@torch.no_grad()
def test_the_attention_among_them_is_the_models_own(name: str) -> None:
    torch.manual_seed(0)
    model = HYBRID[name]().eval()
    model.set_attn_implementation("eager")
    w = seen(model, "dobrushin", IDS)
    assert "Layers without attention of their tokens to themselves: 1, 3." in w.notes
    shown: list[Tensor] = []
    (stack,) = stacks(model).values()
    for part in stack[1].modules():
        if type(part).__name__.endswith("Attention"):
            part.register_forward_hook(lambda module, args, output: shown.append(output[1]))
    model(IDS)
    (P,) = shown
    found = w.profile().curve("dobrushin")[:, 2]
    torch.testing.assert_close(found, reference.dobrushin(P.double(), ALL), rtol=1e-6, atol=1e-6)


def test_generation_measures_the_prompt() -> None:
    model = tiny(hf.MambaForCausalLM, **STATE, pad_token_id=0, eos_token_id=None)().eval()
    with rankscope.watch(model, "mu") as w:
        model.generate(IDS, max_new_tokens=4)
    assert checks(w)["calls"] == 4 and sum(checks(w)["calls_left_out"].values()) == 3
    prompt = seen(model, "mu", IDS).profile()
    torch.testing.assert_close(w.profile().curve("mu"), prompt.curve("mu"), rtol=1e-5, atol=1e-6)
