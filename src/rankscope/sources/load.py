"""`load`: a model of Hugging Face's kind as a canonical network, checked against the original."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.errors import RankscopeError, SourceError
from rankscope.extras import need
from rankscope.naming import forgiven
from rankscope.nets import Transformer
from rankscope.nets.storage import is_saved
from rankscope.sources.adapters import base_of, is_adapter, merged, read_adapter, unwrapped
from rankscope.sources.canonical import canonical
from rankscope.sources.checkpoint import MINILM, Checkpoint, first_line, place
from rankscope.sources.checkpoint import tokenizer as read_tokenizer
from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.families.family import is_of_transformers
from rankscope.sources.loaded import Loaded
from rankscope.sources.model_types import family_of
from rankscope.sources.parity import check
from rankscope.sources.quantised import dequantised, read_dequantised
from rankscope.sources.saved import read_saved
from rankscope.sources.streamed import from_shelf, on_shelf, refuse_stream


def load(
    source: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    family: str | Family | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    cache_dir: str | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    remote_code: bool = False,
    stream: bool | None = None,
) -> Transformer:
    """The network of a model: `"minilm"`, a local directory, an id on the hub, or a model in memory; or one
    that `net.save` wrote, as it was.

    In float64 unless a `dtype` is asked for; a saved network has its own.

    An in-memory model is left as it is; adapters (peft) are merged and quantised weights
    dequantised, on a copy, and `net.origin` says so.
    `family` names the family where a config does not say its model
    type, or which part of a model to load: an encoder-decoder is its encoder unless the decoder is asked for,
    `family="t5_decoder"`, which needs a memory to read, `net.with_memory(M)`; or is one of your own, a
    `sources.Family`, for any module in memory.
    `revision`, `cache_dir`, `local_files_only` and `token` are as transformers has them; code that comes with
    a checkpoint runs only with `remote_code=True`.

    `stream=True` leaves the layers of a checkpoint in its files (safetensors): they are read one at a time,
    whatever is done with the network. Unless told, so is a network that does not fit into the memory that is
    free; `net.streamed` says so. Numbers are the same, bit for bit.

    Every load ends with the parity check (`parity.py`); `net.origin.parity` has what it found. The check runs
    original and network in float64 on the CPU, a layer at a time where weights come from safetensors; of
    other files, adapters, quantised weights and models in memory, all at once: some 16 bytes of memory for
    each weight, for a moment.

    >>> net = load("minilm")
    >>> net.arch.layers, net.encode(["Call me Ishmael."]).X.shape
    (6, torch.Size([1, 8, 384]))
    """
    if tokenizer is not None and not callable(tokenizer):
        raise SourceError(f"tokenizer must be a tokenizer of transformers; got a {type(tokenizer).__name__}")
    if isinstance(source, str | Path) and is_saved(source):
        refuse_stream(stream, str(source), "was written by net.save")
        return read_saved(source, tokenizer).to(dtype, device)
    embedded = isinstance(source, str) and forgiven(source, ["minilm"]) == "minilm"
    need("loading a model", "transformers", *([MINILM] if embedded else []))
    shelf = None
    if isinstance(source, nn.Module):
        refuse_stream(stream, type(source).__name__, "is in memory already")
        checkpoint, name = in_memory(source, family), type(source).__name__
        details: dict[str, Any] = {}

        def find() -> Any:
            raise SourceError(
                f"{name} was loaded from memory, without a tokenizer: load(model, tokenizer=) takes one, and "
                "encode takes token ids"
            )

    elif isinstance(source, str) or hasattr(source, "__fspath__"):
        options = {"revision": revision, "cache_dir": cache_dir, "local_files_only": local_files_only,
                   "token": token, "trust_remote_code": remote_code}  # fmt: skip
        given = {key: value for key, value in options.items() if value is not None}
        found = place(str(source), given)
        adapter = is_adapter(found)
        name = found.name
        if adapter:
            refuse_stream(stream, name, "is an adapter, which is merged into weights in memory")
            checkpoint = read_adapter(found, family)
        else:
            shelf = on_shelf(found, family, stream)
            checkpoint = read_dequantised(found, family) if shelf is None else shelf.checkpoint

        def find() -> Any:
            own = not adapter or (Path(found.where) / "tokenizer_config.json").is_file()
            return read_tokenizer(found if own else base_of(found))

        details = {} if revision is None or found.local else {"revision": revision}
    else:
        raise SourceError(
            "load takes a model of transformers, a directory, an id on the hub or 'minilm'; got a "
            f"{type(source).__name__}"
        )
    with built_as(checkpoint.family, name):
        core = checkpoint.core
        if shelf is None:
            net, embedding = canonical(checkpoint, name)
            parity = check(net, checkpoint.family, core, embedding, name)
            net = net.to(dtype, device)
        else:
            net, embedding, parity = from_shelf(shelf, dtype or torch.float64, device, stream)
    config = core.config if is_of_transformers(core) else None
    details["model_type"] = checkpoint.family.name if config is None else config.model_type
    if tokenizer is not None:
        find = lambda: tokenizer  # noqa: E731
    weights = "given" if isinstance(source, nn.Module) else "trained"
    notes = [*checkpoint.notes, *(["layers read from its files one at a time"] if net.streamed else [])]
    if notes:
        details["notes"] = notes
    origin = Loaded(name, checkpoint.family.name, embedding, parity, find, weights, details, config)
    return replace(net, origin=origin)


def in_memory(model: nn.Module, family: str | Family | None = None) -> Checkpoint:
    """A copy in float64: the user's model is never touched."""
    model = unwrapped(model)
    config = getattr(model, "config", None)
    own = isinstance(family, Family)  # says itself how to read the model, whatever that is
    if not own and (config is None or not hasattr(config, "model_type")):
        raise SourceError(
            f"load takes a model of transformers; a {type(model).__name__} has no config: watch measures any "
            "module as it is, and a family of your own maps it (docs/extending.md)"
        )
    from transformers import PreTrainedModel

    if not own and not isinstance(model, PreTrainedModel):
        raise SourceError(
            f"load takes a model of transformers; a {type(model).__name__} wraps one or is a part of one: "
            "give the model itself, or watch it as it is"
        )
    if any(weight.is_meta for weight in model.parameters()):
        raise SourceError(
            f"the weights of {type(model).__name__} must be in memory; they are on the meta device, which "
            "holds no numbers: load the model from its files"
        )
    kind = family_of(getattr(config, "model_type", None), family or _alone(model))
    opened, notes = dequantised(model)
    core = _copied(kind.core(opened)).to("cpu", torch.float64).eval()
    return merged(Checkpoint(core, kind, (), notes=notes))


def _alone(model: nn.Module) -> str | None:
    """The family of a decoder that was taken out of its encoder-decoder."""
    config: Any = model.config
    if not (type(model).__name__.endswith("Decoder") or getattr(model, "is_decoder", False)):
        return None
    kinds = [each for each in FAMILIES.values() if config.model_type in each.types and each.side == "decoder"]
    return kinds[0].name if kinds else None


def _copied(core: nn.Module) -> Any:
    """Weights are brought over one by one: where the model is, there is no room for a second one."""
    weights = {
        id(each): nn.Parameter(each.detach().to("cpu", torch.float64, copy=True), each.requires_grad)
        for each in core.parameters()
        if type(each) is nn.Parameter and each.is_floating_point()
    }
    return copy.deepcopy(core, weights)


@contextmanager
def built_as(family: Family, name: str) -> Iterator[None]:
    """A model that goes by a family's name and is built otherwise fails in ways of its own: one sentence."""
    try:
        yield
    except RankscopeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if "allocate" in str(error):  # too little memory says nothing of the model
            raise
        raise SourceError(
            f"{name} must be built like transformers' own {family.name}; it is not ({first_line(error)}): "
            "watch measures it as it is"
        ) from error
