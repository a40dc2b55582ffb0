"""`load`: a Hugging Face model as a canonical network, checked against the original.

The order: find the checkpoint (`checkpoint.locate`), read it (`checkpoint.read`, `adapters`,
or `streamed_checkpoint` for layers left in files), map it (`canonical`, with the family's file), check it
(`parity`), and attach the origin. `named_network` and `read_saved` are the other ways to a network.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from rankscope.errors import FileError, RankscopeError, SourceError, require
from rankscope.extras import need
from rankscope.naming import forgiven
from rankscope.nets import Architecture, Transformer, is_saved, read, usual_modes
from rankscope.sources.adapters import base_of, dequantised, is_adapter, merged, read_adapter, read_plain, unwrapped
from rankscope.sources.canonical import canonical
from rankscope.sources.checkpoint import (
    MINILM,
    Checkpoint,
    CheckpointLocation,
    HubOptions,
    first_line,
    hub_options,
    locate,
    quiet,
)
from rankscope.sources.checkpoint import tokenizer as read_tokenizer
from rankscope.sources.embedding import read_embedding
from rankscope.sources.families import FAMILIES, Family, family_of, module_family
from rankscope.sources.families.family import is_of_transformers
from rankscope.sources.origin import TOKENIZER, CheckpointOrigin
from rankscope.sources.parity import Parity, check
from rankscope.sources.presets import PRESETS, RandomOrigin, fresh
from rankscope.sources.streamed_checkpoint import StreamedCheckpoint, refuse_stream


@usual_modes()
def load(
    source: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    family: str | Family | None = None,
    tokenizer: Any = None,
    stream: bool | None = None,
    **options: Unpack[HubOptions],
) -> Transformer:
    """Load a Hugging Face model as a canonical network, checked against the original (parity).

    The check runs original and network in float64 on the CPU and compares hidden states and attention
    patterns; `net.origin.parity` has the differences, and above 1e-9 the load is refused. Weights in
    safetensors are checked a layer at a time; other files, adapters, quantised weights and models in memory
    at once, which takes some 16 bytes of memory per weight for a moment.

    Args:
        source: `"minilm"` (the embedded model), `"moby-gpt"` or `"digit-vit"` (shipped; `"digit-vit/checkpoint-640"`
            is it earlier in its training), a local directory, an id on the hub, a model in memory (which is not
            changed), or a folder that `net.save` wrote. Adapters (peft) are merged and quantised weights
            dequantised, on a copy; `net.origin` says so.
        dtype: The dtype of the network; float64 if left out, and for a saved network the one it has.
        device: Where the network is put.
        family: The family, where a config does not say its model type; or the side of an encoder-decoder
            (`"t5_decoder"`, which then needs a memory: `net.with_memory(M)`); or a `sources.Family` of your
            own, for any module in memory.
        tokenizer: A tokenizer of transformers in place of the model's own.
        stream: True leaves layers in their safetensors files and reads them one at a time; False never does.
            By default networks that do not fit into free memory are streamed; `net.streamed` says so.
            Numbers are the same, bit for bit.
        options: Those of `HubOptions`, as in transformers: `revision`, `cache_dir`, `local_files_only`, `token` and
            `trust_remote_code`.

    Returns:
        The network, a `Transformer` with its origin.

    Raises:
        SourceError: The model cannot be read, or no family maps it.
        ParityError: The network does not compute what the original does.
        FileError: A file is missing or damaged.

    >>> net = load("minilm")
    >>> net.arch.layers, net.encode(["Call me Ishmael."]).X.shape
    (6, torch.Size([1, 8, 384]))
    """
    message = f"tokenizer must be a tokenizer of transformers; got a {type(tokenizer).__name__}"
    require(tokenizer is None or callable(tokenizer), message, SourceError, "tokenizer")
    given = hub_options(options)
    if isinstance(source, str | Path) and is_saved(source):
        refuse_stream(stream, str(source), "was written by net.save")
        return read_saved(source, tokenizer).to(dtype, device)
    embedded = isinstance(source, str) and forgiven(source, ["minilm"]) == "minilm"
    need("loading a model", "transformers", *([MINILM] if embedded else []))
    streamed, details = None, dict[str, Any]()
    find: Callable[[], Any]
    if isinstance(source, nn.Module):
        refuse_stream(stream, type(source).__name__, "is in memory already")
        checkpoint, name, find = in_memory(source, family), type(source).__name__, partial(no_tokenizer, source)
    elif isinstance(source, str) or hasattr(source, "__fspath__"):
        location = locate(str(source), given)
        adapter, name, find = is_adapter(location), location.name, partial(read_tokenizer, location)
        if adapter:
            refuse_stream(stream, name, "is an adapter, which is merged into weights in memory")
            checkpoint = read_adapter(location, family)
            if not (Path(location.path_or_id) / "tokenizer_config.json").is_file():
                find = partial(read_tokenizer, base_of(location))
        else:
            streamed = StreamedCheckpoint.of(location, family, stream)
            checkpoint = read_plain(location, family) if streamed is None else streamed.checkpoint
        details = {"revision": given["revision"]} if "revision" in given and not location.local else {}
    else:
        expected = "load takes a model of transformers, a directory, an id on the hub or 'minilm'"
        raise SourceError(f"{expected}; got a {type(source).__name__}", subject="source")
    with built_as(checkpoint.family, name):
        core = checkpoint.core
        if streamed is None:
            net, embedding = canonical(checkpoint, name)
            parity = check(net, checkpoint.family, core, embedding, name)
            net = net.to(dtype, device)
        else:
            net, embedding, parity = streamed.checked_network(dtype or torch.float64, device, stream)
    config = core.config if is_of_transformers(core) else None
    details["model_type"] = checkpoint.family.name if config is None else config.model_type
    if notes := [*checkpoint.notes, *(["layers read from its files one at a time"] if net.streamed else [])]:
        details["notes"] = notes
    find = find if tokenizer is None else lambda: tokenizer
    weights = "given" if isinstance(source, nn.Module) else "trained"
    origin = CheckpointOrigin(name, checkpoint.family.name, embedding, parity, find, weights, details, config)
    return replace(net, origin=origin)


def no_tokenizer(model: nn.Module) -> Any:
    """Raise the `SourceError` of a text for a model that was loaded from memory."""
    message = f"{type(model).__name__} was loaded from memory, without a tokenizer: load(model, tokenizer=) takes one"
    raise SourceError(message, subject="tokenizer")


def is_drawn(model: str) -> bool:
    """True if a network of this name has random weights: a preset or a JSON file of an architecture."""
    return model in PRESETS or model.endswith(".json") or Path(model).is_file()


def named_network(
    model: str, seed: int = 0, init: str = "bert", device: str = "cpu", stream: bool | None = None
) -> Transformer:
    """The network that a command line names: a preset (`bert-base`) or a JSON file of an architecture, both
    with random weights, or anything that `load` takes."""
    model = forgiven(model, ["minilm", *PRESETS])
    if not is_drawn(model):
        return load(model, device=device, stream=stream)
    refuse_stream(stream, model, "has random weights")
    if model in PRESETS:
        return fresh(model, seed=seed, init=init, device=device)
    return fresh(Architecture.read(model), seed, init, device=device, name=Path(model).stem)


def read_saved(folder: str | Path, tokenizer: Any = None) -> Transformer:
    """Read a saved network, bit for bit; `tokenizer` replaces the one that was saved with it."""
    arch, tensors, description = read(folder)
    net = Transformer.from_weights(arch, tensors)
    message = f"the files of {folder} must belong together; they are of different networks: save it again"
    require(net.fingerprint == description.get("fingerprint"), message, FileError, "files")
    if description.get("origin") is None:
        return net
    try:
        fields = dict(description["origin"])
        if fields.pop("kind") == "untrained":
            return replace(net, origin=RandomOrigin(**fields))
        fields["embedding"] = read_embedding(Path(folder), fields["embedding"])
        if fields["config"] is not None:
            need("the config of a network that was loaded", "transformers")
            from transformers import AutoConfig

            fields["config"] = AutoConfig.for_model(**fields["config"])
        location = CheckpointLocation(str(Path(folder) / TOKENIZER), str(folder), {"local_files_only": True})
        fields["parity"] = Parity(**fields["parity"])
        find = partial(read_tokenizer, location) if tokenizer is None else lambda: tokenizer
        return replace(net, origin=CheckpointOrigin(find_tokenizer=find, **fields))
    except (KeyError, TypeError) as error:
        message = f"the origin saved in {folder} cannot be read ({error}): save it again"
        raise FileError(message, subject="origin") from error


def in_memory(model: nn.Module, family: str | Family | None = None) -> Checkpoint:
    """A checkpoint of a model in memory: a copy in float64, so that the user's model is never changed."""
    model = unwrapped(model)
    config = getattr(model, "config", None)
    if not isinstance(family, Family) and not hasattr(config, "model_type"):
        family = module_family(model, family) or family
    own_family = isinstance(family, Family)  # says itself how to read the model, whatever that is
    if not own_family and not hasattr(config, "model_type"):
        message = "load takes a model of transformers, or a ViT of vit-pytorch or timm"
        message += f"; a {type(model).__name__} has no config: watch measures it as it"
        raise SourceError(f"{message} is, and a family of your own maps it (docs/extending.md)", subject="source")
    from transformers import PreTrainedModel

    if not own_family and not isinstance(model, PreTrainedModel):
        message = f"load takes a model of transformers; a {type(model).__name__} wraps one or is a part of one"
        raise SourceError(f"{message}: give the model itself, or watch it as it is", subject="source")
    if any(weight.is_meta for weight in model.parameters()):
        message = f"the weights of {type(model).__name__} must be in memory; they are on the meta device"
        raise SourceError(f"{message}: load the model from its files", subject="weights")
    model_type = getattr(config, "model_type", None)
    if family is None and (type(model).__name__.endswith("Decoder") or getattr(model, "is_decoder", False)):
        # A decoder that was taken out of its encoder-decoder.
        decoders = (each for each in FAMILIES.values() if each.side == "decoder")
        family = next((each for each in decoders if model_type in each.types), None)
    kind = family_of(model_type, family, lambda: model)
    opened, notes = dequantised(model)
    core, weights = kind.core(opened), {}
    for weight in core.parameters():  # one by one: the device of the model may have no room for a second one
        if type(weight) is nn.Parameter and weight.is_floating_point():
            data = weight.detach().to("cpu", torch.float64, copy=True)
            weights[id(weight)] = nn.Parameter(data, weight.requires_grad)
    core = copy.deepcopy(core, weights).to("cpu", torch.float64).eval()
    return merged(Checkpoint(core, kind, (), notes=notes))


