"""Decides which checkpoints stay in their files, and builds their networks. Called by `load`."""

import torch

from rankscope.errors import SourceError, TooLargeError
from rankscope.nets import Transformer
from rankscope.nets.devices import FLOAT64_BYTES, check_device, check_dtype, format_bytes, free_memory
from rankscope.nets.storage import digests
from rankscope.nets.weights import StreamedLayers
from rankscope.sources.canonical import StreamedNetwork
from rankscope.sources.checkpoint import (
    CheckpointLocation,
    clear_errors,
    quiet,
    read_config,
    refuse_too_large,
    to_be_dequantised,
)
from rankscope.sources.embedding import Embedding
from rankscope.sources.families import Family
from rankscope.sources.parity import Parity, check
from rankscope.sources.streamed_checkpoint import StreamedCheckpoint, weight_files


def refuse_stream(stream: bool | None, name: str, why: str) -> None:
    """Raise `SourceError` if `stream=True` was asked for and cannot be had, because `name` `why`."""
    if stream:
        raise SourceError(
            "layers are read one at a time from a checkpoint in safetensors, its weights ordinary numbers; "
            f"{name} {why}: leave stream out",
            subject="stream",
        )


def on_shelf(
    location: CheckpointLocation, family: str | Family | None, stream: bool | None
) -> StreamedCheckpoint | None:
    """Open a checkpoint whose layers stay in their files; None where it can only be read whole."""
    with quiet(), clear_errors(location):
        files = weight_files(location)
        if not files:
            refuse_stream(stream, location.name, "has none")
            return None
        refuse_too_large(location, whole=False)
        if to_be_dequantised(read_config(location, family)):
            refuse_stream(stream, location.name, "has quantised ones")
            return None
        return StreamedCheckpoint(location, files, family)


def from_shelf(
    checkpoint: StreamedCheckpoint, dtype: torch.dtype, device: torch.device | str, stream: bool | None
) -> tuple[Transformer, Embedding, Parity]:
    """Build the network of an opened checkpoint, its embedding and its parity, one layer at a time.

    Layers are left in their files with `stream=True`, or if they do not fit into the memory that is free.
    """
    check_dtype(dtype)
    check_device(device, dtype)
    bytes_needed, bytes_free = (
        checkpoint.numbers * dtype.itemsize + checkpoint.largest * FLOAT64_BYTES,
        free_memory(torch.device(device)),
    )
    if bytes_free is not None and bytes_needed > bytes_free:
        if stream is False:
            raise TooLargeError(
                f"a network must fit into memory; {checkpoint.name} takes {format_bytes(bytes_needed)} in "
                f"{dtype}, and {format_bytes(bytes_free)} are free on {device}: stream=True reads one "
                "layer at a time",
                subject="memory",
            )
        stream = True
    streamed_network = StreamedNetwork.of(checkpoint)
    with checkpoint.running() as core:
        parity = check(
            streamed_network.network(), checkpoint.family, core, streamed_network.embedding, checkpoint.name
        )
    net = streamed_network.network(dtype, device)
    layers = net.weights.layers
    assert isinstance(layers, StreamedLayers)
    if stream:
        layers.source.note = digests
        return net, streamed_network.embedding, parity
    return net.held(), streamed_network.embedding, parity
