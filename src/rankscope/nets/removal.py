"""Layers and heads taken out of a network: what `Transformer.without` does.

Layers are numbered as in every table: from 1, layer 0 being the embedding. Heads are numbered from 0.

1. `layers_left` and `heads_left` check what is to go, and say what stays.
2. `variants.with_layers` and `weights.picked` make the network of the layers that stay, with their own masks, angles,
   bare layers and experts.
3. `narrowed` removes the tensors of heads that are not active, where the architecture can hold what is left
   (`can_narrow`); elsewhere they stay in memory and are not active (`Architecture.kept_heads`). Both compute the same.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets.architecture import Architecture
from rankscope.nets.order import active_heads
from rankscope.nets.parts import pieces

HeadsOut = Mapping[int, Iterable[int]] | Iterable[tuple[int, int]]  # {layer: heads}, or pairs (layer, head)
HEAD_AXES = {
    "query.weight": 1, "query.bias": 0, "gate.weight": 1, "gate.bias": 0, "output.weight": 0, "position": 1,
    "content_bias": 0, "position_bias": 0, "sink": 0, "relative_key.weight": 1, "relative_key.bias": 0,
    "relative_query.weight": 1, "relative_query.bias": 0,
}  # fmt: skip
"""The axis of heads in the tensors of attention that have one."""
KEY_HEAD_AXES = {"key.weight": 1, "key.bias": 0, "value.weight": 1, "value.bias": 0}  # The same of key heads


def layers_left(arch: Architecture, layers: Iterable[int]) -> list[int]:
    """The layers that stay, in order and counted from 0, where `layers` (from 1) go."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        sentence = f"layers must be a list of layers, numbered from 1, as [3, 4]; got {layers!r}"
        raise ArchitectureError(sentence, subject="layers")
    out = list(layers)
    for layer in out:
        _check_layer(arch, layer, "layers")
    left = [index for index in range(arch.layers) if index + 1 not in out]
    if not left:
        sentence = f"a network must keep at least one layer; all {arch.layers} would be taken out"
        raise ArchitectureError(sentence, subject="layers")
    numbered = [part.name for part in arch.parts if getattr(part, "by_number", False)]
    if out and numbered:
        sentence = f"{numbered[0]} acts by the number of a layer or by the depth: no layer can be taken out"
        raise ArchitectureError(f"{sentence}; got layers {sorted(set(out))}", subject=numbered[0])
    return left


def heads_left(arch: Architecture, heads: HeadsOut) -> tuple[tuple[int, ...], ...] | None:
    """The active heads of every layer, where `heads` go beside those that were not active before; None: none goes."""
    out: dict[int, set[int]] = {}
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        raise ArchitectureError(_expected(heads), subject="heads")
    items = heads.items() if isinstance(heads, Mapping) else heads
    for item in items:
        if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 2:
            raise ArchitectureError(_expected(heads), subject="heads")
        layer, chosen = item
        _check_layer(arch, layer, "heads")
        chosen = [chosen] if not isinstance(heads, Mapping) else chosen
        if isinstance(chosen, str) or not isinstance(chosen, Iterable):
            raise ArchitectureError(_expected(heads), subject="heads")
        for head in chosen:
            if type(head) is not int or not 0 <= head < arch.heads:
                sentence = f"heads are numbered 0..{arch.heads - 1}; got {head!r} in layer {layer}"
                raise ArchitectureError(sentence, subject="heads")
            out.setdefault(layer, set()).add(head)
    if not out:
        return None
    late = [part.name for part in pieces(arch.parts) if part.place == "heads"]
    if late:
        sentence = f"{late[0]} acts on the outputs of heads, also of those that are not active: no head can be taken"
        raise ArchitectureError(f"{sentence} out; got heads of layer {min(out)}", subject=late[0])
    return tuple(
        tuple(head for head in active_heads(arch, index) if head not in out.get(index + 1, ()))
        for index in range(arch.layers)
    )


def can_narrow(arch: Architecture) -> bool:
    """True if heads that are not active can be removed for real, and what is left is a network of fewer heads.

    Every layer must lose as many heads, and every key head that stays must keep as many heads of queries. Heads
    that other heads feel stay: slopes by the number of heads (ALiBi), one norm of all queries of a token, and
    cross-attention, which has as many heads; so do those that parts or a kernel of one's own may read. Layers that
    share their weights, and heads that share one table of position biases, must lose the same heads."""
    if arch.kept_heads is None or arch.positions == "alibi" or arch.query_norm_across or arch.cross_attention:
        return False
    if arch.parts or not isinstance(arch.kernel, str):
        return False
    kept = [active_heads(arch, index) for index in range(arch.layers)]
    if len(set(kept)) > 1 and (arch.shared or arch.positions == "bias"):
        return False
    shapes = {(len(heads), tuple(_heads_by_key(arch, heads).values())) for heads in kept}
    counts = {count for _, by_key in shapes for count in by_key}
    return len({(heads, len(by_key)) for heads, by_key in shapes}) == 1 and len(counts) == 1


def narrowed(arch: Architecture, tensors: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, Tensor]]:
    """The architecture and tensors (as of `Transformer.state`) without the heads that are not active."""
    assert arch.kept_heads is not None
    kept = [active_heads(arch, index) for index in range(arch.layers)]
    keys = [tuple(_heads_by_key(arch, heads)) for heads in kept]
    result = {}
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            _, index, part = name.split(".", 2)
            leaf = part.removeprefix("attention.")
            for axes, left in ((HEAD_AXES, kept), (KEY_HEAD_AXES, keys)):
                if part != leaf and leaf in axes:
                    tensor = _chosen(tensor, axes[leaf], left[int(index)])
        elif name == "bias_table":
            tensor = _chosen(tensor, 1, kept[0])
        result[name] = tensor
    sizes = {name: getattr(arch, name) for name in ("head_width", "value_width", "divisor")}
    return arch.replace(heads=len(kept[0]), key_heads=len(keys[0]), kept_heads=None, **sizes), result


def _heads_by_key(arch: Architecture, heads: Sequence[int]) -> dict[int, int]:
    """How many of the heads read each key head that any of them reads."""
    group = arch.heads // arch.key_heads
    counts: dict[int, int] = {}
    for head in heads:
        counts[head // group] = counts.get(head // group, 0) + 1
    return counts


def _chosen(tensor: Tensor, axis: int, indices: Sequence[int]) -> Tensor:
    return tensor[:, list(indices)] if axis else tensor[list(indices)]


def _check_layer(arch: Architecture, layer: object, subject: str) -> None:
    if type(layer) is not int or not 1 <= layer <= arch.layers:
        sentence = f"layers are numbered 1..{arch.layers}, as in every table (layer 0 is the embedding)"
        raise ArchitectureError(f"{sentence}; got {layer!r}", subject=subject)


def _expected(heads: object) -> str:
    return f"heads must be lists by layer {{3: [0, 5]}} or pairs [(3, 0), (3, 5)]; got {heads!r:.60}"
