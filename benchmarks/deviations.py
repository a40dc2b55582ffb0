"""What deviation arithmetic costs over a plain float64 forward pass."""

from collections.abc import Iterable

import torch

from benchmarks.timing import Row, least_seconds
from rankscope.deviation import propagate
from rankscope.nets import Transformer, named_variant
from rankscope.sources.presets import preset
from rankscope.sources.words import bundled_excerpts, word_tokens

VARIANTS = ("transformer", "san+norm+skip", "san+mlp", "san")
"""From tokens that stay apart to tokens that fall together."""


def rows(small: bool = False, batch: int = 4, device: str = "cpu") -> list[Row]:
    """(what, against what, ratio) at BERT-base size, `batch` x 128 tokens, float64."""
    net = Transformer.random(preset("bert-tiny" if small else "bert-base"), device=device)
    X, _ = word_tokens(bundled_excerpts(128)[:batch], net.arch.width, 8 if small else 128)
    X = X.to(device)
    found = []
    for name in VARIANTS:
        variant = named_variant(net, name)
        cases = {
            "plain": lambda variant=variant: _walk(variant.steps(X), device),
            "deviation": lambda variant=variant: _walk(propagate(variant, X), device),
        }
        seconds = least_seconds(cases, rounds=1 if small else 4)
        ratio = seconds["deviation"] / seconds["plain"]
        found.append((f"deviation, {name}", f"float64 forward ({seconds['plain']:.3f} s)", ratio))
    return found


@torch.no_grad()
def _walk(steps: Iterable[object], device: str) -> None:
    for _ in steps:
        pass
    if device != "cpu":
        torch.cuda.synchronize()
