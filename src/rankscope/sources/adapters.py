"""Adapters and quantised weights: ordinary matrices in their place, on a copy.

Adapters (LoRA and its kin, as peft has them) are merged, so that the network has one matrix where the model has a
matrix and what was learned beside it:

    W' = W + (alpha / r) B A

The parity check holds the merged network against the model with its adapters beside its matrices. Quantised weights
become the numbers that they stand for. A network of them is not the quantised model to the last digit where that
rounds activations as well: parity is held against the dequantised copy, and `net.origin` says so.
"""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.errors import FileError, SourceError, require
from rankscope.extras import need
from rankscope.sources.checkpoint import Checkpoint, CheckpointLocation, clear_errors, first_line, locate, quiet, read
from rankscope.sources.families import Family

CONFIG = "adapter_config.json"
LOADERS = {
    "CAUSAL_LM": "AutoModelForCausalLM", "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification", "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
}  # fmt: skip
"""The class of transformers whose names of weights an adapter for a task uses; others use AutoModel's."""
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # Of weights that are not quantised


def is_adapter(location: CheckpointLocation) -> bool:
    """Whether a directory holds an adapter in the place of a model."""
    folder = Path(location.path_or_id)
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(location: CheckpointLocation) -> CheckpointLocation:
    """Where the model lies that an adapter was made for."""
    path = Path(location.path_or_id) / CONFIG
    try:
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        message = f"{path} must be a JSON file of an adapter's settings; {error}"
        raise FileError(message, subject="adapter_config.json") from error
    message = f"an adapter must say which model it is for; {path} has no base_model_name_or_path: load it with peft"
    require(base, message, SourceError, "base_model_name_or_path")
    return locate(base, location.options)


def read_adapter(location: CheckpointLocation, family: str | Family | None) -> Checkpoint:
    """The model that an adapter was made for, with the adapter."""
    need(f"the adapter {location.name}", "peft")
    with quiet():
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
        from peft.utils import load_peft_weights
    base = base_of(location)
    with clear_errors(location):
        config = PeftConfig.from_pretrained(location.path_or_id)
        class_name = (config.auto_mapping or {}).get("base_model_class") or LOADERS.get(str(config.task_type))
    checkpoint = read_plain(base, family, class_name)
    with quiet(), clear_errors(location):
        path = location.path_or_id
        adapted: Any = PeftModel.from_pretrained(checkpoint.model, path, autocast_adapter_dtype=False)
        stored, taken = load_peft_weights(path, device="cpu"), get_peft_model_state_dict(adapted)
    mismatched = sorted(stored.keys() ^ taken.keys())
    if mismatched:
        message = f"the adapter {location.name} must fit the model that it names, {base.name}; {len(mismatched)} of"
        raise SourceError(f"{message} its weights do not, {mismatched[0]} among them", subject="adapter")
    return merged(replace(checkpoint, model=unwrapped(adapted).double().eval()))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model of transformers inside peft's, adapters and all."""
    configs = getattr(model, "peft_config", {})
    if not hasattr(model, "get_base_model"):
        return model
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            message = f"load merges adapters that change matrices; adapter {name!r} is of type {kind}, which adds"
            raise SourceError(f"{message} tokens: watch measures it as it is", subject="adapter")
    return model.get_base_model()  # type: ignore[operator]


def merged(checkpoint: Checkpoint) -> Checkpoint:
    """With the adapters of its model merged on a copy, which shares all that has no adapter; as it is where
    there is none."""
    if "peft" not in sys.modules:
        return checkpoint
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    original = checkpoint.model
    adapter_layers: list[Any] = [part for part in original.modules() if isinstance(part, kinds)]
    if not adapter_layers:
        return checkpoint
    adapter_parameters = {id(weight) for part in adapter_layers for weight in part.parameters()}
    shared = {id(w): w for w in original.parameters() if id(w) not in adapter_parameters}
    model, merged_parts = copy.deepcopy(original, shared), 0
    names: dict[str, None] = {}
    with torch.no_grad():
        for path in outermost(model, kinds):
            part = model.get_submodule(path)
            try:
                replacement, names_merged = _without(part)
            except Exception as error:
                message = f"the adapter of {path} must be one that can be merged ({first_line(error)})"
                raise SourceError(f"{message}: watch measures the model as it is", subject="adapter") from error
            model.set_submodule(path, replacement)
            names |= dict.fromkeys(names_merged)
            merged_parts += bool(names_merged)
    note = f"adapters merged: {', '.join(names) or 'none is active'}, into {merged_parts} parts"
    return replace(checkpoint, model=model, original=original, notes=(*checkpoint.notes, note))


