"""Leaves out heads: the output projection takes 0 for what they give, `P_h V_h`.

An observer of `attention/` reports the outputs of all heads, and the linear layer that is called on exactly these is
the output projection; a hook before it sets some to 0. `nn.MultiheadAttention` calls no linear layer: while it runs,
its output projection has a copy of its weight, with 0 where these heads come in. Where neither is seen, an error says
so when the block returns.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.attention import AttentionCall
from rankscope.live.attention.head_outputs import is_linear, takes_heads
from rankscope.live.attention.multihead import multihead_modules
from rankscope.live.hooks import Hooks
from rankscope.live.modules import parts_in


class HeadsRemoval:
    """Sets the output of some heads to 0 before the output projection. `heads` and `blocks` are by layer."""

    def __init__(self, heads: Mapping[int, frozenset[int]], blocks: Mapping[int, nn.Module]) -> None:
        self.heads, self.blocks = heads, blocks
        self.layer: int | None = None  # the layer that runs, if it loses heads
        self.begun = self.done = False  # attention in it was seen; the output projection was
        self.outputs: Tensor | None = None  # what the heads of the running layer gave, `[batch, query, head, d]`
        self._weights: list[tuple[nn.Module, Tensor]] = []  # output projections, with the weights to give back

    def attach(self, hooks: Hooks, entered: Callable[[int], None]) -> None:
        """Hook the blocks and linear layers in them, until `hooks` are closed; `entered` is called for each call of a
        block."""
        hooks.callback(self._restore)
        for layer, block in self.blocks.items():

            def before(module: nn.Module, args: Any, layer: int = layer) -> None:
                entered(layer)
                self.layer, self.begun, self.done, self.outputs = layer, False, False, None

            hooks.attach(block, before, before=True)
            hooks.attach(block, self._left)
            parts = parts_in([block])
            for attention in multihead_modules(parts):
                hooks.attach(attention, self._mask_weight, before=True)
            for linear in filter(is_linear, parts):
                hooks.attach(linear, self._mask_input, before=True)

    def attach_last(self, hooks: Hooks) -> None:
        """Attach the hooks that restore weights. They run after the observer's, which therefore computes its second
        pass without these heads."""
        for part in multihead_modules(parts_in(self.blocks.values())):
            hooks.attach(part, lambda *_: self._restore(), always_call=True)

    def on_attention(self, attention: AttentionCall) -> None:
        """Wait for the output projection, once the layer's attention of its tokens to themselves was seen."""
        if self.layer is None or self.begun or attention.self_attention is False or attention.unused:
            return
        self.begun = True
        if attention.head_outputs is not None:
            self.outputs = attention.head_outputs()
            self._check(self.outputs.shape[2])

    def _check(self, count: int) -> None:
        """Refuse numbers of heads that the running layer does not have."""
        assert self.layer is not None
        if (last := max(self.heads[self.layer])) >= count:
            raise WatchError(f"heads are numbered 0..{count - 1}; got {last} in layer {self.layer}", subject="heads")

    def _mask_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What a linear layer takes, with 0 for what these heads gave, if it is the output projection."""
        outputs = self.outputs
        if outputs is None or self.layer is None or not takes_heads(outputs, args):
            return None
        self.outputs, self.done = None, True
        split = args[0].unflatten(-1, outputs.shape[-2:])
        return (split.index_fill(-2, self._indices(split), 0).flatten(-2),)

    def _mask_weight(self, module: nn.MultiheadAttention, args: Any) -> None:
        """Give an `nn.MultiheadAttention` an output projection without these heads, while it runs."""
        if self.layer is None or self.begun:
            return
        self._check(module.num_heads)
        self.begun = self.done = True
        projection = module.out_proj
        weight = projection.weight.view(len(projection.weight), module.num_heads, -1)
        self._weights.append((projection, projection.weight))
        masked: Any = weight.index_fill(1, self._indices(weight), 0).flatten(1)
        projection._parameters["weight"] = masked

    def _indices(self, like: Tensor) -> Tensor:
        assert self.layer is not None
        return torch.tensor(sorted(self.heads[self.layer]), device=like.device)

    def _restore(self) -> None:
        """Give weights back to the output projections that had a copy."""
        while self._weights:
            projection, weight = self._weights.pop()
            projection._parameters["weight"] = weight  # type: ignore[assignment]

    def _left(self, block: nn.Module, args: Any, output: Any) -> None:
        """A block has returned: its heads must have been left out."""
        layer, self.layer, self.outputs = self.layer, None, None
        if not self.done:
            seen = "no Linear or Conv1D took what they gave" if self.begun else "its attention was not seen"
            sentence = f"heads are left out where the output projection takes them; in layer {layer} {seen}"
            raise WatchError(f"{sentence}: leave out the branch of attention instead", subject="heads")
