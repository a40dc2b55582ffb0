"""Rotary positions and masks by layer, as Hugging Face configs give them.

transformers keeps the angles in float32, may rescale them for long contexts and scale what is rotated; both
are taken from its own functions. Schemes that follow the length of the input (dynamic, longrope) are those of
inputs up to the length from which on they change: longer ones are refused by the network (`rotary_reach`).
"""

from collections.abc import Mapping
from typing import Any

import torch

from rankscope.errors import SourceError, one_of, require_one_of

SCHEMES = ("default", "linear", "llama3", "proportional", "yarn", "longrope", "dynamic")


def rotary(config: Any, share: float = 1.0) -> dict[str, Any]:
    """The fields of an architecture with these positions: angles and scales by layer, and how far they hold.
    `share` of a head is rotated by default: most models read no `partial_rotary_factor` then."""
    kinds, parameters = getattr(config, "layer_types", None), config.rope_parameters
    if kinds is None or not all(isinstance(value, Mapping) for value in parameters.values()):
        kinds, parameters = [None], {None: parameters}
    tensors = {kind: _of(config, parameters[kind], kind, share) for kind in dict.fromkeys(kinds)}
    scales = tuple(tensors[kind][1] for kind in kinds)
    reach = list(filter(None, (_reach(config, parameters[kind]) for kind in tensors)))
    return {
        "positions": "rotary",
        "rotary_frequencies": tuple(tensors[kind][0] for kind in kinds),
        "rotary_scales": scales if set(scales) != {1.0} else (),
        "rotary_reach": min(reach, default=0),
    }


def partly_rotary(config: Any) -> dict[str, Any]:
    """The fields where a head is rotated by the share of it that its config says."""
    share = float(config.rope_parameters.get("partial_rotary_factor", 1.0))
    return {**rotary(config, share), "rotary_share": share}


def _of(config: Any, parameters: Any, kind: str | None, share: float) -> tuple[tuple[float, ...], float]:
    """The angle per position of each rotated pair, and what rotated entries are multiplied by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scheme = parameters["rope_type"]
    if scheme not in SCHEMES:
        message = one_of("scheme of rotary positions", scheme, SCHEMES)
        raise SourceError(f"{message}: watch measures the model as it is", subject="rope_type")
    if scheme == "default":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return angles(parameters["rope_theta"], int(width * share)), 1.0
    by_kind = {} if kind is None else {"layer_type": kind}
    tensors, scale = ROPE_INIT_FUNCTIONS[scheme](config, device=torch.device("cpu"), **by_kind)
    return tuple(tensors.double().tolist()), float(scale)


def angles(base: float, width: int) -> tuple[float, ...]:
    """The angle per position of each pair of `width` rotated entries, `base^(-2k / width)`, in float32."""
    power = torch.arange(0, width, 2, dtype=torch.float) / width
    return tuple((1.0 / (base**power)).double().tolist())


def _reach(config: Any, parameters: Mapping[str, Any]) -> int:
    """The most tokens for which the angles are those of short inputs; 0 where they are the same for all."""
    if parameters["rope_type"] == "dynamic":
        return int(config.max_position_embeddings)
    return int(parameters["original_max_position_embeddings"]) if parameters["rope_type"] == "longrope" else 0


def masks(config: Any, usual: str = "causal") -> str:
    """The mask of each layer by its kind in `layer_types`: `usual`, or within the window where it slides."""
    known = {"full_attention": usual, "sliding_attention": sliding(config, usual)}
    for kind in config.layer_types:
        require_one_of("kind of layers", kind, known, SourceError, "layer_types")
    by_layer = [known[kind] for kind in config.layer_types]
    return by_layer[0] if len(set(by_layer)) == 1 else ";".join(by_layer)


def sliding(config: Any, usual: str = "causal") -> str:
    """A causal window of w lets a token see itself and the w - 1 before; a two-sided one, w on each side."""
    window = config.sliding_window
    if window is None:
        return usual
    return f"causal&window:{window - 1}" if usual == "causal" else f"window:{window}"
