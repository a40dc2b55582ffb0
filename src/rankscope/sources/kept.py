"""An embedding as plain Python and tensors, for a network that is saved, and back."""

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from rankscope.errors import FileError, SourceError
from rankscope.nets.norms import NormWeights
from rankscope.nets.storage import read_tensors, write_tensors
from rankscope.nets.weights import Linear
from rankscope.sources.embedding import (
    Convolution,
    Embedding,
    ImageEmbedding,
    SoundEmbedding,
    TextEmbedding,
)

TENSORS = "embedding.safetensors"
KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (TextEmbedding, ImageEmbedding, SoundEmbedding, Convolution, NormWeights, Linear)
}


def write_embedding(folder: Path, embedding: Embedding) -> dict[str, Any]:
    """Its tensors into a file of the folder; what else there is to say."""
    described = _described(embedding, "")
    return {"same": write_tensors(folder / TENSORS, tensors_of(embedding)), "made_of": described}


def read_embedding(folder: Path, about: dict[str, Any]) -> Embedding:
    """What `write_embedding` wrote."""
    tensors = read_tensors(folder / TENSORS, about["same"])
    try:
        found: Embedding = _rebuilt(about["made_of"], tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"the embedding saved in {folder} cannot be read ({error}): save it again") from error
    return found


def tensors_of(value: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors of an embedding, by their dotted names."""
    if isinstance(value, Tensor):
        return {path: value}
    if not dataclasses.is_dataclass(value):
        return {}
    found: dict[str, Tensor] = {}
    for each in dataclasses.fields(value):
        found |= tensors_of(getattr(value, each.name), f"{path}.{each.name}" if path else each.name)
    return found


def _described(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": path}
    if isinstance(value, tuple):
        return {"tuple": list(value)}
    if not dataclasses.is_dataclass(value):
        return value
    kind = type(value).__name__
    if KINDS.get(kind) is not type(value):
        raise SourceError(f"an embedding of one's own, {kind}, cannot be saved: leave out origin")
    fields = [each.name for each in dataclasses.fields(value)]
    inside = {name: _described(getattr(value, name), f"{path}.{name}" if path else name) for name in fields}
    return {"kind": kind, "fields": inside}


def _rebuilt(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(value["tuple"])
    return KINDS[value["kind"]](**{name: _rebuilt(part, tensors) for name, part in value["fields"].items()})
