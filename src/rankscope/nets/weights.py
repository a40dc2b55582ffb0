"""The tensors of a network: their names, their shapes, and the structure the forward pass reads.

Row vectors, as in the papers: a linear map is `x W + b`, W of shape `[in, out]`. Query, key, value and
output keep the head as an axis of its own, so `W_h = value.weight[:, h] @ output.weight[h]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from rankscope.errors import WeightsError
from rankscope.nets.architecture import Architecture
from rankscope.nets.norms import UNWEIGHTED, NormWeights, norm_of
from rankscope.nets.order import norms
from rankscope.nets.stored import Stored

Shape = tuple[int, ...]
LATENT_EPS = 1e-6
"""Of the norms of latents, whatever that of tokens is."""
Structure = TypeVar("Structure")


@dataclass(frozen=True)
class Linear:
    """`x W + b`."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Latent:
    """`x A + b`, the first entries, as many as the norm has, through it."""

    weight: Tensor  # [width, latent]
    norm: NormWeights
    bias: Tensor | None = None


@dataclass(frozen=True)
class Attention:
    """The tensors of one attention branch."""

    query: Linear  # [width, head, head_width], or of its latent's width, and so are key and value
    key: Linear  # [width, key_head, head_width]
    value: Linear  # [width, key_head, value_width]
    output: Linear  # [head, value_width, width]
    query_latent: Latent | None = None
    key_latent: Latent | None = None
    gate: Linear | None = None  # [width, head, value_width]
    """Of what heads say (architecture's `head_gate`)."""
    query_norm: NormWeights = UNWEIGHTED
    """Of each query, before positions (architecture's `query_norm`)."""
    key_norm: NormWeights = UNWEIGHTED
    position: Float[Tensor, "width head head_width"] | None = None
    """Projects the sinusoid of `i - j` to a relative key (positions 'relative')."""
    content_bias: Float[Tensor, "head head_width"] | None = None
    """u of Transformer-XL: added to the query that meets keys."""
    position_bias: Float[Tensor, "head head_width"] | None = None
    """v of Transformer-XL: added to the query that meets relative positions."""
    mix_keys: Float[Tensor, "rank length"] | None = None
    """E of Linformer: mixes tokens into k keys."""
    mix_values: Float[Tensor, "rank length"] | None = None
    """F of Linformer: mixes tokens into k values."""


@dataclass(frozen=True)
class MLPWeights:
    """`act(x up) down`, or gated `(act(x gate) * (x up)) down`."""

    up: Linear
    down: Linear
    gate: Linear | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """A mixture of experts (`experts.py`)."""

    router: Linear  # [width, expert]
    gate: Linear  # [width, expert, expert_width]
    up: Linear  # [width, expert, expert_width]
    down: Linear  # [expert, expert_width, width]
    shared: MLPWeights | None = None
    shared_gate: Linear | None = None  # [width, 1]

    def expert(self, index: int) -> MLPWeights:
        """One of them."""
        up, gate = (Linear(each.weight[:, index]) for each in (self.up, self.gate))
        return MLPWeights(up, Linear(self.down.weight[index]), gate)

    def side_by_side(self) -> MLPWeights:
        """All of them as one gated MLP, the shared one last: a mixture at its `gates`."""
        up, gate = (Linear(each.weight.flatten(1)) for each in (self.up, self.gate))
        down = Linear(self.down.weight.flatten(0, 1))
        if self.shared is None or self.shared.gate is None:
            return MLPWeights(up, down, gate)
        return MLPWeights(
            Linear(torch.cat([up.weight, self.shared.up.weight], 1)),
            Linear(torch.cat([down.weight, self.shared.down.weight])),
            Linear(torch.cat([gate.weight, self.shared.gate.weight], 1)),
        )


