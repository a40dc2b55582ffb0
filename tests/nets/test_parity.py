"""The reference network against the libraries' own: one block covers them all.

Small random models of `transformers`, in float64, with padding where the model takes it. Their weights are
spelled out here by hand, so that the block is checked independently of any loader.
"""

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


def from_layers(arch: Architecture, layers: list[dict[str, Tensor]], **others: Tensor) -> Transformer:
    tensors = {
        f"layers.{index}.{name}": tensor.detach()
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
    }
    return Transformer.from_weights(arch, {**tensors, **{k: v.detach() for k, v in others.items()}})


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
    arch = Architecture(
        layers=LAYERS, width=WIDTH, heads=HEADS, mlp_width=INNER, activation=activation,
        norm_place="pre" if norm_first else "post", norm_eps=1e-5, mask="causal",
    )  # fmt: skip
    layers = []
    states = [torch.randn(2, N, WIDTH, dtype=torch.float64)]
    blocked = torch.ones(N, N, dtype=torch.bool).triu(1)
    for block in encoder:
        q, k, v = block.self_attn.in_proj_weight.chunk(3)
        bq, bk, bv = block.self_attn.in_proj_bias.chunk(3)
        layers.append({
            "attention.query.weight": inward(q), "attention.query.bias": bq.view(HEADS, HEAD),
            "attention.key.weight": inward(k), "attention.key.bias": bk.view(HEADS, HEAD),
            "attention.value.weight": inward(v), "attention.value.bias": bv.view(HEADS, HEAD),
            "attention.output.weight": outward(block.self_attn.out_proj.weight),
            "attention.output.bias": block.self_attn.out_proj.bias,
            "attention_norm.gain": block.norm1.weight, "attention_norm.bias": block.norm1.bias,
            "mlp.up.weight": block.linear1.weight.T, "mlp.up.bias": block.linear1.bias,
            "mlp.down.weight": block.linear2.weight.T, "mlp.down.bias": block.linear2.bias,
            "mlp_norm.gain": block.norm2.weight, "mlp_norm.bias": block.norm2.bias,
        })  # fmt: skip
        states.append(block(states[-1], src_mask=blocked).detach())
    agree(from_layers(arch, layers), states)


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
    arch = Architecture(
        layers=LAYERS, width=WIDTH, heads=HEADS, key_heads=2, mlp="gated", mlp_width=INNER, activation="silu",
        norm="rms", norm_place="pre", norm_eps=config.rms_norm_eps, final_norm=True, mask="causal",
        positions="rotary", biases=False,
    )  # fmt: skip
    layers = [
        {
            "attention.query.weight": inward(block.self_attn.q_proj.weight),
            "attention.key.weight": inward(block.self_attn.k_proj.weight, 2),
            "attention.value.weight": inward(block.self_attn.v_proj.weight, 2),
            "attention.output.weight": outward(block.self_attn.o_proj.weight),
            "attention_norm.gain": block.input_layernorm.weight,
            "mlp.gate.weight": block.mlp.gate_proj.weight.T,
            "mlp.up.weight": block.mlp.up_proj.weight.T,
            "mlp.down.weight": block.mlp.down_proj.weight.T,
            "mlp_norm.gain": block.post_attention_layernorm.weight,
        }
        for block in model.layers
    ]
    net = from_layers(arch, layers, **{"final_norm.gain": model.norm.weight})
    agree(net, hidden_states(model, REAL, input_ids=IDS), REAL, within=FLOAT32)


def test_gpt_neox_parallel_branches_partial_rotary() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXModel

    config = GPTNeoXConfig(vocab_size=50, hidden_size=2 * WIDTH, intermediate_size=INNER,
                           num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                           rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                                            "partial_rotary_factor": 0.5})  # fmt: skip
    config._attn_implementation = "eager"
    model = wake(GPTNeoXModel(config))
    arch = Architecture(
        layers=LAYERS, width=2 * WIDTH, heads=HEADS, mlp_width=INNER, parallel=True, norm_place="pre",
        norm_eps=config.layer_norm_eps, final_norm=True, mask="causal", positions="rotary", rotary_share=0.5,
    )  # fmt: skip
    layers = []
    for block in model.layers:
        # Fused per head: [head, (query, key, value), head_width].
        weight = block.attention.query_key_value.weight.view(HEADS, 3, 2 * HEAD, 2 * WIDTH)
        bias = block.attention.query_key_value.bias.view(HEADS, 3, 2 * HEAD)
        fused = {}
        for place, name in enumerate(("query", "key", "value")):
            fused[f"attention.{name}.weight"] = weight[:, place].permute(2, 0, 1)
            fused[f"attention.{name}.bias"] = bias[:, place]
        layers.append({
            **fused,
            "attention.output.weight": outward(block.attention.dense.weight),
            "attention.output.bias": block.attention.dense.bias,
            "attention_norm.gain": block.input_layernorm.weight,
            "attention_norm.bias": block.input_layernorm.bias,
            "mlp.up.weight": block.mlp.dense_h_to_4h.weight.T, "mlp.up.bias": block.mlp.dense_h_to_4h.bias,
            "mlp.down.weight": block.mlp.dense_4h_to_h.weight.T,
            "mlp.down.bias": block.mlp.dense_4h_to_h.bias,
            "mlp_norm.gain": block.post_attention_layernorm.weight,
            "mlp_norm.bias": block.post_attention_layernorm.bias,
        })  # fmt: skip
    last = model.final_layer_norm
    net = from_layers(arch, layers, **{"final_norm.gain": last.weight, "final_norm.bias": last.bias})
    agree(net, hidden_states(model, input_ids=IDS), within=FLOAT32)


