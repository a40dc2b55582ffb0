"""Tiny Hugging Face models of many families, with random weights, and where their blocks are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, WORDS = 16, 4, 3, 40
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
}


@dataclass(frozen=True)
class Family:
    """One family: how to build it, and the dotted names a test looks behind."""

    build: Callable[..., Any]
    """Takes attn_implementation."""
    blocks: str
    projection: str = ""
    """Inside a block; empty where attention cannot be watched."""
    pads: bool = True
    """Whether it takes an attention_mask."""
    token_first: bool = False
    named: bool = False
    """Whether the stack must be named."""

    def model(self, attention: str | None = None) -> Any:
        torch.manual_seed(0)
        model = self.build(**({"attn_implementation": attention} if attention else {})).double().eval()
        for weight in model.parameters():  # initial weights are so small that attention is all but uniform
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.5)
        return model

    def stack(self, model: Any) -> list[nn.Module]:
        return list(model.get_submodule(self.blocks))

    def batch(self, padded: bool = True) -> dict[str, Tensor]:
        torch.manual_seed(1)
        if self.blocks == "layers" and not self.pads:
            return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
        ids = torch.randint(3, WORDS, (2, 6))
        mask = torch.ones_like(ids)
        if padded and self.pads:
            mask[1, 4:] = 0
        return {"input_ids": ids, "attention_mask": mask}


def _bert(**kw: Any) -> Any:
    return hf.BertModel(hf.BertConfig(**SIZES, **kw))


def _gpt2(**kw: Any) -> Any:
    return hf.GPT2Model(
        hf.GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=16, **kw)
    )


def _llama(**kw: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2, **kw))


def _t5(**kw: Any) -> Any:
    sizes: dict[str, Any] = {
        "d_model": WIDTH,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": LAYERS,
        "num_heads": HEADS,
    }
    return hf.T5EncoderModel(hf.T5Config(vocab_size=WORDS, **sizes, **kw))


def _vit(**kw: Any) -> Any:
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return hf.ViTModel(hf.ViTConfig(**sizes, image_size=8, patch_size=4, **kw))


def _albert(**kw: Any) -> Any:
    return hf.AlbertModel(hf.AlbertConfig(**SIZES, embedding_size=8, **kw))


def _xlnet(**kw: Any) -> Any:
    sizes: dict[str, Any] = {"d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 24}
    return hf.XLNetModel(hf.XLNetConfig(vocab_size=WORDS, **sizes, **kw))


def _distilbert(**kw: Any) -> Any:
    sizes: dict[str, Any] = {"dim": WIDTH, "hidden_dim": 24, "n_layers": LAYERS, "n_heads": HEADS}
    return hf.DistilBertModel(hf.DistilBertConfig(vocab_size=WORDS, **sizes, **kw))


def _opt(**kw: Any) -> Any:
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    return hf.OPTModel(hf.OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=WIDTH, **kw))


def _neox(**kw: Any) -> Any:
    return hf.GPTNeoXModel(hf.GPTNeoXConfig(**SIZES, **kw))


def _gemma3(**kw: Any) -> Any:
    return hf.Gemma3TextModel(
        hf.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=2, **kw)
    )


def _modernbert(**kw: Any) -> Any:
    special: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    return hf.ModernBertModel(hf.ModernBertConfig(**SIZES, **special, **kw))


def _bloom(**kw: Any) -> Any:
    return hf.BloomModel(
        hf.BloomConfig(vocab_size=WORDS, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **kw)
    )


FAMILIES = {
    "bert": Family(_bert, "encoder.layer", "attention.output.dense"),
    "gpt2": Family(_gpt2, "h", "attn.c_proj"),
    "llama": Family(_llama, "model.layers", "self_attn.o_proj"),
    "t5": Family(_t5, "encoder.block", "layer.0.SelfAttention.o"),
    "vit": Family(_vit, "layers", "attention.o_proj", pads=False),
    "albert": Family(_albert, "encoder.albert_layer_groups", "albert_layers.0.attention.dense"),
    "xlnet": Family(_xlnet, "layer", token_first=True),
    "distilbert": Family(_distilbert, "transformer.layer", "attention.out_lin"),
    "opt": Family(_opt, "decoder.layers", "self_attn.out_proj"),
    "gpt_neox": Family(_neox, "layers", "attention.dense"),
    "gemma3": Family(_gemma3, "layers", "self_attn.o_proj"),
    "modernbert": Family(_modernbert, "layers", "attn.Wo"),
    "bloom": Family(_bloom, "h"),
}
every = pytest.mark.parametrize("name", FAMILIES)
attending = pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.projection])
