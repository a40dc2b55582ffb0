"""A loss for the criterion `gradient`: that of a language model on its own text, through the model's own head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.depths.criteria import Loss
from rankscope.shapes import Bool, Int


@torch.no_grad()
def next_token_loss(
    model: Any, ids: Int[Tensor, "batch token"], padding: Bool[Tensor, "batch token"] | None = None
) -> Loss | None:
    """The mean cross-entropy of the next token, as a function of the output of the network; None where the model's
    logits are not its output embedding applied to that output (encoders, capped logits, models without a head).

    Args:
        model: A model of transformers with a head, such as `GPT2LMHeadModel`.
        ids: Token ids, padded at the end.
        padding: True at padding.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    valid = torch.ones_like(ids, dtype=torch.bool) if padding is None else ~padding
    if head is None or getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
        return None
    told = model(input_ids=ids, attention_mask=valid.long(), output_hidden_states=True, return_dict=True)
    if not torch.allclose(head(told.hidden_states[-1])[valid], told.logits[valid], rtol=1e-3, atol=1e-3):
        return None
    weight, bias = head.weight.double(), None if head.bias is None else head.bias.double()
    asked = ids[:, 1:].masked_fill(~valid[:, 1:], -100)

    def loss(Y: Tensor) -> Tensor:
        of_output = F.linear(Y[:, :-1], weight.to(Y), None if bias is None else bias.to(Y))
        return F.cross_entropy(of_output.flatten(0, 1), asked.flatten().to(Y.device), ignore_index=-100)

    return loss
