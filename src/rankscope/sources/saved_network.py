"""Reads a network that `net.save` wrote, with its origin. Called by `load`."""

import dataclasses
from pathlib import Path
from typing import Any

from rankscope.errors import FileError
from rankscope.extras import need
from rankscope.nets import Transformer
from rankscope.nets.origin import Origin
from rankscope.nets.storage import read
from rankscope.sources.checkpoint import CheckpointLocation
from rankscope.sources.checkpoint import tokenizer as read_tokenizer
from rankscope.sources.embedding import read_embedding
from rankscope.sources.fresh import RandomOrigin
from rankscope.sources.origin import TOKENIZER, CheckpointOrigin
from rankscope.sources.parity import Parity


def read_saved(folder: str | Path, tokenizer: Any = None) -> Transformer:
    """Read a saved network, bit for bit; `tokenizer` replaces the one that was saved with it."""
    arch, tensors, description = read(folder)
    net = Transformer.from_weights(arch, tensors)
    if net.fingerprint != description.get("fingerprint"):
        raise FileError(
            f"the files of {folder} must belong together; tensors and description are of different networks, "
            "or were changed: save it again",
            subject="files",
        )
    try:
        origin = _origin(Path(folder), description.get("origin"))
    except (KeyError, TypeError) as error:
        raise FileError(
            f"the origin saved in {folder} cannot be read ({error}): save it again", subject="origin"
        ) from error
    if tokenizer is not None and isinstance(origin, CheckpointOrigin):
        origin = dataclasses.replace(origin, find_tokenizer=lambda: tokenizer)
    return dataclasses.replace(net, origin=origin)


def _origin(folder: Path, description: dict[str, Any] | None) -> Origin | None:
    if description is None:
        return None
    fields = dict(description)
    kind = fields.pop("kind")
    if kind == "untrained":
        return RandomOrigin(**fields)
    embedding, config = read_embedding(folder, fields.pop("embedding")), _config(fields.pop("config"))
    location = CheckpointLocation(str(folder / TOKENIZER), str(folder), {"local_files_only": True})
    parity = Parity(**fields.pop("parity"))
    return CheckpointOrigin(
        embedding=embedding,
        parity=parity,
        find_tokenizer=lambda: read_tokenizer(location),
        config=config,
        **fields,
    )


def _config(fields: dict[str, Any] | None) -> Any:
    if fields is None:
        return None
    need("the config of a network that was loaded", "transformers")
    from transformers import AutoConfig

    return AutoConfig.for_model(**fields)
