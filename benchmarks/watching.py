"""What watching a live model costs over running it."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2Model

from benchmarks.timing import least_seconds
from rankscope import watch
from rankscope.profiles import DEFAULT_METRICS


def rows(device: str = "cpu", batch: int = 4, rounds: int = 9) -> list[tuple[str, str, float]]:
    """(what, against what, ratio) at GPT-2's size, batch x 128 tokens, float32."""
    build: Any = GPT2Model
    model = build(GPT2Config()).eval().to(device)
    ids = torch.randint(0, model.config.vocab_size, (batch, 128), device=device)

    def plain() -> None:
        with torch.no_grad():
            model(ids)
        if device != "cpu":
            torch.cuda.synchronize()

    def watched(metrics: tuple[str, ...]) -> None:
        with torch.no_grad(), watch(model, metrics) as w:
            model(ids)
        w.profile()

    seconds = least_seconds(
        {
            "plain": plain,
            "tokens": lambda: watched(DEFAULT_METRICS),
            "attention": lambda: watched((*DEFAULT_METRICS, "dobrushin", "entropy")),
        },
        rounds,
    )
    return [
        ("watch, 4 metrics of tokens", "forward, float32", seconds["tokens"] / seconds["plain"]),
        ("watch, and 2 of attention", "forward, float32", seconds["attention"] / seconds["plain"]),
    ]
