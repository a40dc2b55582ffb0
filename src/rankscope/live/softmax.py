"""Attention whose softmax is written out, seen in torch's own functions:

    scores = q k' ...,   P = softmax(scores, -1),   y = dropout(P) V

Scores are a product of two tensors that come from the block's state, and what becomes of it as long as its
last two axes stay. P is what the softmax gave, before dropout. It is attention where it is multiplied with
values that come from the state too, as it is: casts, copies, dropout, heads counted as samples, and zeros for
rows that see nothing may stand between. Whatever else changes the weights (heads that talk, gates) is named.
"""

import math
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rankscope.errors import WatchError
from rankscope.live.heads import CLOSURE, ROUNDINGS, by_head
from rankscope.live.isolation import isolated
from rankscope.metrics.tokens import unit_of

SOFTMAX = {"softmax", "special_softmax"}
PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum"}
PAIRS = PRODUCTS | {"baddbmm", "cdist"}
"""What makes scores of queries and keys."""
COPIES = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "clone", "contiguous", "detach"}
VIEWS = {"view", "reshape", "flatten", "unflatten"}
BLINDING = {"masked_fill", "nan_to_num", "where"}
"""May clear rows that see nothing."""
PARTS = {"__getitem__", "narrow", "split", "chunk", "unbind"}


class Softmax:
    """One softmax written out: what it took, what it gave, and what that was multiplied with."""

    def __init__(self, scores: Tensor, P: Tensor, heads: int | None, certain: bool) -> None:
        self.scores = scores.detach()
        self.became(P)
        self.heads = heads or 1
        """Of weights `[batch * head, token, token]`."""
        self.certain = certain
        """Whether queries and keys both come from the block's state."""
        self.changed: str | None = None
        """What changed the weights before they came to the values, in words."""
        self.dropped = False
        self.used = False
        """Whether they came to any values."""

    def became(self, P: Tensor) -> None:
        """These are the weights."""
        self.P, self.version = P.detach(), _version(P)

    @property
    def touched(self) -> bool:
        """Whether the weights were changed in place since."""
        return self.version != _version(self.P)

    def multiplied(self, values: Tensor, output: Tensor) -> None:
        """With these values the weights gave this."""
        self.values = values.expand(*output.shape[:-2], *values.shape[-2:])
        self.output = output

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(samples, tokens that look, tokens looked at)"""
        samples = self.P.shape[0] // (self.heads if self.P.ndim == 3 else 1)
        return samples, self.P.shape[-2], self.P.shape[-1]

    @property
    def wide(self) -> int:
        """Entries of a head's values."""
        return self.values.shape[-1] if hasattr(self, "values") else 0

    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights `[batch, head, token, token]` and the heads' outputs `[batch, token, head, d]`."""
        with isolated(self.P.device):
            P, values, output = (self._by_head(x.detach()) for x in (self.P, self.values, self.output))
            P = P.to(torch.promote_types(P.dtype, output.dtype))
            if not self.dropped:
                given = output.to(P.dtype)
                miss = (P @ values.to(P.dtype) - given).norm() / given.norm().clamp(min=1e-30)
                if bool(miss > max(CLOSURE, ROUNDINGS * unit_of(output.dtype))):  # never where there is NaN
                    raise WatchError(
                        "attention weights times values must be what the block's product gave; they miss it "
                        f"by {float(miss):.1e} of its size, as weights changed in place do: watch metrics of "
                        "tokens"
                    )
            return P, output.transpose(1, 2)

    def unseen(self) -> Tensor:
        """`[batch, token]`: tokens that no token may look at."""
        return self._by_head(self.scores < -1e3).all(2).all(1)

    def _by_head(self, x: Tensor) -> Tensor:
        return by_head(x.reshape(-1, self.heads, *x.shape[1:]) if x.ndim == 3 else x)


