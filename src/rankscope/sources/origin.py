"""`CheckpointOrigin`: the tokenizer, embedding, config and parity of a network that was loaded."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import RankscopeError, TokensError, require
from rankscope.nets import Encoded, Inputs, Transformer
from rankscope.sources.embedding import Embedding, ImageEmbedding, SoundEmbedding, WaveEmbedding, write_embedding
from rankscope.sources.parity import Parity
from rankscope.sources.to_hf import to_hf

WHOLE = (ImageEmbedding, SoundEmbedding, WaveEmbedding)  # Embeddings of images and sound, which are not cut to a length
TOKENIZER = "tokenizer"  # The folder of a saved network's tokenizer


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointOrigin:
    """Where a loaded network came from, and what turns text into its tokens: `net.origin`."""

    name: str  # What was given to `load`, or the class of an in-memory model
    family: str
    embedding: Embedding
    parity: Parity
    find_tokenizer: Callable[[], Any]  # Reads the tokenizer; called once, when text is first encoded
    weights: str  # "trained", as checkpoints are; of a model in memory nobody knows: "given"
    details: dict[str, Any]  # Model type, revision and the like, for the manifest
    config: Any = None  # The config of the original, from which `to_hf` builds a model

    def __repr__(self) -> str:
        parity = self.parity
        upto = f" on up to {parity.tokens} tokens" if parity.tokens else ""
        attention = "" if parity.attention is None else f" and {parity.attention:.0e} in attention"
        notes = "".join(f"; {note}" for note in self.details.get("notes", ()))
        if parity.named is not None:
            notes = f"; its config names {parity.named}, which was not reached{notes}"
        differs = f"within {parity.states:.0e} of the original in states{attention}{upto}"
        return f"CheckpointOrigin({self.name}, family {self.family}, {differs}{notes})"

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model, read at first use."""
        return self.find_tokenizer()

    def encode(self, inputs: Inputs, length: int, padding: Tensor | None = None) -> Encoded:
        """Turn texts, ids, images or sound into tokens of layer 0, as the model does, with special tokens.

        `length` is the most tokens of each text; `padding` goes with ids."""
        if isinstance(inputs, Tensor):
            cut = inputs if isinstance(self.embedding, WHOLE) else inputs[..., :length]
            return self.embedding.embed(cut, None if padding is None else padding[..., :length])
        if isinstance(self.embedding, WHOLE):
            expected_shape = ", ".join(map(str, ("batch", *self.embedding.shape)))
            what = "sees images" if isinstance(self.embedding, ImageEmbedding) else "hears sound"
            message = f"{self.name} {what}: encode takes a floating tensor [{expected_shape}]; got text"
            raise TokensError(message, subject="texts")
        lists = self.ids([inputs] if isinstance(inputs, str) else inputs, length)
        require(any(lists), f"at least one text must hold a token; none of {len(lists)} does", TokensError, "texts")
        longest = max(map(len, lists))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in lists])
        lengths = torch.tensor([len(row) for row in lists])
        return self.embedding.embed(ids, torch.arange(longest)[None] >= lengths[:, None])

    def ids(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Token ids of each text, cut to `length`."""
        if not texts:
            return []
        token_ids = list(self.tokenizer(list(texts), truncation=True, max_length=length)["input_ids"])
        cut = all(len(ids) <= length for ids in token_ids)  # without room, tokenizers cut nothing at all
        message = f"tokens must leave room for the special tokens of {self.name}'s tokenizer; got {length}"
        require(cut, message, TokensError, "tokens")
        return token_ids

    def words(self, texts: Sequence[str], length: int) -> list[list[str]]:
        """The tokens of each text, readable: subwords as the tokenizer writes them."""
        return [list(self.tokenizer.convert_ids_to_tokens(ids)) for ids in self.ids(texts, length)]

    def save(self, folder: Path) -> dict[str, Any]:
        """Write embedding and tokenizer (if any) into a folder; return the rest that `load` needs."""
        with suppress(AttributeError, RankscopeError):  # none came along: `encode` takes token ids
            self.tokenizer.save_pretrained(folder / TOKENIZER)
        fields = {name: getattr(self, name) for name in ("name", "family", "weights", "details")}
        config = None if self.config is None else json.loads(self.config.to_json_string(use_diff=False))
        embedding = write_embedding(folder, self.embedding)
        return {"kind": "loaded", **fields, "parity": self.parity.described(), "embedding": embedding, "config": config}

    def to_hf(self, net: Transformer, config: Any = None) -> Any:
        """A model of transformers that computes the same as the network (`to_hf.py`)."""
        return to_hf(net, self.family, self.embedding, self.config if config is None else config)

    def described(self) -> dict[str, Any]:
        """The fields of this origin that go into a run's manifest."""
        fields = {"name": self.name, "weights": self.weights, "family": self.family}
        return {**fields, "parity": self.parity.described(), **self.details}

    def fingerprint(self) -> str:
        """SHA-256 over the embedding's tensors and the tokenizer, if there is one."""
        digest = hashlib.sha256()
        _update(digest, self.embedding)
        try:
            digest.update(_rules(self.tokenizer))
        except RankscopeError:
            digest.update(b"no tokenizer")
        return digest.hexdigest()


def _update(digest: Any, value: object) -> None:
    """Add a tensor, or a dataclass that holds tensors, to a digest."""
    if isinstance(value, Tensor):
        digest.update(f"{torch.float64} {tuple(value.shape)}".encode())  # the dtype of use, not of storage
        for rows in torch.split(value.detach().reshape(-1), 2**20):
            digest.update(rows.cpu().double().numpy().data)
    elif isinstance(value, tuple) and any(map(is_dataclass, value)):
        for item in value:
            _update(digest, item)
    elif is_dataclass(value):
        for row in fields(value):
            digest.update(row.name.encode())
            _update(digest, getattr(value, row.name))
    else:
        digest.update(repr(value).encode())


def _rules(tokenizer: Any) -> bytes:
    """Everything that a tokenizer does, as bytes: its files, less the length that it last cut to."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        return json.dumps({**rules, "truncation": None, "padding": None}, sort_keys=True).encode()
    if not hasattr(tokenizer, "save_pretrained"):
        return repr(type(tokenizer)).encode()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file())
