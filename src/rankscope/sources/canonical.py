"""Builds the canonical network and embedding of a model: whole (`canonical`) or layer by layer
(`StreamedNetwork`, for a checkpoint that stays in its files). Called by `load` and `network_on_batch`; what
a family says of its models is applied here.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankscope.errors import SourceError, TooLargeError, require
from rankscope.nets import (
    BIASES,
    FLOAT64_BYTES,
    Architecture,
    Layer,
    LayerSource,
    StreamedLayers,
    Transformer,
    assemble_layer,
    assemble_stored,
    check_device,
    check_dtype,
    digests,
    format_bytes,
    free_memory,
)
from rankscope.sources.checkpoint import (
    Checkpoint,
    CheckpointLocation,
    clear_errors,
    quiet,
    read_config,
    refuse_too_large,
    to_be_dequantised,
)
from rankscope.sources.embedding import Embedding, tensors_of
from rankscope.sources.families import Family
from rankscope.sources.parity import Parity, check
from rankscope.sources.streamed_checkpoint import StreamedCheckpoint, Widened, weight_files


def canonical(checkpoint: Checkpoint, name: str) -> tuple[Transformer, Embedding]:
    """The canonical network of a model in float64, and its embedding."""
    family = checkpoint.family
    core = family.prepare_for_float64(family.core(checkpoint.model))
    core.requires_grad_(False)
    arch = family.architecture_of(core)
    _refuse_other_depth(arch, len(family.blocks(core)), name)
    tensors, embedding = family.tensors(core, arch), family.embedding(core)
    _refuse_unfit(checkpoint, [*tensors.values(), *tensors_of(embedding).values()], name)
    arch, shared = _with_biases(arch, tensors), dict[int, Tensor]()
    weights = {name: shared.setdefault(id(tensor), tensor.contiguous()) for name, tensor in tensors.items()}
    return Transformer.from_weights(arch, weights), embedding


def _with_biases(arch: Architecture, tensors: dict[str, Tensor]) -> Architecture:
    """The architecture with those biases that the weights have."""
    places = {"mlp": ("mlp.up",), "norm": ("attention_norm", "mlp_norm", "mlp_after")}
    names = {part: places.get(part, (f"attention.{part}", f"attention.{part}_latent")) for part in BIASES}
    biases = [part for part in BIASES if any(f"layers.0.{name}.bias" in tensors for name in names[part])]
    return arch.replace(biases=tuple(biases))


@dataclass(frozen=True)
class StreamedNetwork:
    """The canonical network of a checkpoint that stays in its files: layers are made one at a time."""

    shelf: StreamedCheckpoint
    arch: Architecture
    other_tensors: dict[str, Tensor]  # Tensors that belong to no layer
    embedding: Embedding
    _seen: set[int] = field(default_factory=set)  # Layers whose weights were checked to be finite and present

    @classmethod
    @torch.no_grad()
    def of(cls, shelf: StreamedCheckpoint) -> "StreamedNetwork":
        """Read architecture and embedding of a checkpoint; the first layer says which biases there are."""
        family, core, name = shelf.family, shelf.core, shelf.name
        arch = family.architecture_of(core)
        _refuse_other_depth(arch, len(shelf.blocks), name)
        with shelf.filled(shelf.blocks[0]) as first:
            with Widened():
                other_tensors, embedding = family.other_tensors(core), family.embedding(core)
                first_layer = family.layer(first, arch)
            layer = {f"layers.0.{part}": tensor for part, tensor in first_layer.items()}
            tensors = [*other_tensors.values(), *tensors_of(embedding).values()]
            reason = f"layers that are read one at a time must each have their own weights; {name} shares some"
            loaded = not any(tensor.is_meta for tensor in tensors)
            require(loaded, f"{reason}: stream=False reads it whole", SourceError, "stream")
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
        copies = {name: _copied(tensors.pop(name), like) for name in [*tensors]}
        return assemble_layer(self.arch, index, copies)


def _copied(tensor: Tensor, like: Tensor) -> Tensor:
    """A contiguous copy that shares no memory with a file."""
    copy = tensor.detach().to(like).contiguous()  # converted first: torch transposes fast within a dtype
    return copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy


def _refuse_other_depth(arch: Architecture, blocks: int, name: str) -> None:
    message = f"the config of {name} says {arch.layers} layers; the model has {blocks} blocks"
    require(blocks == arch.layers, message, SourceError, "layers")


def _refuse_unfit(checkpoint: Checkpoint, used: list[Tensor], name: str) -> None:
    """Refuse weights that the files lack (transformers would draw them) and weights that are not finite.

    Tensors are told apart by the memory that they occupy."""
    places = {tensor.untyped_storage().data_ptr() for tensor in used} if checkpoint.missing else ()
    parameters = dict(checkpoint.model.named_parameters()) if checkpoint.missing else {}
    present = [key for key in checkpoint.missing if key in parameters]
    lacking = [key for key in present if parameters[key].untyped_storage().data_ptr() in places]
    if lacking:
        message = f"the weights of {name} must fit its config; {len(lacking)} that it asks for are missing"
        raise SourceError(f"{message}, {lacking[0]} among them", subject="weights")
    # A sum of finite numbers may overflow, and then each is looked at: that takes three times as long.
    finite = all(bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()) for tensor in used)
    message = f"the weights of {name} must be finite; some are not: the checkpoint is damaged, or training diverged"
    require(finite, message, SourceError, "weights")


def refuse_stream(stream: bool | None, name: str, why: str) -> None:
    """Raise `SourceError` if `stream=True` was asked for and cannot be had, because `name` `why`."""
    needed = "stream=True needs a checkpoint in safetensors, its weights ordinary numbers"
    require(not stream, f"{needed}; {name} {why}: leave stream out", SourceError, "stream")


def on_shelf(
    location: CheckpointLocation, family: str | Family | None, stream: bool | None
) -> StreamedCheckpoint | None:
    """Open a checkpoint whose layers stay in their files; None where it can only be read whole."""
    with quiet(), clear_errors(location):
        files = weight_files(location)
        if files:
            refuse_too_large(location, whole=False)
            if not to_be_dequantised(read_config(location, family)):
                return StreamedCheckpoint(location, files, family)
        refuse_stream(stream, location.name, "has quantised ones" if files else "has none")
        return None


def from_shelf(
    checkpoint: StreamedCheckpoint, dtype: torch.dtype, device: torch.device | str, stream: bool | None
) -> tuple[Transformer, Embedding, Parity]:
    """Build the network of an opened checkpoint, its embedding and its parity, one layer at a time.

    Layers are left in their files with `stream=True`, or if they do not fit into the memory that is free.
    """
    check_dtype(dtype)
    check_device(device, dtype)
    counts = [sum(weight.numel() for weight in part.parameters()) for part in (checkpoint.core, *checkpoint.blocks)]
    bytes_needed = counts[0] * dtype.itemsize + max(counts[1:]) * FLOAT64_BYTES
    bytes_free = free_memory(torch.device(device))
    if bytes_free is not None and bytes_needed > bytes_free:
        if stream is False:
            sizes = f"{format_bytes(bytes_needed)} in {dtype}, and {format_bytes(bytes_free)} are free on {device}"
            message = f"a network must fit into memory; {checkpoint.name} takes {sizes}: leave stream out"
            raise TooLargeError(message, subject="memory")
        stream = True
    streamed = StreamedNetwork.of(checkpoint)
    with checkpoint.running() as core:
        parity = check(streamed.network(), checkpoint.family, core, streamed.embedding, checkpoint.name)
    net = streamed.network(dtype, device)
    layers = net.weights.layers
    assert isinstance(layers, StreamedLayers)
    if stream:
        layers.source.note = digests
    return net if stream else net.held(), streamed.embedding, parity
