"""Attention whose softmax is written out, seen in torch's own functions:

    scores = q k' ...,   P = softmax(scores, -1),   y = dropout(P) V

Scores are a product of two tensors that come from the block's tokens, and what becomes of it as long as its
last two axes stay. P is what the softmax gave, before dropout. It is the pattern of attention where it is
multiplied, unchanged, with values that come from the tokens too: casts, copies, dropout, heads counted as
samples, and zeros for queries that see no key may stand between. Whatever else changes it (heads that are
mixed, gates) is named. Called by `torch_functions.py` for every call of torch in a block.
"""

import math
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rankscope.live.attention.head_outputs import by_head, check_pattern
from rankscope.live.attention.scores import WrittenScores
from rankscope.live.hidden_states import times_changed
from rankscope.live.hooks import isolated
from rankscope.live.processes import local_part

SOFTMAX = {"softmax", "special_softmax"}
PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum"}
SCORES = PRODUCTS | {"baddbmm", "cdist"}  # functions that make scores of queries and keys
COPIES = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "clone", "contiguous", "detach"}
VIEWS = {"view", "reshape", "flatten", "unflatten"}
BLINDING = {"masked_fill", "nan_to_num", "where"}  # may set rows of queries that see no key to zero
PIECES = {"__getitem__", "narrow", "split", "chunk", "unbind"}


