"""The families of models that `load` maps onto the canonical network (a file for each lineage), which
of them maps a model type, and what is said of one that none does."""

import re
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from torch import nn

from rankscope.errors import SourceError, one_of
from rankscope.nets import layer_shapes
from rankscope.plugins import Group
from rankscope.sources.families import bart, bert, gpt, llama, mixtral, plain_vit, relative, vit
from rankscope.sources.families.family import Family, config_of
from rankscope.sources.families.parts import Tensors, dense, heads_in, heads_out, norm

SHIPPED = (
    bert.Bert(), bert.Roberta(), bert.DistilBert(), bert.Albert(), relative.XLNet(), gpt.GPT2(), bart.OPT(),
    gpt.GPTNeoX(), llama.Llama(), mixtral.Mixtral(), mixtral.Qwen3Next(), mixtral.DeepSeek(), llama.Phi3(),
    llama.Gemma2(), llama.Gemma3(), relative.T5(), relative.T5Decoder(), bart.Bart(), bart.BartDecoder(),
    bart.Whisper(), bart.WhisperDecoder(), vit.ViT(), vit.DinoV2(), bert.ModernBert(), vit.ClipText(), vit.ClipVision(),
    vit.SiglipText(), vit.SiglipVision(), bert.Electra(), bert.MPNet(), bert.Esm(), relative.DebertaV2(), gpt.Phi(),
    llama.Gemma(), llama.OLMo2(), llama.Qwen2VL(), mixtral.GptOss(), relative.MT5(), relative.MT5Decoder(),
    bart.Marian(), bart.MarianDecoder(), bart.Wav2Vec2(), vit.DinoV3(), bert.NomicBert(), relative.Deberta(),
    llama.SmolLM3(), gpt.Bloom(), bart.M2M100(), bart.M2M100Decoder(), bart.MBart(), bart.MBartDecoder(),
    bart.Pegasus(), bart.PegasusDecoder(), vit.DeiT(), vit.DinoV2Registers(), gpt.GPTNeo(), gpt.GPTJ(), gpt.Falcon(),
    vit.AST(),
)  # fmt: skip
FAMILIES: Group[Family] = Group("families", "a Family", lambda each: isinstance(each, Family))
"""Every family by name; of two that map one type of model, the first."""
MODULES: dict[str, Family] = {family.name: family for family in (plain_vit.ViTPytorch(), plain_vit.TimmViT())}
"""Families of plain modules, without a config."""

__all__ = [
    "FAMILIES", "MODULES", "Family", "Tensors", "dense", "family_of", "heads_in", "heads_out", "module_family", "norm",
]  # fmt: skip
RECURRENT = ("mamba", "rwkv", "xlstm")  # How the model types of recurrent models without attention begin or end
CHUNKED = ", whose layers attend within chunks, and choose experts by sigmoids that scale what an expert reads"
DELTA = ", most of whose layers are recurrent (a gated delta rule) and have no attention"
PAGE = ", whose scores add biases by where words stand on a page"
GEMMA_4 = ", whose layers have heads of two widths, norms of values, and a number each that scales what leaves them"
STREAMS = ("gemma3n", "gemma3n_text")  # Types that `watch` does not measure either
REASONS = {
    **dict.fromkeys(("llama4", "llama4_text"), CHUNKED),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), DELTA),
    **dict.fromkeys(("gemma4", "gemma4_text"), GEMMA_4),
    **dict.fromkeys(STREAMS, ", whose layers pass on several streams of tokens side by side"),
    **dict.fromkeys(("layoutlmv2", "layoutlmv3"), PAGE),
    **dict.fromkeys(("beit", "data2vec-vision"), ", whose scores add a bias by distance of each layer's own"),
    **dict.fromkeys(("longformer", "led"), ", which attends within windows, its global tokens by other projections"),
    "convbert": ", half of whose heads are convolutions that each token makes for itself",
    "fnet": ", which mixes tokens by Fourier transforms instead of attention",
    "layoutlm": ", whose tokens begin with where words stand on a page",
    "wavlm": ", whose scores add a bias by distance times a gate of each token",
    **dict.fromkeys(("swin", "swinv2"), ", whose tokens attend within windows that shift, and merge between stages"),
    "deepseek_v32": ", whose tokens attend to those alone that an indexer picks for each",
    "vision-encoder-decoder": ", a pair of two models: load takes its `encoder` and its `decoder` if they are mapped",
    "timm_wrapper": ", a model of timm: load takes its `timm_model` if that is a plain ViT",
}
"""Why no family maps a model type, where that is one part of it."""
CLOSE = 0.8  # The likeness, of at most one, from which on a name may be a slip of another


