"""One block of the reference network: attention, MLP, norms and skips. Readable in one sitting."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import MaskError
from rankscope.nets import masks
from rankscope.nets.activations import ACTIVATIONS
from rankscope.nets.architecture import Architecture
from rankscope.nets.kernels import attention_matrix
from rankscope.nets.norms import normalise
from rankscope.nets.positions import by_offset, rotary_tables, rotate, score_bias, sinusoids
from rankscope.nets.weights import Layer, Linear, NormWeights, Weights

Tokens = Float[Tensor, "batch token width"]
Heads = Float[Tensor, "batch head token head_width"]
Square = Float[Tensor, "batch head token token"]
Spoken = Float[Tensor, "batch token head head_width"]


@dataclass(frozen=True)
class Setting:
    """What every layer shares in one forward pass: who sees whom, and where tokens stand."""

    visible: dict[str, Bool[Tensor, "#batch 1 token token"]]
    """By mask spec, padding taken out."""
    rotary: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and sines by layer, repeating; empty where nothing is rotated."""
    sinusoids: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(
        cls, arch: Architecture, weights: Weights, X: Tokens, real: Bool[Tensor, "batch token"]
    ) -> "Setting":
        """For these tokens, of which some are real and the rest padding."""
        n = X.shape[-2]
        specs = {arch.mask_of(layer) for layer in range(arch.layers)}
        whole = bool(real.all())
        visible = {}
        for spec in specs:
            mask = masks.matrix(spec, n, X.device)[None, None]  # [1, 1, token, token]
            visible[spec] = mask if whole else mask & real[:, None, None, :] & real[:, None, :, None]
            if not whole and bool((real & ~visible[spec][:, 0].any(-1)).any()):
                raise MaskError(
                    "every token must attend to at least one real token; padding takes away all that one "
                    "sees: use a mask in which each token attends to itself"
                )
        return cls(
            visible=visible,
            rotary=rotary_tables(arch, n, X) if arch.positions == "rotary" else (),
            sinusoids=sinusoids(arch, n, X) if arch.positions == "relative" else None,
            bias=score_bias(arch, weights, n, X),
        )

    def rotary_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a layer (0-based)."""
        return self.rotary[layer % len(self.rotary)]


def block(
    arch: Architecture, index: int, layer: Layer, X: Tokens, setting: Setting
) -> tuple[Tokens, Square, Spoken]:
    """Tokens after layer `index`, its attention, and what its heads say."""
    norm_a, norm_m = layer.attention_norm, layer.mlp_norm
    post, has_mlp = arch.norm_place == "post", arch.mlp != "none"

    inside = X if index in arch.bare_layers else _before(arch, norm_a, X)
    branch, P, spoken = attention(arch, index, layer, inside, setting)
    branch = _after(arch, layer.attention_after, branch)
    if arch.parallel and has_mlp:
        branch = branch + _after(arch, layer.mlp_after, mlp(arch, layer, _before(arch, norm_m, X)))
    X = skip(arch.attention_skip, X, branch)
    if post:
        X = _norm(arch, norm_a, X)
    if arch.parallel or not has_mlp:
        return X, P, spoken

    branch = _after(arch, layer.mlp_after, mlp(arch, layer, _before(arch, norm_m, X)))
    X = skip(arch.mlp_skip, X, branch)
    return _norm(arch, norm_m, X) if post else X, P, spoken


def attention(
    arch: Architecture, index: int, layer: Layer, X: Tokens, setting: Setting
) -> tuple[Tokens, Square, Spoken]:
    """`sum_h P_h X W_h + 1 b^T` (Dong et al. 2021, section 2), P, and the values that each head mixed."""
    w = layer.attention
    q = project(X, w.query)  # [batch, head, token, head_width]
    k, v = project(X, w.key), project(X, w.value)  # [batch, key_head, token, head_width]
    if arch.query_norm:
        q = normalise(q, "rms", w.query_norm, arch.norm_eps)
        k = normalise(k, "rms", w.key_norm, arch.norm_eps)
    if setting.rotary:
        q, k = (rotate(part, setting.rotary_of(index), arch.rotary_pairs) for part in (q, k))
    group = arch.heads // arch.key_heads
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    added = setting.bias
    if setting.sinusoids is not None and w.position_bias is not None:
        added = by_offset(q + w.position_bias[:, None], w, setting.sinusoids) / arch.divisor
    P = attention_matrix(arch, w, q, k, setting.visible[arch.mask_of(index)], added)
    heads = P @ v  # [batch, head, token, head_width]
    if arch.kept_heads is not None:
        speaks = torch.zeros(arch.heads, 1, 1, dtype=X.dtype, device=X.device)
        speaks[list(arch.kept_heads[index])] = 1.0
        heads = heads * speaks
    spoken = heads.transpose(1, 2)  # [batch, token, head, head_width]
    Y = spoken.flatten(-2) @ w.output.weight.flatten(0, 1)  # [batch, token, width]
    return Y if w.output.bias is None else Y + w.output.bias, P, spoken


def contributions(layer: Layer, spoken: Spoken) -> Float[Tensor, "batch head token width"]:
    """What each head adds to the attention branch: `P_h X W_h`, without the output bias."""
    return spoken.transpose(1, 2) @ layer.attention.output.weight


def mlp(arch: Architecture, layer: Layer, X: Tokens) -> Tokens:
    """`act(X W_1 + b_1) W_2 + b_2`, or gated."""
    w, act = layer.mlp, ACTIVATIONS[arch.activation]
    assert w is not None
    hidden = affine(X, w.up)  # [batch, token, mlp_width]
    hidden = act(hidden) if w.gate is None else act(affine(X, w.gate)) * hidden
    return affine(hidden, w.down)


def project(X: Tokens, linear: Linear) -> Heads:
    """Queries, keys or values of every head."""
    heads, width = linear.weight.shape[1:]
    Y = X @ linear.weight.flatten(1)  # [batch, token, head * head_width]
    if linear.bias is not None:
        Y = Y + linear.bias.flatten()
    return Y.view(*Y.shape[:-1], heads, width).transpose(1, 2)


def affine(x: Tensor, linear: Linear) -> Tensor:
    """`x W + b`."""
    y = x @ linear.weight
    return y if linear.bias is None else y + linear.bias


def skip(weight: float, X: Tokens, branch: Tokens) -> Tokens:
    """`weight X + branch`; at weight 0 the skip is not there at all."""
    if weight == 0.0:
        return branch
    return (X if weight == 1.0 else weight * X) + branch


def _norm(arch: Architecture, weights: NormWeights, X: Tokens) -> Tokens:
    return normalise(X, arch.norm, weights, arch.norm_eps)


def _before(arch: Architecture, weights: NormWeights, X: Tokens) -> Tokens:
    return X if arch.norm_place == "post" else _norm(arch, weights, X)


def _after(arch: Architecture, weights: NormWeights, branch: Tokens) -> Tokens:
    return _norm(arch, weights, branch) if arch.norm_place == "sandwich" else branch
