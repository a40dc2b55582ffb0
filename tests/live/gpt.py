"""A GPT written by hand, as nanoGPT writes it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
