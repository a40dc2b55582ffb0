"""Where a model keeps its parts, and how they are read: what the families say in `parts` and in their methods."""

import math
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import SourceError, require
from rankscope.nets import Architecture, Linear, NormWeights
from rankscope.sources.embedding import Convolution, ImageEmbedding, TextEmbedding

Tensors = dict[str, Tensor]
ModulePaths = Mapping[str, str]  # Dotted paths of submodules, by our names of parts: `{"mlp.up": "intermediate.dense"}`


def find(module: Any, path: str) -> Any:
    """What is at a dotted path in a module; of several, "mlp.fc1 or mlp.up_proj", at the first that there is. None at
    "q_norm or none" where there is no `q_norm`.

    Raises AttributeError where nothing is at a path that does not end in "or none".
    """
    *first, last = path.split(" or ")
    for each in first:
        with suppress(AttributeError):
            if (found := attrgetter(each)(module)) is not None:
                return found
    return None if last == "none" else attrgetter(last)(module)


def without(paths: ModulePaths, *names: str) -> dict[str, str]:
    """The paths but for those of some names."""
    return {name: path for name, path in paths.items() if name not in names}


def projections(path: str, names: str, kind: str = "attention", joined: str = ", ") -> ModulePaths:
    """Paths of query, key, value and output projection, whose `names` are in this order, in one module; or of all
    three that are `joined` in one map, and the output."""
    parts, count = [f"{kind}.{part}" for part in ("query", "key", "value", "output")], len(names.split())
    parts = parts if count == 4 else [joined.join(parts[:3]), parts[3]]
    return {part: f"{path}.{name}" for part, name in zip(parts, names.split(), strict=True)}


def layout(attention: str, names: str, norms: str, mlp: str, joined: str = ", ") -> ModulePaths:
    """Paths of all parts of a usual block: `projections`, `norms` of attention and MLP, (gate,) up and down."""
    (attention_norm, mlp_norm), maps = norms.split(), mlp.split()
    paths = {**projections(attention, names, joined=joined), "attention_norm": attention_norm}
    paths |= zip(("mlp.gate", "mlp.up", "mlp.down")[-len(maps) :], maps, strict=True)
    return {**paths, "mlp_norm": mlp_norm}


def read_block(block: Any, parts: ModulePaths, arch: Architecture, gain_at_zero: float = 0.0) -> Tensors:
    """Read the tensors of a block at the paths of `parts`, in the shapes of the canonical network; parts that the
    block does not have are left out. Gains of norms are `gain_at_zero` plus their weights."""
    tensors: Tensors = {}
    for names, path in parts.items():
        module = find(block, path)
        if module is None:
            continue
        if "|" in names:
            tensors |= _head_by_head(names.split(" | "), module, arch)
            continue
        names_apart = names.split(", ")
        modules = [module] if len(names_apart) == 1 else _split(module, len(names_apart))
        for name, part in zip(names_apart, modules, strict=True):
            kind = name.removeprefix("attention.").removeprefix("cross.")
            if name.endswith(("_norm", "_after")):
                tensors |= norm(name, part, gain_at_zero)
            elif kind == "output":
                tensors |= heads_out(name, part, arch.heads)
            elif kind in ("query", "key", "value"):
                tensors |= heads_in(name, part, arch.heads if kind == "query" else arch.key_heads)
            else:
                tensors |= dense(name, part)
    return tensors


def _split(linear: Any, count: int) -> list[Linear]:
    """Split one linear map into those that lie side by side in it."""
    biases = [None] * count if linear.bias is None else linear.bias.chunk(count)
    return [Linear(*pair) for pair in zip(matrix(linear).chunk(count, 1), biases, strict=True)]


