"""Tiny Hugging Face models of many families, with random weights, and where their blocks are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from rankscope.live import Watch, watch

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


def tiny(model: Any, **fields: Any) -> Callable[..., Any]:
    """Builds such a model, of the usual sizes but for those that its config calls otherwise (None)."""
    sizes = {name: size for name, size in (SIZES | fields).items() if size is not None}
    return lambda **kw: model(model.config_class(**sizes, **kw))


NAMED = dict.fromkeys(SIZES) | {"vocab_size": WORDS}
"""For configs that have names of their own for every size."""
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
GPT2 = NAMED | {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 16}
T5 = NAMED | {"d_model": WIDTH, "d_kv": 4, "d_ff": 24, "num_layers": LAYERS, "num_heads": HEADS}
_bert = tiny(hf.BertModel)
_llama = tiny(hf.LlamaForCausalLM, num_key_value_heads=2)
_vit = tiny(hf.ViTModel, vocab_size=None, image_size=8, patch_size=4)
_albert = tiny(hf.AlbertModel, embedding_size=8)
_xlnet = tiny(hf.XLNetModel, **NAMED, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, d_inner=24)
_distilbert = tiny(hf.DistilBertModel, **NAMED, dim=WIDTH, hidden_dim=24, n_layers=LAYERS, n_heads=HEADS)
_opt = tiny(hf.OPTModel, intermediate_size=None, ffn_dim=24, word_embed_proj_dim=WIDTH)
_gemma3 = tiny(hf.Gemma3TextModel, num_key_value_heads=2, head_dim=8, sliding_window=2)
_bloom = tiny(hf.BloomModel, **NAMED | {"hidden_size": WIDTH}, n_layer=LAYERS, n_head=HEADS)

FAMILIES = {
    "bert": Family(_bert, "encoder.layer", "attention.output.dense"),
    "gpt2": Family(tiny(hf.GPT2Model, **GPT2), "h", "attn.c_proj"),
    "llama": Family(_llama, "model.layers", "self_attn.o_proj"),
    "t5": Family(tiny(hf.T5EncoderModel, **T5), "encoder.block", "layer.0.SelfAttention.o"),
    "vit": Family(_vit, "layers", "attention.o_proj", pads=False),
    "albert": Family(_albert, "encoder.albert_layer_groups", "albert_layers.0.attention.dense"),
    "xlnet": Family(_xlnet, "layer", token_first=True),
    "distilbert": Family(_distilbert, "transformer.layer", "attention.out_lin"),
    "opt": Family(_opt, "decoder.layers", "self_attn.out_proj"),
    "gpt_neox": Family(tiny(hf.GPTNeoXModel), "layers", "attention.dense"),
    "gemma3": Family(_gemma3, "layers", "self_attn.o_proj"),
    "modernbert": Family(tiny(hf.ModernBertModel, **SPECIAL), "layers", "attn.Wo"),
    "bloom": Family(_bloom, "h"),
}


def made(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A family's model, and a batch with padding."""
    return FAMILIES[name].model(), FAMILIES[name].batch()


def seen(model: nn.Module, metrics: Any, *args: Any, **inputs: Any) -> Watch:
    """The watch of one call, without gradients."""
    with torch.no_grad(), watch(model, metrics) as w:
        model(*args, **inputs)
    return w


def checks(w: Watch) -> dict[str, Any]:
    """What the manifest says of the run."""
    return w.profile().manifest.networks[0].checks


every = pytest.mark.parametrize("name", FAMILIES)
attending = pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.projection])
