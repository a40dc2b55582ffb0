"""Latents of a state: what queries, or keys and values, are linear in where attention has latents.

A latent is `RMSNorm(x A)`, and so a state itself: a common token and deviations, by the rule of norms. What
stands beside it without a norm is put next to it, each part at its own scale until then.
"""

from collections.abc import Callable

import torch

from rankscope.deviation.mlp import affine
from rankscope.deviation.norms import Touch, normed
from rankscope.deviation.scaled import Scaled
from rankscope.deviation.state import State
from rankscope.nets.weights import LATENT_EPS, Latent, Linear


def latent(
    state: State,
    w: Latent | None,
    touch: Callable[[Scaled], Scaled],
    tidy: Callable[[State], State],
    rounding: Touch | None,
    *,
    alone: bool = False,
) -> State:
    """The tokens, or their latent, with what stands beside it unless it is asked for `alone`."""
    if w is None:
        return state
    assert w.norm.gain is not None
    number, valid = len(w.norm.gain), state.valid
    x, R = touch(affine(state.x, Linear(w.weight, w.bias))), touch(state.R.mapped(lambda t: t @ w.weight))
    first, rest = (
        tidy(State(x.mapped(lambda t, at=at: t[..., at]), R.mapped(lambda t, at=at: t[..., at]), valid))
        for at in (slice(number), slice(number, None))
    )
    first = tidy(normed(first, "rms", w.norm, LATENT_EPS, rounding))
    if alone or number == w.weight.shape[1]:
        return first
    return State(_beside(first.x, rest.x), _beside(first.R, rest.R), valid)


def _beside(a: Scaled, b: Scaled) -> Scaled:
    """Entries of a, then those of b; zeros do not set the scale."""
    wide, narrow = torch.zeros_like(b.value), torch.zeros_like(a.value)
    return a.mapped(lambda t: torch.cat([t, wide], -1)) + b.mapped(lambda t: torch.cat([narrow, t], -1))
