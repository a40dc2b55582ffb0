"""Networks of checkpoints that stay in their files: which can, and which must."""

import torch

from rankscope.errors import SourceError, TooLargeError
from rankscope.nets import Transformer
from rankscope.nets.devices import FLOAT64_BYTES, check_device, check_dtype, format_bytes
from rankscope.nets.fingerprint import digests
from rankscope.nets.streamed_layers import StreamedLayers
from rankscope.profiles.needs import available
from rankscope.sources.canonical import Canonical
from rankscope.sources.checkpoint import (
    Place,
    clear_errors,
    quiet,
    read_config,
    refuse_too_large,
    to_be_dequantised,
)
from rankscope.sources.embedding import Embedding
from rankscope.sources.families import Family
from rankscope.sources.parity import Parity, check
from rankscope.sources.shelf import Shelf, weight_files


def refuse_stream(stream: bool | None, name: str, why: str) -> None:
    """A sentence where layers were asked for one at a time and cannot be had so."""
    if stream:
        raise SourceError(
            "layers are read one at a time from a checkpoint in safetensors, its weights ordinary numbers; "
            f"{name} {why}: leave stream out"
        )


def on_shelf(found: Place, family: str | Family | None, stream: bool | None) -> Shelf | None:
    """A checkpoint in its files; None where it can only be read whole."""
    with quiet(), clear_errors(found):
        files = weight_files(found)
        if not files:
            refuse_stream(stream, found.name, "has none")
            return None
        refuse_too_large(found, whole=False)
        if to_be_dequantised(read_config(found, family)):
            refuse_stream(stream, found.name, "has quantised ones")
            return None
        return Shelf(found, files, family)


def from_shelf(
    shelf: Shelf, dtype: torch.dtype, device: torch.device | str, stream: bool | None
) -> tuple[Transformer, Embedding, Parity]:
    """The network of a checkpoint, its layers in memory or left in their files, and how far it is from the
    original: both are run a layer at a time."""
    check_dtype(dtype)
    check_device(device)
    needed, free = (
        shelf.numbers * dtype.itemsize + shelf.largest * FLOAT64_BYTES,
        available(torch.device(device)),
    )
    if free is not None and needed > free:
        if stream is False:
            raise TooLargeError(
                f"a network must fit into memory; {shelf.name} takes {format_bytes(needed)} in {dtype}, and "
                f"{format_bytes(free)} are free on {device}: stream=True reads its layers one at a time"
            )
        stream = True
    made = Canonical.of(shelf)
    with shelf.running() as core:
        parity = check(made.network(), shelf.family, core, made.embedding, shelf.name)
    net = made.network(dtype, device)
    layers = net.weights.layers
    assert isinstance(layers, StreamedLayers)
    if stream:
        layers.source.note = digests
        return net, made.embedding, parity
    return net.held(), made.embedding, parity
