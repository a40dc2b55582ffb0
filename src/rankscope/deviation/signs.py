"""Norms that leave a sign: of one entry, or of two about their mean.

A token that is zero but for rounding has no direction of its own. Through a norm whose eps does not hide it,
rounding gives it one of full length; passes that round otherwise then differ, unless there are two directions
to choose from: they agree by chance every second time. Such a token is looked for instead.
"""

import math
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation.state import State
from rankscope.nets.architecture import Architecture
from rankscope.nets.norms import norm_of

TORN = 1e-11
"""A token this much shorter than what it is the sum of may be what rounding left of zero."""


class SignLosses:
    """Follows what tokens are the sum of, and what norms make signs of."""

    def __init__(self, arch: Architecture) -> None:
        self.norm = norm_of(arch.norm)
        self.matter = self.norm is not None and arch.width - self.norm.centred <= 1
        self.least = 0.5 * math.log(arch.norm_eps) if arch.norm_eps > 0 else -math.inf
        self.terms: Tensor | float = -math.inf
        self.torn: Tensor | bool = False
        """Whether a norm has met such a token, by sample."""

    def summed(self, *parts: Any) -> None:
        """What was added up."""
        for part in parts if self.matter else ():
            size = _log(part)
            self.terms = size if isinstance(self.terms, float) else torch.maximum(self.terms, size)

    def met(self, tokens: Any, valid: Tensor) -> None:
        """What a norm is given; `valid` are the tokens that count."""
        if not self.matter or not valid.shape[1]:
            return
        assert self.norm is not None
        self.summed(tokens)
        X, log = (tokens.whole, tokens.log) if isinstance(tokens, State) else (tokens, 0.0)
        sizes = self.norm.centre(X).abs().amax(-1).masked_fill(~valid, math.inf).amin(-1)
        few = self.terms + math.log(TORN)
        self.torn = self.torn | (sizes.log() + log <= few) & (self.least < few)


def _log(tokens: Any) -> Tensor:
    """The log of the largest entry, of each sample."""
    if isinstance(tokens, State):
        return torch.maximum(tokens.x.log_size(), tokens.R.log_size())
    size: Tensor = tokens.abs().flatten(1).amax(1).log()
    return size
