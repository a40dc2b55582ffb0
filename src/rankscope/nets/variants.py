"""Variants of a network: names such as `san+skip+norm`, and what a variant changes in an architecture.

`transformer` is the network as it stands; each `-part` takes one out, as in `transformer-attention_skip`.
`san` is pure attention: no skip, no MLP, no norm; each `+part` puts one back. Parts: `skip` (both),
`attention_skip`, `mlp_skip`, `mlp`, `norm`.

What the 2021 paper's code calls SAN keeps its norms, and takes only the attention skip out, so its four
curves are `san+norm`, `san+norm+mlp+mlp_skip`, `san+norm+skip` and `transformer` (`PUBLISHED`).

`Transformer.without` takes layers and heads out for good. Layers are numbered as in every table: from 1, layer 0 being
the embedding; heads from 0.

1. `layers_left` and `heads_left` check what is to go, and say what stays.
2. `with_layers` and `weights.picked` make the network of the layers that stay, with their own masks, angles, bare
   layers and experts.
3. `narrowed` removes the tensors of heads that are not active, where the architecture can hold what is left
   (`can_narrow`); elsewhere they stay in memory and are not active (`Architecture.kept_heads`). Both compute the same.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from torch import Tensor

from rankscope.errors import ArchitectureError, require, require_one_of
from rankscope.nets.architecture import Architecture
from rankscope.nets.fields import DEEPEST
from rankscope.nets.kernels import Kernel
from rankscope.nets.masks import MaskLike, mask_spec
from rankscope.nets.norms import Norm
from rankscope.nets.traversal import active_heads

HeadChoice = Sequence[int] | Mapping[int, Sequence[int]]  # Heads of every layer, or of some layers by number from 1
DEFINED = ("san", "san+mlp", "san+skip", "transformer")
"""The four curves of Dong et al. 2021, figure 2, as the paper's text defines them."""
PUBLISHED = {
    "san": "san+norm",
    "san+mlp": "san+norm+mlp+mlp_skip",
    "san+skip": "san+norm+skip",
    "transformer": "transformer",
}
"""The same four curves as the published code computes them."""
HeadsOut = Mapping[int, Iterable[int]] | Iterable[tuple[int, int]]  # {layer: heads}, or pairs (layer, head)
HEAD_AXES = {
    "query.weight": 1, "query.bias": 0, "gate.weight": 1, "gate.bias": 0, "output.weight": 0, "position": 1,
    "content_bias": 0, "position_bias": 0, "sink": 0, "relative_key.weight": 1, "relative_key.bias": 0,
    "relative_query.weight": 1, "relative_query.bias": 0,
}  # fmt: skip
"""The axis of heads in the tensors of attention that have one."""
KEY_HEAD_AXES = {"key.weight": 1, "key.bias": 0, "value.weight": 1, "value.bias": 0}  # The same of key heads
VARIANT_PARTS = ("skip", "attention_skip", "mlp_skip", "mlp", "norm")


class VariantOptions(TypedDict, total=False):
    """The options of `Transformer.variant`, which describes each; None leaves a part as it is."""

    skip: float | bool | None
    attention_skip: float | bool | None
    mlp_skip: float | bool | None
    mlp: bool | str | None
    norm: bool | str | Norm | None
    mask: MaskLike | None
    divisor: float | None
    score_cap: float | None
    kernel: str | Kernel | None
    activation: str | None
    heads: HeadChoice | None
    layers: int | Sequence[int] | None


def named_changes(arch: Architecture, name: str) -> VariantOptions:
    """Return the arguments of `net.variant` that a variant's name stands for.

    >>> named_changes(Architecture(layers=2, width=8, heads=2), "san+norm")
    {'skip': 0.0, 'attention_skip': None, 'mlp_skip': None, 'mlp': False, 'norm': True}
    """
    removes = isinstance(name, str) and name.startswith("transformer")
    base, *parts = str(name).split("-" if removes else "+")
    sentence = "a variant must be 'transformer', 'san' and parts, as san+skip+norm, or transformer-norm and its like"
    require(base in ("transformer", "san"), f"{sentence}; got {name!r}", ArchitectureError, "variant")
    for part in parts:
        require_one_of("variant part", part, VARIANT_PARTS, ArchitectureError, "variant")
    skip, attention_skip, mlp_skip, mlp, norm = ((part in parts) is not removes for part in VARIANT_PARTS)
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
    """The indices of the layers to apply, in order; `layers` are a depth, or layers numbered from 1."""
    if layers is None:
        return list(range(depth))
    if isinstance(layers, int) and not isinstance(layers, bool):
        require(1 <= layers <= DEEPEST, f"layers must be 1 to {DEEPEST}; got {layers}", ArchitectureError, "layers")
        return [index % depth for index in range(layers)]
    chosen = list(layers) if isinstance(layers, Sequence) else []
    sentence = f"layers must be a depth, or a list of layers 1..{depth}; got {layers!r:.40}"
    known = chosen and all(type(layer) is int and 1 <= layer <= depth for layer in chosen)
    require(known, sentence, ArchitectureError, "layers")
    return [layer - 1 for layer in chosen]


