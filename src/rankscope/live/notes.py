"""What a watch says it did: as checks for the manifest, and as sentences for people.

`StackWatch` calls `checks` for its profile, and `notes`; both read the totals of its calls.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rankscope.live.hidden_states import LAYOUTS
from rankscope.live.model_call import WatchTotals, mask_in_doubt
from rankscope.live.modules import dtype_name
from rankscope.live.plan import WatchPlan
from rankscope.metrics import ROUNDING, unit_of


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
    return [*_notes(plan, totals, checks(plan, totals)), *changes]


def layout_note(plan: WatchPlan) -> str:
    """What is said where nothing has shown the layout of hidden states."""
    what = "Nothing showed which axis of the hidden states counts tokens"
    return f"{what}: {LAYOUTS[plan.layout][0]} was assumed; layout= says it"


def _notes(plan: WatchPlan, totals: WatchTotals, results: dict[str, Any]) -> Iterator[str]:
    """Sentences of what was called, in which mode and dtype; `results` are the `checks`."""
    yield f"The model was called {_times(totals.calls)}; {totals.samples} samples were measured."
    if plan.left_out:
        yield f"It ran without {', '.join(plan.left_out.words)}."
    for why, count in totals.calls_left_out.items():
        yield f"{'1 call was' if count == 1 else f'{count} calls were'} left out: {why}."
    yield from _layer_notes(results, plan, totals)
    if totals.modes:
        dropout = f", with dropout of up to {totals.dropout:g}" if "train" in totals.modes else ""
        yield f"The model was in {results['mode']} mode{dropout}."
    yield from _attention_notes(results, totals)
    yield from _padding_notes(results, plan, totals)
    if totals.arithmetic is not None:
        name, floor = dtype_name(totals.arithmetic), ROUNDING * unit_of(totals.arithmetic)
        yield f"It ran in {name}: a relative residual below {floor:.1e} is rounding noise."
    if (layer := results["first_layer_not_finite"]) is not None:
        yield f"Numbers overflow from layer {layer} on: those samples have NaN."


def _layer_notes(results: dict[str, Any], plan: WatchPlan, totals: WatchTotals) -> Iterator[str]:
    """Which layers ran how often, and where blocks did not follow one another."""
    counts = {count for count in results["calls_per_layer"].values() if count}
    if len(counts) == 1 and not results["never_fired"]:
        yield f"Each of the {len(results['calls_per_layer'])} layers fired {_times(counts.pop())}."
    elif counts:
        by_layer = ", ".join(f"{layer}: {count}" for layer, count in results["calls_per_layer"].items())
        yield f"Calls per layer: {by_layer}."
    if results["never_fired"]:
        yield f"Layers that never fired, and have no values: {_joined(results['never_fired'])}."
    for order in results["orders_of_blocks"]:
        blocks = f"Blocks were called in another order than they are listed in ({', '.join(map(str, order))})"
        yield f"{blocks}: layers are numbered in the order of the calls."
    if totals.samples and results["layout"] is None:
        yield f"{layout_note(plan)}."
    if totals.samples:
        yield from (f"{remark}." for remark in plan.remarks)
    for layer in results["layers_not_taken_as_they_were"]:
        between = f"between layers {layer} and {layer + 1}"
        yield f"Something stands {between}: what the second takes is not what the first gave."
    if totals.unsure_layers:
        several = f"Layers that return several tensors like tokens: {_joined(totals.unsure_layers)}"
        yield f"{several}; nothing says which is the state, and the first was measured."
    if totals.blocks_outside:
        why = "recomputation for gradients, or a part of the model called by itself"
        yield f"{totals.blocks_outside} calls of blocks outside a call of the model ({why}) were not measured."


def _padding_notes(results: dict[str, Any], plan: WatchPlan, totals: WatchTotals) -> Iterator[str]:
    """How many padded tokens were left out, and who said that they are padding."""
    padded, masks = f"{results['padded_tokens']} padded tokens were left out", results["masks_found"]
    if not plan.padding_from_model:
        if totals.samples:
            why = "as padding= said" if plan.padding is not None else "padding='none'"
            yield f"{padded}, {why}."
        return
    if masks:
        yield f"{padded}, by {' and '.join(masks)}."
    for name in results["masks_in_doubt"]:
        yield f"{mask_in_doubt(name)}."
    if results["calls_without_a_mask"] and not results["masks_in_doubt"]:
        where = "In some calls no" if masks else "No"
        yield f"{where} mask was found: every token counts as real; padding= says which are not."


def _attention_notes(results: dict[str, Any], totals: WatchTotals) -> Iterator[str]:
    """Whether rows of attention sum to one, and which attention was left out."""
    if (defect := results["largest_row_sum_defect"]) is None:
        yield "Attention was not looked at."
        return
    if results["rows_sum_to_one"]:
        yield f"Attention rows sum to one within {defect:.1e}."
    else:
        why = ", as dropout makes them" if totals.dropout else ""
        yield f"Attention rows miss one by up to {defect:.2g}{why}: theorems on averaging do not apply."
    if totals.float32_inside:
        yield "The model computes attention in float32 inside: float64's floors are too low for it."
    if without := set(totals.calls_per_layer) - totals.layers_with_attention:
        yield f"Layers without attention of their tokens to themselves: {_joined(without)}."
    if totals.later_attention:
        later = f"{totals.later_attention} later ones (cross-attention)"
        yield f"Only the first attention of a block counts: {later} were left out."
    if totals.other_attention:
        elsewhere = "Attention not of a block's tokens to themselves (cross-attention, windows)"
        yield f"{elsewhere} was left out: {totals.other_attention} calls."


def _joined(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers)))


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
