"""Parity of masks and rotary angles at lengths too long to run the whole network on. Called by `parity.py`.

The original prepares both before its first block, from its config. So the original is called with blocks that
only record their arguments: at 4,000 tokens that costs a mask of 4,000 x 4,000 and no weights.
"""

from typing import Any

import torch
from torch import Tensor

from rankscope.errors import ParityError
from rankscope.nets import Transformer, masks
from rankscope.nets.positions import rotary_tables
from rankscope.sources.families import Family

LONGEST = 8300
"""Tokens: a mask of that size in float64 takes half a gigabyte."""
TOLERANCE = 1e-9


@torch.no_grad()
def check_reach(net: Transformer, family: Family, core: Any, n: int, wrapped: bool, name: str) -> bool:
    """Compare masks and rotary angles on n tokens, layer by layer; raise `ParityError` where they differ.

    Args:
        net: The canonical network.
        family: The family that mapped the original.
        core: The original, a copy of ours, without task heads.
        n: How many tokens to compare on.
        wrapped: True if the original's blocks return tuples.
        name: What errors call the original.

    Returns:
        False where nothing can be compared: positions are not rotary, or blocks make masks themselves.
    """
    if net.arch.positions != "rotary":
        return False
    tables = rotary_tables(net.arch, n, torch.zeros(1, dtype=torch.float64))
    visible: dict[Any, Tensor] = {}
    block_arguments = _given(family, core, n, wrapped)
    if not all(
        "attention_mask" in arguments and "position_embeddings" in arguments for arguments in block_arguments
    ):
        return False
    for layer, arguments in enumerate(block_arguments):
        mask = net.arch.mask_of(layer)
        if mask not in visible:
            visible[mask] = masks.matrix(mask, n)
        theirs, angles = arguments["attention_mask"], arguments["position_embeddings"]
        if isinstance(angles, Tensor):  # cosines and sines as complex numbers
            angles = angles.real, angles.imag
        # Eager attention adds the mask to the scores: where there is none, every token sees every other.
        visible_to_original = torch.ones(n, n, dtype=torch.bool) if theirs is None else theirs[0, 0] == 0
        pairs = zip(tables[layer % len(tables)], angles, strict=True)
        angles_agree = all(bool(((a - b[0, :, : a.shape[1]]).abs() <= TOLERANCE).all()) for a, b in pairs)
        if not angles_agree or not torch.equal(visible_to_original, visible[mask]):
            what = "sees other tokens" if angles_agree else "turns positions by other angles"
            raise ParityError(
                f"the canonical network must be the original at every length its config names; at {n} tokens "
                f"layer {layer + 1} of {name} ({family.name}) {what}: its config asks for something this "
                "family does not map; watch measures it as it is",
                subject="masks",
            )
    return True


def _given(family: Family, core: Any, n: int, wrapped: bool) -> list[dict[str, Any]]:
    """The keyword arguments of each block in a forward pass over n tokens that computes nothing else."""
    blocks, recorded = family.blocks(core), []

    def note(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        recorded.append(kwargs)
        return (hidden_states,) if wrapped else hidden_states

    for block in blocks:
        block.forward = note
    try:
        ids = torch.ones(1, n, dtype=torch.long)
        core(input_ids=ids, attention_mask=ids, use_cache=False, return_dict=True)
    finally:
        for block in dict.fromkeys(blocks):
            del block.forward
    return recorded
