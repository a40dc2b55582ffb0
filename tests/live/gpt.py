"""A GPT written by hand, as nanoGPT writes it; its heads may be computed in another way. And what holds of
attention in whatever way it is seen."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rankscope
from rankscope.errors import WatchError
from rankscope.live import Watch
from tests.live.families import checks, seen
from tests.raising import raises

METRICS = ["mu", "entropy", "first_token_mass", "dobrushin", "head_mu", "head_relative_residual"]
Heads = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Takes a module and queries, keys and values `[batch, head, token, d]`, and gives the heads' outputs so."""
WORDS, WIDTH, HEADS, LAYERS, CONTEXT = 40, 16, 4, 3, 12


class SelfAttention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (y.view(B, T, HEADS, -1).transpose(1, 2) for y in self.c_attn(x).split(WIDTH, dim=2))
        p = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn: nn.Module = SelfAttention(dropout)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0, block: Any = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts: dict[str, nn.Module] = {"wte": nn.Embedding(WORDS, WIDTH), "wpe": nn.Embedding(CONTEXT, WIDTH)}
        parts["h"] = nn.ModuleList([block(dropout) for _ in range(LAYERS)])
        self.transformer = nn.ModuleDict(parts | {"ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.5)

    def forward(self, idx: Tensor) -> Tensor:
        places = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](places)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def words(batch: int = 2, token: int = 6) -> Tensor:
    return torch.randint(0, WORDS, (batch, token), generator=torch.Generator().manual_seed(1))


def by_head(x: Tensor) -> Tensor:
    """`[batch, head, token, d]` of `[batch, token, width]`."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def gpt(heads: Heads, dropout: float = 0.0, block: type[Block] = Block) -> GPT:
    """The same with its heads computed so, in float64."""

    class Written(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = map(by_head, self.c_attn(x).split(WIDTH, dim=2))
            return self.c_proj(heads(self, q, k, v).transpose(1, 2).flatten(2))

    class Writing(block):
        def __init__(self, dropout: float) -> None:
            super().__init__(dropout)
            self.attn = Written(dropout)

    return GPT(dropout, Writing).double().eval()


def same(a: Watch, b: Watch, metrics: Sequence[str] = METRICS, within: float = 1e-12) -> None:
    """The two saw the same."""
    for each in metrics:
        torch.testing.assert_close(
            a.profile().curve(each), b.profile().curve(each), rtol=within, atol=within, equal_nan=True
        )


def trains_the_same(make: Callable[[], GPT]) -> Watch:
    """A training step, watched and not: the same to the last bit, dropout and gradients included."""

    def step(watched: bool) -> tuple[Tensor, list[Any], Any]:
        model = make().train()
        torch.manual_seed(3)
        if watched:
            with rankscope.watch(model, METRICS) as w:
                output = model(words())
                output.square().sum().backward()
        else:
            output, w = model(words()), None
            output.square().sum().backward()
        return output, [weight.grad for weight in model.parameters()], w

    (plain, grads, _), (output, others, w) = step(False), step(True)
    assert torch.equal(plain, output)
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert checks(w)["rows_sum_to_one"] is True
    return w


Hidden = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys, values and `[batch, token]`, False at padding."""


class Hiding(nn.Module):
    """Takes padding under a name of its own, and hides it in attention."""

    def __init__(self, heads: Hidden) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([_Hiding(heads) for _ in range(2)])

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, valid)
        return x


class _Hiding(nn.Module):
    def __init__(self, heads: Hidden) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(WIDTH, 3 * WIDTH), heads

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        q, k, v = map(by_head, self.qkv(x).chunk(3, -1))
        return x + self.heads(q, k, v, valid).transpose(1, 2).flatten(2)


def asks_for_padding(heads: Hidden) -> None:
    """Padding that attention alone knows is asked for; given, a padded sample is as one by itself."""
    model, x = Hiding(heads).double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, 4:] = False
    with raises(WatchError, subject="padding"):
        seen(model, "entropy", x, valid)
    with torch.no_grad(), rankscope.watch(model, METRICS[:4], padding=~valid) as w:
        model(x, valid)
    lone = seen(model, METRICS[:4], x[1:, :4], valid[1:, :4])
    for each in METRICS[:4]:
        a, b = w.profile().curve(each)[1], lone.profile().curve(each)[0]
        torch.testing.assert_close(a, b, equal_nan=True)
