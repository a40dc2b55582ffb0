"""What a watch says it did: as checks for the manifest, and as sentences for people.

`Watch.profile` calls `describe_model` and `checks`, `Watch.notes` calls `notes`; both read the totals of a
`CallFollower`. `Monitor` calls `describe_model` for its manifest.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rankscope.live.model_call import WatchTotals, mask_in_doubt
from rankscope.live.plan import WatchPlan
from rankscope.metrics import ROUNDING, unit_of


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Which model was watched, for the manifest: its class, size, dtypes and devices."""
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
    """The name of a dtype without its module, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def checks(plan: WatchPlan, totals: WatchTotals) -> dict[str, Any]:
    """What a watch found out about its run, as numbers for the manifest."""
    layers = range(1, max([len(plan.blocks), *totals.calls_per_layer, *(plan.layers or ())]) + 1)
    defect = max((float(defect) for defect in totals.row_sum_defects), default=None)
    unit = unit_of(torch.float32 if totals.float32_inside else totals.arithmetic or torch.float64)
    overflown = [layer for layer, broken in totals.broken_states if bool(broken)]
    return {
        "arithmetic_asked": dtype_name(totals.arithmetic or torch.float64),
        "calls": totals.calls,
        "calls_left_out": dict(totals.calls_left_out),
        "calls_per_layer": {str(layer): totals.calls_per_layer[layer] for layer in layers},
        "never_fired": [layer for layer in layers if not totals.calls_per_layer[layer]],
        "mode": " and ".join(sorted(totals.modes)),
        "dropout": totals.dropout,
        "padded_tokens": sum(int(padded) for padded in totals.padded_tokens),
        "masks_found": sorted(name for name in totals.masks if name is not None),
        "masks_in_doubt": sorted(totals.doubtful_masks),
        "calls_without_a_mask": None in totals.masks and plan.padding_from_model,
        "layers_not_taken_as_they_were": sorted(totals.broken_links),
        "layers_of_several_tensors": sorted(totals.unsure_layers),
        "orders_of_blocks": sorted(map(list, totals.orders)),
        "layout": plan.layout if plan.layout_known else None,
        "rows_sum_to_one": None if defect is None else defect <= ROUNDING * unit,
        "largest_row_sum_defect": defect,
        "first_layer_not_finite": min(overflown, default=None),
        "left_out": plan.left_out.words,
    }


def notes(plan: WatchPlan, totals: WatchTotals, changes: list[str]) -> list[str]:
    """What a watch did and found, in sentences; `changes` say how the model ran otherwise than unwatched."""
    results = checks(plan, totals)
    sentences = [f"The model was called {_times(totals.calls)}; {totals.samples} samples were measured."]
    if plan.left_out:
        sentences.append(f"It ran without {', '.join(plan.left_out.words)}.")
    for why, count in totals.calls_left_out.items():
        sentences.append(f"{'1 call was' if count == 1 else f'{count} calls were'} left out: {why}.")
    sentences += _layer_notes(results, plan, totals)
    if totals.modes:
        dropout = f", with dropout of up to {totals.dropout:g}" if "train" in totals.modes else ""
        sentences.append(f"The model was in {results['mode']} mode{dropout}.")
    sentences += [*_attention_notes(results, totals), *_padding_notes(results, plan, totals)]
    if totals.arithmetic is not None:
        name, floor = dtype_name(totals.arithmetic), ROUNDING * unit_of(totals.arithmetic)
        sentences.append(f"It ran in {name}: a relative residual below {floor:.1e} is rounding noise.")
    if (layer := results["first_layer_not_finite"]) is not None:
        sentences.append(f"Numbers overflow from layer {layer} on: those samples have NaN.")
    return sentences + changes


def layout_note(plan: WatchPlan) -> str:
    """What is said where nothing has shown the layout of hidden states."""
    axes = "[token, batch, width]" if plan.layout == "token first" else "[batch, token, width]"
    return f"Nothing showed which axis of the hidden states counts tokens: {axes} was assumed; layout= says it"


def _layer_notes(results: dict[str, Any], plan: WatchPlan, totals: WatchTotals) -> list[str]:
    """Which layers ran how often, and where blocks did not follow one another."""
    sentences = []
    counts = {count for count in results["calls_per_layer"].values() if count}
    if len(counts) == 1 and not results["never_fired"]:
        sentences.append(f"Each of the {len(results['calls_per_layer'])} layers fired {_times(counts.pop())}.")
    elif counts:
        by_layer = ", ".join(f"{layer}: {count}" for layer, count in results["calls_per_layer"].items())
        sentences.append(f"Calls per layer: {by_layer}.")
    if results["never_fired"]:
        sentences.append(f"Layers that never fired, and have no values: {_joined(results['never_fired'])}.")
    for order in results["orders_of_blocks"]:
        blocks = f"Blocks were called in another order than they are listed in ({', '.join(map(str, order))})"
        sentences.append(f"{blocks}: layers are numbered in the order of the calls.")
    if totals.samples and results["layout"] is None:
        sentences.append(f"{layout_note(plan)}.")
    if totals.samples:
        sentences += [f"{remark}." for remark in plan.remarks]
    for layer in results["layers_not_taken_as_they_were"]:
        between = f"between layers {layer} and {layer + 1}"
        sentences.append(f"Something stands {between}: what the second takes is not what the first gave.")
    if totals.unsure_layers:
        several = f"Layers that return several tensors like tokens: {_joined(totals.unsure_layers)}"
        sentences.append(f"{several}; nothing says which is the state, and the first was measured.")
    if totals.blocks_outside:
        why = "recomputation for gradients, or a part of the model called by itself"
        outside = f"{totals.blocks_outside} calls of blocks outside a call of the model"
        sentences.append(f"{outside} ({why}) were not measured.")
    return sentences


def _padding_notes(results: dict[str, Any], plan: WatchPlan, totals: WatchTotals) -> list[str]:
    """How many padded tokens were left out, and who said that they are padding."""
    padded = f"{results['padded_tokens']} padded tokens were left out"
    if not plan.padding_from_model:
        why = "as padding= said" if plan.padding is not None else "padding='none'"
        return [f"{padded}, {why}."] if totals.samples else []
    masks = results["masks_found"]
    sentences = [f"{padded}, by {' and '.join(masks)}."] if masks else []
    for name in results["masks_in_doubt"]:
        sentences.append(f"{mask_in_doubt(name)}.")
    if results["calls_without_a_mask"] and not results["masks_in_doubt"]:
        where = "In some calls no" if masks else "No"
        sentences.append(f"{where} mask was found: every token counts as real; padding= says which are not.")
    return sentences


def _attention_notes(results: dict[str, Any], totals: WatchTotals) -> list[str]:
    """Whether rows of attention sum to one, and which attention was left out."""
    if results["rows_sum_to_one"] is None:
        return ["Attention was not looked at."]
    sentences, defect = [], results["largest_row_sum_defect"]
    if results["rows_sum_to_one"]:
        sentences.append(f"Attention rows sum to one within {defect:.1e}.")
    else:
        why = ", as dropout makes them" if totals.dropout else ""
        sentences.append(f"Attention rows miss one by up to {defect:.2g}{why}: theorems on averaging do not apply.")
    if totals.float32_inside:
        sentences.append("The model computes attention in float32 inside: float64's floors are too low for it.")
    if without := set(totals.calls_per_layer) - totals.layers_with_attention:
        sentences.append(f"Layers without attention of their tokens to themselves: {_joined(without)}.")
    if totals.later_attention:
        later = f"{totals.later_attention} later ones (cross-attention)"
        sentences.append(f"Only the first attention of a block counts: {later} were left out.")
    if totals.other_attention:
        elsewhere = "Attention not of a block's tokens to themselves (cross-attention, windows)"
        sentences.append(f"{elsewhere} was left out: {totals.other_attention} calls.")
    return sentences


def _joined(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers)))


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
