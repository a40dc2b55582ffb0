"""What every layer shares in one pass: who sees whom, and where tokens stand."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankscope.errors import MaskError
from rankscope.nets import masks
from rankscope.nets.architecture import Architecture
from rankscope.nets.memory import Memory
from rankscope.nets.positions import rotary_tables, score_bias, sinusoids
from rankscope.nets.weights import Weights
from rankscope.shapes import Bool, Float

UNSEEN = (
    "every token must attend to at least one real token; padding takes away all that one sees: use a mask in "
    "which each token attends to itself"
)

Seen = dict[str | masks.Mask, Bool[Tensor, "#batch 1 token token"]]


def unpadded(arch: Architecture, n: int, device: torch.device) -> Seen:
    """Who sees whom among n real tokens, by mask."""
    used = {arch.mask_of(layer) for layer in range(arch.layers)}
    return {mask: masks.matrix(mask, n, device)[None, None] for mask in used}


def average(visible: Bool[Tensor, "batch 1 row token"]) -> Float[Tensor, "batch 1 row token"]:
    """Return C, float64: each row the uniform average of what it sees; zero where it sees nothing."""
    return visible.double() / visible.sum(-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class PassSettings:
    """What every layer shares in a pass over one batch, valid tokens first: masks, positions, memory."""

    visible: Seen
    """By mask, padding taken out; empty where rows are asked for one block at a time."""
    rotary: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and sines by layer, repeating; empty where nothing is rotated."""
    sinusoids: Tensor | None
    bias: Tensor | None
    valid: Bool[Tensor, "batch token"]
    memory: Memory | None = None
    """What cross-attention reads, of every sample."""

    @classmethod
    def of(
        cls,
        arch: Architecture,
        weights: Weights,
        X: Float[Tensor, "batch token width"],
        valid: Bool[Tensor, "batch token"],
        memory: Memory | None = None,
        whole_masks: bool = True,
        seen: Seen | None = None,
    ) -> "PassSettings":
        """Make the settings of a pass.

        Args:
            arch: The architecture of the network.
            weights: Its weights, for the table of positions `bias`.
            X: The tokens, valid ones first.
            valid: Which positions are tokens.
            memory: What cross-attention reads.
            whole_masks: False makes no matrix `[token, token]`, masks and what positions add included.
            seen: What `unpadded` gave before, where every position is a token.
        """
        n = X.shape[-2]
        visible = {} if seen is None else seen
        if whole_masks and seen is None:
            visible, unpadded_batch = unpadded(arch, n, X.device), bool(valid.all())
            for mask, matrix in () if unpadded_batch else list(visible.items()):
                visible[mask] = matrix & valid[:, None, None, :] & valid[:, None, :, None]
                if bool((valid & ~visible[mask][:, 0].any(-1)).any()):
                    raise MaskError(UNSEEN, subject="mask")
        return cls(
            visible=visible,
            rotary=rotary_tables(arch, n, X) if arch.positions == "rotary" else (),
            sinusoids=sinusoids(arch, n, X) if arch.positions == "relative" else None,
            bias=score_bias(arch, weights, n, X) if whole_masks else None,
            valid=valid,
            memory=None if memory is None else memory.expanded(len(X)),
        )

    def rows(self, mask: str | masks.Mask, start: int, stop: int) -> Bool[Tensor, "#batch 1 row token"]:
        """Who is seen by tokens `start` to `stop`, padding taken out."""
        visible = masks.rows(mask, self.valid.shape[1], start, stop, self.valid.device)[None, None]
        if bool(self.valid.all()):
            return visible
        visible = visible & self.valid[:, None, None, :] & self.valid[:, None, start:stop, None]
        if bool((self.valid[:, start:stop] & ~visible[:, 0].any(-1)).any()):
            raise MaskError(UNSEEN, subject="mask")
        return visible

    def averages(self, mask: str | masks.Mask) -> Float[Tensor, "#batch 1 token token"]:
        """Return C of a layer with this mask: each row the uniform average of what a token sees."""
        return average(self.visible[mask])

    def bare(self) -> "PassSettings":
        """Without positions: what cross-attention has of it."""
        return replace(self, rotary=(), sinusoids=None, bias=None)

    def rotary_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a layer (0-based)."""
        return self.rotary[layer % len(self.rotary)]
