"""Variants of a network: names such as `san+skip+norm`, and what a variant changes in an architecture.

`transformer` is the network as it stands; each `-part` takes one out, as in `transformer-attention_skip`.
`san` is pure attention: no skip, no MLP, no norm; each `+part` puts one back. Parts: `skip` (both),
`attention_skip`, `mlp_skip`, `mlp`, `norm`.

What the 2021 paper's code calls SAN keeps its norms, and takes only the attention skip out, so its four
curves are `san+norm`, `san+norm+mlp+mlp_skip`, `san+norm+skip` and `transformer` (`PUBLISHED`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankscope.errors import ArchitectureError, one_of
from rankscope.nets.architecture import Architecture
from rankscope.nets.checks import DEEPEST
from rankscope.nets.masks import mask_spec
from rankscope.nets.norms import Norm

HeadChoice = Sequence[int] | Mapping[int, Sequence[int]]  # Heads of every layer, or of some layers by number
DEFINED = ("san", "san+mlp", "san+skip", "transformer")
"""The four curves of Dong et al. 2021, figure 2, as the paper's text defines them."""
PUBLISHED = {
    "san": "san+norm",
    "san+mlp": "san+norm+mlp+mlp_skip",
    "san+skip": "san+norm+skip",
    "transformer": "transformer",
}
"""The same four curves as the published code computes them."""
VARIANT_PARTS = ("skip", "attention_skip", "mlp_skip", "mlp", "norm")


def named_changes(arch: Architecture, name: str) -> dict[str, Any]:
    """Return the arguments of `net.variant` that a variant's name stands for.

    >>> named_changes(Architecture(layers=2, width=8, heads=2), "san+norm")
    {'skip': 0.0, 'attention_skip': None, 'mlp_skip': None, 'mlp': False, 'norm': True}
    """
    removes = isinstance(name, str) and name.startswith("transformer")
    base, *parts = str(name).split("-" if removes else "+")
    if base not in ("transformer", "san"):
        sentence = (
            "a variant must be 'transformer', 'san' and parts, as san+skip+norm, or transformer-norm and its like"
        )
        raise ArchitectureError(f"{sentence}; got {name!r}", subject="variant")
    for part in parts:
        if part not in VARIANT_PARTS:
            raise ArchitectureError(one_of("variant part", part, VARIANT_PARTS), subject="variant")
    present = [part not in parts if removes else part in parts for part in VARIANT_PARTS]
    skip, attention_skip, mlp_skip, mlp, norm = present
    return {
        "skip": None if skip else 0.0,
        "attention_skip": _skip_weight(arch.attention_skip, attention_skip, removes),
        "mlp_skip": None if arch.parallel else _skip_weight(arch.mlp_skip, mlp_skip, removes),
        "mlp": mlp,
        "norm": norm,
    }


def _skip_weight(weight: float, present: bool, removes: bool) -> float | None:
    """0 for a skip that the name takes out, its weight where the name puts it back, else None."""
    return (None if present else 0.0) if removes else (weight if present else None)


def chosen_layers(layers: int | Sequence[int] | None, depth: int) -> list[int]:
    """The layers to apply, in order."""
    if layers is None:
        return list(range(depth))
    if isinstance(layers, int) and not isinstance(layers, bool):
        if not 1 <= layers <= DEEPEST:
            raise ArchitectureError(f"layers must be 1 to {DEEPEST}; got {layers}", subject="layers")
        return [index % depth for index in range(layers)]
    chosen = list(layers) if isinstance(layers, Sequence) else []
    if not chosen or not all(type(index) is int and 0 <= index < depth for index in chosen):
        sentence = f"layers must be a depth, or a list of layers 0..{depth - 1}; got {layers!r:.40}"
        raise ArchitectureError(sentence, subject="layers")
    return chosen


