"""What deviation arithmetic costs over a plain float64 forward pass: alone, measured, checked by a second
pass, and in doubled precision."""

import time
from collections.abc import Iterable

import torch

from benchmarks.timing import Row, least_seconds
from rankscope.deviation import propagate
from rankscope.nets import Transformer
from rankscope.profiles import measure
from rankscope.sources.fresh import preset
from rankscope.sources.random_embedding import bundled_excerpts, word_tokens

VARIANTS = ("transformer", "san+norm+skip", "san+mlp", "san")
"""From tokens that stay apart to tokens that fall together."""
DOUBLED = ("transformer", "san")
"""Those that are also run in doubled precision, once."""


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio) at BERT-base size, 4 x 128 tokens, float64."""
    net = Transformer.random(preset("bert-tiny" if small else "bert-base"))
    X, _ = word_tokens(bundled_excerpts(128)[:4], net.arch.width, 8 if small else 128)
    found = []
    for name in VARIANTS:
        variant = net.variant(name)
        cases = {
            "plain": lambda variant=variant: _walk(variant.steps(X)),
            "deviation": lambda variant=variant: _walk(propagate(variant, X)),
            "measure, check=False": lambda variant=variant: measure(variant, X, check=False),
            "measure": lambda variant=variant: measure(variant, X),
        }
        seconds = least_seconds(cases, rounds=1 if small else 4)
        against = f"float64 forward ({seconds['plain']:.3f} s)"
        found += [(f"{what}, {name}", against, seconds[what] / seconds["plain"]) for what in list(cases)[1:]]
        if name in DOUBLED:
            start = time.perf_counter()
            _walk(propagate(variant, X, doubled=True))
            taken = time.perf_counter() - start
            found.append((f"doubled precision, {name}", f"the same ({taken:.0f} s)", taken / seconds["plain"]))
    return found


@torch.no_grad()
def _walk(steps: Iterable[object]) -> None:
    for _ in steps:
        pass