def family_of(
    model_type: str | None, requested: str | Family | None = None, build: Callable[[], Any] | None = None
) -> Family:
    """The family of a model type, or the one asked for: one's own, or by name. `build` gives a model of the type,
    without numbers if need be, so that one of no family can be compared with those that there are."""
    if isinstance(requested, Family):
        return requested
    matching = next((family for family in FAMILIES.values() if model_type in family.types), None)
    if requested is None:
        if matching is None:
            raise SourceError(_unknown(str(model_type), build), subject="model_type")
        return matching
    requested = requested if requested in FAMILIES else str(requested).removesuffix("_encoder")
    if requested not in FAMILIES:
        raise SourceError(one_of("family", requested, FAMILIES, CLOSE), subject="family")
    if matching is not None and model_type not in FAMILIES[requested].types:
        message = f"family {requested!r} must map the model type; the config says {model_type!r}: leave family out"
        raise SourceError(message, subject="family")
    return FAMILIES[requested]


def module_family(model: nn.Module, requested: str | None = None) -> Family | None:
    """The family of a plain module, by how it is laid out, or the one of the name `requested` if it fits."""
    fitting = [family for family in MODULES.values() if requested in (None, family.name)]
    return next((family for family in fitting if family.fits(model)), None)


def same_layout(model: Any) -> list[str]:
    """Names of the families that find all of their weights in a model and leave none over, in its last block and
    around its blocks, but for a pooler."""
    names = []
    for name, family in FAMILIES.items():
        with suppress(Exception):  # which a family may raise on a model of another kind is not known
            core = family.core(model)
            arch, block = family.architecture(config_of(core)), family.blocks(core)[-1]
            tensors = family.layer(block, arch)
            mapped = sum(tensor.numel() for tensor in tensors.values())
            family.embedding(core), family.other_tensors(core)
            around = (family.stack, family.final_norm or "pooler", "pooler", *family.embedding_parts.values())
            known = tuple(f"{path}." for paths in around for path in re.split(", | or ", paths))
            over = [path for path, _ in core.named_parameters() if not f"{path}.".startswith(known)]
            fits = not over and tensors.keys() <= layer_shapes(arch, arch.layers - 1).keys()
            if fits and mapped == sum(weight.numel() for weight in block.parameters()):
                names.append(name)
    return names


def _unknown(model_type: str, build: Callable[[], Any] | None = None) -> str:
    """The sentence for a model type of no family. One that transformers knows is no slip of another."""
    from transformers import CONFIG_MAPPING

    towers = [repr(name) for name in FAMILIES if name in (f"{model_type}_text", f"{model_type}_vision")]
    if towers:
        return f"a {model_type} model has two towers; name the one to load, family={' or '.join(towers)}"
    known = list(dict.fromkeys(kind for family in FAMILIES.values() for kind in family.types))
    theirs = model_type in CONFIG_MAPPING
    near = [] if theirs else get_close_matches(model_type, known, n=1, cutoff=CLOSE)
    letters = [re.sub(r"[\d._-]", "", name) for name in (model_type, *near)]
    # Another version is no slip.
    hint = f" (did you mean {near[0]!r}?)" if near and letters[0] != letters[1] else ""
    if model_type.rstrip("0123456789").endswith(RECURRENT):
        hint = ", a recurrent model without attention"
    this_one = f"no family maps the model type {model_type!r}{REASONS.get(model_type, hint)}"
    watched = "" if model_type in STREAMS else "watch measures any model as it is, and "
    advice = f"{watched}docs/models.md says how to add a family"
    alike = []
    if build is not None and model_type not in REASONS:
        with suppress(Exception):  # some types cannot be built, and then there is nothing to say
            alike = same_layout(build())
    if alike:
        names = " or ".join(map(repr, alike))
        advice = (
            f"load(..., family={names}) reads it, for its weights are laid out alike, and checks that it is built so"
        )
    return f"{this_one}: {advice}; docs/families.md lists the {len(known)} types that are mapped"
