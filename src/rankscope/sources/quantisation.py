"""Quantised weights: the numbers that they stand for, on a copy.

A network of them is not the quantised model to the last digit where that rounds activations as well: parity
is held against the dequantised copy, and `net.origin` says that weights were dequantised.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rankscope.errors import SourceError
from rankscope.sources.checkpoint import Checkpoint, CheckpointLocation, first_line, read
from rankscope.sources.families import Family

PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_dequantised(
    location: CheckpointLocation, family: str | Family | None, class_name: str | None = None
) -> Checkpoint:
    """Read a model (`checkpoint.read`) and dequantise its weights if they are quantised."""
    checkpoint = read(location, family, class_name)
    model, notes = dequantised(checkpoint.model)
    notes = notes or checkpoint.notes
    return replace(checkpoint, model=model.double(), notes=notes) if notes else checkpoint


def dequantised(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy with ordinary weights, with notes on what was done; the model itself if nothing is quantised."""
    quantiser: Any = getattr(model, "hf_quantizer", None)
    torch_layers = [path for path, part in model.named_modules() if _of_torch(part)]
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
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _linear(model.get_submodule(path)))
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


def _of_torch(part: Any) -> bool:
    """True for a quantised layer of torch.ao, whose `weight` is a method."""
    of_torch = type(part).__module__.startswith("torch.ao.nn.quantized")
    return of_torch and callable(getattr(part, "weight", None))


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
