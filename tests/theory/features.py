"""Networks with one feature each: every field of `Architecture` and every remedy, on the network of each theorem."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankscope.nets import Architecture, Experts, Kernel, Mask, Norm, Transformer
from rankscope.nets.masks import from_matrix
from rankscope.remedies import REMEDIES
from tests.builders import normal

TOKENS = 5  # Of each sample

USUAL: dict[str, Any] = {
    "layers": 2, "width": 12, "heads": 1, "head_width": 2, "mlp_width": 2, "mlp": "none", "norm": "none",
    "attention_skip": 0.0,
}  # fmt: skip
"""The fields of every network here, but for what its theorem or feature changes: heads alone."""
SPHERE: dict[str, Any] = {"norm": "scale", "norm_eps": 0.0, "biases": False}
BASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "heads alone": (
        {},
        ("dong2021-2.2", "dong2021-2.3", "dong2021-2.3-gamma1", "oscillation", "attention-factors", "exact-factors",
         "dobrushin", "wu2024-1"),
    ),
    "with MLPs": ({"mlp": "plain"}, ("dong2021-3.2",)),
    "with skips": ({"attention_skip": 1.0}, ("dong2021-skip", "elementary-skip", "aligned-skip", "untouched")),
    "on a sphere": ({**SPHERE, "head_width": 0}, ("wu2024-2", "wu2024-cor1", "hemisphere")),
    "skips under a norm": ({**SPHERE, "attention_skip": 4.0}, ("lambda-skip", "norm-rank")),
}  # fmt: skip
"""By name the fields of a network, and the theorems whose hypotheses it meets."""


@dataclass(frozen=True)
class SumOfTokens:
    """A part of the user's own: attention adds the mean of the tokens that it read."""

    name: str = "mean"
    place: str = "attention"

    def plain(self, A: Tensor, block: Any, rules: Any, inside: Tensor) -> Tensor:
        """Return what attention adds, and the mean of what it read."""
        return A + inside.mean(-2, keepdim=True)


def _squares(q: Tensor, k: Tensor, context: Any) -> Tensor:
    """P of squared scores, each row divided by its sum."""
    P = ((q @ k.mT / context.divisor).square() + 1) * context.visible
    return P / P.sum(-1, keepdim=True)


OWN_KERNEL = Kernel("squares", _squares, averages=True)
OWN_MASK = Mask("even tokens", lambda n: torch.eye(n, dtype=torch.bool) | (torch.arange(n) % 2 == 0))
OWN_NORMS = (
    Norm("centred", centred=True, averaged=False, gain=False),
    Norm("largest", gain=False, length=lambda x, eps: x.abs().amax(-1, keepdim=True) + eps),
)
SHIFTED = from_matrix(torch.eye(TOKENS, dtype=torch.bool).roll(1, 0))  # Each sees its neighbour, and not itself

