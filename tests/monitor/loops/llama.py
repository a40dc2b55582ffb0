"""A Llama as torchtitan writes it: names, blocks in a `ModuleDict`, and its plan of tensor parallelism."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

WORDS, WIDTH, HEADS, KEY_HEADS, LAYERS, TOKENS = 40, 16, 4, 2, 3, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        # As many heads as this process has: tensor parallelism splits them.
        q, k, v = (y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2) for y in (q, k, v))
        q, k = (rotated(y, angles[: y.shape[2]]) for y in (q, k))
        k, v = (y.repeat_interleave(HEADS // KEY_HEADS, 1) for y in (k, v))
        return self.wo(attend(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), angles)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(WORDS, WIDTH)  # a later pipeline stage has none
        self.layers = nn.ModuleDict({str(k): Block() for k in range(LAYERS)})
        self.norm: nn.Module = nn.RMSNorm(WIDTH)
        self.output: nn.Linear | None = nn.Linear(WIDTH, WORDS, bias=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        angles = torch.outer(torch.arange(TOKENS), 0.5 ** torch.arange(2.0)).double()
        for block in self.layers.values():
            x = block(x, angles)
        return x if self.output is None else self.output(self.norm(x))

    def split(self, mesh: Any, sequence: bool, distributed: bool = False, gathered: bool = False) -> "Llama":
        """Split over the processes of a mesh, as torchtitan does: heads and inner widths and, with `sequence`, tokens
        between blocks. `distributed`: what goes from block to block is a DTensor, and so are queries and keys.
        `gathered`: each process attends with all heads, whose weights are split."""
        whole, tokens = Replicate(), Shard(1) if sequence else Replicate()
        local: dict[str, Any] = {"use_local_output": not distributed}
        plan: dict[str, Any] = {
            name: ColwiseParallel(**local) for name in ("attention.wq", "attention.wk", "attention.wv")
        }
        plan |= {name: ColwiseParallel(**local) for name in ("feed_forward.w1", "feed_forward.w3")}
        plan |= {name: RowwiseParallel(output_layouts=tokens, **local) for name in ("attention.wo", "feed_forward.w2")}
        if sequence:
            plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
            plan["attention"] = PrepareModuleInput(
                input_layouts=(tokens, None), desired_input_layouts=(whole, None), **local
            )
            plan["feed_forward"] = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,), **local)
        if gathered:
            plan |= {f"attention.{name}": ColwiseParallel(output_layouts=whole) for name in ("wq", "wk", "wv")}
            plan["attention.wo"] = RowwiseParallel(input_layouts=whole)
        for block in self.layers.values():
            parallelize_module(block, mesh, plan)
        outer: dict[str, Any] = {}
        if self.tok_embeddings is not None and distributed:
            self.tok_embeddings.register_forward_hook(
                lambda _, __, x: DTensor.from_local(x, mesh, [whole]).redistribute(placements=[tokens])
            )
        elif self.tok_embeddings is not None and sequence:
            outer["tok_embeddings"] = RowwiseParallel(input_layouts=whole, output_layouts=tokens)
        if self.output is not None and sequence:
            outer["norm"] = SequenceParallel()
            outer["output"] = ColwiseParallel(input_layouts=tokens, output_layouts=whole)
        parallelize_module(self, mesh, outer)
        return self

    def stage(self, index: int) -> "Llama":
        """The same with the blocks of the first of two pipeline stages, or of the second, alone."""
        for name in list(self.layers)[2:] if index == 0 else list(self.layers)[:2]:
            del self.layers[name]
        if index == 0:
            self.norm, self.output = nn.Identity(), None
        else:
            self.tok_embeddings = None
        return self


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions of queries or keys `[batch, head, token, d]`."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def batch(step: int, samples: int = 4) -> Tensor:
    return torch.randint(WORDS, (samples, TOKENS), generator=torch.Generator().manual_seed(step))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
