"""`CheckpointOrigin`: the tokenizer, embedding, config and parity of a network that was loaded, and the way back into a
model of transformers (`to_hf`): the inverse of a family's mapping, whatever the family."""

import copy
import hashlib
import json
import reprlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import RankscopeError, SourceError, TokensError, require
from rankscope.nets import Architecture, Encoded, Inputs, Transformer
from rankscope.sources.embedding import Embedding, WholeEmbedding, tensors_of, write_embedding
from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.parity import Parity, check

SAVE = "save it as it is, net.save(folder)"  # The advice for a network that no model of transformers can hold
WITHIN = 1e-13  # Relative difference up to which a tensor that was mapped again is the network's
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

    def encode(self, inputs: Inputs, max_length: int, padding: Tensor | None = None) -> Encoded:
        """Turn texts, ids, images or sound into tokens of layer 0, as the model does, with special tokens.

        `max_length` is the most tokens of each text; `padding` goes with ids."""
        if isinstance(inputs, Tensor):
            cut = inputs if isinstance(self.embedding, WholeEmbedding) else inputs[..., :max_length]
            return self.embedding.embed(cut, None if padding is None else padding[..., :max_length])
        if isinstance(self.embedding, WholeEmbedding):
            message = (
                f"{self.name} takes {self.embedding.kind}: encode takes a floating tensor {self.embedding.expected}"
            )
            raise TokensError(f"{message}; got text", subject="texts")
        lists = self.ids([inputs] if isinstance(inputs, str) else inputs, max_length)
        require(any(lists), f"at least one text must hold a token; none of {len(lists)} does", TokensError, "texts")
        longest = max(map(len, lists))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in lists])
        lengths = torch.tensor([len(row) for row in lists])
        return self.embedding.embed(ids, torch.arange(longest)[None] >= lengths[:, None])

    def ids(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """Token ids of each text, cut to `max_length`."""
        if not texts:
            return []
        token_ids = list(self.tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"])
        cut = all(len(ids) <= max_length for ids in token_ids)  # without room, tokenizers cut nothing at all
        message = f"max_length must leave room for the special tokens of {self.name}'s tokenizer; got {max_length}"
        require(cut, message, TokensError, "max_length")
        return token_ids

    def words(self, texts: Sequence[str], max_length: int) -> list[list[str]]:
        """The tokens of each text, readable: subwords as the tokenizer writes them."""
        return [list(self.tokenizer.convert_ids_to_tokens(ids)) for ids in self.ids(texts, max_length)]

    def save(self, folder: Path) -> dict[str, Any]:
        """Write embedding and tokenizer (if any) into a folder; return the rest that `load` needs."""
        with suppress(AttributeError, RankscopeError):  # none came along: `encode` takes token ids
            self.tokenizer.save_pretrained(folder / TOKENIZER)
        fields = {name: getattr(self, name) for name in ("name", "family", "weights", "details")}
        config = None if self.config is None else json.loads(self.config.to_json_string(use_diff=False))
        embedding = write_embedding(folder, self.embedding)
        return {"kind": "loaded", **fields, "parity": self.parity.described(), "embedding": embedding, "config": config}

    def to_hf(self, net: Transformer, config: Any = None) -> Any:
        """A model of transformers that computes the same as the network (`to_hf`)."""
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


def to_hf(net: Transformer, family_name: str, embedding: Embedding, config: Any) -> Any:
    """A model of transformers, without a head for a task, that computes what the network does.

    A family says how a canonical tensor T is made of a model's parameters p: by putting them in another order, at
    times scaled, or moved by one: `T = A p + b`, every row of A with one entry. So

        p = A^T (T - b) / (A^T A 1),

    with b the mapping at p = 0, A 1 the mapping at 1 less b, and A^T its gradient. What comes out is mapped again
    and compared with the network, tensor by tensor, and then held against it in the parity check: a mapping that
    is not of this kind, or a variant that the family has no config for, does not get through.

    Parts that the network does not have (a pooler) are drawn from seed 0."""
    message = f"a family of one's own, {family_name!r}, has no model of transformers to write: {SAVE}"
    require(family_name in FAMILIES, message, SourceError, "family")
    family, wide = FAMILIES[family_name], net.to(torch.float64, "cpu")
    message = f"an encoder-decoder is not written from one of its sides; got its {family.side}: {SAVE}"
    require(not family.side, message, SourceError, "family")
    config = _fitting(config, family, wide.arch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.random_model(config)
    core = family.prepare_for_float64(family.core(model))
    _fill(core, family, wide)
    _embed(core, family, embedding)
    check(wide, family, copy.deepcopy(core), embedding, f"the {config.model_type} model of this network")
    return model.to(net.dtype)


def _fitting(config: Any, family: Family, arch: Architecture) -> Any:
    """The config, for as many layers; refused where the family has none for this architecture."""
    require(
        config is not None, "the config of the model to write is not known: net.to_hf(config)", SourceError, "config"
    )
    config = copy.deepcopy(config)
    if getattr(config, "model_type", None) not in family.types:
        kind = getattr(config, "model_type", type(config).__name__)
        expected = f"config must be one of {family.name}, model type {' or '.join(family.types)}"
        raise SourceError(f"{expected}; got {kind!r}", subject="config")
    config._attn_implementation = "eager"  # a config may name a kernel, which would be fetched from the hub
    theirs = family.architecture(config)
    if theirs.layers != arch.layers and getattr(config, "layer_types", None) is None:
        config.num_hidden_layers = arch.layers
        theirs = family.architecture(config)
    names = [field.name for field in fields(arch) if field.name != "biases"]
    unlike = [name for name in names if getattr(arch, name) != getattr(theirs, name)]
    if unlike:
        name = unlike[0]
        has, says = (reprlib.repr(getattr(described, name)) for described in (arch, theirs))
        message = f"{config.model_type} must be able to express the network; this one has {name} {has}, and the"
        raise SourceError(f"{message} config says {says}: {SAVE}, or pass another config", subject=name)
    return config


@torch.no_grad()
def _at(core: Any, family: Family, arch: Architecture, value: float) -> dict[str, Tensor]:
    """The mapping where every parameter has this value."""
    for parameter in _numbers(core):
        parameter.fill_(value)
    return {name: part.clone() for name, part in family.tensors(core, arch).items()}


def _numbers(core: Any) -> list[Tensor]:
    """All that a mapping may read: parameters, and buffers such as the corrections of DeepSeek V3's routers."""
    return [*core.parameters(), *(buffer for buffer in core.buffers() if buffer.is_floating_point())]


def _fill(core: Any, family: Family, net: Transformer) -> None:
    """Put the network's tensors into the model's parameters."""
    arch, state = net.arch, net.state_dict()
    before = [parameter.detach().clone() for parameter in _numbers(core)]
    at_zero, at_one = _at(core, family, arch, 0.0), _at(core, family, arch, 1.0)
    if at_zero.keys() != state.keys():
        odd = sorted(at_zero.keys() ^ state.keys())[0]
        whose = "the network lacks" if odd in at_zero else "the model has no place for"
        reason = f"{family.name} must be able to express the network; {whose} {odd}"
        raise SourceError(f"{reason}: {SAVE}, or pass another config", subject="weights")
    parameters = _numbers(core)
    for parameter in parameters:
        parameter.requires_grad_(True)
    tensors = family.tensors(core, arch)
    made = [name for name in state if tensors[name].requires_grad]  # not terms that a config leaves out, zero for all
    outputs = [tensors[name] for name in made]

    def transposed(values: Mapping[str, Tensor]) -> list[Tensor | None]:
        moved = [values[name] - at_zero[name] for name in made]
        return list(torch.autograd.grad(outputs, parameters, moved, retain_graph=True, allow_unused=True))

    moved, square = transposed(state), transposed(at_one)
    with torch.no_grad():
        for parameter, kept, above, below in zip(parameters, before, moved, square, strict=True):
            parameter.requires_grad_(False)
            parameter.copy_(kept)
            if above is not None and below is not None:
                parameter.copy_(torch.where(below == 0, kept, above / below.masked_fill(below == 0, 1.0)))
        for name, part in family.tensors(core, arch).items():
            size = float(state[name].abs().max()) if state[name].numel() else 0.0
            back = float((part - state[name]).abs().amax() if part.numel() else 0.0) <= WITHIN * size
            reason = f"{family.name} must be able to express the network; {name} does not come back"
            require(back, f"{reason}: {SAVE}", SourceError, "weights")


@torch.no_grad()
def _embed(core: Any, family: Family, embedding: Embedding) -> None:
    """The embedding's tensors share the model's memory: they are written where they lie."""
    present = family.embedding(core)
    mine, theirs = tensors_of(embedding), tensors_of(present)
    shapes = [{name: part.shape for name, part in field.items()} for field in (mine, theirs)]
    if shapes[0] != shapes[1]:
        reason = f"the config must describe the network's own embedding, {embedding!r}; it describes {present!r}"
        raise SourceError(f"{reason}: pass the config that the network came with", subject="config")
    for name, part in theirs.items():
        part.copy_(mine[name])
    for name, part in tensors_of(family.embedding(core)).items():
        reason = f"{family.name} must be able to express the embedding; {name} does not come back"
        require(torch.equal(part, mine[name].to(part)), f"{reason}: {SAVE}", SourceError, "embedding")