class WrittenSoftmax:
    """One softmax written out: its scores, the pattern it gave, and what that was multiplied with. The pattern is
    `[batch, head, query, key]`, or `[batch * head, query, key]` with the number of `heads`, if known; `certain` says
    that queries and keys are known to come both from the block's tokens."""

    by_kernel = False

    def __init__(self, scores: Tensor, pattern: Tensor, heads: int | None, certain: bool) -> None:
        self.logits = local_part(scores.detach())
        self.set_pattern(pattern)
        self.heads, self.certain = heads or 1, certain
        self.altered_by: str | None = None  # the operation that changed the pattern before it came to the values
        self.dropped = False  # whether dropout stands between pattern and values
        self.used = False  # whether the pattern came to any values

    def set_pattern(self, pattern: Tensor) -> None:
        """Take this tensor for the pattern, and note how often it was changed in place so far."""
        pattern = local_part(pattern.detach())
        self._pattern, self._version = pattern, times_changed(pattern)

    def set_product(self, values: Tensor, output: Tensor) -> None:
        """Note that the pattern times these values gave this output."""
        values, self.output = local_part(values), local_part(output)
        self.values = values.expand(*self.output.shape[:-2], *values.shape[-2:])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of samples, queries and keys."""
        samples = self._pattern.shape[0] // (self.heads if self._pattern.ndim == 3 else 1)
        return samples, self._pattern.shape[-2], self._pattern.shape[-1]

    @property
    def head_width(self) -> int:
        """The number of entries of a head's values; 0 before there are values."""
        return self.values.shape[-1] if hasattr(self, "values") else 0

    def pattern(self) -> Tensor:
        """The attention pattern `[batch, head, query, key]`, checked against the product with the values."""
        with isolated(self._pattern.device):
            P, values, output = (self._by_head(x.detach()) for x in (self._pattern, self.values, self.output))
            P = P.to(torch.promote_types(P.dtype, output.dtype))
            if not self.dropped:
                check_pattern(P, values, output, "the block's product")
            return P

    def head_outputs(self) -> Tensor:
        """The output of each head `[batch, query, head, d]`."""
        return self._by_head(self.output.detach()).transpose(1, 2)

    def scores(self) -> WrittenScores:
        """The scores as the softmax took them."""
        return WrittenScores(self._by_head(self.logits))

    def products(self, rows: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of a pattern, beside those that the softmax gave, `[batch, row, head, key]`."""
        return P.transpose(1, 2), self._by_head(self._pattern)[:, :, rows].transpose(1, 2)

    def hidden_tokens(self) -> Tensor:
        """`[batch, token]`: True at keys that no query may attend to."""
        return self._by_head(self.logits < -1e3).all(2).all(1)

    def _by_head(self, x: Tensor) -> Tensor:
        return by_head(x.reshape(-1, self.heads, *x.shape[1:]) if x.ndim == 3 else x)


class FollowedTensors:
    """A set of tensors that does not keep them alive. Every function that a block calls asks it several times, so it is
    a dictionary of plain weak references, which is quicker than torch's."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Tensor]] = {}

    def add(self, x: Tensor) -> None:
        """Follow a tensor from now on."""
        key, references = id(x), self._references
        references[key] = weakref.ref(x, lambda _: references.pop(key, None))

    def __contains__(self, x: Tensor) -> bool:
        reference = self._references.get(id(x))
        return reference is not None and reference() is x

    def clear(self) -> None:
        """Forget every tensor that was followed."""
        self._references.clear()


class SoftmaxTracer:
    """Follows scores and patterns from call to call of torch; `from_tokens` is `FunctionTracer`'s."""

    def __init__(self, from_tokens: "FollowedTensors") -> None:
        self.from_tokens = from_tokens
        self.scores = WeakTensorKeyDictionary()  # with the number of heads, or None where that is not known
        # Queries `[batch * head, token, d]`, with the number of heads.
        self.folded: MutableMapping[Tensor, int | None] = WeakTensorKeyDictionary()
        self.patterns = WeakTensorKeyDictionary()  # with the softmax, and the name of what changed it since or None
        self.made: list[WrittenSoftmax] = []  # softmaxes of scores since `take_unused` was called last

    def clear(self) -> None:
        """Forget every tensor that was followed."""
        self.scores.clear()
        self.folded.clear()
        self.patterns.clear()
        self.made = []

    def take_unused(self) -> list[WrittenSoftmax]:
        """Softmaxes of scores that came to no values so far; each is given once."""
        made, self.made = self.made, []
        return [softmax for softmax in made if not softmax.used]

    def follow(
        self, name: str, args: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> tuple[WrittenSoftmax, bool] | None:
        """Note one call of torch's function of this name. If it multiplied a pattern with values, its softmax comes
        back, with whether queries, keys and values all come from the block's tokens; else None."""
        operands = list(tensors_in((*args, *named.values())))
        results = list(tensors_in((result, args[0] if name == "__setitem__" else None)))
        if not results:
            return None
        if name in SOFTMAX:
            dim = args[1] if len(args) > 1 else named.get("dim")
            self._softmax(operands[0], results[0], dim in (-1, operands[0].ndim - 1))
            return None
        pattern = next((x for x in operands if x in self.patterns), None) if self.patterns else None
        if name in PRODUCTS and pattern is not None:
            return self._product(name, args, operands, pattern, results[0])
        if name in SCORES:
            self._score(name, args, operands[-2:], results[0])
            return None
        if name in VIEWS | {"transpose"} and results[0].ndim == 3:
            self.folded[results[0]] = self.folded.get(operands[0]) or _folded_heads(operands[0].shape, results[0].shape)
        for output in results:
            if pattern is not None:
                self._pass_on(name, args, named, pattern, output)
            for x in operands if self.scores else ():
                if x in self.scores and output.shape[-2:] == x.shape[-2:] and name != "linear":
                    self.scores[output] = _heads(output) or self.scores[x]
        return None

    def _score(self, name: str, args: tuple[Any, ...], operands: list[Tensor], result: Tensor) -> None:
        """Note scores: a product of queries and keys in which the tokens of each stand last."""
        if len(operands) < 2 or result.ndim < 3 or not all(x in self.from_tokens for x in operands):
            return
        if name == "einsum":
            axes = _axes(args[0])
            if axes is None or any(all(i in x for x in axes[:2]) for i in axes[2][-2:]):
                return
        self.scores[result] = _heads(result) or self.folded.get(operands[0])

    def _softmax(self, x: Tensor, pattern: Tensor, last: bool) -> None:
        """Note the softmax of x, which ran over the last axis or another."""
        certain = x in self.scores
        if x in self.from_tokens and x.ndim > 2 and (last or certain):
            softmax = WrittenSoftmax(x, pattern, self.scores[x] if certain else None, certain)
            self.patterns[pattern] = (softmax, None if last else "a softmax over another axis than the last")
            if certain:
                self.made.append(softmax)

    def _pass_on(self, name: str, args: tuple[Any, ...], named: dict[str, Any], x: Tensor, result: Tensor) -> None:
        """Note that a call took the pattern x and gave `result`: the same pattern, or a changed one."""
        softmax, altered_by = self.patterns[x]
        same_shape = result.shape[-2:] == x.shape[-2:] and result.numel() == x.numel()
        unchanged = same_shape and name in COPIES
        if name == "dropout":  # torch.dropout calls its argument `train`
            p = args[1] if len(args) > 1 else named.get("p", 0.5)
            drops = bool(p and (args[2] if len(args) > 2 else named.get("training", named.get("train", True))))
            softmax.dropped |= drops
            unchanged = result is not x or not drops  # in place, the pattern before dropout is gone
        elif name in BLINDING and same_shape and altered_by is None and not softmax.dropped:
            with isolated(x.device):  # equal but for rows that are now zero
                unchanged = bool(((x == result) | (result == 0).all(-1, keepdim=True)).all())
            if unchanged:
                softmax.set_pattern(result)
        elif name in VIEWS and same_shape and result.ndim > 2:
            unchanged = True
            softmax.heads = _heads(result if result.ndim > 3 else x) or softmax.heads
        if unchanged:
            self.patterns[result] = (softmax, altered_by)
        elif result.numel() == x.numel() or name in PIECES:
            self.patterns[result] = (softmax, altered_by or name.strip("_"))

    def _product(
        self, name: str, args: tuple[Any, ...], operands: list[Tensor], pattern: Tensor, result: Tensor
    ) -> tuple[WrittenSoftmax, bool]:
        """Note that a pattern was multiplied with values; gives what `follow` returns."""
        softmax, altered_by = self.patterns[pattern]
        softmax.used = True
        values = operands[-1] if operands[0] is pattern else operands[0]
        product = None
        if len(operands) == 2:
            if name == "einsum":
                product = _einsum_product(args[0], operands[0] is pattern, values, result)
            elif operands[0] is pattern and pattern.ndim == values.ndim and pattern.shape[:-2] == result.shape[:-2]:
                product = (values, result)
        if product is None or values in self.patterns:
            altered_by = altered_by or f"{name} in another way than the pattern times values"
        else:
            softmax.set_product(*product)
        in_place = softmax._version != times_changed(softmax._pattern)
        softmax.altered_by = altered_by or ("a change in place" if in_place else None)
        mislaid = product is not None and altered_by is None and is_mislaid(product[0], softmax.sizes)
        return softmax, softmax.certain and values in self.from_tokens and not mislaid


def _axes(equation: Any) -> tuple[str, str, str] | None:
    """The letters of two operands and of the result, where an einsum names them all."""
    if not isinstance(equation, str) or "." in equation or equation.count(",") != 1 or "->" not in equation:
        return None
    operands, result = equation.replace(" ", "").split("->")
    first, second = operands.split(",")
    return first, second, result


def _einsum_product(equation: Any, pattern_first: bool, values: Tensor, result: Tensor) -> tuple[Tensor, Tensor] | None:
    """Values `[..., key, d]` and outputs `[..., query, d]`, axes as the pattern's; None if it is no such product."""
    axes = _axes(equation)
    if axes is None:
        return None
    P, V, out = axes if pattern_first else (axes[1], axes[0], axes[2])
    outer, i, j = P[:-2], P[-2], P[-1]
    d = "".join(sorted(set(V) - set(P)))
    if len(d) != 1 or i in V or j not in V or outer[0] not in V or sorted(out) != sorted(outer + i + d):
        return None
    values = values.permute([V.index(letter) for letter in outer + j + d if letter in V])
    for axis, letter in enumerate(outer):
        if letter not in V:
            values = values.unsqueeze(axis)
    return values, result.permute([out.index(letter) for letter in outer + i + d])


def is_mislaid(values: Tensor, sizes: tuple[int, int, int]) -> bool:
    """True if the axes of the values that should be samples and tokens are others (channels, heads), as strides of a
    view of rows `[batch * token, width]` tell; elsewhere True if there are as many channels as tokens, to be safe."""
    rows = values._base if values._is_view() else None
    samples, token, _ = sizes
    unsure = values.shape[-1] == token
    if rows is None or values.ndim < 3 or not rows.is_contiguous() or rows.ndim not in (2, 3):
        return unsure
    width = rows.shape[-1]
    if rows.numel() != samples * token * width or (values.ndim == 3 and len(values) != samples):
        return unsure
    if samples == 1:
        return values.stride(-2) != width
    return (values.stride(0), values.stride(-2)) not in ((token * width, width), (width, samples * width))


def _heads(x: Tensor) -> int | None:
    """The number of heads in `[batch, head, ..., query, key]`; None without an axis of heads."""
    return math.prod(x.shape[1:-2]) if x.ndim > 3 else None


def _folded_heads(shape: torch.Size, view: torch.Size) -> int | None:
    """The number of heads that a view of three axes counts as samples: `[batch * head, token, d]` of `[batch, head,
    token, d]`, or `[token, batch * head, d]` of `[token, batch, width]`; None in any other."""
    if len(shape) == 4 and view == (shape[0] * shape[1], *shape[2:]):
        return shape[1]
    heads = shape[-1] // max(1, view[-1])
    return heads if len(shape) == 3 and view == (shape[0], shape[1] * heads, view[-1]) and heads > 1 else None


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results, also those in tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