def with_layers(arch: Architecture, chosen: list[int]) -> Architecture:
    """The architecture of the layers of these indices, with their fields that are given by layer."""
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


def changed(arch: Architecture, options: VariantOptions) -> tuple[Architecture, list[int]]:
    """(the architecture with the options of a variant that are given, the indices of the layers it has)."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    mlp, norm = (keeps_part(arch, part, given.get(part, True)) for part in ("mlp", "norm"))
    chosen = chosen_layers(given.get("layers"), arch.layers)
    arch = with_layers(arch, chosen) if "layers" in given else arch
    changes: dict[str, Any] = {name: given[name] for name in ("attention_skip", "mlp_skip") if name in given}
    for name in ("attention_skip", "mlp_skip") if "skip" in given else ():
        if name == "attention_skip" or not arch.parallel:  # a parallel block has one skip
            changes.setdefault(name, given["skip"])
    for name, weight in changes.items():
        sentence = f"{name} must be a number, True or False; got {weight!r}"
        require(isinstance(weight, int | float), sentence, ArchitectureError, name)
        changes[name] = float(weight)
    if not mlp:
        changes |= {"mlp": "none", "mlp_skip": 1.0}
    if not norm:
        changes["norm"] = "none"
    if "mask" in given:
        changes["mask"] = mask_spec(given["mask"])
    changes |= {name: given[name] for name in ("divisor", "score_cap", "kernel", "activation") if name in given}
    if "heads" in given:
        changes["kept_heads"] = kept_heads(arch, given["heads"])
    result = arch.replace(**changes)
    if result.linformer_rank != arch.linformer_rank or (result.kernel == "sink" != arch.kernel):
        sentence = f"a variant from kernel {arch.kernel!r} to {result.kernel!r} needs other weights"
        raise ArchitectureError(f"{sentence}: use Transformer.random(arch.replace(kernel=...))", subject="kernel")
    return result, chosen


def kept_heads(arch: Architecture, heads: HeadChoice) -> tuple[tuple[int, ...], ...]:
    """The active heads of each layer, from a list for all layers or lists by layer, numbered from 1."""
    listed = isinstance(heads, Mapping | Sequence) and not isinstance(heads, str)
    sentence = f"heads must be a list of heads, or lists by layer {{3: [0, 5]}}; got {heads!r}"
    require(listed, sentence, ArchitectureError, "heads")
    if not isinstance(heads, Mapping):
        return (tuple(heads),) * arch.layers
    for layer in heads:
        _check_layer(arch, layer, "heads")
    before = arch.kept_heads or (tuple(range(arch.heads)),) * arch.layers
    return tuple(tuple(heads.get(layer, kept)) for layer, kept in enumerate(before, 1))


def layers_left(arch: Architecture, layers: Iterable[int]) -> list[int]:
    """The layers that stay, in order, where `layers` go; both numbered from 1."""
    listed = isinstance(layers, Iterable) and not isinstance(layers, str)
    sentence = f"layers must be a list of layers, numbered from 1, as [3, 4]; got {layers!r}"
    require(listed, sentence, ArchitectureError, "layers")
    out = list(layers)
    for layer in out:
        _check_layer(arch, layer, "layers")
    left = [layer for layer in range(1, arch.layers + 1) if layer not in out]
    sentence = f"a network must keep at least one layer; all {arch.layers} would be taken out"
    require(left, sentence, ArchitectureError, "layers")
    numbered = [part.name for part in arch.parts if getattr(part, "by_number", False)]
    if out and numbered:
        sentence = f"{numbered[0]} acts by the number of a layer or by the depth: no layer can be taken out"
        raise ArchitectureError(f"{sentence}; got layers {sorted(set(out))}", subject=numbered[0])
    return left


def heads_left(arch: Architecture, heads: HeadsOut) -> tuple[tuple[int, ...], ...] | None:
    """The active heads of every layer, where `heads` go beside those that were not active before; None: none goes."""
    expected = f"heads must be lists by layer {{3: [0, 5]}} or pairs [(3, 0), (3, 5)]; got {heads!r:.60}"

    def check_listed(given: object, kind: type) -> None:
        require(isinstance(given, kind) and not isinstance(given, str), expected, ArchitectureError, "heads")

    out: dict[int, set[int]] = {}
    check_listed(heads, Iterable)
    pairs: Iterable[Any] = heads.items() if isinstance(heads, Mapping) else heads
    for pair in pairs:
        check_listed(pair, Sequence)
        require(len(pair) == 2, expected, ArchitectureError, "heads")
        layer, chosen = pair
        _check_layer(arch, layer, "heads")
        chosen = chosen if isinstance(heads, Mapping) else [chosen]
        check_listed(chosen, Iterable)
        for head in chosen:
            sentence = f"heads are numbered 0..{arch.heads - 1}; got {head!r} in layer {layer}"
            require(type(head) is int and 0 <= head < arch.heads, sentence, ArchitectureError, "heads")
            out.setdefault(layer, set()).add(head)
    if not out:
        return None
    late = [part.name for part in arch.pieces if part.place == "heads"]
    if late:
        sentence = f"{late[0]} acts on the outputs of heads, also of those that are not active: no head can be taken"
        raise ArchitectureError(f"{sentence} out; got heads of layer {min(out)}", subject=late[0])
    return tuple(
        tuple(head for head in active_heads(arch, index) if head not in out.get(index + 1, ()))
        for index in range(arch.layers)
    )


def can_narrow(arch: Architecture) -> bool:
    """True if heads that are not active can be removed, tensors and all, and what is left is a network of fewer heads.

    Every layer must lose as many heads, and every key head that stays must keep as many heads of queries. Heads
    that other heads feel stay: slopes by the number of heads (ALiBi), one norm of all queries of a token, and
    cross-attention, which has as many heads; so do those that parts or a kernel of one's own may read. Layers that
    share their weights, and heads that share one table of position biases, must lose the same heads."""
    felt = arch.positions == "alibi" or arch.query_norm_across or arch.cross_attention
    if arch.kept_heads is None or felt or arch.parts or not isinstance(arch.kernel, str):
        return False
    kept = [active_heads(arch, index) for index in range(arch.layers)]
    if len(set(kept)) > 1 and (arch.shared or arch.positions == "bias"):
        return False
    by_key = [_heads_by_key(arch, heads) for heads in kept]
    sizes = {(len(heads), len(keys)) for heads, keys in zip(kept, by_key, strict=True)}
    return len(sizes) == 1 and len({count for keys in by_key for count in keys.values()}) == 1


def narrowed(arch: Architecture, tensors: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, Tensor]]:
    """The architecture and tensors (as of `Transformer.state_dict`) without the heads that are not active."""
    assert arch.kept_heads is not None
    kept = [active_heads(arch, index) for index in range(arch.layers)]
    keys = [tuple(_heads_by_key(arch, heads)) for heads in kept]

    def chosen(tensor: Tensor, axis: int, heads: tuple[int, ...]) -> Tensor:
        return tensor[:, list(heads)] if axis else tensor[list(heads)]

    result = {}
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            _, index, part = name.split(".", 2)
            leaf = part.removeprefix("attention.")
            for axes, left in ((HEAD_AXES, kept), (KEY_HEAD_AXES, keys)):
                if part != leaf and leaf in axes:
                    tensor = chosen(tensor, axes[leaf], left[int(index)])
        elif name == "bias_table":
            tensor = chosen(tensor, 1, kept[0])
        result[name] = tensor
    sizes = {name: getattr(arch, name) for name in ("head_width", "value_width", "divisor")}
    return arch.replace(heads=len(kept[0]), key_heads=len(keys[0]), kept_heads=None, **sizes), result


def _heads_by_key(arch: Architecture, heads: Sequence[int]) -> Counter[int]:
    """How many of the heads read each key head that any of them reads."""
    return Counter(head // (arch.heads // arch.key_heads) for head in heads)


def _check_layer(arch: Architecture, layer: object, subject: str) -> None:
    known = type(layer) is int and 1 <= layer <= arch.layers
    sentence = f"layers are numbered 1..{arch.layers}, as in every table (layer 0 is the embedding); got {layer!r}"
    require(known, sentence, ArchitectureError, subject)
