"""The one entrance of every metric: checked, upcast to float64, padding set apart.

Tokens come as `[*batch, token, width]`; `padding` is `[*batch, token]`, True where a token
is padding (Hugging Face's `attention_mask == 0`). Padded rows are set to zero here and never
counted afterwards, so a padded batch gives what each sequence gives alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from rankscope.errors import TokensError
from rankscope.metrics.norms import ORDER, Norms, is_fused, token_norms
from rankscope.shapes import Bool, Float, Int

Values = Float[Tensor, "*batch"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens ready to be measured, by one metric or many: what several of them need is computed once."""

    given: Float[Tensor, "*batch token width"]  # in the dtype they came in; padded tokens may hold anything
    valid: Bool[Tensor, "*batch token"]  # True at tokens, False at padding
    unit: float  # the eps of the dtype they came in
    unpadded: bool = False  # whether every token is known to be valid
    memo: dict[str, Tensor] = field(default_factory=dict)
    broken: Bool[Tensor, "*batch"] | None = None  # samples with NaN or infinity, taken as zero; None if there are none
    fused: bool = False  # whether the norms of X and of its residual are best taken together, as `norms`

    @property
    def count(self) -> Int[Tensor, "*batch"]:
        """The number of valid tokens of each sample."""
        return self.once("count", lambda: self.valid.sum(-1))

    @cached_property
    def X(self) -> Float[Tensor, "*batch token width"]:
        """The tokens in float64, zero at padded tokens and in broken samples."""
        valid = self.valid if self.broken is None else self.valid & ~self.broken[..., None]
        X = self.given.to(torch.float64)
        return X if self.unpadded and self.broken is None else X.masked_fill(~valid[..., None], 0.0)

    @property
    def norms(self) -> Norms:
        """The norms of X and of its residual about the mean that `token_norms` takes in one go."""
        return self.once("norms", lambda: token_norms(self.given, None if self.unpadded else self.valid))

    def norm(self, norm: str, residual: bool) -> Tensor:
        """One of `norms`; zero of a broken sample."""
        value = self.norms[ORDER[norm], int(residual)]
        return value if self.broken is None else value.masked_fill(self.broken, 0.0)

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


def nobody_can_look(X: Tensor) -> bool:
    """True while a CUDA graph is captured: the host cannot wait for numbers, and looks for NaN elsewhere."""
    return X.is_cuda and torch.cuda.is_current_stream_capturing()


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
    on_cpu = X.device.type == "cpu"
    ready = _ready(X, valid, padding is None or (on_cpu and bool(valid.all())))
    if not X.numel() or (on_cpu and _is_finite(ready)):
        return ready
    if nobody_can_look(X):
        return ready
    unpadded, finite = padding is None, _finite_samples(ready)
    if unpadded:
        every = bool(finite.all())
    else:  # one copy to the host, and as few kernels before it as can be
        finite, count = torch.stack([finite, ready.count]).cpu()
        every, unpadded = bool(finite.all()), bool((count == X.shape[-2]).all())
    if not every:
        where = f"sample {(~finite).nonzero()[0].tolist()}" if finite.ndim else "a token"
        sentence = (
            f"tokens must be finite; {where} holds NaN or infinity: measure an earlier layer, or in a wider dtype"
        )
        raise TokensError(sentence, subject="X")
    return replace(ready, unpadded=unpadded)


def tokens_of(
    X: Float[Tensor, "*batch token width"], valid: Bool[Tensor, "*batch token"], unpadded: bool = False
) -> tuple[Tokens, Bool[Tensor, "*batch"]]:
    """Tokens ready to be measured, and the samples that hold NaN or infinity, which are taken as zero.

    For states that a network has just made: nothing is refused, and off the CPU nothing is waited for.
    `unpadded` where every token is known to count.
    """
    on_cpu = X.device.type == "cpu"  # where looking costs nothing
    ready = _ready(X, valid, unpadded or (on_cpu and bool(valid.all())))
    if not X.numel() or (on_cpu and _is_finite(ready)):
        return ready, torch.zeros(X.shape[:-2], dtype=torch.bool, device=X.device)
    broken = ~_finite_samples(ready)
    kept = {name: value for name, value in ready.memo.items() if name in ("norms", "count")}
    return replace(ready, memo=kept, broken=broken), broken


def _ready(X: Tensor, valid: Tensor, unpadded: bool) -> Tokens:
    """Tokens that nobody has looked at."""
    return Tokens(X, valid, unit_of(X.dtype), unpadded, fused=is_fused(X))


def _is_finite(ready: Tokens) -> bool:
    """True if there is surely no NaN or infinity among the entries: sums and squares may leave the range where these
    do not."""
    if ready.fused:  # a pass over large tokens that makes no copy
        return bool(ready.given.sum(dtype=torch.float64).isfinite())
    return bool(norm_in_range(ready).isfinite().all())


def _finite_samples(ready: Tokens) -> Bool[Tensor, "*batch"]:
    """True for samples without NaN and infinity at valid tokens."""
    if ready.fused:
        return ready.norms[ORDER["max"], 0] < torch.inf  # NaN is not below infinity
    least, largest = ready.X.flatten(-2).aminmax(dim=-1)  # NaN or infinite when any entry is
    return least.isfinite() & largest.isfinite()


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
    if of.unpadded and of.given.shape[-2]:
        return values
    return values.masked_fill(of.count == 0, torch.nan)


def ratio(numerator: Values, denominator: Values) -> Values:
    """numerator / denominator, with 0 / 0 = 0: zero tokens are all the same."""
    zero = denominator == 0
    return (numerator / denominator.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)
