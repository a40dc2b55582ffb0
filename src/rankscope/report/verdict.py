"""What was measured, in a sentence or two: whether tokens stay apart, and which part of the network does it.

A cause is named only where taking the part out was measured: the smallest set of parts without which tokens
become the same. What was not measured is not claimed.
"""

import math
from dataclasses import dataclass

from rankscope.figures import power
from rankscope.profiles import Profile, Summary
from rankscope.profiles.shown import middle
from rankscope.report.parts import present, removed, said

APART, UNIFORM = 0.05, 1e-3
"""Relative residual at the last layer above which tokens stay apart, and below which they are the same."""
FINEST = ("deviation", "float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Fate:
    """What becomes of the tokens of one variant."""

    group: str
    """apart, closing, uniform, or broken."""
    last: float
    """log10 at the last layer."""
    layer: int
    """uniform: the first layer below `UNIFORM`; broken: the first without a number."""
    there: float
    """log10 at that layer."""
    end: str
    """The number at the last layer, or from where on it is a floor."""


def verdict(profile: Profile | Summary, metric: str = "relative_residual") -> str:
    """Whether tokens stay apart and because of what; or, where there is no whole network to compare with,
    which networks keep them apart and which do not."""
    if metric not in profile.metrics:
        return f"Measured: {', '.join(profile.metrics)}."
    return _attributed(profile, metric) or _listing(profile, metric)


def fate(curve: list[float], noise: list[bool], arithmetic: str) -> Fate:
    """What a curve of log10 comes to."""
    last = curve[-1]
    if math.isnan(last):
        broken = next(k for k, value in enumerate(curve) if math.isnan(value))
        return Fate("broken", last, broken, last, f"no number from layer {broken}")
    floor = next((layer for layer, part in enumerate(noise) if part), None)
    end = power(last) if floor is None else f"at {arithmetic}'s floor from layer {floor}"
    if last > math.log10(UNIFORM):
        return Fate("apart" if last > math.log10(APART) else "closing", last, len(curve) - 1, last, end)
    below = next(layer for layer, value in enumerate(curve) if value <= math.log10(UNIFORM))
    return Fate("uniform", last, below, curve[below], end)


def _attributed(profile: Profile | Summary, metric: str) -> str | None:
    """The verdict on the network called `transformer`, by what its other variants went without."""
    networks = {each["variant"]: each.get("architecture") for each in profile.manifest["networks"]}
    whole = networks.get("transformer")
    arithmetic = next((name for name in FINEST if name in profile.arithmetics), None)
    if whole is None or arithmetic is None or ("transformer", arithmetic) not in profile.lines(metric):
        return None
    fates: dict[frozenset[str], Fate] = {}
    for variant, name in profile.lines(metric):
        architecture = networks.get(variant)
        gone = None if name != arithmetic or architecture is None else removed(whole, architecture)
        if gone is not None and gone not in fates:
            fates[gone] = fate(*middle(profile, metric, variant, name), name)
    own = fates.pop(frozenset())
    depth = len(middle(profile, metric, "transformer", arithmetic)[0]) - 1
    if own.group == "broken":
        return f"Numbers overflow from layer {own.layer}."
    if own.group == "uniform":
        return " ".join([_uniform(own, depth), *_kept(fates, "draw tokens together")])
    stays = "stay apart" if own.group == "apart" else "are nearly the same, though not uniform"
    return _apart(fates, present(whole), stays, f"{own.end} of their size at layer {depth}", depth)


def _uniform(own: Fate, depth: int) -> str:
    return f"Tokens become the same: uniform to {power(own.there)} by layer {own.layer}, {_at(own, depth)}."


def _at(own: Fate, depth: int) -> str:
    return own.end if "floor" in own.end else f"to {own.end} at layer {depth}"


def _kept(fates: dict[frozenset[str], Fate], what: str) -> list[str]:
    """Parts without which tokens would stay apart."""
    return [
        f"Without {said(parts)} they stay apart ({each.end}): {said(parts)} {what} here."
        for parts, each in _smallest(fates, "apart")
    ]


def _apart(
    fates: dict[frozenset[str], Fate], every: frozenset[str], stays: str, number: str, depth: int
) -> str:
    alone = every - {"mlp_skip"} if "mlp" in every else every  # what attention alone goes without
    causes = _smallest(fates, "uniform")
    others = [parts for parts, each in fates.items() if each.group == "apart"]
    if not causes:
        sentence = f"Tokens {stays} ({number})"
        if not others:
            return f"{sentence}. What holds them apart was not measured: no variant without a part was."
        without = " or ".join(said(parts) for parts in others)
        return f"{sentence}, also without {without}. No part that was taken out makes them the same."
    (parts, first), *more = causes
    if len(alone) > 1 and (parts == alone or (len(parts) > 2 and alone in fates)):
        return f"Tokens {stays} ({number}). {_put_back(fates, alone, every, depth)}"
    sentences = [
        f"Tokens {stays} ({number}) because of {said(parts)}: without them they are uniform to "
        f"{power(first.there)} by layer {first.layer} and {_at(first, depth)}."
    ]
    sentences += [
        f"Without {said(each)} they are uniform by layer {found.layer}, too."
        for each, found in more
        if each != alone
    ]
    if others:
        without = " or without ".join(said(each) for each in others)
        sentences.append(f"Without {without} they stay apart as well.")
    if parts != alone and alone in fates and fates[alone].group == "uniform":
        sentences.append(f"Attention alone makes them uniform {_at(fates[alone], depth)}.")
    return " ".join(sentences)


def _put_back(
    fates: dict[frozenset[str], Fate], bare: frozenset[str], every: frozenset[str], depth: int
) -> str:
    """Where only attention alone was seen to make tokens the same: what one part put back changes."""
    alone = fates[bare]
    back = {}
    for parts, each in fates.items():
        gone = parts | ({"mlp_skip"} & every) if "mlp" in parts else parts
        if parts != bare and len(every - gone) == 1:
            back[said(every - gone)] = each
    holding = [f"{name} ({each.end})" for name, each in back.items() if each.group == "apart"]
    failing = [
        f"{name} (uniform by layer {each.layer})" for name, each in back.items() if each.group == "uniform"
    ]
    groups = ((holding, "put back alone hold them apart"), (failing, "put back alone do not"))
    told = [f"{' and '.join(names)} {does}" for names, does in groups if names]
    rest = "; ".join(told) or f"which of {said(bare)} holds them apart was not measured"
    return (
        f"Attention alone makes them uniform to {power(alone.there)} by layer {alone.layer} and "
        f"{_at(alone, depth)}; {rest}."
    )


def _smallest(fates: dict[frozenset[str], Fate], group: str) -> list[tuple[frozenset[str], Fate]]:
    """Sets of parts with this fate of which no measured subset has it, the smallest first."""
    found = [(parts, each) for parts, each in fates.items() if each.group == group]
    least = [(parts, each) for parts, each in found if not any(other < parts for other, _ in found)]
    return sorted(least, key=lambda pair: (len(pair[0]), pair[1].layer))


def _listing(profile: Profile | Summary, metric: str) -> str:
    """Which networks keep their tokens apart, which make them the same, and by which layer."""
    groups: dict[str, dict[str, list[str]]] = {"apart": {}, "closing": {}, "uniform": {}, "broken": {}}
    depth = 0
    for variant, arithmetic in profile.lines(metric):
        name = variant if len(profile.arithmetics) == 1 else f"{variant} in {arithmetic}"
        curve, noise = middle(profile, metric, variant, arithmetic)
        found = fate(curve, noise, arithmetic)
        below = f"below {UNIFORM:g} from layer {found.layer}, " if found.group == "uniform" else ""
        groups[found.group].setdefault(below + found.end, []).append(name)
        depth = max(depth, len(curve) - 1)
    parts = {
        "apart": "at layer {} tokens stay apart in {}",
        "closing": "at layer {} tokens are nearly the same in {}",
        "uniform": "by layer {} tokens are the same in {}",
        "broken": "before layer {} numbers overflow in {}",
    }
    listed = "; ".join(
        text.format(depth, _listed(groups[group])) for group, text in parts.items() if groups[group]
    )
    return f"{listed[:1].upper()}{listed[1:]}."


def _listed(found: dict[str, list[str]]) -> str:
    return ", ".join(f"{', '.join(names)} ({detail})" for detail, names in found.items())
