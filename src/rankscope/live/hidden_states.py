"""Finds the hidden states in what a block takes and returns, and follows them from block to block.

Blocks take and return a tensor, a tuple, a dictionary or an object like one: a floating tensor of three axes in it is
the hidden states, or of four where tokens stand in rows and columns. Of several, it is the one of the shape that the
block took, and of these the one that the next block takes. Most put the batch first, `[batch, token, width]`: torch's
and transformers' layers say which they do; of any other, attention in the first block shows it, since it mixes tokens.

`plan.py` calls `layout_of` and `tokens_in_rows_and_columns`; `model_call.py` calls
`layout_in_attention`; `call_follower.py` and the monitor call `hidden_states_in` for every block. The follower makes a
`BlockChain` for each call, and calls `gave` when a block is left, `handed_on` and, if that says no, `took` when the
next is entered, `ended` after the last, and `check`: blocks that were chosen wrongly do not take what others gave.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, require, require_one_of
from rankscope.live.processes import local_tokens

Layout = Literal["batch first", "token first", "width second"]
LAYOUTS: dict[Layout, tuple[str, tuple[int, int]]] = {
    "batch first": ("[batch, token, width]", (0, 0)),
    "token first": ("[token, batch, width]", (0, 1)),
    "width second": ("[batch, width, token]", (1, 2)),
}
"""Of each layout, its axes, and the two that are exchanged to have those of the first."""
# Blocks of transformers that take the token first, beside those with `batch_first=False`.
TOKEN_FIRST = {"XLNetLayer", "fsmt.EncoderLayer", "fsmt.DecoderLayer", "Mask2FormerMaskedAttentionDecoderLayer"}
CHANNELS_SECOND = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm2d, nn.GroupNorm)
ALIKE = 0.9  # cosine of what a block gives and the next takes, above which something small stands between


def layout_of(blocks: Sequence[nn.Module], modules: Sequence[nn.Module], layout: str | None) -> tuple[Layout, bool]:
    """The layout of the hidden states of blocks, with these modules in them, and whether it is known: as the user named
    it, or else as they declare; that is known where torch or transformers wrote the blocks.

    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> layout_of([layer], list(layer.modules()), None)
    ('token first', True)
    """
    if layout is not None:
        require_one_of("layout", layout, LAYOUTS, WatchError)
        return layout, True  # type: ignore[return-value]
    token_first = False in (vars(part).get("batch_first") for part in modules)
    for kind in set(map(type, modules)):
        names = (kind.__name__, f"{kind.__module__.split('.')[-2:][0]}.{kind.__name__}")
        token_first |= getattr(kind, "batch_first", None) is False or not TOKEN_FIRST.isdisjoint(names)
    known = all(type(block).__module__.startswith(("torch.nn.", "transformers.", "rankscope.")) for block in blocks)
    return "token first" if token_first else "batch first", known


def layout_in_attention(shape: Sequence[int], sizes: tuple[int, int, int] | None) -> Layout | None:
    """The layout of hidden states of this shape, by the numbers of samples, queries and keys of their attention to
    themselves; None if these are not known, or do not tell.

    >>> layout_in_attention((9, 2, 16), (2, 9, 9))
    'token first'
    """
    (first, second, third), (samples, queries, keys) = shape, sizes or (0, 0, 0)
    if queries != keys or first == second or not first * second * samples:
        return None
    if queries == second and samples % first == 0:
        return "batch first"
    if queries == first and samples % second == 0:
        return "token first"
    return "width second" if (samples, queries) == (first, third) else None


def exchanged(x: Tensor, layout: Layout) -> Tensor:
    """`[batch, token, width]` of hidden states in this layout; or, since axes are exchanged, the other way round."""
    return x.transpose(*LAYOUTS[layout][1])


def tokens_in_rows_and_columns(modules: Sequence[nn.Module]) -> bool:
    """True if four axes would be `[batch, row, column, width]`, as in Swin; convolutions have channels second."""
    kinds = set(map(type, modules))  # a model has few classes: each is asked once
    linear = any(issubclass(kind, nn.Linear) for kind in kinds)
    return linear and not any(issubclass(kind, CHANNELS_SECOND) for kind in kinds)


def candidates_in(values: object, grid: bool = False) -> list[Tensor]:
    """The floating tensors that could be the hidden states: of three axes, else, if tokens may be in a `grid`, of four,
    else of two. `values` is what a block returned, or its arguments in order."""
    tensors = floating_tensors(values)
    for axes in (3, 4, 2) if grid else (3, 2):
        if fitting := [x for x in tensors if x.ndim == axes]:
            return fitting
    return []


def hidden_states_in(values: object, layout: Layout, where: str, grid: bool = False) -> list[Tensor]:
    """What `candidates_in` finds, as `[batch, token, width]`, detached, as far as
    this process has it: a single sequence `[token, width]` is a batch of one, `[batch, row, column, width]` has its
    tokens row by row. `where` says what `values` are, for the error."""
    tensors = floating_tensors(values)
    single = tensors[0] if len(tensors) == 1 and layout == "batch first" else None
    if type(single) is Tensor and single.ndim == 3 and not (single.requires_grad or single.is_nested):
        return tensors  # as it is: the usual case
    if any(x.is_nested for x in tensors):
        raise WatchError(f"{where} holds nested tensors: watch the model with padded ones", subject="blocks")
    if fitting := candidates_in(tensors, grid):
        fitting = [local_tokens(x.detach() if x.requires_grad else x) for x in fitting]
        axes = fitting[0].ndim
        if axes == 2:
            return [x[None] for x in fitting]
        if axes == 4:
            return [x.flatten(1, 2) for x in fitting]
        return fitting if layout == "batch first" else [exchanged(x, layout) for x in fitting]
    shapes = ", ".join(str(tuple(x.shape)) for x in tensors) or "no floating tensor"
    sentence = f"{where} must be tokens [batch, token, width]; it holds {shapes}: name other blocks with blocks="
    raise WatchError(sentence, subject="blocks")


def same(a: Tensor, b: Tensor) -> bool:
    """True if two tensors are the same memory, or hold equal numbers."""
    if a is b:
        return True
    if a.shape != b.shape:
        return False
    alike = a.device == b.device and a.dtype == b.dtype and a.stride() == b.stride()
    if alike and a.data_ptr() == b.data_ptr():
        return True
    return bool(((a == b.to(a.device)) | (a.isnan() & b.to(a.device).isnan())).all())


def sizes_in(values: Iterable[object]) -> list[tuple[int, int]]:
    """(batch, token) of each argument that is ids or a mask `[batch, token]`, or embeddings `[batch, token, width]`."""
    tensors = [x for x in values if isinstance(x, Tensor) and x.ndim == (3 if x.is_floating_point() else 2)]
    return [(x.shape[0], x.shape[1]) for x in tensors]


def rows_and_columns(shape: Sequence[int], sizes: Iterable[tuple[int, int]], block: nn.Module) -> str:
    """A sentence that hidden states of this shape, of four axes, are read as `[batch, row, column, width]`.

    Args:
        shape: What the first block takes.
        sizes: What `sizes_in` gives for the arguments of the call.
        block: The first block, whose weights tell its width.

    Raises:
        WatchError: They are `[batch, token, stream, width]`, or `[batch, channel, row, column]`.
    """
    first, second, third, last = shape
    fault = f"received {tuple(shape)}"
    sentence = "blocks must take hidden states [batch, token, width]"
    what = f"{fault}, {second} tokens in {third} streams: watch no such model"
    require((first, second) not in sizes, f"{sentence}; {what}", WatchError, "blocks")
    linear = {part.in_features for part in block.modules() if isinstance(part, nn.Linear)}
    norms = {part.normalized_shape[-1] for part in block.modules() if isinstance(part, nn.LayerNorm)}
    sentence = "blocks must take tokens [batch, row, column, width]"
    what = f"{fault}, with {second} channels before rows and columns: name blocks inside of these with blocks="
    wide = linear | norms
    require(second not in wide or last in wide, f"{sentence}; {what}", WatchError, "blocks")
    axes = "tokens in rows and columns, [batch, row, column, width]"
    return f"Hidden states of four axes were read as {axes}: {tuple(shape)}"


def floating_tensors(values: object) -> list[Tensor]:
    """The floating tensors in what a block takes or returns: a tensor, a dictionary, a tuple or a list."""
    if isinstance(values, Tensor):
        values = (values,)
    elif not isinstance(values, (tuple, list)):
        values = [*values.values()] if isinstance(values, Mapping) else ()
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]


HeldStates = tuple[int, list[Tensor], list[int]]
"""A layer, the tensors that could be its hidden states, and how often each was changed in place."""


def continuation(held: HeldStates | None, states: Sequence[Tensor]) -> int:
    """Which of the tensors that a block takes is what was held of the one before; 0 if none is."""
    tensors = held[1] if held is not None else []
    return next((k for k, y in enumerate(states) if any(same(x, y) for x in tensors)), 0)


class BlockChain:
    """Follows the hidden states of one call from block to block."""

    def __init__(self) -> None:
        self.held: HeldStates | None = None
        self.position: int | None = None  # which of the tensors that a block returns the next one took
        self.linked = 0  # blocks that took what the one before gave
        self.broken: dict[int, float] = {}  # layers that the next block did not take as they were: how alike
        self.unsure: list[int] = []  # layers of which nothing said which tensor is the hidden states

    def gave(self, layer: int, states: Sequence[Tensor], taken: torch.Size | None) -> Tensor | None:
        """Hold what a block returned; gives its tensor of the shape that was `taken`, or None if several have it."""
        fitting = [x for x in states if x.shape == taken] or list(states)
        self.held = (layer, fitting, [times_changed(x) for x in fitting]) if fitting else None
        return fitting[0] if len(fitting) == 1 else None

    def handed_on(self, x: object) -> bool:
        """True if what the next block takes is the one tensor that was held, unchanged; then the link is counted."""
        tensors, versions = ((), ()) if self.held is None else self.held[1:]
        if len(tensors) != 1 or tensors[0] is not x or versions[0] != times_changed(tensors[0]):
            return False
        self.held = None
        self.linked += 1
        return True

    def took(self, states: Sequence[Tensor]) -> tuple[int, Tensor] | None:
        """Compare what the next block takes with what was held; (layer, hidden states) if that was open."""
        if self.held is None:
            return None
        (layer, fitting, versions), self.held = self.held, None
        for k, x in enumerate(fitting):
            if versions[k] == times_changed(x) and any(same(x, y) for y in states):
                self.linked += 1
                self.position = k if len(fitting) > 1 else self.position
                return (layer, x) if len(fitting) > 1 else None
        x = fitting[self._usual_position(layer, fitting)]
        wide = [(x.double(), y.to(x.device).double()) for y in states if y.shape == x.shape]
        cosines = [float(torch.cosine_similarity(*pair, dim=-1).mean()) for pair in wide]
        self.broken[layer] = max(cosines, default=0.0)
        return (layer, x) if len(fitting) > 1 else None

    def ended(self) -> tuple[int, Tensor] | None:
        """No block comes after: (last layer, its hidden states) if that was open."""
        if self.held is None:
            return None
        (layer, fitting, _), self.held = self.held, None
        return (layer, fitting[self._usual_position(layer, fitting)]) if len(fitting) > 1 else None

    def check(self, blocks: str) -> None:
        """Refuse blocks of which none takes what the one before gave; `blocks` says how they were chosen."""
        if self.broken and not self.linked and min(self.broken.values()) < ALIKE:
            fault = f"none of the {len(self.broken) + 1} {blocks} does, as branches of a layer: name whole layers"
            raise WatchError(f"every block must take what the one before it gave; {fault}", subject="blocks")

    def _usual_position(self, layer: int, fitting: Sequence[Tensor]) -> int:
        """Which of several tensors to take if the next block took none: as before, or the first."""
        if len(fitting) > 1 and (self.position is None or self.position >= len(fitting)):
            self.unsure.append(layer)
        return min(self.position or 0, len(fitting) - 1)


def times_changed(x: Tensor) -> int:
    """How often x was changed in place; tensors of inference mode do not count it."""
    return 0 if x.is_inference() else x._version