@contextmanager
def built_as(family: Family, name: str) -> Iterator[None]:
    """A context manager that turns errors in mapping a model into a `SourceError` of one sentence: a model
    that goes by a family's name and is built differently fails in many ways."""
    try:
        yield
    except RankscopeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if "allocate" in str(error):  # too little memory says nothing of the model
            raise
        whose = "transformers' own " if family.types else ""
        reason = f"{name} must be built like {whose}{family.name}; it is not ({first_line(error)})"
        raise SourceError(f"{reason}: watch measures it as it is", subject="family") from error


class FamilyParity(NamedTuple):
    """The parity measured for one config of one family, or why it could not be."""

    family: str
    config: str  # What sets it apart within the family; empty where not even the configs could be made
    types: tuple[str, ...]
    parity: Parity | None
    failure: str = ""
    """What was said instead of a parity: the model could not be built, or is not what `load` computes."""


def survey(progress: Callable[[int, int], None] | None = None) -> Iterator[FamilyParity]:
    """Load a small random model of every config of every family, and yield each parity as it is measured; a model that
    fails has a failure in place of one, and the others are loaded."""
    cases: list[tuple[Family, str]] = []
    with quiet():  # configs may warn of themselves
        for family in FAMILIES.values():
            try:
                cases += [(family, label) for label in family.tiny_configs()]
            except Exception:  # where transformers makes none: `random_model` says why
                cases.append((family, ""))
    for done, (family, label) in enumerate(cases, 1):
        # Encoders are the default where a model has both sides.
        named = family.name if family.side == "decoder" else None
        try:
            with quiet():
                net: Any = load(random_model(family.name, label), family=named)
            parity = FamilyParity(family.name, label, family.types, net.origin.parity)
        except Exception as error:  # what another version of transformers may do to a model is any error
            failure = str(error) if isinstance(error, RankscopeError) else first_line(error)
            parity = FamilyParity(family.name, label, family.types, None, failure)
        if progress is not None:
            progress(done, len(cases))
        yield parity


def random_model(name: str, label: str, seed: int = 0) -> Any:
    """A small random model of a family, by the label of its config."""
    return built(FAMILIES[name], FAMILIES[name].tiny_configs()[label], seed)


def built(family: Family, config: Any, seed: int = 0) -> Any:
    """A random model of a config in float64, with every parameter moved off its initial zero or one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = family.random_model(config)
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model