def outermost(model: nn.Module, kinds: tuple[type, ...]) -> list[str]:
    """Where modules of these kinds are, but for those inside another."""
    paths: list[str] = []
    for path, part in model.named_modules():
        if isinstance(part, kinds) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    return paths


def _without(part: Any) -> tuple[nn.Module, list[str]]:
    """A part with its active adapters merged, and their names."""
    active = [] if part.disable_adapters else list(part.active_adapters)
    if hasattr(part, "unload_and_optionally_merge_module"):
        options = {"merge": bool(active), "safe_merge": False, "adapter_names": None}
        return part.unload_and_optionally_merge_module(**options), active
    if active:
        part.merge()
    return part.get_base_layer(), [name for name in active if name in part.merged_adapters]


def read_plain(location: CheckpointLocation, family: str | Family | None, class_name: str | None = None) -> Checkpoint:
    """Read a model (`checkpoint.read`) and dequantise its weights if they are quantised."""
    checkpoint = read(location, family, class_name)
    model, notes = dequantised(checkpoint.model)
    notes = notes or checkpoint.notes
    return replace(checkpoint, model=model.double(), notes=notes) if notes else checkpoint


def dequantised(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy with ordinary weights, with notes on what was done; the model itself if nothing is quantised."""
    quantiser: Any = getattr(model, "hf_quantizer", None)
    torch_layers = [  # quantised layers of torch.ao, whose `weight` is a method
        path for path, part in model.named_modules()
        if type(part).__module__.startswith("torch.ao.nn.quantized") and callable(getattr(part, "weight", None))
    ]  # fmt: skip
    method, notes = "unknown", []
    if quantiser is not None or torch_layers:
        model = copy.deepcopy(model)
    if quantiser is not None:
        method = getattr(quantiser.quantization_config, "quant_method", "")
        method = str(getattr(method, "value", method))
        if not all(_plain(weight) for weight in model.parameters()):  # else transformers did it while reading
            try:
                model = model.dequantize()  # type: ignore[operator]
            except Exception as error:
                raise _error(method, first_line(error)) from error
        notes.append(f"quantised weights ({method}) dequantised")
    for path in torch_layers:
        model.set_submodule(path, _linear(model.get_submodule(path)))
    if torch_layers:
        notes.append(f"{len(torch_layers)} quantised layers dequantised, their activations not rounded")
    for name, weight in model.named_parameters():  # reading what is still quantised as numbers would be wrong
        if not _plain(weight) and not weight.is_meta:
            raise _error(method, f"{name} is a {type(weight).__name__} of {weight.dtype}")
    return model, tuple(notes)


def _error(method: str, why: str) -> SourceError:
    return SourceError(
        f"load takes weights that are ordinary numbers; these are quantised ({method}) and cannot be "
        f"dequantised here ({why}): load the model as it was before, or watch it as it is",
        subject="quantised weights",
    )


def _plain(weight: Any) -> bool:
    return type(weight.data) is torch.Tensor and weight.data.dtype in PLAIN


def _linear(part: Any) -> nn.Module:
    weight, bias = part.weight(), part.bias()
    if weight.ndim != 2:
        raise _error("torch.ao", f"a {type(part).__name__} is no linear map")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        linear.weight.copy_(weight.dequantize())
        if bias is not None:
            linear.bias.copy_(bias)
    return linear
