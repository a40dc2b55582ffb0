"""A small GPT in plain torch: what anyone might train. Its skips can be left out."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankscope.shapes import Float, Int


@dataclass(frozen=True)
class Shape:
    """What it looks like."""

    vocabulary: int
    context: int = 64
    layers: int = 6
    width: int = 64
    heads: int = 4
    skips: bool = True
    dropout: float = 0.0


class Block(nn.Module):
    """Norm, attention, norm, MLP: each added to what it was given, or in its place."""

    causal: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.skips = shape.skips
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, shape.heads, dropout=shape.dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(shape.dropout)
        hidden = torch.ones(shape.context, shape.context, dtype=torch.bool).triu(1)
        self.register_buffer("causal", hidden, persistent=False)

    def forward(self, x: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """The tokens after this block."""
        kept = 1.0 if self.skips else 0.0
        y, hidden = self.norm1(x), self.causal[: x.shape[1], : x.shape[1]]
        y, _ = self.attn(y, y, y, attn_mask=hidden, is_causal=True, need_weights=False)
        x = kept * x + self.drop(y)
        return kept * x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Symbols and positions, blocks, a norm, and a guess at the next symbol; initialised as GPT-2 is, but for
    its weights' size, `1/sqrt(inputs)`: so small a network would learn nothing from 0.02.

    >>> GPT(Shape(vocabulary=10, layers=2))(torch.zeros(1, 5, dtype=torch.long)).shape
    torch.Size([1, 5, 10])
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.symbols = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=shape.width**-0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        if shape.skips:  # what branches add is as large at any depth
            for block in self.blocks:
                for last in (block.attn.out_proj, block.mlp[2]):  # type: ignore[union-attr, index]
                    nn.init.normal_(last.weight, std=(2 * shape.layers * last.in_features) ** -0.5)  # type: ignore[union-attr, arg-type, operator]

    def forward(self, ids: Int[Tensor, "batch token"]) -> Float[Tensor, "batch token symbol"]:
        """The logits of what follows each symbol."""
        x = self.drop(self.symbols(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
