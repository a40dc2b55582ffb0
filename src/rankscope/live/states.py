"""The tokens in what a block was given and in what it gave back.

Blocks take and return a tensor, a tuple, a dictionary or an object like one: a floating tensor of three dims
in it is the state, or of four where tokens stand in rows and columns. Where there are several, it is the one
of the shape that the block took, and of these the one that the next block takes. Most put the batch first,
`[batch, token, width]`; torch's own with `batch_first=False` and XLNet put the token first.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, one_of
from rankscope.live.modules import holds

Layout = Literal["batch first", "token first"]
TOKEN_FIRST = ("XLNetLayer",)
"""Classes of blocks that take the token first, beside those that say so with `batch_first=False`."""


def layout_of(inside: Sequence[nn.Module], asked: str | None) -> Layout:
    """What was asked, or what blocks say of themselves; `inside` are they and all that is in them.

    >>> layout_of(list(nn.TransformerEncoderLayer(8, 2).modules()), None)
    'token first'
    """
    if asked is not None:
        if asked not in get_args(Layout):
            raise WatchError(one_of("layout", asked, get_args(Layout)))
        return asked  # type: ignore[return-value]
    kinds = set(map(type, inside))
    if any(kind.__name__ in TOKEN_FIRST for kind in kinds):
        return "token first"
    said = [part.__dict__["batch_first"] for part in inside if "batch_first" in part.__dict__]
    said += [getattr(kind, "batch_first", None) for kind in kinds]
    return "token first" if False in said else "batch first"


def in_rows_and_columns(inside: Sequence[nn.Module]) -> bool:
    """Whether a state of four dims would be `[batch, row, column, width]`, as in Swin: its blocks are linear
    maps and norms of the last dim, where those of convolutional networks have channels second. `inside` as
    above."""
    channels = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm2d, nn.GroupNorm)
    return holds(inside, (nn.Linear,)) and not holds(inside, channels)


def fitting_in(found: object, grid: bool = False) -> list[Tensor]:
    """The floating tensors that could be the state, as they are: of three dims, else of two, or of four."""
    tensors = [x for x in _tensors(found) if x.is_floating_point()]
    for dims in (3, 4, 2) if grid else (3, 2):
        if fitting := [x for x in tensors if x.ndim == dims]:
            return fitting
    return []


def states_in(found: object, layout: Layout, where: str, grid: bool = False) -> list[Tensor]:
    """What could be the state, as `[batch, token, width]`, detached, in the order of `fitting_in`; a single
    sequence `[token, width]` is a batch of one, `[batch, row, column, width]` has its tokens row by row.

    `found` is what a block returned, or its arguments in order; `grid`, whether four dims are such.
    """
    tensors = [x for x in _tensors(found) if x.is_floating_point()]
    if any(x.is_nested for x in tensors):
        raise WatchError(f"{where} holds nested tensors: watch the model with padded ones")
    if fitting := [x.detach() for x in fitting_in(found, grid)]:
        dims = fitting[0].ndim
        turned = layout == "token first" and dims == 3
        return [
            x[None] if dims == 2 else x.flatten(1, 2) if dims == 4 else x.transpose(0, 1) if turned else x
            for x in fitting
        ]
    shapes = ", ".join(str(tuple(x.shape)) for x in tensors) or "no floating tensor"
    raise WatchError(
        f"{where} must be tokens [batch, token, width]; it holds {shapes}: name other blocks with blocks="
    )


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two states are one: the same memory, or equal numbers."""
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
    """The cosine of two states, each token by itself, on average; 0 where their shapes differ."""
    if a.shape != b.shape:
        return 0.0
    pair = a.double(), b.to(a.device).double()
    return float(torch.nn.functional.cosine_similarity(*pair, dim=-1).mean())


def _tensors(found: object) -> Iterable[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    parts: Iterable[Any] = ()
    if isinstance(found, Mapping):
        parts = found.values()
    elif isinstance(found, tuple | list):
        parts = found
    return [x for x in parts if isinstance(x, Tensor)]
