"""What a watch says it did: as checks for the manifest, and as sentences for people."""

from typing import Any

import torch
from torch import nn

from rankscope.live.recorder import Recorder
from rankscope.metrics.metric import ROUNDING
from rankscope.metrics.tokens import unit_of


def described(model: nn.Module) -> dict[str, Any]:
    """Which model it was, for the manifest."""
    weights = list(model.parameters())
    config = getattr(model, "config", None)
    return {
        "fingerprint": None,
        "architecture": None,
        "model": {
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "model_type": getattr(config, "model_type", None),
            "parameters": sum(weight.numel() for weight in weights),
            "dtypes": sorted({dtype_name(weight.dtype) for weight in weights}),
            "devices": sorted({str(weight.device) for weight in weights}),
        },
    }


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` and its like."""
    return str(dtype).removeprefix("torch.")


def checks(seen: Recorder) -> dict[str, Any]:
    """What the run found about itself."""
    layers = range(1, max([len(seen.blocks), *seen.fired, *(seen.plan.layers or ())]) + 1)
    defect = max((float(each) for each in seen.defects), default=None)
    unit = unit_of(torch.float32 if seen.narrow else seen.arithmetic or torch.float64)
    overflown = [layer for layer, broken in seen.broken if bool(broken)]
    return {
        "arithmetic_asked": dtype_name(seen.arithmetic or torch.float64),
        "calls": seen.calls,
        "calls_left_out": dict(seen.left_out),
        "calls_per_layer": {str(layer): seen.fired[layer] for layer in layers},
        "never_fired": [layer for layer in layers if not seen.fired[layer]],
        "mode": " and ".join(sorted(seen.modes)),
        "dropout": seen.dropout,
        "padded_tokens": sum(int(each) for each in seen.padded),
        "masks_found": sorted(name for name in seen.masks if name is not None),
        "calls_without_a_mask": None in seen.masks and seen.plan.own_padding,
        "layers_not_taken_as_they_were": sorted(seen.between),
        "layers_of_several_tensors": sorted(seen.unsure),
        "rows_sum_to_one": None if defect is None else defect <= ROUNDING * unit,
        "largest_row_sum_defect": defect,
        "first_layer_not_finite": min(overflown, default=None),
    }


def notes(seen: Recorder, changes: list[str]) -> list[str]:
    """The same, in plain sentences; `changes` are what was done to the model while it ran."""
    found = checks(seen)
    return [
        f"The model was called {_times(seen.calls)}; {seen.samples} samples were measured.",
        *(f"{_calls(number)} left out: {why}." for why, number in seen.left_out.items()),
        *_layers(found, seen),
        *([f"The model was in {found['mode']} mode{_dropout(seen)}."] if seen.modes else []),
        *_rows(found, seen),
        *_padding(found, seen),
        *_floor(seen),
        *_finite(found),
        *changes,
    ]


def _layers(found: dict[str, Any], seen: Recorder) -> list[str]:
    said = []
    numbers = {number for number in found["calls_per_layer"].values() if number}
    if len(numbers) == 1 and not found["never_fired"]:
        said.append(f"Each of the {len(found['calls_per_layer'])} layers fired {_times(numbers.pop())}.")
    elif numbers:
        each = ", ".join(f"{layer}: {number}" for layer, number in found["calls_per_layer"].items())
        said.append(f"Calls per layer: {each}.")
    if found["never_fired"]:
        names = ", ".join(map(str, found["never_fired"]))
        said.append(f"Layers that never fired, and have no values: {names}.")
    for layer in found["layers_not_taken_as_they_were"]:
        said.append(
            f"Something stands between layers {layer} and {layer + 1}: what the second takes is not what the "
            "first gave."
        )
    if seen.unsure:
        names = ", ".join(map(str, sorted(seen.unsure)))
        said.append(
            f"Layers that return several tensors like tokens: {names}; nothing says which is the state, and "
            "the first was measured."
        )
    if seen.outside:
        said.append(
            f"{seen.outside} calls of blocks outside a call of the model (recomputation for gradients, or a "
            "part of the model called by itself) were not measured."
        )
    return said


def _padding(found: dict[str, Any], seen: Recorder) -> list[str]:
    number = f"{found['padded_tokens']} padded tokens were left out"
    if not seen.plan.own_padding:
        given = "as padding= said" if seen.plan.padding is not None else "padding='none'"
        return [f"{number}, {given}."] if seen.samples else []
    said = [f"{number}, by {' and '.join(found['masks_found'])}."] if found["masks_found"] else []
    if found["calls_without_a_mask"]:
        where = "In some calls no" if said else "No"
        said.append(f"{where} mask was found: every token counts as real; padding= says which are not.")
    return said


def _rows(found: dict[str, Any], seen: Recorder) -> list[str]:
    if found["rows_sum_to_one"] is None:
        return ["Attention was not looked at."]
    said, by = [], found["largest_row_sum_defect"]
    if found["rows_sum_to_one"]:
        said.append(f"Attention rows sum to one within {by:.1e}.")
    else:
        why = ", as dropout makes them" if seen.dropout else ""
        said.append(f"Attention rows miss one by up to {by:.2g}{why}: theorems on averaging do not apply.")
    if seen.narrow:
        said.append("The model computes attention in float32 inside: float64's floors are too low for it.")
    without = sorted(set(seen.fired) - seen.attended)
    if without:
        said.append(
            f"Layers without attention of their tokens to themselves: {', '.join(map(str, without))}."
        )
    if seen.others:
        said.append(
            f"Only the first attention of a block counts: {seen.others} later ones (cross-attention) were "
            "left out."
        )
    if seen.elsewhere:
        said.append(
            f"Attention not of a block's tokens to themselves (cross-attention, windows) was left out: "
            f"{seen.elsewhere} calls."
        )
    return said


def _floor(seen: Recorder) -> list[str]:
    if seen.arithmetic is None:  # nothing has run
        return []
    floor = ROUNDING * unit_of(seen.arithmetic)
    ran = dtype_name(seen.arithmetic)
    return [f"It ran in {ran}: a relative residual below {floor:.1e} is rounding noise."]


def _finite(found: dict[str, Any]) -> list[str]:
    layer = found["first_layer_not_finite"]
    return [] if layer is None else [f"Numbers overflow from layer {layer} on: those samples have NaN."]


def _dropout(seen: Recorder) -> str:
    return f", with dropout of up to {seen.dropout:g}" if "train" in seen.modes else ""


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _calls(number: int) -> str:
    return "1 call was" if number == 1 else f"{number} calls were"
