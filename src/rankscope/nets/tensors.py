"""The tensors of a network by name: their shapes, the structure that a flat mapping of them becomes, and random ones.

Random weights are drawn by the schemes the papers use (`random_tensors`):

| init         | queries, keys, MLP     | values and outputs                                       |
|--------------|------------------------|----------------------------------------------------------|
| `bert`       | N(0, 0.02)             | N(0, 0.02)                                               |
| `xavier`     | U(+-sqrt(6/(in+out)))  | the same                                                 |
| `kaiming`    | N(0, 0.02)             | U(+-1/sqrt(in)): `kaiming_uniform_(a=sqrt 5)`, as in the 2021 code |
| `orthogonal` | as xavier              | orthonormal rows or columns (Wu et al. 2024, Thm 2)      |

`"bert/sqrt(L)"` and its like divide what each branch adds by sqrt(layers): the `1/sqrt(L)` skip scaling
of Noci et al. 2022. Biases are 0 and gains 1; tables of positions are N(0, 0.02), Linformer's mixers
N(0, 1/k). Everything is drawn in float64 on the CPU, so a seed means the same on every device.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Generator, Tensor

from rankscope.errors import ArchitectureError, WeightsError, one_of
from rankscope.nets import weights
from rankscope.nets.architecture import Architecture
from rankscope.nets.norms import NormWeights, norm_of
from rankscope.nets.traversal import norms
from rankscope.nets.weights import HeldLayers, Layer, StreamedLayers, Weights

Shape = tuple[int, ...]
Draw = Callable[[Shape, int, int, Generator], Tensor]  # (shape, inputs, outputs, generator) -> weights


def layer_shapes(arch: Architecture, index: int) -> dict[str, Shape]:
    """Names and shapes of the tensors of layer `index`."""
    d, h, g, c, m = arch.width, arch.heads, arch.key_heads, arch.head_width, arch.mlp_width
    v, r, k = arch.value_width, arch.query_latent, arch.key_latent
    shapes: dict[str, Shape] = {}
    for name in ("attention", "cross") if arch.cross_attention else ("attention",):
        shapes |= {
            **_linear(f"{name}.query", (r or d, h, c), (h, c), arch.has_bias("query") and not r),
            **_linear(f"{name}.key", (arch.latent_width if k else d, g, c), (g, c), arch.has_bias("key") and not k),
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
        widths = (h * c, g * c) if arch.query_norm_across else (c, c)
        shapes |= {f"attention.{name}_norm.gain": (n,) for name, n in zip(("query", "key"), widths, strict=True)}
    if arch.positions == "relative":
        shapes |= {"attention.position": (d, h, c), "attention.content_bias": (h, c), "attention.position_bias": (h, c)}
    if arch.positions == "disentangled":
        for name in ("query", "key"):
            shapes |= _linear(f"attention.relative_{name}", (d, h, c), (h, c), arch.has_bias(name))
    if arch.kernel == "sink":
        shapes["attention.sink"] = (h,)
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
    """The initial tensors of parts in layer `index`, by name; random ones are drawn from the generator."""
    generator = generator or Generator().manual_seed(0)
    return {
        f"parts.{part.name}.{name}": tensor
        for part in arch.parts
        if hasattr(part, "initial")
        for name, tensor in part.initial(arch, index, generator).items()
    }


def with_parts(arch: Architecture, state: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """A network's tensors, and what its parts start from where they have none among them yet."""
    drawn = Generator().manual_seed(0)
    tensors = dict(state)
    for index in range(1 if arch.shared else arch.layers):
        for name, tensor in part_tensors(arch, index, drawn).items():
            tensors.setdefault(f"layers.{index}.{name}", tensor.to(like))
    return tensors


def shapes(arch: Architecture) -> dict[str, Shape]:
    """Names and shapes of every tensor of a network: what `from_weights` expects and `state_dict` gives."""
    stored = 1 if arch.shared else arch.layers
    result = {
        f"layers.{index}.{name}": shape for index in range(stored) for name, shape in layer_shapes(arch, index).items()
    }
    if arch.positions == "absolute":
        result["positions"] = (arch.length, arch.width)
    if arch.positions == "bias":
        result["bias_table"] = (arch.bias_buckets, arch.heads)
    if arch.positions == "disentangled":
        result["relative_table"] = (2 * arch.bias_buckets, arch.width)
    if arch.final_norm:
        result |= _norm("final_norm", arch)
    return result


