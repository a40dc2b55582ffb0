"""An original and its network on the same inputs: states, attention and gradients, compared."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.nets import Transformer
from rankscope.sources import Family, lifted
from rankscope.sources.parity import relative

WITHIN = 1e-9


class Differences(NamedTuple):
    """The largest of each, at real tokens."""

    states: float
    """Relative to the largest entry of each, the output among them."""
    attention: float
    gradient: float
    """Relative to its largest entry."""


def padded(length: int, side: str, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """What an original takes of three samples, two of them shorter, and their padding on that side."""
    ids = torch.randint(3, 60, (3, length), generator=torch.Generator().manual_seed(seed))
    number = torch.tensor([length, max(1, length - 2), max(1, length // 2)])[:, None]
    at = torch.arange(length)[None]
    padding = at >= number if side == "right" else at < length - number
    places = ((~padding).long().cumsum(-1) - 1).clamp(min=0)
    mask = (~padding).long()
    return {"input_ids": ids.masked_fill(padding, 0), "attention_mask": mask, "position_ids": places}, padding


def agrees(
    family: Family, model: Any, net: Transformer, given: dict[str, Tensor], X: Tensor, padding: Tensor
) -> Differences:
    """Against what transformers itself reports, with its float32 parts lifted; the gradient is that of a
    random linear function of the last block's state, by the tokens that enter the first block."""
    entered: list[Tensor] = []
    left: list[Any] = []
    core, real = family.core(model), ~padding
    blocks = family.blocks(core)

    def leaf(module: Any, args: Any, kwargs: Any) -> Any:
        if entered:
            return None
        key = next((key for key in ("hidden_states", "output_h") if key in kwargs), None)
        entered.append((args[0] if key is None else kwargs[key]).detach().requires_grad_())
        return ((entered[0], *args[1:]), kwargs) if key is None else (args, kwargs | {key: entered[0]})

    handles = [blocks[0].register_forward_pre_hook(leaf, with_kwargs=True)]
    handles.append(blocks[-1].register_forward_hook(lambda _, args, out: left.append(out)))
    try:
        with lifted():
            theirs = model(**given, output_hidden_states=True, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    X = X.clone().requires_grad_()
    mine = net.run(X, padding, attention=True)
    pairs = list(zip(mine.states[:-1], theirs.hidden_states, strict=False))
    pairs += [(mine.output, theirs.last_hidden_state)] if family.output(core) else []
    assert len(mine.attention) == len(theirs.attentions) == net.arch.layers
    seen = [
        float(((P - Q) * real[:, None, :, None]).detach().abs().max())
        for P, Q in zip(mine.attention, theirs.attentions, strict=True)
    ]
    last = left[-1][0] if isinstance(left[-1], tuple) else left[-1]
    weigh = torch.randn(X.shape, generator=torch.Generator().manual_seed(3), dtype=X.dtype)
    weigh = weigh.masked_fill(padding[..., None], 0.0)
    (gradient,) = torch.autograd.grad((mine.states[-1] * weigh).sum(), X)
    first = weigh.transpose(0, 1) if family.tokens_first else weigh
    (original,) = torch.autograd.grad((last * first).sum(), entered[0])
    original = original.transpose(0, 1) if family.tokens_first else original
    assert float(original.abs().max()) > 0
    with torch.no_grad():
        states = max(relative(a, b, real) for a, b in pairs)
        return Differences(states, max(seen), relative(gradient, original, real))