class Softmaxes:
    """Follows scores and weights from call to call."""

    def __init__(self, own: MutableMapping[Tensor, Any]) -> None:
        self.own = own
        """Tensors that come from the block's state."""
        self.scores = WeakTensorKeyDictionary()
        """With the number of heads, where known."""
        self.weights = WeakTensorKeyDictionary()
        """With their softmax, and what changed them since."""
        self.made: list[Softmax] = []

    def clear(self) -> None:
        """Nothing is followed."""
        self.scores.clear()
        self.weights.clear()
        self.made = []

    def unused(self) -> list[Softmax]:
        """Softmaxes of scores that came to no values so far; each is told once."""
        made, self.made = self.made, []
        return [each for each in made if not each.used]

    def follow(
        self, name: str, args: tuple[Any, ...], named: dict[str, Any], found: Any
    ) -> tuple[Softmax, bool] | None:
        """One call of torch; the softmax whose weights it multiplied with values, if it did, and whether
        queries, keys and values all come from the block's state."""
        given = list(tensors((*args, *named.values())))
        results = list(tensors((found, args[0] if name == "__setitem__" else None)))
        if not results:
            return None
        if name in SOFTMAX:
            dim = args[1] if len(args) > 1 else named.get("dim")
            self._softmax(given[0], results[0], dim in (-1, given[0].ndim - 1))
            return None
        held = next((x for x in given if x in self.weights), None)
        if name in PRODUCTS and held is not None:
            return self._product(name, args, given, held, results[0])
        if name in PAIRS:
            self._pair(name, args, given[-2:], results[0])
            return None
        for result in results:
            if held is not None:
                self._passed(name, args, named, held, result)
            for x in given:
                if x in self.scores and result.shape[-2:] == x.shape[-2:] and name != "linear":
                    self.scores[result] = _heads(result) or self.scores[x]
        return None

    def _pair(self, name: str, args: tuple[Any, ...], given: list[Tensor], found: Tensor) -> None:
        """Queries times keys are scores: the tokens of each stay, and stand last."""
        if len(given) < 2 or found.ndim < 3 or not all(x in self.own for x in given):
            return
        if name == "einsum":
            letters = _letters(args[0])
            if letters is None or any(all(i in x for x in letters[:2]) for i in letters[2][-2:]):
                return
        self.scores[found] = _heads(found)

    def _softmax(self, x: Tensor, P: Tensor, last: bool) -> None:
        certain = x in self.scores
        if x in self.own and x.ndim > 2 and (last or certain):
            made = Softmax(x, P, self.scores[x] if certain else None, certain)
            self.weights[P] = (made, None if last else "a softmax over another axis than the last")
            if certain:
                self.made.append(made)

    def _passed(
        self, name: str, args: tuple[Any, ...], named: dict[str, Any], x: Tensor, result: Tensor
    ) -> None:
        """Weights went through a call: as they are, or changed."""
        softmax, changed = self.weights[x]
        same = result.shape[-2:] == x.shape[-2:] and result.numel() == x.numel()
        kept = same and name in COPIES
        if name == "dropout":
            drops = _drops(args, named)
            softmax.dropped |= drops
            kept = result is not x or not drops  # in place, the weights before are gone
        elif name in BLINDING and same and changed is None and not softmax.dropped:
            kept = _blinded(x, result)
            if kept:
                softmax.became(result)
        elif name in VIEWS and same and result.ndim > 2:
            kept = True
            four = result if result.ndim > 3 else x
            softmax.heads = _heads(four) or softmax.heads
        if kept:
            self.weights[result] = (softmax, changed)
        elif result.numel() == x.numel() or name in PARTS:
            self.weights[result] = (softmax, changed or name.strip("_"))

    def _product(
        self, name: str, args: tuple[Any, ...], given: list[Tensor], P: Tensor, found: Tensor
    ) -> tuple[Softmax, bool]:
        softmax, changed = self.weights[P]
        softmax.used = True
        values = given[-1] if given[0] is P else given[0]
        spoken = None
        if len(given) == 2:
            if name == "einsum":
                spoken = _by_letters(args[0], given[0] is P, values, found)
            elif given[0] is P and P.ndim == values.ndim and P.shape[:-2] == found.shape[:-2]:
                spoken = (values, found)
        if spoken is None or values in self.weights:
            changed = changed or f"{name} in another way than weights times values"
        else:
            softmax.multiplied(*spoken)
        softmax.changed = changed or ("a change in place" if softmax.touched else None)
        stray = spoken is not None and changed is None and strays(spoken[0], softmax.sizes)
        return softmax, softmax.certain and values in self.own and not stray


def _letters(equation: Any) -> tuple[str, str, str] | None:
    """The axes of two operands and of the result, where an einsum names them all."""
    if not isinstance(equation, str) or "." in equation or equation.count(",") != 1 or "->" not in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    first, second = given.split(",")
    return first, second, result


def _by_letters(equation: Any, first: bool, values: Tensor, found: Tensor) -> tuple[Tensor, Tensor] | None:
    """Values `[..., token, d]` and outputs `[..., token, d]` in the order of the weights' axes."""
    letters = _letters(equation)
    if letters is None:
        return None
    P, V, out = letters if first else (letters[1], letters[0], letters[2])
    around, i, j = P[:-2], P[-2], P[-1]
    d = "".join(sorted(set(V) - set(P)))
    if len(d) != 1 or i in V or j not in V or around[0] not in V or sorted(out) != sorted(around + i + d):
        return None
    there = [each for each in around + j + d if each in V]
    values = values.permute([V.index(each) for each in there])
    for axis, each in enumerate(around):
        if each not in V:
            values = values.unsqueeze(axis)
    return values, found.permute([out.index(each) for each in around + i + d])


def strays(values: Tensor, sizes: tuple[int, int, int]) -> bool:
    """Whether values lie in memory so that what they have for tokens and samples is something else: channels,
    or heads. Told where they are a view of rows `[batch * token, width]`; where they are not, channels may
    stand for tokens if there are as many."""
    rows = values._base if values._is_view() else None
    samples, token, _ = sizes
    unsure = values.shape[-1] == token
    if rows is None or values.ndim < 3 or not rows.is_contiguous() or rows.ndim not in (2, 3):
        return unsure
    width = rows.shape[-1]
    if rows.numel() != samples * token * width or (values.ndim == 3 and len(values) != samples):
        return unsure
    steps = (values.stride(0), values.stride(-2))
    if samples == 1:
        return steps[1] != width
    return steps not in ((token * width, width), (width, samples * width))


def _drops(args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a call of F.dropout, or of torch's, drops anything."""
    p = args[1] if len(args) > 1 else named.get("p", 0.5)
    training = args[2] if len(args) > 2 else named.get("training", named.get("train", True))
    return bool(p and training)


def _heads(x: Tensor) -> int | None:
    return math.prod(x.shape[1:-2]) if x.ndim > 3 else None


def _version(x: Tensor) -> int:
    """Counts changes in place; inference tensors have no count."""
    return 0 if x.is_inference() else x._version


def _blinded(x: Tensor, result: Tensor) -> bool:
    """Whether they are the same but for rows that have no weights now."""
    with isolated(x.device):
        rows = (result != 0).any(-1, keepdim=True)
        return bool(((x == result) | ~rows).all())


def tensors(found: Any) -> Iterator[Tensor]:
    """All that are in it."""
    for each in found:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple | list):
            yield from tensors(each)
