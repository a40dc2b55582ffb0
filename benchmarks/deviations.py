"""What deviation arithmetic costs over a plain float64 forward pass: alone, measured, checked by a second
pass, and in doubled precision."""

import time
from collections.abc import Iterable
from functools import partial

import torch

from benchmarks.timing import Row, least_seconds
from rankscope.deviation import propagate
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.sources import bundled_excerpts, preset, word_tokens

VARIANTS = ("transformer", "san+norm+skip", "san+mlp", "san")
"""From tokens that stay apart to tokens that fall together."""
DOUBLED = ("transformer", "san")
"""Those that are also run in doubled precision, once."""
SMALL = ((2, 16), (6, 64), (12, 64))
"""Layers and widths of small networks."""


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
    return found + _unchecked(small)


def _unchecked(small: bool) -> list[Row]:
    """What `check=False` takes against the default on small networks, of 2 x 16 tokens: where tokens stay apart more,
    for there the default needs no deviation arithmetic."""
    found = []
    for layers, width in SMALL[:1] if small else SMALL:
        net = Transformer.random(Architecture(layers=layers, width=width, heads=2))
        X, _ = word_tokens(bundled_excerpts(16)[:2], width, 16)
        for name in ("transformer", "san"):
            given = net.variant(name), X
            cases = {"measure": partial(measure, *given), "unchecked": partial(measure, *given, check=False)}
            seconds = least_seconds(cases, rounds=1 if small else 7)
            what = f"measure, check=False, {name}, {layers} layers of width {width}"
            found.append((what, f"measure ({seconds['measure']:.3f} s)", seconds["unchecked"] / seconds["measure"]))
    return found


@torch.no_grad()
def _walk(steps: Iterable[object]) -> None:
    for _ in steps:
        pass
