"""nanoGPT: its `model.py` and the loop of its `train.py`, small, with a monitor where a user would put one."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rankscope import Monitor

WORDS, WIDTH, HEADS, LAYERS, BLOCK_SIZE = 32, 16, 2, 2, 12
LEARNING_RATE, MIN_LR, WARMUP, DECAY, GRAD_CLIP = 6e-3, 6e-4, 2, 8, 1.0


class LayerNorm(nn.Module):
    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, dropout: float, bias: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, dropout: float, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, dropout: float, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = LayerNorm(WIDTH, bias), CausalSelfAttention(dropout, bias)
        self.ln_2, self.mlp = LayerNorm(WIDTH, bias), MLP(dropout, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.1, bias: bool = False) -> None:
        super().__init__()
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(WORDS, WIDTH),
            "wpe": nn.Embedding(BLOCK_SIZE, WIDTH),
            "drop": nn.Dropout(dropout),
            "h": nn.ModuleList([Block(dropout, bias) for _ in range(LAYERS)]),
            "ln_f": LayerNorm(WIDTH, bias),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, weight in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(weight, mean=0.0, std=0.02 / math.sqrt(2 * LAYERS))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](pos))
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits, loss = self.lm_head(x[:, [-1], :]), None
        return logits, loss

    def configure_optimizers(self) -> torch.optim.AdamW:
        weights = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in weights if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def get_lr(it: int) -> float:
    if it < WARMUP:
        return LEARNING_RATE * (it + 1) / (WARMUP + 1)
    if it > DECAY:
        return MIN_LR
    ratio = (it - WARMUP) / (DECAY - WARMUP)
    return MIN_LR + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (LEARNING_RATE - MIN_LR)


def get_batch(rank: int = 0, samples: int = 2, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """`samples` pieces of one text: words and the ones that follow; each rank has pieces of its own."""
    data = torch.randint(WORDS, (400,), generator=torch.Generator().manual_seed(rank))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - BLOCK_SIZE - 1, (samples,), generator=generator).tolist()
    X, Y = (torch.stack([data[i + off : i + off + BLOCK_SIZE] for i in starts]) for off in (0, 1))
    return X, Y


def train(
    monitored: Callable[[nn.Module, torch.optim.Optimizer], Monitor] | None = None,
    *,
    steps: int = 8,
    accumulate: int = 2,
    backend: str = "",
    rank: int = 0,
    ddp: bool = False,
    dtype: torch.dtype = torch.float32,
    around: Any = None,
) -> tuple[list[float], nn.Module, Tensor]:
    """(losses, the model, the state of torch's generator at the end). `around`: told before and after each step."""
    torch.manual_seed(1337)
    model: Any = GPT().train()
    torch.manual_seed(1337 + rank)
    ctx = nullcontext() if dtype == torch.float32 else torch.amp.autocast("cpu", dtype=dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    raw_model, optimizer = model, model.configure_optimizers()
    if backend:
        model = torch.compile(model, backend=backend)
    if ddp:
        model = DistributedDataParallel(model)
    monitor = None if monitored is None else monitored(model, optimizer)

    @torch.no_grad()
    def estimate_loss() -> None:
        model.eval()
        for _ in range(2):
            with ctx:
                raw_model(*get_batch(rank))
        model.train()

    losses = []
    X, Y = get_batch(rank)
    for iter_num in range(steps):
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % 3 == 0 and rank == 0:
            estimate_loss()
        for micro_step in range(accumulate):
            if ddp:
                model.require_backward_grad_sync = micro_step == accumulate - 1
            with ctx:
                _, loss = model(X, Y)
                loss = loss / accumulate
            X, Y = get_batch(rank)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        if around is not None:
            around.begins()
        scaler.step(optimizer)
        scaler.update()
        if around is not None:
            around.ends()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * accumulate)
        if monitor is not None:
            monitor.step(loss=losses[-1])
    if monitor is not None:
        monitor.close()
    return losses, raw_model, torch.get_rng_state()
