"""An original and its network on the same token ids: states, attention and gradients, compared."""

from typing import Any

import torch
from torch import Tensor

from rankscope.nets import Transformer
from rankscope.sources.parity import lifted

WITHIN = 1e-9


def padded(length: int, side: str, seed: int) -> tuple[Tensor, Tensor]:
    """Ids of three samples, two of them shorter, and their padding on that side."""
    ids = torch.randint(3, 60, (3, length), generator=torch.Generator().manual_seed(seed))
    number = torch.tensor([length, max(1, length - 2), max(1, length // 2)])[:, None]
    at = torch.arange(length)[None]
    padding = at >= number if side == "right" else at < length - number
    return ids.masked_fill(padding, 0), padding


def agrees(model: Any, net: Transformer, ids: Tensor, padding: Tensor) -> float:
    """The largest relative difference of states, attention and the gradient of a random linear function of
    the output, by the tokens that enter the first block."""
    real = ~padding
    X = net.encode(ids, padding=padding).X.requires_grad_()
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    theirs_in = model.get_input_embeddings()(ids).detach().requires_grad_()
    with lifted():
        theirs = model(
            inputs_embeds=theirs_in, attention_mask=real.long(), position_ids=positions,
            output_hidden_states=True, output_attentions=True, use_cache=False,
        )  # fmt: skip
        mine = net.run(X, padding, attention=True)
        weights = torch.randn(X.shape, generator=torch.Generator().manual_seed(1), dtype=X.dtype)
        weights = weights * real[..., None]
        (mine.output * weights).sum().backward()
        (theirs.last_hidden_state.masked_fill(~real[..., None], 0.0) * weights).sum().backward()
    assert X.grad is not None and theirs_in.grad is not None
    pairs = [
        *zip(mine.states[:-1], theirs.hidden_states, strict=False),
        (mine.output, theirs.last_hidden_state),
    ]
    pairs.append((X.grad, theirs_in.grad))
    found = [float((a - b)[real].detach().abs().max() / b[real].detach().abs().max()) for a, b in pairs]
    for P, attention in zip(mine.attention, theirs.attentions, strict=True):
        found.append(float(((P - attention) * real[:, None, :, None]).detach().abs().max()))
    assert float(theirs_in.grad.abs().max()) > 0
    return max(found)
