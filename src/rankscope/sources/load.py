"""`load`: a model of Hugging Face's kind as a canonical network, checked against the original."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import RankscopeError, SourceError
from rankscope.nets import Architecture, Transformer
from rankscope.nets.fields import BIASES
from rankscope.nets.saved import is_saved
from rankscope.sources.adapters import base_of, is_adapter, merged, read_adapter, unwrapped
from rankscope.sources.checkpoint import Checkpoint, first_line, place
from rankscope.sources.checkpoint import tokenizer as read_tokenizer
from rankscope.sources.embedding import Embedding
from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.families.family import config_of, is_of_transformers
from rankscope.sources.loaded import Loaded
from rankscope.sources.model_types import family_of
from rankscope.sources.parity import check
from rankscope.sources.quantised import dequantised, read_dequantised
from rankscope.sources.saved import read_saved


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
) -> Transformer:
    """The network of a model: `"minilm"`, a local directory, an id on the hub, or a model in memory; or one
    that `net.save` wrote, as it was.

    In float64 unless a `dtype` is asked for; a saved network has its own.

    An in-memory model is left as it is; adapters (peft) are merged and quantised weights
    dequantised, on a copy, and `net.origin` says so.
    `family` names the family where a config does not say its model
    type, or which part of a model to load: an encoder-decoder is its encoder unless the decoder is asked for,
    `family="t5_decoder"`, which needs a memory to read, `net.reading(M)`; or is one of your own, a
    `sources.Family`, for any module in memory.
    `revision`, `cache_dir`, `local_files_only` and `token` are as transformers has them; code that comes with
    a checkpoint runs only with `remote_code=True`.

    Every load ends with the parity check (`parity.py`); `net.origin.parity` has what it found. The check runs
    original and network in float64 on the CPU: some 16 bytes of memory for each weight, for a moment.

    >>> net = load("minilm")
    >>> net.arch.layers, net.encode(["Call me Ishmael."]).X.shape
    (6, torch.Size([1, 8, 384]))
    """
    if tokenizer is not None and not callable(tokenizer):
        raise SourceError(f"tokenizer must be a tokenizer of transformers; got a {type(tokenizer).__name__}")
    if isinstance(source, str | Path) and is_saved(source):
        return read_saved(source, tokenizer).to(dtype, device)
    if isinstance(source, nn.Module):
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
        checkpoint, name = (read_adapter if adapter else read_dequantised)(found, family), found.name

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
        net, embedding = canonical(checkpoint, name)
        core = checkpoint.core
        parity = check(net, checkpoint.family, core, embedding, name)
    config = core.config if is_of_transformers(core) else None
    details["model_type"] = checkpoint.family.name if config is None else config.model_type
    if tokenizer is not None:
        find = lambda: tokenizer  # noqa: E731
    weights = "given" if isinstance(source, nn.Module) else "trained"
    if checkpoint.notes:
        details["notes"] = list(checkpoint.notes)
    origin = Loaded(name, checkpoint.family.name, embedding, parity, find, weights, details, config)
    return replace(net, origin=origin).to(dtype, device)


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


def canonical(checkpoint: Checkpoint, name: str) -> tuple[Transformer, Embedding]:
    """The canonical network of a model in float64, and its embedding."""
    family = checkpoint.family
    core = family.widen(family.core(checkpoint.model))
    core.requires_grad_(False)
    arch = family.architecture(config_of(core))
    blocks = family.blocks(core)
    if len(blocks) != arch.layers:
        raise SourceError(
            f"the config of {name} says {arch.layers} layers; the model has {len(blocks)} blocks"
        )
    tensors = family.others(core)
    stored = blocks[:1] if arch.shared else blocks
    layers: dict[int, dict[str, Tensor]] = {}
    for index, block in enumerate(stored):
        # A block that comes several times keeps one set of tensors.
        layer = layers.setdefault(id(block), family.layer(block, arch))
        tensors |= {f"layers.{index}.{part}": tensor for part, tensor in layer.items()}
    embedding = family.embedding(core)
    _refuse_missing(checkpoint, tensors, embedding, name)
    if not all(bool(tensor.isfinite().all()) for tensor in [*tensors.values(), *_tensors(embedding)]):
        raise SourceError(
            f"the weights of {name} must be finite numbers; some are NaN or infinite: the checkpoint is "
            "damaged, or its training diverged"
        )
    arch = _with_biases(arch, tensors)
    kept: dict[int, Tensor] = {}
    own = {part: kept.setdefault(id(tensor), tensor.contiguous()) for part, tensor in tensors.items()}
    return Transformer.from_weights(arch, own), embedding


def _with_biases(arch: Architecture, tensors: dict[str, Tensor]) -> Architecture:
    """The biases that the weights have."""
    places = {"mlp": "mlp.up", "norm": "mlp_norm"}
    names = {part: (places.get(part, f"attention.{part}"), f"attention.{part}_latent") for part in BIASES}
    found = [part for part in BIASES if any(f"layers.0.{name}.bias" in tensors for name in names[part])]
    return arch.replace(biases=tuple(found))


def _refuse_missing(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], embedding: Embedding, name: str
) -> None:
    """Weights that the files lack must not be among those that the network reads: they would be random."""
    used = {tensor.untyped_storage().data_ptr() for tensor in [*tensors.values(), *_tensors(embedding)]}
    parameters = dict(checkpoint.model.named_parameters())
    lacking = [
        key
        for key in checkpoint.missing
        if key in parameters and parameters[key].untyped_storage().data_ptr() in used
    ]
    if lacking:
        raise SourceError(
            f"the weights of {name} must fit its config; {len(lacking)} that the config asks for are "
            f"missing, {lacking[0]} among them: config and weights do not belong together"
        )


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in getattr(value, "__dict__", {}).values() for tensor in _tensors(part)]
