"""What deviation arithmetic costs over a plain float64 forward pass."""

from collections.abc import Callable, Iterable
from functools import partial

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
            "plain": partial(_pass, Transformer.steps, variant, X),
            "deviation": partial(_pass, propagate, variant, X),
        }
        seconds = least_seconds(cases, rounds=1 if small else 4)
        ratio = seconds["deviation"] / seconds["plain"]
        found.append((f"deviation, {name}", f"float64 forward ({seconds['plain']:.3f} s)", ratio))
    return found


def _pass(steps: Callable[..., Iterable[object]], net: Transformer, X: torch.Tensor) -> None:
    with torch.no_grad():
        for _ in steps(net, X):
            pass
    if X.is_cuda:
        torch.cuda.synchronize()
