"""What is seen of attention inside a block: its weights, and what each head adds."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.call import Call, Plan
from rankscope.live.functions import Attention
from rankscope.live.heads import CLOSURE, check_closure, contributions, weight_of
from rankscope.live.isolation import isolated
from rankscope.live.multihead import head_outputs
from rankscope.live.reading import read_attention, read_heads
from rankscope.live.softmax import Softmax


class Attending:
    """The part of a recorder that hears of attention."""

    plan: Plan
    call: Call | None
    narrow: bool
    """Whether a model in float64 computed attention in float32."""

    def attention(self, weights: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Attention through the interface, inside a block: its weights, and its heads' outputs."""
        if self._listens():
            self._heard(*weights())

    def function(self, seen: Attention | Softmax, own: bool) -> None:
        """Attention through torch's functions, inside a block; `own` is whether tokens look at themselves."""
        call = self.call
        if call is None or not call.inside or call.shape is None:
            return
        batch, token = call.shape
        if seen.sizes != (batch, token, token):
            call.longer |= seen.sizes[:2] == (batch, token) and seen.sizes[2] > token
            call.elsewhere.append(
                f"attention of {seen.sizes[1]} tokens to {seen.sizes[2]} in {seen.sizes[0]} "
                "samples (windows, other tokens, or heads counted as samples)"
            )
        elif not own:
            said = "attention whose queries and keys cannot both be followed back to the block's tokens"
            if seen.wide == token:
                said += " (heads are as wide as there are tokens: call it on another number of them)"
            call.elsewhere.append(said)
        elif seen.changed is not None:
            raise WatchError(
                "attention weights must come to the values as their softmax gave them to be read; in block "
                f"{call.inside[-1]} {seen.changed} is between: watch metrics of tokens"
            )
        elif call.inside[-1] in call.attended:
            raise WatchError(
                f"a block must have one attention of its tokens to themselves for its weights to be read; a "
                f"second one came in block {call.inside[-1]}: name finer blocks with blocks=, or watch "
                "metrics of tokens"
            )
        elif self.plan.measures(call.inside[-1]):
            self.padded_attention(seen.unseen(), "a mask that hides tokens from all")
            self._heard(*seen.weights())
        else:
            call.attended.add(call.inside[-1])

    def unused(self, found: Sequence[Softmax]) -> None:
        """A block is left in which these softmaxes of its tokens' scores came to no values."""
        call = self.call
        assert call is not None and call.shape is not None
        batch, token = call.shape
        for each in found:
            if each.sizes == (batch, token, token) and call.inside[-1] in call.attended:
                raise WatchError(
                    f"a block must have one attention of its tokens to themselves for its weights to be "
                    f"read; block {call.inside[-1]} has a second softmax of its tokens' scores: watch "
                    "metrics of tokens"
                )
            call.elsewhere.append("a softmax of scores whose weights were not seen to multiply values")

    def multihead(
        self, module: nn.MultiheadAttention, weights: Callable[[], tuple[Tensor, Tensor, Tensor]]
    ) -> None:
        """Attention of torch's own module, inside a block."""
        if not self._listens():
            return
        P, value, output = weights()
        call = self._attending(P)
        if call is not None and self.plan.wants("heads"):
            with isolated(P.device):
                added = contributions(head_outputs(module, P, value), weight_of(module.out_proj))
                check_closure(added, module.out_proj.bias, output, type(module).__name__)
                read_heads(self.plan, call, added)

    def told(self, P: Tensor, added: Callable[[], Tensor]) -> None:
        """Attention that a block tells itself: its weights, and what each head adds."""
        if not self._listens():
            return
        call = self._attending(P.detach())
        if call is not None and self.plan.wants("heads"):
            with isolated(P.device):
                read_heads(self.plan, call, added().to(torch.float64))

    def padded_attention(self, mask: Tensor | None, name: str = "a key_padding_mask") -> None:
        """Attention inside a block was given padding: it must be the one that was found."""
        call = self.call
        if mask is None or call is None or not call.inside or call.mask is not None or self.plan.decoder:
            return
        hidden = mask < 0 if mask.is_floating_point() else mask.bool()
        if self.plan.own_padding and hidden.shape == call.shape and bool(hidden.any()):
            raise WatchError(
                "padding must be found in what the model is called with; attention inside a block was "
                f"given {name}, and no argument that watch knows holds it: give padding= (True at padded "
                "tokens)"
            )

    def projected(self, projection: nn.Module, x: Tensor, y: Tensor) -> None:
        """A linear map inside a block was called; if on the heads' outputs, it is their projection."""
        call = self.call
        if call is None or call.spoken is None or x.numel() != call.spoken.numel():
            return
        spoken = call.spoken
        if x.shape[-1] != spoken.shape[-2] * spoken.shape[-1]:
            return
        beside = spoken.flatten(-2).reshape(x.shape)
        with isolated(x.device):
            if not bool(torch.isclose(x, beside.to(x.dtype), equal_nan=True).all()):
                return
            call.spoken = None
            added = contributions(spoken, weight_of(projection))
            check_closure(added, projection.bias, y, type(projection).__name__)  # type: ignore[arg-type]
            read_heads(self.plan, call, added)
            call.projection = (projection, x, y.clone())  # a wrapper may add to y in place

    def wrapped(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        """A module with several weights was called; if around the heads' projection, both must agree."""
        if self.call is None or self.call.projection is None:
            return
        projection, given, output = self.call.projection
        if x.shape != given.shape or projection not in set(module.modules()):
            return
        with isolated(x.device):
            same = y.shape == output.shape and torch.allclose(y.to(output), output, CLOSURE, 1e-12, True)
            if torch.equal(x, given) and not same:
                raise WatchError(
                    f"what each head adds needs a plain output projection; {type(module).__name__} adds to "
                    f"what a {type(projection).__name__} in it returns, as LoRA does: merge it into the "
                    "weights, or watch metrics of tokens or attention"
                )

    def _heard(self, P: Tensor, spoken: Tensor) -> None:
        call = self._attending(P)
        if call is not None and self.plan.wants("heads"):
            call.spoken = spoken

    def _listens(self) -> bool:
        """Whether attention that happens now is the first of a block in a call that is measured."""
        call = self.call
        if call is None or not call.inside or call.shape is None:
            return False
        if call.inside[-1] in call.attended:
            call.others += 1
            return False
        return True

    def _attending(self, P: Tensor) -> Call | None:
        """The call whose attention this is, once read; None where it is not the tokens' own, or not asked
        for."""
        call = self.call
        assert call is not None and call.shape is not None
        layer = call.inside[-1]
        batch, token = call.shape
        if P.ndim != 4 or (P.shape[0], *P.shape[2:]) != (batch, token, token):
            call.unfit.append(tuple(P.shape))
            return None
        call.attended.add(layer)
        if not self.plan.measures(layer):
            return None
        self.narrow |= read_attention(self.plan, call, layer, P)
        return call
