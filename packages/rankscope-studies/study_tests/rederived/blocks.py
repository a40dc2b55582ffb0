"""Whole blocks in plain numpy: attention, skips, LayerNorm before or after, and an MLP."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import erf

from study_tests.rederived.plain import Array, Heads, Mask, Rng, attended, drawn, left, normed

Draw = Callable[[int, int, Rng], Array]  # Inputs, outputs, and where random numbers come from
CLOSE = 1e-5  # Tokens nearer to each other are followed by the derivative at their mean
SMALL = 1e-12  # BERT's eps


@dataclass(frozen=True)
class Block:
    """One layer; `skip` is the weight of both skips, `up` None where there is no MLP."""

    attention: Heads
    up: Array | None
    down: Array | None
    skip: float
    place: str  # "post", "pre" or "none"
    seen: Mask | None = None  # The mask; None: complete

    def norm(self, X: Array) -> Array:
        return normed(X, SMALL)

    def mlp(self, X: Array) -> Array:
        assert self.up is not None and self.down is not None
        hidden = X @ self.up
        return hidden * (1 + erf(hidden / math.sqrt(2))) / 2 @ self.down

    def __call__(self, X: Array) -> Array:
        """The next tokens, in floating point."""
        parts = [lambda Y: attended(self.attention, Y, self.seen)] + ([self.mlp] if self.up is not None else [])
        for part in parts:
            X = self.skip * X + part(self.norm(X) if self.place == "pre" else X)
            X = self.norm(X) if self.place == "post" else X
        return X

    def pushed(self, x: Array, R: Array) -> Array:
        """Where small differences R about equal tokens x go. Attention does not see them: it averages x with x, and
        what it makes of R is of third order; so R is what the skip and the MLP leave of it."""

        def through_norm(x: Array, R: Array) -> Array:
            c, C = x - x.mean(), R - R.mean(-1, keepdims=True)
            size = math.sqrt(np.square(c).mean() + SMALL)
            return C / size - np.outer(C @ c, c) / (len(c) * size**3)

        x = x[None]
        after = self.skip * x + attended(self.attention, self.norm(x) if self.place == "pre" else x)
        R = self.skip * R
        if self.place == "post":
            R, after = through_norm(after[0], R), self.norm(after)
        if self.up is None or self.down is None:
            return R
        y, S = (self.norm(after), through_norm(after[0], R)) if self.place == "pre" else (after, R)
        z = y @ self.up
        slope = (1 + erf(z / math.sqrt(2))) / 2 + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        R = self.skip * R + (S @ self.up * slope) @ self.down
        return through_norm((self.skip * after + self.mlp(y))[0], R) if self.place == "post" else R


def followed(blocks: list[Block], X: Array) -> list[float]:
    """log10 of what is left after each layer: in floating point while tokens are apart, then by derivatives."""
    logs, R, s = [math.log10(left(X))], None, 0.0
    for block in blocks:
        if R is None:
            X = block(X)
            logs.append(math.log10(left(X)))
            if logs[-1] < math.log10(CLOSE):
                x, R = X.mean(0), X - X.mean(0)
        else:
            R = block.pushed(x, R)
            x = block(x[None])[0]
            size = float(np.linalg.norm(R))
            R, s = R / size, s + math.log10(size)
            logs.append(s - math.log10(math.sqrt(len(R)) * float(np.linalg.norm(x))))
    return logs


def stack(
    draw: Draw, layers: int, width: int, heads: int, rng: Rng, skip: float, place: str, mlp: bool = True
) -> list[Block]:
    """Blocks with weights of their own; `draw(inputs, outputs, rng)` gives a matrix."""

    def square(width: int, rng: Rng) -> Array:
        return draw(width, width, rng)

    return [
        Block(
            drawn(square, width, heads, rng),
            draw(width, 4 * width, rng) if mlp else None, draw(4 * width, width, rng) if mlp else None, skip, place,
        )
        for _ in range(layers)
    ]  # fmt: skip
