"""What a profile says, in a sentence."""

import math

from rankscope.profiles import Profile

APART, UNIFORM = 0.05, 1e-3
"""Relative residual at the last layer above which tokens stay apart, and below which they are the same."""


def verdict(profile: Profile, metric: str = "relative_residual") -> str:
    """Which networks keep their tokens apart, which make them the same, and by which layer."""
    if metric not in profile.metrics:
        return f"Measured: {', '.join(profile.metrics)}."
    groups: dict[str, dict[str, list[str]]] = {"apart": {}, "closing": {}, "uniform": {}, "broken": {}}
    for variant in profile.variants:
        for arithmetic in profile.arithmetics:
            if not len(profile.table.filter(variant=variant, arithmetic=arithmetic, metric=metric)):
                continue
            name = variant if len(profile.arithmetics) == 1 else f"{variant} in {arithmetic}"
            curve = profile.curve(metric, variant=variant, arithmetic=arithmetic).nanmean(0)
            noise = profile.curve(metric, "below_floor", variant=variant, arithmetic=arithmetic).amin(0)
            group, detail = _judged(curve.tolist(), noise.tolist(), arithmetic)
            groups[group].setdefault(detail, []).append(name)
    depth = int(profile.table["layer"].max())  # type: ignore[arg-type]
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


def _judged(curve: list[float], noise: list[float], arithmetic: str) -> tuple[str, str]:
    """The group a curve belongs to, and the detail to say of it."""
    last = curve[-1]
    if math.isnan(last):
        return "broken", f"from layer {next(k for k, value in enumerate(curve) if math.isnan(value))}"
    if last > APART:
        return "apart", f"{last:.2f}"
    if last > UNIFORM:
        return "closing", f"{last:.3f}"
    below = next(layer for layer, value in enumerate(curve) if value <= UNIFORM)
    floor = next((layer for layer, part in enumerate(noise) if part == 1), None)
    at_floor = "" if floor is None else f", at {arithmetic}'s floor from layer {floor}"
    return "uniform", f"below {UNIFORM:g} from layer {below}{at_floor}"


def _listed(found: dict[str, list[str]]) -> str:
    return ", ".join(f"{', '.join(names)} ({detail})" for detail, names in found.items())