def with_layers(arch: Architecture, chosen: list[int]) -> Architecture:
    """The architecture of the chosen layers, with their fields that are given by layer."""
    changes: dict[str, Any] = {"layers": len(chosen)}
    if isinstance(arch.mask, str) and ";" in arch.mask:
        changes["mask"] = ";".join(str(arch.mask_of(index)) for index in chosen)
    if arch.kept_heads is not None:
        changes["kept_heads"] = tuple(arch.kept_heads[index] for index in chosen)
    for name in ("rotary_frequencies", "rotary_scales"):
        if len(repeated := getattr(arch, name)) > 1:
            changes[name] = tuple(repeated[index % len(repeated)] for index in chosen)
    changes["bare_layers"] = tuple(at for at, index in enumerate(chosen) if index in arch.bare_layers)
    if arch.experts is not None:
        dense = tuple(at for at, index in enumerate(chosen) if index in arch.experts.dense_layers)
        changes["experts"] = replace(arch.experts, dense_layers=dense)
    return arch.replace(**changes)


def keeps_part(arch: Architecture, part: str, choice: bool | str | Norm) -> bool:
    """True if a variant keeps its `mlp` or `norm`: True and the network's own name keep it, False and "none" do not.

    Another name is refused: a variant has the weights of its network, and none for another part.
    """
    value = getattr(arch, part)
    name = value.name if isinstance(value, Norm) else value
    if not isinstance(choice, str) and choice in (False, True):
        return bool(choice)
    if choice in ("none", value, name):
        return choice != "none"
    sentence = f"{part} of a variant must be True (as it is, {name!r}), or False or 'none' (taken out)"
    advice = f"Transformer.random(net.arch.replace({part}=...)) has weights for another"
    raise ArchitectureError(f"{sentence}; got {choice!r:.60}: {advice}", subject=part)


def with_changes(arch: Architecture, mlp: bool, norm: bool, **options: Any) -> Architecture:
    """Return the architecture with the options of `Transformer.variant` that are given: not None, or False."""
    given = {name: value for name, value in options.items() if value is not None}
    changes: dict[str, Any] = {name: given[name] for name in ("attention_skip", "mlp_skip") if name in given}
    for name in ("attention_skip", "mlp_skip") if "skip" in given else ():
        if name == "attention_skip" or not arch.parallel:  # a parallel block has one skip
            changes.setdefault(name, given["skip"])
    for name, weight in changes.items():
        if not isinstance(weight, int | float):
            raise ArchitectureError(f"{name} must be a number, True or False; got {weight!r}", subject=name)
        changes[name] = float(weight)
    if not mlp:
        changes |= {"mlp": "none", "mlp_skip": 1.0}
    if not norm:
        changes["norm"] = "none"
    if "mask" in given:
        changes["mask"] = mask_spec(given["mask"])
    for name in ("divisor", "score_cap", "kernel", "activation"):
        if name in given:
            changes[name] = given[name]
    if "heads" in given:
        changes["kept_heads"] = kept_heads(arch, given["heads"])
    changed = arch.replace(**changes)
    if changed.linformer_rank != arch.linformer_rank or (changed.kernel == "sink" != arch.kernel):
        sentence = f"a variant from kernel {arch.kernel!r} to {changed.kernel!r} needs other weights"
        raise ArchitectureError(f"{sentence}: use Transformer.random(arch.replace(kernel=...))", subject="kernel")
    return changed


def kept_heads(arch: Architecture, heads: HeadChoice) -> tuple[tuple[int, ...], ...]:
    """The active heads of each layer, from a list for all layers or lists by layer."""
    if not isinstance(heads, Mapping | Sequence) or isinstance(heads, str):
        sentence = f"heads must be a list of heads, or lists by layer {{3: [0, 5]}}; got {heads!r}"
        raise ArchitectureError(sentence, subject="heads")
    if not isinstance(heads, Mapping):
        return (tuple(heads),) * arch.layers
    for layer in heads:
        if not (type(layer) is int and 0 <= layer < arch.layers):
            raise ArchitectureError(f"layers are 0..{arch.layers - 1}; got {layer!r}", subject="heads")
    before = arch.kept_heads or (tuple(range(arch.heads)),) * arch.layers
    return tuple(tuple(heads.get(layer, kept)) for layer, kept in enumerate(before))