def _experts(arch: Architecture) -> dict[str, Shape]:
    experts = arch.experts
    assert experts is not None
    d, e, m, s = arch.width, experts.number, experts.width, experts.shared_width
    result: dict[str, Shape] = {"router": (d, e), "gate": (d, e, m), "up": (d, e, m), "down": (e, m, d)}
    if s:
        result |= {"shared.up": (d, s), "shared.gate": (d, s), "shared.down": (s, d)}
    if experts.shared_gate:
        result["shared_gate"] = (d, 1)
    more: dict[str, Shape] = {"experts.correction": (e,)} if experts.correction else {}
    if experts.biases:
        biases: dict[str, Shape] = {"router": (e,), "gate": (e, m), "up": (e, m), "down": (e, d)}
        more |= {f"experts.{name}.bias": shape for name, shape in biases.items()}
    return {f"experts.{name}.weight": shape for name, shape in result.items()} | more


def _latent(part: str, width: int, latent: int, normed: int, arch: Architecture) -> dict[str, Shape]:
    """The bias of queries or keys is that of what they are made of."""
    name = f"attention.{part}_latent"
    return {**_linear(name, (width, latent), (latent,), arch.has_bias(part)), f"{name}.norm.gain": (normed,)}


def _linear(name: str, weight: Shape, bias: Shape, has_bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": weight} | ({f"{name}.bias": bias} if has_bias else {})


def _norm(name: str, arch: Architecture) -> dict[str, Shape]:
    norm = norm_of(arch.norm)
    has_gain = norm is not None and norm.gain
    has_bias = norm is not None and norm.bias and arch.has_bias("norm")
    return {f"{name}.{leaf}": (arch.width,) for leaf, present in (("gain", has_gain), ("bias", has_bias)) if present}


def assemble(arch: Architecture, tensors: Mapping[str, Tensor]) -> Weights:
    """The structure of a flat mapping of tensors; names, shapes and dtypes are checked."""
    _check(shapes(arch), tensors)
    return built(arch, tensors)


def built(arch: Architecture, tensors: Mapping[str, Tensor]) -> Weights:
    """Assemble without checks: tensors that were checked once, at every step of a training."""
    stored = 1 if arch.shared else arch.layers
    network_tensors: dict[str, Tensor] = {}
    by_layer: list[dict[str, Tensor]] = [{} for _ in range(stored)]
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            _, index, inner = name.split(".", 2)
            by_layer[int(index)][inner] = tensor
        else:
            network_tensors[name] = tensor
    layers = HeldLayers([_build(Layer, _nested(layer)) for layer in by_layer] * (arch.layers if arch.shared else 1))
    return cast(Weights, _build(Weights, {**_nested(network_tensors), "layers": layers}))


def assemble_layer(arch: Architecture, index: int, tensors: Mapping[str, Tensor]) -> Layer:
    """Assemble and check one layer, its tensors named as `layer_shapes` lists them."""
    _check(layer_shapes(arch, index), tensors)
    return cast(Layer, _build(Layer, _nested(tensors)))


def assemble_stored(arch: Architecture, layers: StreamedLayers[Layer], tensors: Mapping[str, Tensor]) -> Weights:
    """Assemble streamed layers and the tensors that belong to no layer, which are checked."""
    _check({name: shape for name, shape in shapes(arch).items() if not name.startswith("layers.")}, tensors)
    return cast(Weights, _build(Weights, {**_nested(tensors), "layers": layers}))


def _check(expected: Mapping[str, Shape], tensors: Mapping[str, Tensor]) -> None:
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or unknown:
        problem = f"{sorted(missing)[0]!r} is missing" if missing else f"{sorted(unknown)[0]!r} is not one of them"
        sentence = f"this architecture has {len(expected)} tensors; of the {len(tensors)} given, {problem}"
        subject = sorted(missing or unknown)[0]
        raise WeightsError(f"{sentence}: rankscope.nets.shapes(arch) lists them", subject=subject)
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightsError(f"{name} must have shape {shape}; received {tuple(tensors[name].shape)}", subject=name)
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
    if len(kinds) > 1 or not all(tensor.is_floating_point() for tensor in tensors.values()):
        kinds_text = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        sentence = f"weights must share one floating dtype and one device; received {kinds_text}"
        raise WeightsError(sentence, subject="dtype")


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = tensor
    return tree


STRUCTURES: dict[str, type] = {
    **dict.fromkeys(("attention", "cross"), weights.AttentionWeights),
    **dict.fromkeys(("query_latent", "key_latent"), weights.Latent),
    **dict.fromkeys(("mlp", "shared"), weights.MLPWeights),
    "experts": weights.ExpertWeights,
}
"""The structures in a layer by name, but for norms (`..norm`, `.._after`) and linear maps, which are the others."""


def _build(kind: type, tree: dict[str, Any]) -> Any:
    def member(name: str, value: Any) -> Any:
        if not isinstance(value, dict) or name == "parts":
            return value
        usual = NormWeights if name.endswith(("norm", "_after")) else weights.Linear
        return _build(STRUCTURES.get(name, usual), value)

    return kind(**{name: member(name, value) for name, value in tree.items()})


def _normal(shape: Shape, inputs: int, outputs: int, generator: Generator) -> Tensor:
    return 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(bound: float, shape: Shape, generator: Generator) -> Tensor:
    return bound * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)