def _head_by_head(names: list[str], linear: Any, arch: Architecture) -> Tensors:
    """Projections of one linear map, `[head, (name, ...), head_width]` in its output, each as `[width, head,
    head_width]`."""
    tensors: Tensors = {}
    for kind, fused in linear.named_parameters():
        by_head = fused.unflatten(0, (arch.heads, len(names), arch.head_width)).unbind(1)
        parts = by_head if kind == "bias" else (part.permute(2, 0, 1) for part in by_head)
        tensors |= {f"{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
    return tensors


def matrix(linear: Any) -> Tensor:
    """The matrix `[in, out]` of a torch Linear (transposed), GPT-2 Conv1D or `nets` Linear (as they are)."""
    return linear.weight.T if isinstance(linear, nn.Linear) else linear.weight


def dense(name: str, linear: Any) -> Tensors:
    """Weight and bias of a linear map, named `NAME.weight` and `NAME.bias`."""
    return {f"{name}.weight": matrix(linear), **_bias(name, linear.bias)}


def heads_in(name: str, linear: Any, heads: int) -> Tensors:
    """A projection to queries, keys or values, its weight as `[width, head, head_width]`."""
    weight = matrix(linear)
    bias = None if linear.bias is None else linear.bias.reshape(heads, -1)
    return {f"{name}.weight": weight.reshape(len(weight), heads, -1), **_bias(name, bias)}


def heads_out(name: str, linear: Any, heads: int) -> Tensors:
    """The output projection of attention, its weight as `[head, head_width, width]`."""
    weight = matrix(linear)
    return {f"{name}.weight": weight.reshape(heads, -1, weight.shape[1]), **_bias(name, linear.bias)}


def norm(name: str, module: Any, gain_at_zero: float = 0.0) -> Tensors:
    """Gain (`gain_at_zero` plus the weight) and bias of a LayerNorm or RMSNorm; empty for an identity in its place."""
    if isinstance(module, nn.Identity):
        return {}
    message = f"a norm must have a gain; {name} of this model has none: watch measures it as it is"
    require(module.weight is not None, message, SourceError, "norm")
    gain = gain_at_zero + module.weight if gain_at_zero else module.weight
    return {f"{name}.gain": gain, **_bias(name, getattr(module, "bias", None))}


def norm_weights(module: Any) -> NormWeights | None:
    """Gain and bias of a norm in an embedding; None where there is none, or an identity in its place."""
    missing = module is None or isinstance(module, nn.Identity)
    return None if missing else NormWeights(module.weight.detach(), _detached(module.bias))


def linear_weights(module: Any) -> Linear | None:
    """Weight and bias of a linear map in an embedding; None where there is none."""
    return None if module is None else Linear(matrix(module).detach(), _detached(module.bias))


def convolution(module: Any) -> Convolution:
    """A convolution along time in an embedding."""
    bias, stride, padding = _detached(module.bias), int(module.stride[0]), int(module.padding[0])
    return Convolution(module.weight.detach(), bias, stride, padding, module.groups)


def text_embedding(model: Any, paths: ModulePaths, first_position: int, **more: Any) -> TextEmbedding:
    """The embedding of token ids from the parts of a model.

    Args:
        model: The original.
        paths: Dotted paths, by the fields of `TextEmbedding`, as far as the model has them. The segment is the first
            of those at its path.
        first_position: The row of the table of positions that belongs to the first token.
        more: Further fields, which go before what is at the paths.
    """
    parts = {name: part for name, path in paths.items() if (part := find(model, path)) is not None}
    tables = {name: getattr(part, "weight", part) for name, part in parts.items() if name in ("words", "positions")}
    fields: dict[str, Any] = {name: table.detach() for name, table in tables.items()}
    if "positions" in fields:
        fields["positions"] = fields["positions"][first_position:]
    if "segment" in parts:
        fields["segment"] = parts["segment"].weight.detach()[0]
    if "scale" in parts:
        fields["scale"] = float(parts["scale"])
    fields |= {name: linear_weights(parts[name]) for name in ("before", "after") if name in parts}
    return TextEmbedding(**{**fields, **_norm_fields(parts.get("norm")), **more})


def image_embedding(model: Any, paths: ModulePaths) -> ImageEmbedding:
    """The embedding of images from the parts of a model: `patches`, the convolution that cuts them, the `size` of an
    image, and as far as the model has them `positions`, the tokens that come `first` (several paths, "a, b") and a
    `norm`. Where there are fewer positions than tokens, the last of those that come first have none."""
    patches, table = find(model, paths["patches"]), find(model, paths.get("positions", "none"))
    found = (find(model, path) for path in paths["first"].split(", ")) if "first" in paths else ()
    kernel, size = patches.weight.detach(), sides(find(model, paths["size"]))
    tokens = [token.detach().reshape(-1, len(kernel)) for token in found if token is not None]
    first = torch.cat(tokens) if len(tokens) > 1 else (tokens or [None])[0]  # one alone shares the model's memory
    positions = None if table is None else getattr(table, "weight", table).detach().reshape(-1, len(kernel))
    if first is not None and positions is not None:
        placed = len(positions) - math.prod(side // cut for side, cut in zip(size, kernel.shape[2:], strict=True))
        if placed < len(first):
            positions = torch.cat([positions[:placed], torch.zeros_like(first[placed:]), positions[placed:]])
    first = first[0] if first is not None and "," not in paths["first"] else first
    norm = _norm_fields(find(model, paths.get("norm", "none")))
    return ImageEmbedding(kernel, _detached(patches.bias), positions, size, first, **norm)


def _norm_fields(module: Any) -> dict[str, Any]:
    """The fields of an embedding for its norm, if there is one."""
    weights = norm_weights(module)
    eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None)  # as DeBERTa's own norm has it
    return {} if weights is None else {"norm": weights, "norm_eps": eps}


def sides(size: Any) -> tuple[int, int]:
    """Height and width, of a pair of them or of one number for both."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def scaled(tensors: Tensors, part: str, scale: Any) -> Tensors:
    """The tensors of a block with what one part gives scaled, entry by entry or by a number: so are its matrix and
    bias."""
    return {name: scale * tensor if name.startswith(f"{part}.") else tensor for name, tensor in tensors.items()}


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _bias(name: str, bias: Tensor | None) -> Tensors:
    return {} if bias is None else {f"{name}.bias": bias}
