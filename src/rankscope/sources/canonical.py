"""Builds the canonical network and embedding of a model: whole (`canonical`) or layer by layer
(`StreamedNetwork`). Called by `load` and `batch_network`; what a family says of its models is applied here.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankscope.errors import SourceError
from rankscope.nets import Architecture, Transformer
from rankscope.nets.fields import BIASES
from rankscope.nets.tensors import assemble_layer, assemble_stored
from rankscope.nets.weights import Layer, LayerSource, StreamedLayers
from rankscope.sources.checkpoint import Checkpoint
from rankscope.sources.embedding import Embedding
from rankscope.sources.families.family import config_of
from rankscope.sources.streamed_checkpoint import StreamedCheckpoint, Widened


def canonical(checkpoint: Checkpoint, name: str) -> tuple[Transformer, Embedding]:
    """The canonical network of a model in float64, and its embedding."""
    family = checkpoint.family
    core = family.prepare_for_float64(family.core(checkpoint.model))
    core.requires_grad_(False)
    arch = family.architecture(config_of(core))
    blocks = family.blocks(core)
    _refuse_other_depth(arch, len(blocks), name)
    tensors = family.other_tensors(core)
    stored = blocks[:1] if arch.shared else blocks
    layers: dict[int, dict[str, Tensor]] = {}
    for index, block in enumerate(stored):
        # A block that comes several times keeps one set of tensors.
        layer = layers.setdefault(id(block), family.layer(block, arch))
        tensors |= {f"layers.{index}.{part}": tensor for part, tensor in layer.items()}
    embedding = family.embedding(core)
    _refuse_unfit(checkpoint, [*tensors.values(), *_tensors(embedding)], name)
    arch = _with_biases(arch, tensors)
    shared: dict[int, Tensor] = {}
    tensors_by_name = {
        part: shared.setdefault(id(tensor), tensor.contiguous()) for part, tensor in tensors.items()
    }
    return Transformer.from_weights(arch, tensors_by_name), embedding


def _with_biases(arch: Architecture, tensors: dict[str, Tensor]) -> Architecture:
    """The architecture with those biases that the weights have."""
    places = {"mlp": "mlp.up", "norm": "mlp_norm"}
    names = {part: (places.get(part, f"attention.{part}"), f"attention.{part}_latent") for part in BIASES}
    biases = [part for part in BIASES if any(f"layers.0.{name}.bias" in tensors for name in names[part])]
    return arch.replace(biases=tuple(biases))


@dataclass(frozen=True)
class StreamedNetwork:
    """The canonical network of a checkpoint that stays in its files: layers are made one at a time."""

    shelf: StreamedCheckpoint
    arch: Architecture
    other_tensors: dict[str, Tensor]
    """Tensors that belong to no layer."""
    embedding: Embedding
    _seen: set[int] = field(default_factory=set)
    """Layers whose weights were checked to be finite and present."""

    @classmethod
    @torch.no_grad()
    def of(cls, shelf: StreamedCheckpoint) -> "StreamedNetwork":
        """Read architecture and embedding of a checkpoint; the first layer says which biases there are."""
        family, core, name = shelf.family, shelf.core, shelf.name
        arch = family.architecture(config_of(core))
        _refuse_other_depth(arch, len(shelf.blocks), name)
        with shelf.filled(shelf.blocks[0]) as first:
            with Widened():
                other_tensors, embedding = family.other_tensors(core), family.embedding(core)
                first_layer = family.layer(first, arch)
            layer = {f"layers.0.{part}": tensor for part, tensor in first_layer.items()}
            tensors = [*other_tensors.values(), *_tensors(embedding)]
            if any(tensor.is_meta for tensor in tensors):
                raise SourceError(
                    f"layers that are read one at a time must each have their own weights; {name} has some "
                    "that belong to several: stream=False reads it whole",
                    subject="stream",
                )
            _refuse_unfit(shelf.checkpoint, [*tensors, *layer.values()], name)
        return cls(shelf, _with_biases(arch, layer), other_tensors, embedding)

    def network(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Transformer:
        """The network in a dtype on a device, its layers still in their files."""
        first = {id(block): index for index, block in reversed([*enumerate(self.shelf.blocks)])}
        like = torch.empty(0, dtype=dtype, device=device)
        source = LayerSource(lambda place: self.layer(place, like), like)
        layers = StreamedLayers(source, [first[id(block)] for block in self.shelf.blocks])
        other_tensors = {name: _copied(tensor, like) for name, tensor in self.other_tensors.items()}
        return Transformer(self.arch, assemble_stored(self.arch, layers, other_tensors))

    @torch.no_grad()
    def layer(self, index: int, like: Tensor) -> Layer:
        """Read one layer from its files, in the dtype and on the device of `like`."""
        with self.shelf.filled(self.shelf.blocks[index]) as block:
            with Widened():
                tensors = self.shelf.family.layer(block, self.arch)
            if index not in self._seen:
                _refuse_unfit(self.shelf.checkpoint, [*tensors.values()], self.shelf.name)
                self._seen.add(index)
        # The block holds them no more: what is copied is let go, tensor by tensor.
        return assemble_layer(
            self.arch, index, {name: _copied(tensors.pop(name), like) for name in [*tensors]}
        )


def _copied(tensor: Tensor, like: Tensor) -> Tensor:
    """A contiguous copy that shares no memory with a file. Converted first: torch transposes fast within a
    dtype."""
    tensor = tensor.detach()
    biases = tensor.to(like).contiguous()
    return biases.clone() if biases.data_ptr() == tensor.data_ptr() else biases


def _refuse_other_depth(arch: Architecture, blocks: int, name: str) -> None:
    if blocks != arch.layers:
        raise SourceError(
            f"the config of {name} says {arch.layers} layers; the model has {blocks} blocks", subject="layers"
        )


def _refuse_unfit(checkpoint: Checkpoint, used: list[Tensor], name: str) -> None:
    """Refuse weights that the files lack (transformers would draw them) and weights that are not finite."""
    _refuse_missing(checkpoint, used, name)
    # A sum of finite numbers may overflow, and then each is looked at: that takes three times as long.
    if not all(bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()) for tensor in used):
        raise SourceError(
            f"the weights of {name} must be finite numbers; some are NaN or infinite: the checkpoint is "
            "damaged, or its training diverged",
            subject="weights",
        )


def _refuse_missing(checkpoint: Checkpoint, used: list[Tensor], name: str) -> None:
    """Refuse weights that the files lack; tensors are told apart by the memory that they occupy."""
    if not checkpoint.missing:
        return
    places = {tensor.untyped_storage().data_ptr() for tensor in used}
    parameters = dict(checkpoint.model.named_parameters())
    lacking = [
        key
        for key in checkpoint.missing
        if key in parameters and parameters[key].untyped_storage().data_ptr() in places
    ]
    if lacking:
        raise SourceError(
            f"the weights of {name} must fit its config; {len(lacking)} that the config asks for are "
            f"missing, {lacking[0]} among them: config and weights do not belong together",
            subject="weights",
        )


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in getattr(value, "__dict__", {}).values() for tensor in _tensors(part)]
