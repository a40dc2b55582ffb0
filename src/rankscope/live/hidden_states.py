"""Finds the hidden states in what a block takes and in what it returns.

Blocks take and return a tensor, a tuple, a dictionary or an object like one: a floating tensor of three axes
in it is the hidden states, or of four where tokens stand in rows and columns. Where there are several, it is
the one of the shape that the block took, and of these the one that the next block takes (`chain.py`). Most
put the batch first, `[batch, token, width]`; torch's own with `batch_first=False` and XLNet put the token
first. Called by `plan.py` (`layout_of`, `tokens_in_rows_and_columns`) and, for every block, by `recorder.py`
and the monitor (`hidden_states_in`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, one_of
from rankscope.live.modules import contains

Layout = Literal["batch first", "token first"]
TOKEN_FIRST = ("XLNetLayer",)
"""Classes of blocks that take the token first, beside those that say so with `batch_first=False`."""


def layout_of(modules: Sequence[nn.Module], layout: str | None) -> Layout:
    """The layout that the user named, or else the one that the blocks, with all in them, declare.

    >>> layout_of(list(nn.TransformerEncoderLayer(8, 2).modules()), None)
    'token first'
    """
    if layout is not None:
        if layout not in get_args(Layout):
            raise WatchError(one_of("layout", layout, get_args(Layout)), subject="layout")
        return layout  # type: ignore[return-value]
    kinds = set(map(type, modules))
    if any(kind.__name__ in TOKEN_FIRST for kind in kinds):
        return "token first"
    declared = [part.__dict__["batch_first"] for part in modules if "batch_first" in part.__dict__]
    declared += [getattr(kind, "batch_first", None) for kind in kinds]
    return "token first" if False in declared else "batch first"


def tokens_in_rows_and_columns(modules: Sequence[nn.Module]) -> bool:
    """True if hidden states of four axes would be `[batch, row, column, width]`, as in Swin.

    The blocks of such models are linear maps and norms of the last axis; convolutional networks have channels
    second. `modules` are the blocks and all modules in them.
    """
    channels = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm2d, nn.GroupNorm)
    return contains(modules, (nn.Linear,)) and not contains(modules, channels)


def candidates_in(values: object, grid: bool = False) -> list[Tensor]:
    """The floating tensors that could be the hidden states, as they are: of three axes, else of two or four.

    `values` is what a block returned, or its arguments in order; `grid`, whether tokens may be in four axes.
    """
    tensors = [x for x in _tensors(values) if x.is_floating_point()]
    for axes in (3, 4, 2) if grid else (3, 2):
        if fitting := [x for x in tensors if x.ndim == axes]:
            return fitting
    return []


def hidden_states_in(values: object, layout: Layout, where: str, grid: bool = False) -> list[Tensor]:
    """What could be the hidden states, as `[batch, token, width]`, detached, in the order of `candidates_in`.

    A single sequence `[token, width]` becomes a batch of one; `[batch, row, column, width]` has its tokens
    row by row. `where` says what `values` are, for the error if there is no such tensor.
    """
    tensors = [x for x in _tensors(values) if x.is_floating_point()]
    if any(x.is_nested for x in tensors):
        raise WatchError(f"{where} holds nested tensors: watch the model with padded ones", subject="blocks")
    if fitting := [x.detach() for x in candidates_in(values, grid)]:
        axes = fitting[0].ndim
        turned = layout == "token first" and axes == 3
        return [
            x[None] if axes == 2 else x.flatten(1, 2) if axes == 4 else x.transpose(0, 1) if turned else x
            for x in fitting
        ]
    shapes = ", ".join(str(tuple(x.shape)) for x in tensors) or "no floating tensor"
    raise WatchError(
        f"{where} must be tokens [batch, token, width]; it holds {shapes}: name other blocks with blocks=",
        subject="blocks",
    )


def same(a: Tensor, b: Tensor) -> bool:
    """True if two tensors are the same memory, or hold equal numbers."""
    if a.shape != b.shape:
        return False
    if (
        a.device == b.device
        and a.dtype == b.dtype
        and a.data_ptr() == b.data_ptr()
        and a.stride() == b.stride()
    ):
        return True
    return bool(((a == b.to(a.device)) | (a.isnan() & b.to(a.device).isnan())).all())


def alike(a: Tensor, b: Tensor) -> float:
    """The mean cosine of the tokens of two hidden states; 0 if their shapes differ."""
    if a.shape != b.shape:
        return 0.0
    pair = a.double(), b.to(a.device).double()
    return float(torch.nn.functional.cosine_similarity(*pair, dim=-1).mean())


def _tensors(values: object) -> list[Tensor]:
    """The tensors in a tensor, a dictionary, a tuple or a list."""
    parts: Iterable[Any] = ()
    if isinstance(values, Tensor):
        parts = [values]
    elif isinstance(values, Mapping):
        parts = values.values()
    elif isinstance(values, tuple | list):
        parts = values
    return [x for x in parts if isinstance(x, Tensor)]
