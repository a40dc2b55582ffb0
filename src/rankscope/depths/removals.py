"""What the output loses when a layer or a head is taken out: measured, by running the network without it.

`without(net, ...)` would run as often as there are layers and heads. Here what comes before a layer is not run again:
the tokens before it are known from the pass forward (`readings.py`), and all networks that lack something run side by
side as copies in one batch. Each layer is applied to all copies while it is in memory. As many copies run together as
memory holds; where that is not all, the later layers are read again for the rest.

Without a layer its input goes on as its output. Without a head the others, the output bias and all norms stay.
The result is that of `net.without(layers=...)` and `net.without(heads=...)`.

Cost, in layers applied to the text: `L (L - 1) / 2` for all layers, and `H L (L + 1) / 2` for all heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rankscope.metrics import ROUNDING, Values, frobenius_norm, unit_of
from rankscope.nets import Block, Memory, PassSettings, Plain, RowOutputs, Tokens, Transformer, free_memory, traverse
from rankscope.paths import centred_tokens, uniform
from rankscope.shapes import Bool, Float

SHARE = 4  # The part of free memory that copies of the tokens may fill: one in so many
UNKNOWN = 2**30  # Bytes for copies where nobody says how many are free


class _WithoutHead(Plain):
    """Plain rules in which each sample of the batch lacks one head."""

    def __init__(self, settings: PassSettings, net: Transformer, removed: Tensor) -> None:
        super().__init__(net.arch, settings)
        self.removed = torch.nn.functional.one_hot(removed, net.arch.heads).bool()[..., None, None]
        self.in_cross = False

    def only_active(self, block: Block, heads: Float[Tensor, "batch head row head_width"]) -> RowOutputs:
        """The outputs of heads, zero of the one that a sample lacks."""
        return super().only_active(block, heads if self.in_cross else heads.masked_fill(self.removed, 0.0))

    def cross(self, block: Block, X: Tokens) -> Tokens:
        """Cross-attention keeps all its heads."""
        self.in_cross = True
        try:
            return super().cross(block, X)
        finally:
            self.in_cross = False


@dataclass(eq=False)
class Removals:
    """Runs a network without each of its layers and, if asked for, each of its heads."""

    net: Transformer
    inputs: Sequence[Tokens]  # The prepared tokens before each layer, and after the last
    valid: Bool[Tensor, "batch token"]  # Which of them are tokens
    heads: bool  # Whether heads are taken out as well
    batch: int  # Samples that run together at most
    progress: Callable[[int], None]  # Called with how many layers were applied to the text

    def __post_init__(self) -> None:
        self.starts: list[int | None] = [None, *(range(self.net.arch.heads) if self.heads else ())]
        self.together = max(1, self.batch // len(self.valid))
        self.output = self.net.finish(self.inputs[-1]) * self.valid[..., None]
        self.floor = torch.zeros_like(self.valid[:, 0], dtype=torch.float64)
        """By sample: a change of the output up to this one may be rounding; known once `run` has ended."""
        self._settings: dict[int, PassSettings] = {}

    @staticmethod
    def layers_applied(layers: int, heads: int) -> int:
        """How many layers are applied to the text in all; `heads` is 0 where none is taken out."""
        return layers + layers * (layers - 1) // 2 + heads * layers * (layers + 1) // 2

    @torch.no_grad()
    def run(self) -> Iterator[tuple[tuple[int, int | None], dict[str, Tensor]]]:
        """Yield ((layer, head), what is lost without it, by column); the head is None where the layer went."""
        layers = len(self.net.blocks)
        state_bytes = max(1, self.inputs[0].numel() * self.inputs[0].element_size())
        free = free_memory(self.inputs[0].device)
        most = max(1, int((UNKNOWN if free is None else free / SHARE) // state_bytes) // len(self.starts))
        for first in range(0, layers, most):
            yield from self._group(first, min(first + most, layers))

    def _group(self, first: int, stop: int) -> Iterator[tuple[tuple[int, int | None], dict[str, Tensor]]]:
        """Without something of layers `first` to `stop`: their copies go to the end side by side."""
        names: list[tuple[int, int | None]] = []
        copies = self.inputs[0].new_empty((0, *self.inputs[0].shape))
        if first == 0:  # nothing is taken out of this copy: its entries are changed by a unit of rounding, up or down
            X = self.inputs[0]
            signs = 2 * torch.randint(2, X.shape, generator=torch.Generator().manual_seed(0)).to(X) - 1
            names, copies = [(0, None)], (X * (1 + torch.finfo(X.dtype).eps * signs))[None]
        for block in self.net.blocks[first:]:
            copies = self._through(block, copies)
            if block.index < stop:
                X = self.inputs[block.index][None]
                heads = self._without_heads(block) if len(self.starts) > 1 else X[:0]
                copies = torch.cat([copies, X, heads])
                names += [(block.index + 1, head) for head in self.starts]
        self.net.weights.layers.release()
        for name, X in zip(names, copies, strict=True):
            lost = self._lost(X)
            if name[0] == 0:
                self.floor = ROUNDING * lost["lost"].clamp(min=unit_of(X.dtype))
            else:
                yield name, lost

    def _through(self, block: Block, copies: Float[Tensor, "copy batch token width"]) -> Tensor:
        """All copies after a block."""
        for start in range(0, len(copies), self.together):
            some = copies[start : start + self.together]
            rules = Plain(self.net.arch, self._settings_of(len(some)))
            copies[start : start + self.together] = self._applied(block, rules, some)
        return copies

    def _without_heads(self, block: Block) -> Float[Tensor, "head batch token width"]:
        """The tokens after a block without each of its heads."""
        outputs = []
        for start in range(0, self.net.arch.heads, self.together):
            removed = torch.arange(start, min(start + self.together, self.net.arch.heads), device=self.valid.device)
            rules = _WithoutHead(self._settings_of(len(removed)), self.net, removed.repeat_interleave(len(self.valid)))
            X = self.inputs[block.index]
            outputs.append(self._applied(block, rules, X.expand(len(removed), *X.shape)))
        return torch.cat(outputs)

    def _applied(self, block: Block, rules: Plain, copies: Tensor) -> Tensor:
        state: Any = traverse(block, rules, copies.flatten(0, 1)).state
        self.progress(len(copies))
        return state.view(copies.shape).masked_fill(~self.valid[..., None], 0.0)

    def _settings_of(self, copies: int) -> PassSettings:
        """The settings of a pass over so many copies of the samples."""
        if copies not in self._settings:
            net, X = self.net, self.inputs[0]
            if net.memory is not None and len(net.memory.valid) > 1:
                memory = Memory(net.memory.tokens.repeat(copies, 1, 1), net.memory.valid.repeat(copies, 1))
                net = replace(net, memory=memory)
            self._settings[copies] = net.settings(X.repeat(copies, 1, 1), self.valid.repeat(copies, 1))
        return self._settings[copies]

    def _lost(self, X: Tokens) -> dict[str, Tensor]:
        """What the output loses where tokens X come out of the last layer."""
        changed, output = (self.net.finish(X) * self.valid[..., None]).double(), self.output.double()
        difference, residual = changed - output, centred_tokens(output, self.valid)
        lost, lost_residual = _ratio(difference, output), _ratio(centred_tokens(difference, self.valid), residual)
        lost_residual = lost_residual.masked_fill(uniform(self.output, self.valid), torch.nan)
        residual_floor = self.floor / _ratio(residual, output)
        return {
            "lost": lost,  # |output' - output| / |output|
            "lost_cosine": _cosine_gap(changed, output),  # 1 - the cosine of output' and output
            "lost_residual": lost_residual,  # of the residuals of both; NaN where the output is uniform
            "lost_below_floor": lost <= self.floor,  # rounding alone may change the output as much
            "lost_residual_below_floor": lost_residual <= residual_floor,
        }


def _ratio(difference: Tokens, whole: Tokens) -> Values:
    """The norm of a difference over that of the whole; NaN where the whole is zero."""
    size = frobenius_norm(whole)
    return frobenius_norm(difference) / size.masked_fill(size == 0, torch.nan)


def _cosine_gap(changed: Tokens, output: Tokens) -> Values:
    """`1 - cos`, as half the square of what unit vectors differ by; 1 where one of them is zero."""
    sizes = [frobenius_norm(X)[:, None, None] for X in (changed, output)]
    u, v = (X / size.masked_fill(size == 0, 1.0) for X, size in zip((changed, output), sizes, strict=True))
    zero = (sizes[0] == 0) | (sizes[1] == 0)
    return ((u - v).square().sum((1, 2)) / 2).masked_fill(zero.flatten(), 1.0)