def _xavier(shape: Shape, inputs: int, outputs: int, generator: Generator) -> Tensor:
    return _uniform(math.sqrt(6 / (inputs + outputs)), shape, generator)


def _kaiming(shape: Shape, inputs: int, outputs: int, generator: Generator) -> Tensor:
    return _uniform(1 / math.sqrt(inputs), shape, generator)


def _orthogonal(shape: Shape, inputs: int, outputs: int, generator: Generator) -> Tensor:
    flat = torch.empty(inputs, outputs, dtype=torch.float64)
    return torch.nn.init.orthogonal_(flat, generator=generator).reshape(shape)


SCHEMES: dict[str, tuple[Draw, Draw]] = {
    "bert": (_normal, _normal),
    "xavier": (_xavier, _xavier),
    "kaiming": (_normal, _kaiming),
    "orthogonal": (_xavier, _orthogonal),
}
"""(for most matrices, for values and outputs)."""

DEPTH_SCALED = "/sqrt(L)"
OUTWARD = ("attention.value", "attention.output", "cross.value", "cross.output")


def random_tensors(arch: Architecture, seed: int, init: str) -> dict[str, Tensor]:
    """Every tensor of `shapes(arch)`, drawn by a scheme."""
    scheme = init.removesuffix(DEPTH_SCALED)
    if scheme not in SCHEMES:
        known = [*SCHEMES, *(name + DEPTH_SCALED for name in SCHEMES)]
        raise ArchitectureError(one_of("init", init, known), subject="init")
    usual, outward = SCHEMES[scheme]
    branch = 1 / math.sqrt(arch.layers) if init.endswith(DEPTH_SCALED) else 1.0
    generator = Generator().manual_seed(seed)
    drawn = {
        name: _tensor(name, shape, usual, outward, branch, generator)
        for name, shape in shapes(arch).items()
        if ".parts." not in name
    }
    # Parts are drawn last: with them or without, the rest is the same.
    for index in range(1 if arch.shared else arch.layers):
        tensors = part_tensors(arch, index, generator)
        drawn |= {f"layers.{index}.{name}": tensor for name, tensor in tensors.items()}
    return drawn


def _tensor(name: str, shape: Shape, usual: Draw, outward: Draw, branch: float, generator: Generator) -> Tensor:
    part, _, leaf = name.rpartition(".")
    if leaf in ("bias", "content_bias", "position_bias", "correction", "sink"):
        return torch.zeros(shape, dtype=torch.float64)
    if leaf == "gain":
        return torch.ones(shape, dtype=torch.float64)
    if leaf in ("positions", "bias_table", "relative_table"):
        return _normal(shape, 0, 0, generator)
    if leaf.startswith("mix_"):
        return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0])
    inputs = shape[0] * shape[1] if part.endswith(("attention.output", "cross.output")) else shape[0]
    outputs = math.prod(shape) // inputs
    if part.endswith(("experts.up", "experts.gate", "experts.down")):  # each expert is a map of its own
        inputs, outputs = shape[1] if part.endswith("down") else shape[0], shape[2]
    weight = (outward if part.endswith(OUTWARD) else usual)(shape, inputs, outputs, generator)
    ends_branch = part.endswith(("attention.output", "cross.output", "mlp.down", "experts.down", "shared.down"))
    return weight * branch if ends_branch else weight
