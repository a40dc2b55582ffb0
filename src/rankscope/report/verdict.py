"""What a profile says, in a sentence."""

import math

from rankscope.figures import power
from rankscope.profiles import Profile, Summary

APART, UNIFORM = 0.05, 1e-3
"""Relative residual at the last layer above which tokens stay apart, and below which they are the same."""


def middle(
    measured: Profile | Summary, metric: str, variant: str, arithmetic: str
) -> tuple[list[float], list[bool]]:
    """By layer: log10 of the geometric mean over samples and heads, or of a corpus the median; and whether
    it is only noise."""
    noise = measured.at_floor(metric, variant=variant, arithmetic=arithmetic).tolist()
    if isinstance(measured, Summary):
        return measured.curve(metric, "log10_q50", variant=variant, arithmetic=arithmetic).tolist(), noise
    curve = measured.curve(metric, "log10", variant=variant, arithmetic=arithmetic)
    return curve.transpose(0, 1).flatten(1).nanmean(1).tolist(), noise


def verdict(profile: Profile | Summary, metric: str = "relative_residual") -> str:
    """Which networks keep their tokens apart, which make them the same, and by which layer."""
    if metric not in profile.metrics:
        return f"Measured: {', '.join(profile.metrics)}."
    groups: dict[str, dict[str, list[str]]] = {"apart": {}, "closing": {}, "uniform": {}, "broken": {}}
    depth = 0
    for variant, arithmetic in profile.lines(metric):
        name = variant if len(profile.arithmetics) == 1 else f"{variant} in {arithmetic}"
        curve, noise = middle(profile, metric, variant, arithmetic)
        group, detail = _judged(curve, noise, arithmetic)
        groups[group].setdefault(detail, []).append(name)
        depth = max(depth, len(curve) - 1)
    parts = {
        "apart": "at layer {} tokens stay apart in {}",
        "closing": "at layer {} tokens are nearly the same in {}",
        "uniform": "by layer {} tokens are the same in {}",
        "broken": "before layer {} numbers overflow in {}",
    }
    said = "; ".join(
        text.format(depth, _listed(groups[group])) for group, text in parts.items() if groups[group]
    )
    return f"{said[:1].upper()}{said[1:]}."


def _judged(curve: list[float], noise: list[bool], arithmetic: str) -> tuple[str, str]:
    """The group a curve of log10 belongs to, and the detail to say of it."""
    last = curve[-1]
    if math.isnan(last):
        return "broken", f"from layer {next(k for k, value in enumerate(curve) if math.isnan(value))}"
    if last > math.log10(APART):
        return "apart", power(last)
    if last > math.log10(UNIFORM):
        return "closing", power(last)
    below = next(layer for layer, value in enumerate(curve) if value <= math.log10(UNIFORM))
    floor = next((layer for layer, part in enumerate(noise) if part), None)
    end = power(last) if floor is None else f"at {arithmetic}'s floor from layer {floor}"
    return "uniform", f"below {UNIFORM:g} from layer {below}, {end}"


def _listed(found: dict[str, list[str]]) -> str:
    return ", ".join(f"{', '.join(names)} ({detail})" for detail, names in found.items())
