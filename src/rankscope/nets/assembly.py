"""A flat mapping of tensors as the structure that the forward pass reads; names, shapes, dtypes checked."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from rankscope.errors import WeightsError
from rankscope.nets.architecture import Architecture
from rankscope.nets.norms import NormWeights
from rankscope.nets.streamed_layers import StreamedLayers
from rankscope.nets.tensors import Shape, layer_shapes, shapes
from rankscope.nets.weights import AttentionWeights, ExpertWeights, Latent, Layer, Linear, MLPWeights, Weights


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
        if _of_a_layer(name):
            _, index, inner = name.split(".", 2)
            by_layer[int(index)][inner] = tensor
        else:
            network_tensors[name] = tensor
    layers = [_build(Layer, _nested(tensors_of_layer, "")) for tensors_of_layer in by_layer]
    return _around(tuple(layers) * (arch.layers if arch.shared else 1), network_tensors)


def assemble_layer(arch: Architecture, index: int, tensors: Mapping[str, Tensor]) -> Layer:
    """Assemble and check one layer, its tensors named as `layer_shapes` lists them."""
    _check(layer_shapes(arch, index), tensors)
    return cast(Layer, _build(Layer, _nested(tensors, "")))


def assemble_stored(
    arch: Architecture, layers: StreamedLayers[Layer], tensors: Mapping[str, Tensor]
) -> Weights:
    """Assemble streamed layers and the tensors that belong to no layer, which are checked."""
    _check({name: shape for name, shape in shapes(arch).items() if not _of_a_layer(name)}, tensors)
    return _around(layers, tensors)


def _around(layers: tuple[Layer, ...] | StreamedLayers[Layer], tensors: Mapping[str, Tensor]) -> Weights:
    network_tensors = {name: tensor for name, tensor in tensors.items() if not _of_a_layer(name)}
    return cast(Weights, _build(Weights, {**_nested(network_tensors, ""), "layers": layers}))


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
            "rankscope.nets.shapes(arch) lists them",
            subject=sorted(missing or unknown)[0],
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightsError(
                f"{name} must have shape {shape}; received {tuple(tensors[name].shape)}", subject=name
            )
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
    if len(kinds) > 1 or not all(tensor.is_floating_point() for tensor in tensors.values()):
        kinds_text = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise WeightsError(
            f"weights must share one floating dtype and one device; received {kinds_text}", subject="dtype"
        )


PARTS: dict[str, type] = {
    "attention": AttentionWeights,
    "cross": AttentionWeights,
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
