"""The reference network against the libraries' own: one block covers them all.

Small random models of `transformers`, in float64, with padding where the model takes it. Their weights are
spelled out here by hand, so that the block is checked independently of any loader.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer

WIDTH, HEADS, INNER, LAYERS, N = 16, 4, 24, 3, 7
HEAD = WIDTH // HEADS
FLOAT32 = 1e-6
"""Within this, where transformers computes a softmax, a norm or a table of positions in float32 whatever the
model's dtype. A wrong formula would show at order one: every parameter is of size 0.1."""


def inward(weight: Tensor, heads: int = HEADS) -> Tensor:
    """torch's [out, in] -> [width, head, head_width]."""
    return weight.T.reshape(weight.shape[1], heads, -1)


def outward(weight: Tensor) -> Tensor:
    """torch's [out, in] -> [head, head_width, width]."""
    return weight.T.reshape(HEADS, -1, weight.shape[0])


def wake(model: torch.nn.Module) -> Any:
    """Move every parameter off its initial zero or one, so that biases and gains matter."""
    generator = torch.Generator().manual_seed(5)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def agree(net: Transformer, states: list[Tensor], real: Tensor | None = None, within: float = 1e-12) -> None:
    """Every state equal, relative to its largest entry, at real tokens."""
    padding = None if real is None else ~real
    run = net.run(states[0], padding)
    kept = torch.ones(states[0].shape[:2], dtype=torch.bool) if real is None else real
    for mine, theirs in zip([*run.states[:-1], run.output], states, strict=True):
        error = float((mine - theirs)[kept].abs().max() / theirs.abs().max())
        assert error < within


def spelled(
    attention: dict[str, Any], mlp: dict[str, Any], norms: dict[str, Any], key_heads: int = HEADS
) -> dict[str, Tensor]:
    """What a library's modules hold, by our names."""
    found: dict[str, Tensor | None] = {}
    for name, module in attention.items():
        heads, inside = key_heads if name in ("key", "value") else HEADS, name != "output"
        bias = getattr(module, "bias", None)
        found[f"attention.{name}.weight"] = inward(module.weight, heads) if inside else outward(module.weight)
        found[f"attention.{name}.bias"] = bias.view(heads, -1) if inside and bias is not None else bias
    for name, module in mlp.items():
        found |= {f"mlp.{name}.weight": module.weight.T, f"mlp.{name}.bias": module.bias}
    for name, module in norms.items():
        found |= {f"{name}.gain": module.weight, f"{name}.bias": getattr(module, "bias", None)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def network(layers: list[dict[str, Tensor]], others: dict[str, Tensor], **fields: Any) -> Transformer:
    """Ours, of these weights."""
    arch = Architecture(**{"layers": LAYERS, "width": WIDTH, "heads": HEADS, "mlp_width": INNER, **fields})
    tensors = {f"layers.{index}.{name}": each for index, layer in enumerate(layers) for name, each in layer.items()}
    return Transformer.from_weights(arch, {name: each.detach() for name, each in (tensors | others).items()})


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torch_encoder_layers_post_and_pre_norm(norm_first: bool, activation: str) -> None:
    encoder: Any = torch.nn.ModuleList(
        torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, INNER, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
        )
        for _ in range(LAYERS)
    )
    wake(encoder)
    layers = []
    states = [torch.randn(2, N, WIDTH, dtype=torch.float64)]
    blocked = torch.ones(N, N, dtype=torch.bool).triu(1)
    for block in encoder:
        fused = block.self_attn
        parts = zip(fused.in_proj_weight.chunk(3), fused.in_proj_bias.chunk(3), strict=True)
        q, k, v = (SimpleNamespace(weight=weight, bias=bias) for weight, bias in parts)
        layers.append(
            spelled(
                {"query": q, "key": k, "value": v, "output": fused.out_proj},
                {"up": block.linear1, "down": block.linear2},
                {"attention_norm": block.norm1, "mlp_norm": block.norm2},
            )
        )
        states.append(block(states[-1], src_mask=blocked).detach())
    place = "pre" if norm_first else "post"
    agree(network(layers, {}, activation=activation, norm_place=place, norm_eps=1e-5, mask="causal"), states)


@torch.no_grad()
def hidden_states(model: Any, real: Tensor | None = None, **inputs: Any) -> list[Tensor]:
    mask = {} if real is None else {"attention_mask": real.long()}
    return list(model(**inputs, **mask, output_hidden_states=True).hidden_states)


IDS = torch.randint(0, 50, (2, N), generator=torch.Generator().manual_seed(2))
REAL = torch.arange(N)[None] < torch.tensor([[N], [N - 3]])


