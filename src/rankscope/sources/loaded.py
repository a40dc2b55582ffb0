"""The origin of a network that was loaded: its tokenizer, its embedding, its parity."""

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

from rankscope.errors import RankscopeError, TokensError
from rankscope.nets import Encoded, Inputs, Transformer
from rankscope.sources.embedding import Embedding, ImageEmbedding, SoundEmbedding
from rankscope.sources.kept import write_embedding
from rankscope.sources.parity import Parity
from rankscope.sources.to_hf import to_hf

WHOLE = (ImageEmbedding, SoundEmbedding)
"""Embeddings of what is no text, and is not cut."""
TOKENIZER = "tokenizer"
"""The folder of a saved network's tokenizer."""


@dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """What a loaded network remembers."""

    name: str
    """What was given to `load`, or the class of an in-memory model."""
    family: str
    embedding: Embedding
    parity: Parity
    find_tokenizer: Callable[[], Any]
    """Reads the tokenizer; called once, when text is first encoded."""
    weights: str
    """"trained", as checkpoints are; of a model in memory nobody knows: "given"."""
    details: dict[str, Any]
    """Model type, revision and the like, for the manifest."""
    config: Any = None
    """The original's, by which `to_hf` writes it again."""

    def __repr__(self) -> str:
        seen = self.parity
        upto = f" on up to {seen.tokens} tokens" if seen.tokens else ""
        attention = "" if seen.attention is None else f" and {seen.attention:.0e} in attention"
        done = "".join(f"; {note}" for note in self.details.get("notes", ()))
        unseen = "" if seen.named is None else f"; its config names {seen.named}, which was not reached"
        return (
            f"Loaded({self.name}, family {self.family}, within {seen.states:.0e} of the original in states"
            f"{attention}{upto}{unseen}{done})"
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own."""
        return self.find_tokenizer()

    def encode(self, inputs: Inputs, length: int, padding: Tensor | None = None) -> Encoded:
        """Tokenised as the model does, special tokens and all."""
        if isinstance(inputs, Tensor):
            cut = inputs if isinstance(self.embedding, WHOLE) else inputs[..., :length]
            return self.embedding.embed(cut, None if padding is None else padding[..., :length])
        if isinstance(self.embedding, WHOLE):
            given = ", ".join(map(str, ("batch", *self.embedding.shape)))
            what = "sees images" if isinstance(self.embedding, ImageEmbedding) else "hears sound"
            raise TokensError(f"{self.name} {what}: encode takes a floating tensor [{given}]; got text")
        lists = self.ids([inputs] if isinstance(inputs, str) else inputs, length)
        if not any(lists):
            raise TokensError(f"at least one text must hold a token; received {len(lists)} texts without any")
        longest = max(map(len, lists))
        ids = torch.tensor([each + [0] * (longest - len(each)) for each in lists])
        number = torch.tensor([len(each) for each in lists])
        return self.embedding.embed(ids, torch.arange(longest)[None] >= number[:, None])

    def ids(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Token ids of each text, cut to `length`."""
        if not texts:
            return []
        found = list(self.tokenizer(list(texts), truncation=True, max_length=length)["input_ids"])
        if any(len(ids) > length for ids in found):  # tokenizers then cut nothing at all
            raise TokensError(
                f"tokens must leave room for the special tokens that the tokenizer of {self.name} adds; got "
                f"{length}"
            )
        return found

    def words(self, texts: Sequence[str], length: int) -> list[list[str]]:
        """The tokens of each text, readable: subwords as the tokenizer writes them."""
        return [list(self.tokenizer.convert_ids_to_tokens(ids)) for ids in self.ids(texts, length)]

    def save(self, folder: Path) -> dict[str, Any]:
        """The embedding and the tokenizer, where there is one, into files of a folder; what else `load` needs
        to read them again."""
        with suppress(AttributeError, RankscopeError):  # none came along: `encode` takes token ids
            self.tokenizer.save_pretrained(folder / TOKENIZER)
        fields = {name: getattr(self, name) for name in ("name", "family", "weights", "details")}
        return {
            "kind": "loaded", **fields, "parity": self.parity.described(),
            "embedding": write_embedding(folder, self.embedding),
            "config": None if self.config is None else json.loads(self.config.to_json_string(use_diff=False)),
        }  # fmt: skip

    def to_hf(self, net: Transformer, config: Any = None) -> Any:
        """A model of transformers that computes what the network does (`to_hf.py`)."""
        return to_hf(net, self.family, self.embedding, self.config if config is None else config)

    def described(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "name": self.name,
            "weights": self.weights,
            "family": self.family,
            "parity": self.parity.described(),
            **self.details,
        }

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
    """Take in a tensor, or what holds some."""
    if isinstance(value, Tensor):
        digest.update(
            f"{torch.float64} {tuple(value.shape)}".encode()
        )  # as it is used, whatever it is kept in
        for rows in torch.split(value.detach().reshape(-1), 2**20):
            digest.update(rows.cpu().double().numpy().data)
    elif is_dataclass(value):
        for each in fields(value):
            digest.update(each.name.encode())
            _update(digest, getattr(value, each.name))
    else:
        digest.update(repr(value).encode())


def _rules(tokenizer: Any) -> bytes:
    """All that a tokenizer does, as bytes: what its files hold, less the length it last cut to."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        return json.dumps({**rules, "truncation": None, "padding": None}, sort_keys=True).encode()
    if not hasattr(tokenizer, "save_pretrained"):
        return repr(type(tokenizer)).encode()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file())