@dataclass(frozen=True)
class Layer:
    """The tensors of one block."""

    attention: Attention
    cross: Attention | None = None
    """Of cross-attention: keys and values of the memory, as wide as the tokens."""
    mlp: MLPWeights | None = None
    experts: ExpertWeights | None = None
    """In the place of `mlp`."""
    attention_norm: NormWeights = UNWEIGHTED
    cross_norm: NormWeights = UNWEIGHTED
    mlp_norm: NormWeights = UNWEIGHTED
    attention_after: NormWeights = UNWEIGHTED
    """Second norm of a sandwich, on the branch before it is added."""
    cross_after: NormWeights = UNWEIGHTED
    mlp_after: NormWeights = UNWEIGHTED
    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Of parts that have tensors (`parts.py`), by the name of the part."""


@dataclass(frozen=True, repr=False)
class Weights:
    """All tensors of a network."""

    layers: tuple[Layer, ...] | Stored[Layer]
    """A tuple, or layers that are read one at a time (`stored.py`)."""
    positions: Float[Tensor, "length width"] | None = None
    """The table of positions 'absolute', added to the tokens."""
    bias_table: Float[Tensor, "bucket head"] | None = None
    """The table of positions 'bias', added to the scores of every layer."""
    final_norm: NormWeights = UNWEIGHTED

    @property
    def like(self) -> Tensor:
        """A tensor of their dtype, where they are."""
        layers = self.layers
        return layers.source.like if isinstance(layers, Stored) else layers[0].attention.query.weight

    def __repr__(self) -> str:
        if isinstance(self.layers, Stored):
            return f"Weights({len(self.layers)} layers, read one at a time)"
        distinct = {id(tensor): tensor.numel() for tensor in named(self).values()}
        return f"Weights({len(self.layers)} layers, {sum(distinct.values()):,} numbers)"


def layer_shapes(arch: Architecture, index: int) -> dict[str, Shape]:
    """Names and shapes of the tensors of layer `index`."""
    d, h, g, c, m = arch.width, arch.heads, arch.key_heads, arch.head_width, arch.mlp_width
    v, r, k = arch.value_width, arch.query_latent, arch.key_latent
    shapes: dict[str, Shape] = {}
    for name in ("attention", "cross") if arch.cross_attention else ("attention",):
        shapes |= {
            **_linear(f"{name}.query", (r or d, h, c), (h, c), arch.has_bias("query") and not r),
            **_linear(
                f"{name}.key", (arch.latent_width if k else d, g, c), (g, c), arch.has_bias("key") and not k
            ),
            **_linear(f"{name}.value", (k or d, g, v), (g, v), arch.has_bias("value") and not k),
            **_linear(f"{name}.output", (h, v, d), (d,), arch.has_bias("output")),
        }
    if r:
        shapes |= _latent("query", d, r, r, arch)
    if k:
        shapes |= _latent("key", d, arch.latent_width, k, arch)
    if arch.head_gate:
        shapes |= _linear("attention.gate", (d, h, v), (h, v), arch.has_bias("query"))
    if arch.query_norm:
        shapes |= {"attention.query_norm.gain": (c,), "attention.key_norm.gain": (c,)}
    if arch.positions == "relative":
        shapes |= {
            "attention.position": (d, h, c),
            "attention.content_bias": (h, c),
            "attention.position_bias": (h, c),
        }
    if arch.linformer_rank is not None:
        mix = (arch.linformer_rank, arch.length)
        shapes |= {"attention.mix_keys": mix, "attention.mix_values": mix}
    if arch.mixes(index):
        shapes |= _experts(arch)
    elif arch.mlp != "none":
        for name in ("up",) if arch.mlp == "plain" else ("up", "gate"):
            shapes |= _linear(f"mlp.{name}", (d, m), (m,), arch.has_bias("mlp"))
        shapes |= _linear("mlp.down", (m, d), (d,), arch.has_bias("mlp"))
    for name in norms(arch, index):
        shapes |= _norm(name, arch)
    for name, tensor in part_tensors(arch, index).items():
        shapes[name] = tuple(tensor.shape)
    return shapes


def part_tensors(arch: Architecture, index: int, generator: Generator | None = None) -> dict[str, Tensor]:
    """What parts start from in layer `index`, by its name there; drawn where one says so."""
    generator = generator or Generator().manual_seed(0)
    return {
        f"parts.{part.name}.{name}": tensor
        for part in arch.parts
        if hasattr(part, "initial")
        for name, tensor in part.initial(arch, index, generator).items()
    }


def shapes(arch: Architecture) -> dict[str, Shape]:
    """Names and shapes of every tensor of a network: what `from_weights` expects and `state` gives."""
    stored = 1 if arch.shared else arch.layers
    result = {
        f"layers.{index}.{name}": shape
        for index in range(stored)
        for name, shape in layer_shapes(arch, index).items()
    }
    if arch.positions == "absolute":
        result["positions"] = (arch.length, arch.width)
    if arch.positions == "bias":
        result["bias_table"] = (arch.bias_buckets, arch.heads)
    if arch.final_norm:
        result |= _norm("final_norm", arch)
    return result


def _experts(arch: Architecture) -> dict[str, Shape]:
    experts = arch.experts
    assert experts is not None
    d, e, m, s = arch.width, experts.number, experts.width, experts.shared_width
    found: dict[str, Shape] = {"router": (d, e), "gate": (d, e, m), "up": (d, e, m), "down": (e, m, d)}
    if s:
        found |= {"shared.up": (d, s), "shared.gate": (d, s), "shared.down": (s, d)}
    if experts.shared_gate:
        found["shared_gate"] = (d, 1)
    return {f"experts.{name}.weight": shape for name, shape in found.items()}


def _latent(part: str, width: int, latent: int, normed: int, arch: Architecture) -> dict[str, Shape]:
    """The bias of queries or keys is that of what they are made of."""
    name = f"attention.{part}_latent"
    return {
        **_linear(name, (width, latent), (latent,), arch.has_bias(part)),
        f"{name}.norm.gain": (normed,),
    }


def _linear(name: str, weight: Shape, bias: Shape, has_bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": weight} | ({f"{name}.bias": bias} if has_bias else {})


def _norm(name: str, arch: Architecture) -> dict[str, Shape]:
    norm = norm_of(arch.norm)
    has_gain = norm is not None and norm.gain
    has_bias = norm is not None and norm.bias and arch.has_bias("norm")
    return {
        f"{name}.{leaf}": (arch.width,) for leaf, there in (("gain", has_gain), ("bias", has_bias)) if there
    }


def assemble(arch: Architecture, tensors: Mapping[str, Tensor]) -> Weights:
    """The structure of a flat mapping of tensors; names, shapes and dtypes are checked."""
    _check(shapes(arch), tensors)
    return built(arch, tensors)


def built(arch: Architecture, tensors: Mapping[str, Tensor]) -> Weights:
    """The same, unchecked: of tensors that were checked once and are asked for at every step of a
    training."""
    stored = 1 if arch.shared else arch.layers
    whole: dict[str, Tensor] = {}
    by_layer: list[dict[str, Tensor]] = [{} for _ in range(stored)]
    for name, tensor in tensors.items():
        if _of_a_layer(name):
            _, index, inner = name.split(".", 2)
            by_layer[int(index)][inner] = tensor
        else:
            whole[name] = tensor
    layers = [_build(Layer, _nested(each, "")) for each in by_layer]
    return _around(tuple(layers) * (arch.layers if arch.shared else 1), whole)


def assemble_layer(arch: Architecture, index: int, tensors: Mapping[str, Tensor]) -> Layer:
    """The same of one layer, its tensors named as `layer_shapes` lists them."""
    _check(layer_shapes(arch, index), tensors)
    return cast(Layer, _build(Layer, _nested(tensors, "")))


def assemble_stored(arch: Architecture, layers: Stored[Layer], tensors: Mapping[str, Tensor]) -> Weights:
    """The same of layers that are not in memory, and the tensors that belong to no layer."""
    _check({name: shape for name, shape in shapes(arch).items() if not _of_a_layer(name)}, tensors)
    return _around(layers, tensors)


def _around(layers: tuple[Layer, ...] | Stored[Layer], tensors: Mapping[str, Tensor]) -> Weights:
    whole = {name: tensor for name, tensor in tensors.items() if not _of_a_layer(name)}
    return cast(Weights, _build(Weights, {**_nested(whole, ""), "layers": layers}))


def _of_a_layer(name: str) -> bool:
    return name.startswith("layers.")


def _check(expected: Mapping[str, Shape], tensors: Mapping[str, Tensor]) -> None:
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or unknown:
        problem = (
            f"{sorted(missing)[0]!r} is missing" if missing else f"{sorted(unknown)[0]!r} is not one of them"
        )
        raise WeightsError(
            f"this architecture has {len(expected)} tensors; of the {len(tensors)} given, {problem}: "
            "rankscope.nets.shapes(arch) lists them"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightsError(f"{name} must have shape {shape}; received {tuple(tensors[name].shape)}")
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
    if len(kinds) > 1 or not all(tensor.is_floating_point() for tensor in tensors.values()):
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise WeightsError(f"weights must share one floating dtype and one device; received {found}")


PARTS: dict[str, type] = {
    "attention": Attention,
    "cross": Attention,
    **dict.fromkeys(("query_latent", "key_latent"), Latent),
    "mlp": MLPWeights,
    "experts": ExpertWeights,
    "shared": MLPWeights,
    **dict.fromkeys(
        ("query", "key", "value", "output", "up", "down", "gate", "router", "shared_gate"), Linear
    ),
    **dict.fromkeys(
        (
            "attention_norm",
            "cross_norm",
            "mlp_norm",
            "attention_after",
            "cross_after",
            "mlp_after",
            "final_norm",
            "norm",
            "query_norm",
            "key_norm",
        ),
        NormWeights,
    ),
}


def _nested(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            *path, leaf = name.removeprefix(prefix).split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = tensor
    return tree


def _build(kind: type, tree: dict[str, Any]) -> Any:
    return kind(
        **{
            name: _build(PARTS[name], value) if isinstance(value, dict) and name != "parts" else value
            for name, value in tree.items()
        }
    )


def named(weights: object, prefix: str = "", layers: bool = True) -> dict[str, Tensor]:
    """Every tensor of a structure, by its dotted name; of a network's, without its `layers` if so asked."""
    found: dict[str, Tensor] = {}
    for name, value in _members(weights):
        if name == "layers" and not layers:
            continue
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Tensor):
            found[path] = value
        elif value is not None:
            found |= named(value, path)
    return found


