"""Models in frequent use that no family maps: `load` says why, and `watch` measures them as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import rankscope
from rankscope.errors import SourceError
from tests.live import reference
from tests.live.families import LAYERS, SPECIAL, WIDTH, WORDS, seen, tiny

GROUPED = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = {"input_ids": torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(0))}
IMAGES = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()}
UNMAPPED: dict[str, tuple[Callable[..., Any], str]] = {
    "qwen3_5_text": (
        tiny(
            hf.Qwen3_5TextModel, **GROUPED, linear_key_head_dim=4, linear_value_head_dim=4, linear_num_key_heads=2,
            linear_num_value_heads=2, layer_types=["linear_attention", "linear_attention", "full_attention"],
        ),
        "recurrent",
    ),
    "gemma4_text": (
        tiny(
            hf.Gemma4TextModel, **GROUPED, global_head_dim=8, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        "norms of values",
    ),
    "llama4_text": (
        tiny(hf.Llama4TextModel, **GROUPED, intermediate_size_mlp=24, num_local_experts=4, attention_chunk_size=4),
        "chunks",
    ),
    "deepseek_v32": (
        tiny(
            hf.DeepseekV32Model, num_key_value_heads=4, kv_lora_rank=5, q_lora_rank=7, qk_rope_head_dim=4,
            qk_nope_head_dim=6, v_head_dim=3, first_k_dense_replace=LAYERS, index_n_heads=2, index_head_dim=8,
            index_topk=4,
        ),
        "indexer",
    ),
    "layoutlm": (tiny(hf.LayoutLMModel, max_2d_position_embeddings=32), "page"),
    "layoutlmv3": (
        tiny(
            hf.LayoutLMv3Model, max_2d_position_embeddings=32, coordinate_size=3, shape_size=2, visual_embed=False,
            **SPECIAL,
        ),
        "page",
    ),
    "convbert": (tiny(hf.ConvBertModel, embedding_size=WIDTH), "convolutions"),
    "beit": (
        tiny(hf.BeitModel, vocab_size=None, image_size=16, patch_size=4, use_relative_position_bias=True),
        "each layer's own",
    ),
}  # fmt: skip
"""Models, and a word of the reason why they are refused."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", UNMAPPED)
def test_what_no_family_maps_is_refused_with_a_reason_and_watched(name: str) -> None:
    """Tokens are the model's own hidden states; attention is what it hands out where it runs eagerly."""
    build, reason = UNMAPPED[name]
    torch.manual_seed(0)
    model = build(attn_implementation="eager").double().eval()
    with pytest.raises(SourceError) as caught:
        rankscope.load(model)
    assert reason in str(caught.value) and "watch" in str(caught.value)
    inputs = IMAGES if name == "beit" else IDS
    w = seen(model, ["mu", "entropy"], **inputs)
    with torch.no_grad():
        own = model(**inputs, output_hidden_states=True, output_attentions=True)
    states = own.hidden_states[:LAYERS]  # the last may be behind the last norm
    real = torch.ones(states[0].shape[:2], dtype=torch.bool)
    expected = torch.stack([reference.mu(state, real) for state in states], 1)
    torch.testing.assert_close(w.profile().curve("mu")[:, :LAYERS], expected, rtol=1e-9, atol=1e-12)
    entropy = w.profile().curve("entropy")
    attending = [layer for layer in range(1, LAYERS + 1) if entropy[:, layer].isfinite().all()]
    assert attending == ([3] if name == "qwen3_5_text" else [1, 2, 3])
    for layer, P in zip(attending, [P for P in own.attentions if P is not None], strict=True):
        torch.testing.assert_close(entropy[:, layer], rows_of(P), rtol=1e-4, atol=1e-5)  # float32 softmax in some


def rows_of(P: Tensor) -> Tensor:
    """The entropy of a row of attention, averaged over rows, for each sample and head."""
    return torch.special.entr(P.double()).sum(-1).mean(-1)


@torch.no_grad()
def test_models_whose_attention_cannot_be_seen_are_watched_for_their_tokens() -> None:
    sound = {"conv_dim": [4, 4], "conv_stride": [3, 2], "conv_kernel": [5, 3], "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    torch.manual_seed(0)
    wavlm = tiny(hf.WavLMModel, **sound, **places)().double().eval()
    longformer = tiny(hf.LongformerModel, attention_window=4)().double().eval()
    fnet = tiny(hf.FNetModel, num_attention_heads=None)().double().eval()
    waves = {"input_values": torch.randn(2, 200, dtype=torch.float64)}
    for model, inputs, reason in ((wavlm, waves, "gate"), (longformer, IDS, "windows"), (fnet, IDS, "Fourier")):
        with pytest.raises(SourceError, match=reason):
            rankscope.load(model)
        w = seen(model, "mu", **inputs)
        assert w.profile().curve("mu").shape == (2, LAYERS + 1) and w.profile().curve("mu").isfinite().all()
    with pytest.raises(SourceError, match="windows"):
        rankscope.load(_swin())
    with rankscope.watch(model := _swin(), "mu", blocks="encoder.layers.0.blocks") as w:
        model(IMAGES["pixel_values"])
    assert w.profile().curve("mu").isfinite().all()  # of one stage, whose tokens are not merged


def _swin() -> Any:
    sizes: dict[str, Any] = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": WIDTH,
        "depths": [2, 2],
        "num_heads": [2, 2],
    }
    return hf.SwinModel(hf.SwinConfig(**sizes, window_size=4)).double().eval()