VALUES: dict[str, tuple[Any, ...]] = {
    "layers": (3,), "width": (14,), "heads": (2,), "key_heads": (1,), "head_width": (3,), "value_width": (3,),
    "query_latent": (2,), "key_latent": (2,),
    "kernel": ("gaussian", "uniform", "sigmoid", "sink", "linear", "sinkhorn:2", "linformer:3", OWN_KERNEL),
    "divisor": (3.0,), "score_cap": (0.5,), "log_gain": (1.0,),
    "mask": ("causal", "window:1", "unidirectional", "dilated:1:2", "strided", "prefix:2", "longformer:1:1",
             "bigbird:1:1:1", "edges:0>1,0>2,0>3,0>4", SHIFTED, "causal;complete", OWN_MASK),
    "kept_heads": (((0,), (1,)), ((1,), ())),
    "positions": ("absolute", "relative", "rotary", "bias", "alibi", "disentangled"),
    "length": (8,), "rotary_base": (100.0,), "rotary_share": (0.5,), "rotary_pairs": ("adjacent",),
    "rotary_frequencies": (((0.5,),),), "rotary_scales": ((1.5,),), "rotary_reach": (9,), "rotary_grid": ((2, 2, 1),),
    "query_norm": (True,), "query_norm_across": (True,), "head_gate": (True,),
    "bias_buckets": (8,), "bias_reach": (3,), "bias_ahead": (False,), "cross_attention": (True,),
    "mlp": ("plain", "gated", "experts"), "mlp_width": (3,),
    "activation": ("gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "identity"),
    "experts": (Experts(number=3, chosen=2, width=2, shared_width=2),),
    "norm": ("layer", "rms", "scale", *OWN_NORMS), "norm_place": ("pre", "sandwich", "output"), "norm_eps": (1e-3,),
    "final_norm": (True,), "bare_layers": ((0,),),
    "attention_skip": (0.5, -1.0), "mlp_skip": (0.5,), "parallel": (True,), "shared": (True,),
    "biases": (True, False), "parts": (SumOfTokens(), *REMEDIES),
    "padding": (2,), "dtype": (torch.float32, torch.bfloat16),
}  # fmt: skip
"""Of every field of `Architecture`, values other than the usual; of `parts` the remedies by name. Beside them the
number of padded positions, and the dtype of the weights."""
_ROTARY, _BIAS, _MLP, _PRE = {"positions": "rotary"}, {"positions": "bias"}, {"mlp": "plain"}, {"norm_place": "pre"}
_EXPERTS = {"mlp": "experts", "experts": VALUES["experts"][0]}
NEEDS: dict[str, dict[str, Any]] = {
    "key_heads": {"heads": 2}, "kept_heads": {"heads": 2}, "length": {"positions": "absolute"},
    "rotary_base": _ROTARY, "rotary_share": {**_ROTARY, "head_width": 4}, "rotary_pairs": _ROTARY,
    "rotary_frequencies": _ROTARY, "rotary_scales": _ROTARY, "rotary_reach": _ROTARY,
    "rotary_grid": {**_ROTARY, "head_width": 4}, "query_norm_across": {"query_norm": True},
    "bias_buckets": _BIAS, "bias_reach": _BIAS, "bias_ahead": _BIAS,
    "mlp_width": _MLP, "activation": _MLP, "mlp_skip": _MLP, "parallel": _MLP, "experts": _EXPERTS,
    "mlp=experts": _EXPERTS, "norm_place": {"norm": "layer"}, "norm_eps": {"norm": "layer"},
    "final_norm": {"norm": "layer"}, "bare_layers": {"norm": "layer", **_PRE},
    "remedy=deepnorm": {"norm": "layer"}, "remedy=lnscale": {"norm": "layer", **_PRE},
}  # fmt: skip
"""What else a network must have for the field, or this value of it, to mean something."""


@dataclass(frozen=True)
class Feature:
    """One value of one field, other than the usual."""

    field: str
    value: Any = dataclasses.field(hash=False)

    @property
    def is_remedy(self) -> bool:
        """True if the value is the name of a remedy, which goes onto a network."""
        return self.field == "parts" and isinstance(self.value, str)

    def __str__(self) -> str:
        """What `COVERAGE` calls it."""
        if self.field == "kept_heads":
            return "kept_heads, none in a layer" if () in self.value else "kept_heads"
        if self.field == "mask" and ";" in str(self.value):
            return "mask by layer"
        if self.field == "biases":
            return f"biases={'all' if self.value else 'none'}"
        own = {"kernel": "a Kernel", "mask": "a Mask", "norm": "a Norm", "parts": "a Part"}.get(self.field, "")
        name = self.value.partition(":")[0] if isinstance(self.value, str) else own or str(self.value)
        return f"{'remedy' if self.is_remedy else self.field}={name}"

    def example(self, base: str, seed: int = 0) -> tuple[Transformer, Tensor, Tensor | None]:
        """The network of this name among `BASES` with the feature, its tokens `[1, token, width]` and padding."""
        needs = {**NEEDS.get(self.field, {}), **NEEDS.get(str(self), {})}
        fields: dict[str, Any] = {**USUAL, **needs, **BASES[base][0]}
        fields["mlp"] = needs.get("mlp", fields["mlp"])
        if self.field in Architecture.__dataclass_fields__ and not self.is_remedy:
            fields[self.field] = (self.value,) if self.field == "parts" else self.value
        if self.field == "rotary_frequencies":  # of each rotated pair
            fields[self.field] = tuple(
                angles * ((fields["head_width"] or fields["width"]) // 2) for angles in self.value
            )
        arch, sphere = Architecture(**fields), base == "on a sphere"
        tensors = Transformer.random(arch, seed, "orthogonal" if sphere else "xavier").state_dict()
        for place, (name, tensor) in enumerate(tensors.items()):
            if name.endswith("bias"):
                tensors[name] = 0.1 * normal(*tensor.shape, seed=seed + place)
        net = Transformer.from_weights(arch, tensors)
        net = net.with_remedy(self.value) if self.is_remedy else net
        net = net.with_memory(normal(1, 4, arch.width)) if arch.cross_attention else net
        padded = self.value if self.field == "padding" else 0
        X, padding = (
            0.3 * normal(1, TOKENS + padded, arch.width, seed=seed),
            torch.arange(TOKENS + padded)[None] % 3 == 1,
        )
        X = X.abs() if sphere else X
        return net.to(self.value if self.field == "dtype" else None), X, padding if padded else None


def features() -> Iterator[Feature]:
    """Every feature of every field, in the order of the fields."""
    for name, values in VALUES.items():
        yield from (Feature(name, value) for value in values)
