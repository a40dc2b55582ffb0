"""Gradient ascent against every bound: over tokens and weights, towards what the theorem forbids.

The ratio that is climbed comes from `plain.py`, which shares no code with the certificates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.theory import plain as slow
from tests.theory.plain import Logs, Plain

STEPS = 30


@dataclass(frozen=True)
class Attack:
    """A theorem, its formula, the networks it speaks of, and how they are kept within its hypotheses."""

    theorem: str
    bound: Callable[[Plain], Logs]
    start: Callable[[int], Plain]
    keep: Callable[[Plain], Plain] = lambda plain: plain
    lower: bool = False
    agrees: bool = True
    """Whether the formula is the certificate's own bound, and not just one of its kind."""
    sharp: bool = False
    """Whether attention must stay above rounding, for the smallest weight on an edge to be seen."""


def with_mlp(seed: int) -> Plain:
    g = torch.Generator().manual_seed(seed)
    up, down = (torch.randn(2, *shape, generator=g, dtype=torch.float64) for shape in ((3, 4), (4, 3)))
    return replace(Plain.random(seed), up=up, down=down)


def with_skip(seed: int, branch: float = 1.0) -> Plain:
    plain = Plain.random(seed)
    return replace(plain, skip=1.0, output=branch * plain.output)


def quiet(seed: int) -> Plain:
    """A skip that outweighs its branch."""
    return with_skip(seed, branch=0.2)


def masked(seed: int) -> Plain:
    plain = Plain.random(seed, layers=3)
    return replace(plain, query=0.3 * plain.query, mask=("causal", "window:1")[seed % 2])


def within_root(plain: Plain) -> Plain:
    """Queries shrunk until every |E_ij - E_ij'| is within the condition; one layer, so that the next is not
    changed by it."""
    o = slow.oscillation(slow.run(plain)[0])
    return replace(plain, query=plain.query * (1.25 / o).clamp(max=1.0))


def sphere(seed: int) -> Plain:
    plain = Plain.random(seed, heads=1, layers=4)
    return replace(plain, norm=True, mask=("causal", "window:1")[seed % 2])


def few_on_a_sphere(seed: int) -> Plain:
    """No more tokens than dimensions, each of which reaches all."""
    plain = Plain.random(seed, n=3, d=4, k=4, heads=1, layers=4)
    return replace(plain, norm=True, mask=("complete", "window:1")[seed % 2])


def orthogonal(plain: Plain) -> Plain:
    """Values made orthogonal, tokens positive: no cosine is negative."""
    turn = torch.matrix_exp(plain.value - plain.value.mT)
    eye = torch.eye(plain.X.shape[1], dtype=torch.float64).expand_as(plain.output)
    return replace(plain, value=turn, output=eye, X=plain.X.abs() + 1e-3)


def narrow(seed: int) -> Plain:
    return replace(Plain.random(seed, d=4, heads=1), skip=(1.0, -0.5)[seed % 2])


def low_rank(plain: Plain) -> Plain:
    """All outputs within two directions, which are themselves climbed (the first rows of the first)."""
    frame = plain.output[0, 0, :2]
    return replace(plain, output=plain.output[..., :2] @ frame)


def under_a_norm(seed: int) -> Plain:
    plain = Plain.random(seed, layers=3)
    return replace(plain, norm=True, skip=2.0, output=0.05 * plain.output)


ATTACKS = [
    Attack("dong2021-2.2", slow.closed, lambda seed: Plain.random(seed, heads=1)),
    Attack("dong2021-2.3", slow.closed, Plain.random),
    Attack("dong2021-2.3-gamma1", slow.with_gamma_one, lambda seed: Plain.random(seed, layers=1), within_root),
    Attack("dong2021-3.2", slow.closed, with_mlp),
    Attack("dong2021-skip", slow.with_skip, with_skip),
    Attack("oscillation", slow.by_oscillation, Plain.random),
    Attack("attention-factors", slow.by_attention, masked),
    Attack("dobrushin", slow.by_dobrushin, with_skip),
    Attack("wu2024-1", slow.masked, masked, sharp=True),
    Attack("wu2024-cor1", slow.cosines, sphere, orthogonal, sharp=True),
    Attack("hemisphere", slow.in_a_hemisphere, sphere, orthogonal, agrees=False, sharp=True),
    Attack("elementary-skip", slow.elementary, quiet, lower=True),
    Attack("aligned-skip", slow.aligned, quiet, lower=True),
    Attack("untouched", slow.untouched, narrow, low_rank, lower=True),
    Attack("lambda-skip", slow.lambda_skip, under_a_norm, lower=True),
]


def flatness(plain: Plain) -> Logs:
    """The share of the smallest of the last tokens' singular values that should not vanish."""
    last = slow.run(plain)[-1].after
    s = torch.linalg.svdvals(last - last.mean(0))[: len(last) - 1]
    return torch.zeros((), dtype=torch.float64), (s[-1] / s[0]).log()


TOWARDS_ROUNDING = [
    Attack("exact-factors", slow.by_attention, Plain.random, lower=True),
    Attack("wu2024-2", slow.cosines, few_on_a_sphere, orthogonal, sharp=True),
    Attack("norm-rank", flatness, under_a_norm, lower=True),
]
"""Theorems whose bound is their measurement, or a count: climbed to where parts all but cancel."""


def excess(attack: Attack, plain: Plain) -> Tensor:
    """log(measured / bound), or its inverse: above 0 the theorem is wrong."""
    bound, measured = attack.bound(attack.keep(plain))
    return bound - measured if attack.lower else measured - bound


def weight(plain: Plain) -> float:
    """The smallest attention on an edge."""
    with torch.no_grad():
        return float(slow.smallest(slow.run(plain), plain.mask))


def climbed(attack: Attack, seed: int, steps: int = STEPS) -> tuple[Plain, float, float]:
    """(the best network that Adam found, its excess, that of the start)."""
    start = attack.start(seed)
    free: dict[str, Any] = {name: value.clone().requires_grad_() for name, value in start.tensors.items()}
    adam = torch.optim.Adam(free.values(), lr=0.05)
    best, most, first = start, -math.inf, math.nan
    for step in range(steps):
        plain = replace(start, **free)
        value = excess(attack, plain)
        if step == 0:
            first = float(value.detach())
        if not bool(value.isfinite()) or (attack.sharp and weight(attack.keep(plain)) < 1e-12):
            break
        if float(value.detach()) > most:
            most = float(value.detach())
            kept: dict[str, Any] = {name: each.detach().clone() for name, each in free.items()}
            best = replace(start, **kept)
        adam.zero_grad()
        (-value).backward()
        if not all(bool(each.grad.isfinite().all()) for each in free.values() if each.grad is not None):
            break
        adam.step()
    return best, most, first
