"""The one entrance of every metric: checked, upcast to float64, padding set apart.

Tokens come as `[*batch, token, width]`; `padding` is `[*batch, token]`, True where a token
is padding (Hugging Face's `attention_mask == 0`). Padded rows are set to zero here and never
counted afterwards, so a padded batch gives what each sequence gives alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rankscope.errors import TokensError
from rankscope.shapes import Bool, Float, Int

Values = Float[Tensor, "*batch"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens ready to be measured, by one metric or many: what several of them need is computed once."""

    X: Float[Tensor, "*batch token width"]  # float64, zero at padded tokens
    valid: Bool[Tensor, "*batch token"]  # True at tokens, False at padding
    count: Int[Tensor, "*batch"]  # valid tokens of each sample
    unit: float  # the eps of the dtype they came in
    unpadded: bool = False  # whether every token is known to be valid
    memo: dict[str, Tensor] = field(default_factory=dict)

    def once(self, what: str, compute: Callable[[], Tensor]) -> Tensor:
        """The tensor of this name, computed at the first call; not to be changed in place."""
        if what not in self.memo:
            self.memo[what] = compute()
        return self.memo[what]


TokensLike = Tensor | Tokens  # What a metric takes: a tensor, or tokens that are ready, to measure them many times


def unit_of(dtype: torch.dtype) -> float:
    """The machine epsilon of an arithmetic; float64's at least, since metrics are computed there.

    >>> unit_of(torch.bfloat16)
    0.0078125
    """
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float64).eps)


def tokens(X: TokensLike, padding: Tensor | None = None) -> Tokens:
    """Check X and its padding, upcast to float64, zero the padded rows.

    >>> tokens(torch.ones(2, 5, 3), torch.arange(5).expand(2, 5) >= 4).count
    tensor([4, 4])
    """
    if isinstance(X, Tokens):
        return X
    if not isinstance(X, Tensor):
        sentence = f"tokens must be a torch tensor [batch, token, width]; got {type(X).__name__}: use torch.as_tensor"
        raise TokensError(sentence, subject="X")
    if X.ndim < 2:
        raise TokensError(f"tokens must have at least 2 dims [token, width]; received {tuple(X.shape)}", subject="X")
    if not X.is_floating_point():
        raise TokensError(f"tokens must be of a floating dtype; received {X.dtype}: embed token ids first", subject="X")
    valid = valid_tokens(X.shape[:-1], padding, X.device)
    ready = _ready(X, valid, padding is None or bool(valid.all()))
    if not X.numel() or bool(norm_in_range(ready).isfinite().all()):
        return ready
    finite = ready.X.isfinite().flatten(-2).all(-1)  # squares may leave the range where entries do not
    if not bool(finite.all()):
        where = f"sample {(~finite).nonzero()[0].tolist()}" if finite.ndim else "a token"
        sentence = (
            f"tokens must be finite; {where} holds NaN or infinity: measure an earlier layer, or in a wider dtype"
        )
        raise TokensError(sentence, subject="X")
    return ready


def tokens_of(
    X: Float[Tensor, "*batch token width"], valid: Bool[Tensor, "*batch token"], unpadded: bool = False
) -> tuple[Tokens, Bool[Tensor, "*batch"]]:
    """Tokens ready to be measured, and the samples that hold NaN or infinity, which are taken as zero.

    For states that a network has just made: nothing is refused, and off the CPU nothing is waited for.
    `unpadded` where every token is known to count.
    """
    on_cpu = X.device.type == "cpu"  # where looking costs nothing
    ready = _ready(X, valid, unpadded or (on_cpu and bool(valid.all())))
    X, fine = ready.X, torch.zeros(X.shape[:-2], dtype=torch.bool, device=X.device)
    if not X.numel() or (on_cpu and bool(norm_in_range(ready).isfinite().all())):
        return ready, fine
    if ready.unit > torch.finfo(torch.float64).eps:  # of a dtype whose squares stay in range: the norm tells
        norm = norm_in_range(ready)
        broken = ~norm.isfinite()
        known = {"vector norm": norm.masked_fill(broken, 0.0)}
    else:
        # The least and the largest entry are NaN or infinite when any is.
        least, largest = X.flatten(-2).aminmax(dim=-1)
        broken, known = ~(least.isfinite() & largest.isfinite()), {}
    return replace(ready, X=X.masked_fill(broken[..., None, None], 0.0), memo=known), broken


def _ready(X: Tensor, valid: Tensor, unpadded: bool) -> Tokens:
    """Tokens in float64, zero at padding."""
    unit, X = unit_of(X.dtype), X.to(torch.float64)
    X = X if unpadded else X.masked_fill(~valid[..., None], 0.0)
    return Tokens(X, valid, valid.sum(-1), unit, unpadded)


def norm_in_range(ready: Tokens) -> Values:
    """`||X||_F`, where its squares stay in range; infinite or NaN when an entry is."""
    return ready.once("vector norm", lambda: torch.linalg.vector_norm(ready.X, dim=(-2, -1)))


def valid_tokens(shape: torch.Size, padding: Tensor | None, device: torch.device) -> Bool[Tensor, "*batch token"]:
    """True where a token counts; the padding is checked against the tokens' shape."""
    if padding is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool:
        got = padding.dtype if isinstance(padding, Tensor) else type(padding).__name__
        sentence = f"padding must be a boolean tensor, True at padded tokens; received {got}: pass attention_mask == 0"
        raise TokensError(sentence, subject="padding")
    if padding.shape != shape:
        sentence = f"padding must have the tokens' shape {tuple(shape)}; received {tuple(padding.shape)}"
        raise TokensError(sentence, subject="padding")
    return ~padding.to(device)


def nan_where_empty(values: Values, of: Tokens) -> Values:
    """A sample without any token has no value: NaN, never a number that looks measured."""
    if of.unpadded and of.X.shape[-2]:
        return values
    return values.masked_fill(of.count == 0, torch.nan)


def ratio(numerator: Values, denominator: Values) -> Values:
    """numerator / denominator, with 0 / 0 = 0: zero tokens are all the same."""
    zero = denominator == 0
    return (numerator / denominator.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)