def test_llama_grouped_heads_rotary_positions_gated_mlp_rms_norm() -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(vocab_size=50, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, num_key_value_heads=2, pad_token_id=None,
                         bos_token_id=None, eos_token_id=None)  # fmt: skip
    config._attn_implementation = "eager"
    model = wake(LlamaModel(config))
    layers = [
        spelled(
            {"query": own.q_proj, "key": own.k_proj, "value": own.v_proj, "output": own.o_proj},
            {"gate": block.mlp.gate_proj, "up": block.mlp.up_proj, "down": block.mlp.down_proj},
            {"attention_norm": block.input_layernorm, "mlp_norm": block.post_attention_layernorm},
            key_heads=2,
        )
        for block in model.layers
        for own in [block.self_attn]
    ]
    net = network(
        layers, spelled({}, {}, {"final_norm": model.norm}), key_heads=2, mlp="gated", activation="silu",
        norm="rms", norm_place="pre", norm_eps=config.rms_norm_eps, final_norm=True, mask="causal",
        positions="rotary", biases=False,
    )  # fmt: skip
    agree(net, hidden_states(model, REAL, input_ids=IDS), REAL, within=FLOAT32)


def test_gpt_neox_parallel_branches_partial_rotary() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXModel

    config = GPTNeoXConfig(vocab_size=50, hidden_size=2 * WIDTH, intermediate_size=INNER,
                           num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                           rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                                            "partial_rotary_factor": 0.5})  # fmt: skip
    config._attn_implementation = "eager"
    model = wake(GPTNeoXModel(config))
    layers = []
    for block in model.layers:
        # Fused per head: [head, (query, key, value), head_width].
        fused = block.attention.query_key_value
        weight, bias = fused.weight.view(HEADS, 3, 2 * HEAD, 2 * WIDTH), fused.bias.view(HEADS, 3, 2 * HEAD)
        q, k, v = (SimpleNamespace(weight=weight[:, i].flatten(0, 1), bias=bias[:, i].flatten()) for i in range(3))
        layers.append(
            spelled(
                {"query": q, "key": k, "value": v, "output": block.attention.dense},
                {"up": block.mlp.dense_h_to_4h, "down": block.mlp.dense_4h_to_h},
                {"attention_norm": block.input_layernorm, "mlp_norm": block.post_attention_layernorm},
            )
        )
    net = network(
        layers, spelled({}, {}, {"final_norm": model.final_layer_norm}), width=2 * WIDTH, parallel=True,
        norm_place="pre", norm_eps=config.layer_norm_eps, final_norm=True, mask="causal", positions="rotary",
        rotary_share=0.5,
    )  # fmt: skip
    agree(net, hidden_states(model, input_ids=IDS), within=FLOAT32)


def test_t5_position_buckets_and_no_divisor() -> None:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=50, d_model=WIDTH, d_kv=HEAD, d_ff=INNER, num_layers=LAYERS, num_heads=HEADS,
                      relative_attention_num_buckets=8, relative_attention_max_distance=6)  # fmt: skip
    model = wake(T5EncoderModel(config))
    layers = []
    for block in model.encoder.block:
        attention, mlp = block.layer
        own = attention.SelfAttention
        layers.append(
            spelled(
                {"query": own.q, "key": own.k, "value": own.v, "output": own.o},
                {"up": mlp.DenseReluDense.wi, "down": mlp.DenseReluDense.wo},
                {"attention_norm": attention.layer_norm, "mlp_norm": mlp.layer_norm},
            )
        )
    first = model.encoder.block[0].layer[0].SelfAttention
    others = spelled({}, {}, {"final_norm": model.encoder.final_layer_norm})
    net = network(
        layers, others | {"bias_table": first.relative_attention_bias.weight}, activation="relu", divisor=1.0,
        norm="rms", norm_place="pre", norm_eps=config.layer_norm_epsilon, final_norm=True, positions="bias",
        bias_buckets=8, bias_reach=6, biases=False,
    )  # fmt: skip
    agree(net, hidden_states(model, REAL, input_ids=IDS), REAL, within=FLOAT32)


def test_xlnet_relative_positions() -> None:
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(vocab_size=50, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, d_inner=INNER,
                         dropout=0.0, ff_activation="gelu")  # fmt: skip
    model = wake(XLNetModel(config))
    layers = [
        {
            "attention.query.weight": block.rel_attn.q,
            "attention.key.weight": block.rel_attn.k,
            "attention.value.weight": block.rel_attn.v,
            "attention.output.weight": block.rel_attn.o.permute(1, 2, 0),
            "attention.position": block.rel_attn.r,
            "attention.content_bias": block.rel_attn.r_w_bias,
            "attention.position_bias": block.rel_attn.r_r_bias,
            **spelled(
                {},
                {"up": block.ff.layer_1, "down": block.ff.layer_2},
                {"attention_norm": block.rel_attn.layer_norm, "mlp_norm": block.ff.layer_norm},
            ),
        }
        for block in model.layer
    ]
    net = network(layers, {}, norm_eps=config.layer_norm_eps, positions="relative", biases=("mlp", "norm"))
    agree(net, hidden_states(model, input_ids=IDS), within=FLOAT32)
