"""Angles of rotary positions, and masks by layer, as Hugging Face configs give them.

transformers keeps the angles in float32 and may rescale them for long contexts; they are taken from its own
functions, so that every scheme that does not depend on the length of the input works.
"""

from collections.abc import Mapping
from typing import Any

import torch

from rankscope.errors import SourceError

STEADY = ("default", "linear", "llama3", "proportional")
"""Schemes whose angles do not depend on the input and which leave scores unscaled."""


def angles(config: Any, share: float = 1.0) -> tuple[tuple[float, ...], ...]:
    """The angle per position of each rotated pair, by layer; one tuple where all layers agree. `share` of a
    head is rotated by default: most models read no `partial_rotary_factor` then."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None or not _by_kind(config.rope_parameters):
        return (_angles(config, config.rope_parameters, None, share),)
    by_kind = {
        kind: _angles(config, config.rope_parameters[kind], kind, share) for kind in dict.fromkeys(kinds)
    }
    return tuple(by_kind[kind] for kind in kinds)


def _by_kind(parameters: Mapping[str, Any]) -> bool:
    return all(isinstance(value, Mapping) for value in parameters.values())


def _angles(config: Any, parameters: Mapping[str, Any], kind: str | None, share: float) -> tuple[float, ...]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scheme = parameters["rope_type"]
    if scheme not in STEADY:
        raise SourceError(
            f"rotary positions must be of a scheme that does not depend on the input, {', '.join(STEADY)}; "
            f"this config says {scheme!r}: watch measures the model as it is"
        )
    if scheme == "default":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(width * share)
        power = torch.arange(0, width, 2, dtype=torch.float) / width
        found, scale = 1.0 / (parameters["rope_theta"] ** power), 1.0
    else:
        by_kind = {} if kind is None else {"layer_type": kind}
        found, scale = ROPE_INIT_FUNCTIONS[scheme](config, device="cpu", **by_kind)
    if scale != 1.0:
        raise SourceError(f"rotary positions must leave scores unscaled; this config scales them by {scale}")
    return tuple(found.double().tolist())


def masks(config: Any, usual: str = "causal") -> str:
    """The mask of each layer by its kind in `layer_types`: `usual`, or within the window where it slides."""
    known = {"full_attention": usual, "sliding_attention": sliding(config, usual)}
    for kind in config.layer_types:
        if kind not in known:
            raise SourceError(f"layers must be of kind {', '.join(known)}; this config has {kind!r}")
    by_layer = [known[kind] for kind in config.layer_types]
    return by_layer[0] if len(set(by_layer)) == 1 else ";".join(by_layer)


def sliding(config: Any, usual: str = "causal") -> str:
    """A causal window of w lets a token see itself and the w - 1 before; a two-sided one, w on each side."""
    window = config.sliding_window
    if window is None:
        return usual
    return f"causal&window:{window - 1}" if usual == "causal" else f"window:{window}"
