"""How queries and keys become the attention pattern P of every head.

With q_i, k_j the query and key, b_ij whatever positions add, and V_i the tokens that i may see:

| kernel        | P_ij                                                              | rows sum to one |
|---------------|-------------------------------------------------------------------|-----------------|
| `softmax`     | `exp(q_i . k_j / divisor + b_ij)`, normalised over V_i            | yes             |
| `gaussian`    | `exp(-|q_i - k_j|^2 / (2 divisor) + b_ij)`, normalised over V_i   | yes             |
| `uniform`     | `1 / |V_i|`                                                       | yes             |
| `sink`        | `exp(s_ij) / (exp(sink) + sum over V_i of exp(s_ik))`, s as of softmax (gpt-oss) | no |
| `sigmoid`     | `sigmoid(q_i . k_j / divisor + b_ij - log |V_i|)` (Ramapuram 2024) | no              |
| `linear`      | `f(q_i) . f(k_j)`, `f = elu + 1`, normalised (Katharopoulos 2020) | yes             |
| `sinkhorn:k`  | softmax, then k rounds of columns and rows (Sander et al. 2022)   | yes             |
| `linformer:k` | `softmax(Q (E K)^T / divisor) F` (Wang 2020)                      | no              |

P is always `[batch, head, row, token]`, so that `P V` is the head's output whatever the kernel; rows and
tokens are the same but for cross-attention. Your own kernel is a `Kernel`, made as those in `KERNELS`
are; a new built-in one is added to that list.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import methodcaller
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.shapes import Bool, Float

Queries = Float[Tensor, "batch head row head_width"]
Keys = Float[Tensor, "batch head token head_width"]
Rows = Float[Tensor, "batch head row token"]
Visible = Bool[Tensor, "#batch 1 row token"]


class KernelContext(NamedTuple):
    """What a kernel needs beside queries and keys."""

    visible: Visible  # `visible[.., i, j]`: whether i may see j
    added: Tensor | None  # b, what positions add to the scores, after the divisor
    divisor: float  # What scores are divided by
    cap: float = 0.0  # C: scores s become `C tanh(s / C)`; 0: they stay as they are
    mixing: tuple[Tensor, Tensor] | None = None  # E and F of Linformer, `[rank, length]`
    rounds: int = 0  # Rounds of Sinkhorn
    gain: Tensor | None = None  # What scores are multiplied by at last, `[batch, 1, 1, 1]`
    sink: Tensor | None = None  # The score of each head for seeing nothing `[head]`


@runtime_checkable
class ScoreOperations(Protocol):
    """What deviation arithmetic offers to the deviation rule of a kernel: ways to make scores whose softmax
    is the pattern, split into what rows share and what they do not (`deviation/scores.py`)."""

    @property
    def split_heads(self) -> tuple[Any, Any, Any, Any]:
        """Queries and keys: of the common token `[batch, head, head_width]`, and what tokens add to each."""

    def products(self) -> Any:
        """`q_i . k_j / divisor + b_ij`, with the cap and gain of the architecture."""

    def distances(self) -> Any:
        """`-|q_i - k_j|^2 / (2 divisor) + b_ij`, with the gain of the architecture."""

    def feature_products(self) -> Any:
        """`log f(q_i) . f(k_j)`, `f = elu + 1`."""

    def equal(self) -> Any:
        """One score for all pairs of tokens."""

    def given(self, ref: Any, D: Any) -> Any:
        """Scores `ref_j + D_ij` that the rule computed itself from `split_heads`."""


@dataclass(frozen=True)
class Kernel:
    """A kind of attention: what its rows of P are, and the rules that its arithmetics and backends need."""

    name: str  # What files and messages call it
    pattern: Callable[[Queries, Keys, KernelContext], Rows]  # (queries, keys, context) to P
    averages: bool  # Whether rows of P sum to one whatever the tokens are
    deviation: Callable[[ScoreOperations], Any] | None = None
    """Its rule in deviation arithmetic, for kernels that average: the scores whose softmax P is. Without one, networks
    with this kernel are measured in float64."""
    has_scores: bool = True  # Whether P is made of scores, which positions and `log_gain` can change
    capped: bool = False  # Whether scores can be capped
    softmax_of: Literal["products", "distances", ""] = ""
    """The scores whose softmax a row of P is, where rows are computed as such; "" elsewhere."""
    by_row: bool = False  # Whether a row of P needs no other row, so that long contexts are computed some at a time
    deviation_by_row: bool = False  # Whether scores of the deviation rule are made some rows at a time as well


def kernel_of(kind: str | Kernel) -> Kernel:
    """The kernel of a name as an architecture has it, or itself."""
    return KERNELS[kind.partition(":")[0]] if isinstance(kind, str) else kind


def scores(q: Queries, k: Keys, context: KernelContext) -> Rows:
    """`q_i . k_j / divisor + b_ij`, capped where there is a cap, times the gain where there is one."""
    values = _with_positions(q @ k.mT, context)
    return _gained(context.cap * torch.tanh(values / context.cap) if context.cap else values, context)


def log_gain(gamma: float, valid: Bool[Tensor, "batch token"], like: Tensor) -> Tensor | None:
    """Return `gamma ln n` of every sample, n its valid tokens; None where gamma is 0."""
    return gamma * valid.sum(-1).clamp(min=1).to(like.dtype).log()[:, None, None, None] if gamma else None


def _gained(scores: Rows, context: KernelContext) -> Rows:
    return scores if context.gain is None else scores * context.gain


def masked_softmax(scores: Rows, visible: Visible) -> Rows:
    """Softmax over the visible tokens; a row that sees none (padding) is zero."""
    on_cpu = visible.device.type == "cpu"  # elsewhere the answer would be waited for
    if on_cpu and bool(visible.any(-1).all()):
        return (scores if bool(visible.all()) else scores.masked_fill(~visible, -torch.inf)).softmax(-1)
    blind = ~visible.any(-1, keepdim=True)
    seen = scores.masked_fill(~(visible | blind), -torch.inf)
    return seen.softmax(-1).masked_fill(~visible, 0.0)


def _with_positions(products: Rows, context: KernelContext) -> Rows:
    scores = products / context.divisor
    return scores if context.added is None else scores + context.added


def _softmax(q: Queries, k: Keys, context: KernelContext) -> Rows:
    return masked_softmax(scores(q, k, context), context.visible)


def _sink(q: Queries, k: Keys, context: KernelContext) -> Rows:
    """One more column takes its part of every row, and is left out."""
    assert context.sink is not None
    s = scores(q, k, context).masked_fill(~context.visible, -torch.inf)
    sink = context.sink[:, None, None].expand(*s.shape[:-1], 1)
    return torch.cat([s, sink], -1).softmax(-1)[..., :-1]


def _gaussian(q: Queries, k: Keys, context: KernelContext) -> Rows:
    products = q @ k.mT - k.square().sum(-1)[..., None, :] / 2  # |q_i|^2 is constant along a row
    return masked_softmax(_gained(_with_positions(products, context), context), context.visible)


def _sigmoid(q: Queries, k: Keys, context: KernelContext) -> Rows:
    seen = context.visible.sum(-1, keepdim=True).clamp(min=1)
    return torch.sigmoid(scores(q, k, context) - seen.to(q.dtype).log()) * context.visible


def _uniform(q: Queries, k: Keys, context: KernelContext) -> Rows:
    seen = context.visible.sum(-1, keepdim=True).clamp(min=1)
    return (context.visible.to(q.dtype) / seen).expand(len(q), q.shape[1], -1, -1)


def _linear(q: Queries, k: Keys, context: KernelContext) -> Rows:
    products = (F.elu(q) + 1) @ (F.elu(k) + 1).mT * context.visible
    total = products.sum(-1, keepdim=True)
    P = products / total.masked_fill(total == 0, 1.0)
    underflow = (total == 0) & context.visible.any(-1, keepdim=True)
    if not underflow.any():
        return P
    return torch.where(underflow, masked_softmax(linear_logs(q, k), context.visible), P)


def linear_logs(q: Queries, k: Keys) -> Rows:
    """`log f(q_i) . f(k_j)`, `f = elu + 1`, up to a constant of each row: for products that underflow."""
    log_q, log_k = (torch.where(x >= 0, torch.log1p(x.clamp(min=0.0)), x) for x in (q, k))
    log_q = log_q - log_q.amax(-1, keepdim=True)
    terms = [a[..., None] + b[..., None, :] for a, b in zip(log_q.unbind(-1), log_k.unbind(-1), strict=True)]
    top = reduce(torch.maximum, terms)
    return top + reduce(torch.add, [(term - top).exp() for term in terms]).log()


def _sinkhorn(q: Queries, k: Keys, context: KernelContext) -> Rows:
    """Columns are divided by their sums over the tokens that see them, then rows by theirs."""
    logs = scores(q, k, context)
    if not context.rounds:
        return masked_softmax(logs, context.visible)
    logs = logs.masked_fill(~context.visible, -torch.inf)
    logs = logs - _log_sum(logs, -1)
    for _ in range(context.rounds):
        for dim in (-2, -1):
            logs = logs - _log_sum(logs, dim)
    return logs.exp()


def _log_sum(logs: Rows, dim: int) -> Tensor:
    """`log sum e^x` along a dimension; zero where nothing is seen."""
    total = logs.logsumexp(dim, keepdim=True)
    return total.masked_fill(total == -torch.inf, 0.0)


def _linformer(q: Queries, k: Keys, context: KernelContext) -> Rows:
    assert context.mixing is not None
    n = q.shape[-2]
    seen = context.visible.any(-2)[..., None, :].to(q.dtype)  # [batch, 1, 1, token]: padding mixes nothing
    mix_keys, mix_values = (mixer[:, :n] * seen for mixer in context.mixing)
    scores = q @ (mix_keys @ k).mT / context.divisor  # [batch, head, token, rank]
    return _gained(scores, context).softmax(-1) @ mix_values


PRODUCTS, DISTANCES, FEATURE_PRODUCTS, EQUAL = (
    methodcaller(name) for name in ("products", "distances", "feature_products", "equal")
)
"""The deviation rules of the built-in kernels: each one call on `ScoreOperations`."""

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("softmax", _softmax, True, PRODUCTS, True, True, "products", by_row=True, deviation_by_row=True),
        Kernel("gaussian", _gaussian, True, DISTANCES, True, False, "distances", by_row=True, deviation_by_row=True),
        Kernel("uniform", _uniform, True, EQUAL, capped=True, by_row=True, deviation_by_row=True),
        Kernel("sink", _sink, False, capped=True),
        Kernel("sigmoid", _sigmoid, False, capped=True, by_row=True),
        Kernel("linear", _linear, True, FEATURE_PRODUCTS, has_scores=False, by_row=True),
        Kernel("sinkhorn", _sinkhorn, True, PRODUCTS, capped=True),
        Kernel("linformer", _linformer, False),
    )
}
