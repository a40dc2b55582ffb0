"""Two routes to one number: parts left out of the original, and of the canonical network that `load` maps it to."""

from typing import Any

import pytest
import torch

from rankscope.live import watch
from rankscope.nets import Transformer
from rankscope.profiles import measure
from rankscope.sources import FAMILIES, lifted, load
from tests.sources.models import CASES, model_of
from tests.sources.test_families import encoded, inputs_of

METRICS = ["mu", "relative_residual", "residual", "mean_cosine", "entropy", "head_mu"]
WITHIN: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
NAMES = {
    "bert": (
        "encoder.layer.*.attention.output.dense",
        "encoder.layer.*.output.dense",
        "encoder.layer.*.output.LayerNorm",
    ),
    "gpt2": ("h.*.attn", "h.*.mlp", ()),
    "llama": ("layers.*.self_attn", "layers.*.mlp", ()),
    "gpt_neox": ("layers.*.attention", "layers.*.mlp", ()),
    "gemma2": ("layers.*.self_attn", "layers.*.mlp", ()),
    "t5": ("block.*.layer.0.SelfAttention", "block.*.layer.1.DenseReluDense", ()),
}
"""Attention, the MLP, and the norm that goes with an MLP where it stands after the skip."""
LABELS = {name: next(label for family, label in CASES if family == name) for name in NAMES}
UNPROJECTED = {"xlnet", "qwen3_next", "albert"}  # no plain output projection; blocks that are several layers


def both(name: str, label: str, parts: dict[str, Any], change: Any, metrics: list[str]) -> tuple[Any, Any]:
    """The profiles of the original without these parts, and of the changed network."""
    model: Any = FAMILIES[name].core(model_of(name, label))
    net = load(model)
    inputs, padding = inputs_of(name, model, net)
    X, _ = encoded(name, net, inputs, padding)
    with lifted(), torch.no_grad(), watch(model, metrics).without(**parts) as w:
        model(**inputs)
    return w.profile(), measure(change(net), X, padding, metrics, "float64")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", ["transformer-mlp", "transformer-attention_skip", "transformer-mlp_skip"])
def test_parts_left_out_are_a_variant(name: str, variant: str) -> None:
    attention, mlp, norms = NAMES[name]
    changes: dict[str, dict[str, Any]] = {
        "transformer-mlp": {"branches": mlp, "norms": norms},
        "transformer-attention_skip": {"skips": attention},
        "transformer-mlp_skip": {"skips": mlp},
    }
    parts = changes[variant]
    if name == "gpt_neox" and variant == "transformer-mlp_skip":
        variant = "transformer-attention_skip"  # parallel branches have one skip
    seen, expected = both(name, LABELS[name], parts, lambda net: net.variant(variant), METRICS)
    for metric in METRICS:
        torch.testing.assert_close(seen.curve(metric), expected.curve(metric), **WITHIN)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "label"), [case for case in CASES if case[0] != "albert"])
def test_layers_and_heads_of_every_family(name: str, label: str) -> None:
    """The first layer, the last, a head of each; 1e-9, as in the parity check."""
    metrics = ["mu", "relative_residual"]

    def compare(keep: Any, **parts: Any) -> None:
        seen, expected = both(name, label, parts, lambda net: Transformer.without(net, **parts), metrics)
        for metric in metrics:
            kept = seen.curve(metric)[:, keep]
            torch.testing.assert_close(kept, expected.curve(metric), rtol=1e-9, atol=1e-9, equal_nan=True)

    arch = load(FAMILIES[name].core(model_of(name, label))).arch
    compare(slice(0, -1), layers=[arch.layers])
    compare([0, *range(2, arch.layers + 1)], layers=[1])
    if name not in UNPROJECTED:
        compare(slice(None), heads={1: [0], arch.layers: [arch.heads - 1]})