def test_t5_position_buckets_and_no_divisor() -> None:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=50, d_model=WIDTH, d_kv=HEAD, d_ff=INNER, num_layers=LAYERS, num_heads=HEADS,
                      relative_attention_num_buckets=8, relative_attention_max_distance=6)  # fmt: skip
    model = wake(T5EncoderModel(config))
    arch = Architecture(
        layers=LAYERS, width=WIDTH, heads=HEADS, mlp_width=INNER, activation="relu", divisor=1.0, norm="rms",
        norm_place="pre", norm_eps=config.layer_norm_epsilon, final_norm=True, positions="bias",
        bias_buckets=8, bias_reach=6, biases=False,
    )  # fmt: skip
    layers = []
    for block in model.encoder.block:
        attention, mlp = block.layer
        layers.append({
            "attention.query.weight": inward(attention.SelfAttention.q.weight),
            "attention.key.weight": inward(attention.SelfAttention.k.weight),
            "attention.value.weight": inward(attention.SelfAttention.v.weight),
            "attention.output.weight": outward(attention.SelfAttention.o.weight),
            "attention_norm.gain": attention.layer_norm.weight,
            "mlp.up.weight": mlp.DenseReluDense.wi.weight.T,
            "mlp.down.weight": mlp.DenseReluDense.wo.weight.T,
            "mlp_norm.gain": mlp.layer_norm.weight,
        })  # fmt: skip
    first = model.encoder.block[0].layer[0].SelfAttention
    net = from_layers(
        arch, layers,
        **{"final_norm.gain": model.encoder.final_layer_norm.weight,
           "bias_table": first.relative_attention_bias.weight},
    )  # fmt: skip
    agree(net, hidden_states(model, REAL, input_ids=IDS), REAL, within=FLOAT32)


def test_xlnet_relative_positions() -> None:
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(vocab_size=50, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, d_inner=INNER,
                         dropout=0.0, ff_activation="gelu")  # fmt: skip
    model = wake(XLNetModel(config))
    arch = Architecture(
        layers=LAYERS, width=WIDTH, heads=HEADS, mlp_width=INNER, norm_eps=config.layer_norm_eps,
        positions="relative", biases=("mlp", "norm"),
    )  # fmt: skip
    layers = [
        {
            "attention.query.weight": block.rel_attn.q,
            "attention.key.weight": block.rel_attn.k,
            "attention.value.weight": block.rel_attn.v,
            "attention.output.weight": block.rel_attn.o.permute(1, 2, 0),
            "attention.position": block.rel_attn.r,
            "attention.content_bias": block.rel_attn.r_w_bias,
            "attention.position_bias": block.rel_attn.r_r_bias,
            "attention_norm.gain": block.rel_attn.layer_norm.weight,
            "attention_norm.bias": block.rel_attn.layer_norm.bias,
            "mlp.up.weight": block.ff.layer_1.weight.T, "mlp.up.bias": block.ff.layer_1.bias,
            "mlp.down.weight": block.ff.layer_2.weight.T, "mlp.down.bias": block.ff.layer_2.bias,
            "mlp_norm.gain": block.ff.layer_norm.weight, "mlp_norm.bias": block.ff.layer_norm.bias,
        }
        for block in model.layer
    ]  # fmt: skip
    agree(from_layers(arch, layers), hidden_states(model, input_ids=IDS), within=FLOAT32)


@pytest.mark.parametrize(("heads", "first"), [(8, 0.5), (4, 0.25), (6, 0.25)])
def test_alibi_slopes_are_the_papers(heads: int, first: float) -> None:
    """Press et al. 2022: for 8 heads 1/2, 1/4, ..., 1/256; else the lower power of two's, then between."""
    from rankscope.nets.positions import alibi_slopes

    slopes = alibi_slopes(heads).tolist()
    assert slopes[0] == first and len(set(slopes)) == heads
    if heads == 8:
        assert slopes == [2.0**-k for k in range(1, 9)]
    if heads == 6:
        assert slopes == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