def converted(weights: Structure, move: Callable[[Tensor], Tensor]) -> Structure:
    """The same structure with every tensor moved; a tensor met twice is moved once."""
    return cast(Structure, _moved(weights, move, {}))


def _moved(value: Any, move: Callable[[Tensor], Tensor], seen: dict[int, Any]) -> Any:
    # No function inside `converted`: one that calls itself would hold all tensors until garbage is collected.
    if id(value) not in seen:
        if isinstance(value, Tensor):
            seen[id(value)] = move(value)
        elif isinstance(value, Stored):
            seen[id(value)] = value.moved(lambda layer: converted(layer, move), move(value.source.like), move)
        elif isinstance(value, tuple):
            make = getattr(type(value), "_make", tuple)
            seen[id(value)] = make(_moved(item, move, seen) for item in value)
        elif isinstance(value, dict):
            seen[id(value)] = {key: _moved(item, move, seen) for key, item in value.items()}
        elif is_dataclass(value) and not isinstance(value, type):
            seen[id(value)] = type(value)(
                **{name: _moved(item, move, seen) for name, item in _members(value)}
            )
        else:
            return value
    return seen[id(value)]


def _members(value: object) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, tuple | Stored):
        return [(str(index), item) for index, item in enumerate(value)]
    return [(field.name, getattr(value, field.name)) for field in fields(cast(Any, value))]
