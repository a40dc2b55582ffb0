"""What a variant changes in an architecture: parts out, weights of skips, masks, heads, layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankscope.errors import ArchitectureError
from rankscope.nets.architecture import DEEPEST, Architecture, mask_spec
from rankscope.nets.kernels import Kernel
from rankscope.nets.masks import Mask, MaskLike

Heads = Sequence[int] | Mapping[int, Sequence[int]]


def chosen_layers(layers: int | Sequence[int] | None, depth: int) -> list[int]:
    """The layers to apply, in order."""
    if layers is None:
        return list(range(depth))
    if isinstance(layers, int) and not isinstance(layers, bool):
        if layers < 1:
            raise ArchitectureError(
                f"a network must have at least one layer; got layers={layers}", subject="layers"
            )
        if layers > DEEPEST:
            raise ArchitectureError(f"layers must be at most {DEEPEST}; got {layers}", subject="layers")
        return [index % depth for index in range(layers)]
    if not isinstance(layers, Sequence):
        raise ArchitectureError(
            f"layers must be a depth or a list of layers; got {layers!r}", subject="layers"
        )
    chosen = list(layers)
    if not chosen or not all(type(index) is int and 0 <= index < depth for index in chosen):
        raise ArchitectureError(
            f"layers must name layers 0..{depth - 1}, at least one; got {chosen[:8]}", subject="layers"
        )
    return chosen


def with_layers(arch: Architecture, chosen: list[int]) -> Architecture:
    """The architecture of the chosen layers; what it says by layer follows them."""
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


def with_changes(
    arch: Architecture,
    *,
    skip: float | bool | None,
    attention_skip: float | bool | None,
    mlp_skip: float | bool | None,
    mlp: bool,
    norm: bool,
    mask: MaskLike | None,
    divisor: float | None,
    score_cap: float | None,
    kernel: str | Kernel | None,
    activation: str | None,
    heads: Heads | None,
) -> Architecture:
    """Return the architecture with what is not None (or False, of mlp and norm) changed.

    Args:
        arch: The architecture of the network.
        skip: As in `Transformer.variant`, and so are all others.
    """
    changes: dict[str, Any] = {}
    if not arch.parallel or mlp_skip is not None:  # a parallel block has one skip
        changes["mlp_skip"] = skip if mlp_skip is None else mlp_skip
    changes["attention_skip"] = skip if attention_skip is None else attention_skip
    changes = {name: _weight(name, weight) for name, weight in changes.items() if weight is not None}
    if not mlp:
        changes |= {"mlp": "none", "mlp_skip": 1.0}
    if not norm:
        changes["norm"] = "none"
    if mask is not None:
        changes["mask"] = mask if isinstance(mask, Mask) else mask_spec(mask)
    given = {"divisor": divisor, "score_cap": score_cap, "kernel": kernel, "activation": activation}
    changes |= {name: value for name, value in given.items() if value is not None}
    if heads is not None:
        changes["kept_heads"] = kept_heads(arch, heads)
    changed = arch.replace(**changes)
    if changed.linformer_rank != arch.linformer_rank:
        raise ArchitectureError(
            f"linformer's weights mix tokens and no other kernel's do: from {arch.kernel!r} to {kernel!r} is "
            "another network, Transformer.random(arch.replace(kernel=...))",
            subject="kernel",
        )
    return changed


def _weight(name: str, weight: Any) -> float:
    if not isinstance(weight, int | float):
        raise ArchitectureError(f"{name} must be a number, True or False; got {weight!r}", subject=name)
    return float(weight)


def kept_heads(arch: Architecture, heads: Heads) -> tuple[tuple[int, ...], ...]:
    """The heads that speak in each layer, of a list for all or lists by layer."""
    if not isinstance(heads, Mapping | Sequence) or isinstance(heads, str):
        raise ArchitectureError(
            f"heads must be a list of heads, or lists by layer {{3: [0, 5]}}; got {heads!r}", subject="heads"
        )
    if not isinstance(heads, Mapping):
        return (tuple(heads),) * arch.layers
    for layer in heads:
        if not (type(layer) is int and 0 <= layer < arch.layers):
            raise ArchitectureError(
                f"layers are numbered 0..{arch.layers - 1}; got {layer!r}", subject="heads"
            )
    before = arch.kept_heads or (tuple(range(arch.heads)),) * arch.layers
    return tuple(tuple(heads.get(layer, kept)) for layer, kept in enumerate(before))
