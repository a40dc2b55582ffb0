"""How scores become weights: the attention matrix P of every head.

With q_i, k_j the query and key, b_ij whatever positions add, and V_i the tokens that i may see:

| kernel        | P_ij                                                              | rows sum to one |
|---------------|-------------------------------------------------------------------|-----------------|
| `softmax`     | `exp(q_i . k_j / divisor + b_ij)`, normalised over V_i            | yes             |
| `gaussian`    | `exp(-|q_i - k_j|^2 / (2 divisor) + b_ij)`, normalised over V_i   | yes             |
| `uniform`     | `1 / |V_i|`                                                       | yes             |
| `sigmoid`     | `sigmoid(q_i . k_j / divisor + b_ij - log |V_i|)` (Ramapuram 2024) | no              |
| `linear`      | `f(q_i) . f(k_j)`, `f = elu + 1`, normalised (Katharopoulos 2020) | yes             |
| `linformer:k` | `softmax(Q (E K)^T / divisor) F` (Wang 2020)                      | no              |

P is always `[batch, head, token, token]`, so that `P V` is the head's output whatever the kernel.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.nets.architecture import Architecture
from rankscope.nets.weights import Attention

Heads = Float[Tensor, "batch head token head_width"]
Square = Float[Tensor, "batch head token token"]
Visible = Bool[Tensor, "#batch 1 token token"]


def attention_matrix(
    arch: Architecture, layer: Attention, q: Heads, k: Heads, visible: Visible, added: Tensor | None
) -> Square:
    """P of every head. `visible[.., i, j]` says whether i may see j; `added` is b, after the divisor."""
    kernel = arch.kernel.partition(":")[0]
    if kernel == "uniform":
        return _uniform(q, visible)
    if kernel == "linear":
        return _divided((F.elu(q) + 1) @ (F.elu(k) + 1).mT * visible)
    if kernel == "linformer":
        return _linformer(arch, layer, q, k, visible)
    if layer.content_bias is not None:
        q = q + layer.content_bias[:, None]
    scores = q @ k.mT
    if kernel == "gaussian":
        scores = scores - k.square().sum(-1)[..., None, :] / 2  # |q_i|^2 is constant along a row
    scores = scores / arch.divisor
    if added is not None:
        scores = scores + added
    if kernel == "sigmoid":
        seen = visible.sum(-1, keepdim=True).clamp(min=1)
        return torch.sigmoid(scores - seen.to(scores.dtype).log()) * visible
    return masked_softmax(scores, visible)


def masked_softmax(
    scores: Float[Tensor, "batch head row token"], visible: Bool[Tensor, "#batch 1 row token"]
) -> Float[Tensor, "batch head row token"]:
    """Softmax over the visible tokens; a row that sees none (padding) is zero."""
    blind = ~visible.any(-1, keepdim=True)
    hidden = scores.masked_fill(~(visible | blind), -torch.inf)
    return hidden.softmax(-1).masked_fill(~visible, 0.0)


def _uniform(q: Heads, visible: Visible) -> Square:
    seen = visible.sum(-1, keepdim=True).clamp(min=1)
    return (visible.to(q.dtype) / seen).expand(len(q), q.shape[1], -1, -1)


def _divided(weight: Square) -> Square:
    total = weight.sum(-1, keepdim=True)
    return weight / total.masked_fill(total == 0, 1.0)


def _linformer(arch: Architecture, layer: Attention, q: Heads, k: Heads, visible: Visible) -> Square:
    assert layer.mix_keys is not None and layer.mix_values is not None
    n = q.shape[-2]
    seen = visible.any(-2)[..., None, :].to(q.dtype)  # [batch, 1, 1, token]: padding mixes nothing
    mix_keys = layer.mix_keys[:, :n] * seen
    mix_values = layer.mix_values[:, :n] * seen
    scores = q @ (mix_keys @ k).mT / arch.divisor  # [batch, head, token, rank]
    return scores.softmax(-1) @ mix_values
