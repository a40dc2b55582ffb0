"""Reading a network that `net.save` wrote, with the origin that it had."""

import dataclasses
from pathlib import Path
from typing import Any

from rankscope.errors import FileError
from rankscope.extras import need
from rankscope.nets import Transformer
from rankscope.nets.origin import Origin
from rankscope.nets.storage import read
from rankscope.sources.checkpoint import Place
from rankscope.sources.checkpoint import tokenizer as read_tokenizer
from rankscope.sources.fresh import Untrained
from rankscope.sources.kept import read_embedding
from rankscope.sources.loaded import TOKENIZER, Loaded
from rankscope.sources.parity import Parity


def read_saved(folder: str | Path, tokenizer: Any = None) -> Transformer:
    """The network of a folder, every bit as it was saved; with another tokenizer where one is given."""
    arch, tensors, about = read(folder)
    net = Transformer.from_weights(arch, tensors)
    if net.fingerprint != about.get("fingerprint"):
        raise FileError(
            f"the files of {folder} must belong together; tensors and description are of different networks, "
            "or were changed: save it again"
        )
    try:
        origin = _origin(Path(folder), about.get("origin"))
    except (KeyError, TypeError) as error:
        raise FileError(f"the origin saved in {folder} cannot be read ({error}): save it again") from error
    if tokenizer is not None and isinstance(origin, Loaded):
        origin = dataclasses.replace(origin, find_tokenizer=lambda: tokenizer)
    return dataclasses.replace(net, origin=origin)


def _origin(folder: Path, about: dict[str, Any] | None) -> Origin | None:
    if about is None:
        return None
    fields = dict(about)
    kind = fields.pop("kind")
    if kind == "untrained":
        return Untrained(**fields)
    embedding, config = read_embedding(folder, fields.pop("embedding")), _config(fields.pop("config"))
    place = Place(str(folder / TOKENIZER), str(folder), {"local_files_only": True})
    parity = Parity(**fields.pop("parity"))
    return Loaded(
        embedding=embedding,
        parity=parity,
        find_tokenizer=lambda: read_tokenizer(place),
        config=config,
        **fields,
    )


def _config(fields: dict[str, Any] | None) -> Any:
    if fields is None:
        return None
    need("the config of a network that was loaded", "transformers")
    from transformers import AutoConfig

    return AutoConfig.for_model(**fields)
