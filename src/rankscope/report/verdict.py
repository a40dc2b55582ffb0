"""What was measured, in a sentence or two: whether tokens stay apart, and which part of the network does it.

A cause is named only where taking the part out was measured: the smallest set of parts without which tokens
become the same. What was not measured is not claimed.
"""

from rankscope.profiles import Profile, Summary
from rankscope.report.fate import UNIFORM, Fate, fate_of
from rankscope.report.parts import present, removed, said

FINEST = ("deviation", "float64", "float32", "bfloat16")
STAYS = {"apart": "stay apart", "closing": "are nearly the same, though not uniform"}
LISTED = {
    "apart": "tokens stay apart",
    "closing": "tokens are nearly the same",
    "uniform": "tokens are the same",
    "hidden": "tokens are as close as can be told",
    "broken": "there is no number, for an overflow or a NaN,",
}


def verdict(profile: Profile | Summary, metric: str = "relative_residual") -> str:
    """Whether tokens stay apart and because of what; or, where there is no whole network to compare with,
    which networks keep them apart and which do not."""
    if metric not in profile.metrics:
        return f"Measured: {', '.join(profile.metrics)}."
    return _attributed(profile, metric) or _listing(profile, metric)


def _attributed(profile: Profile | Summary, metric: str) -> str | None:
    """The verdict on the network called `transformer`, by what its other variants went without."""
    networks = {
        each.variant: each.architecture for each in profile.manifest.networks if each.architecture is not None
    }
    whole = networks.get("transformer")
    arithmetic = next((name for name in FINEST if name in profile.arithmetics), None)
    if whole is None or arithmetic is None or ("transformer", arithmetic) not in profile.lines(metric):
        return None
    fates: dict[frozenset[str], Fate] = {}
    for variant, name in profile.lines(metric):
        architecture = networks.get(variant)
        gone = None if name != arithmetic or architecture is None else removed(whole, architecture)
        if gone is not None and gone not in fates:
            fates[gone] = fate_of(profile, metric, variant, name)
    own = fates.pop(frozenset())
    if own.group == "broken":
        return f"There is no number from layer {own.layer} on: an overflow, or a NaN in what was given."
    if own.group == "hidden":
        return (
            f"Tokens come as close as {arithmetic} can tell: {own.end}. A finer arithmetic can see further."
        )
    if own.group == "uniform":
        return " ".join([_uniform(own), *_kept(fates, "draw tokens together")])
    return _apart(fates, present(whole), own)


def _uniform(own: Fate) -> str:
    if own.layer == 0:
        return "Tokens are the same from the input on: there is nothing to hold apart."
    return f"Tokens become the same: uniform to {own.there} by layer {own.layer}, {own.at_end}."


def _kept(fates: dict[frozenset[str], Fate], what: str) -> list[str]:
    """Parts without which tokens would stay apart."""
    return [
        f"Without {said(parts)} they stay apart ({each.end}): {said(parts)} {what} here."
        for parts, each in _smallest(fates, "apart")
    ]


def _apart(fates: dict[frozenset[str], Fate], every: frozenset[str], own: Fate) -> str:
    alone = every - {"mlp_skip"} if "mlp" in every else every  # what attention alone goes without
    causes = _smallest(fates, "uniform")
    others = [parts for parts, each in fates.items() if each.group == "apart"]
    sentence = f"Tokens {STAYS[own.group]} ({own.end} of their size at layer {own.depth})"
    if not fates:
        return f"{sentence}. What holds them apart was not measured: no variant without a part was."
    if not causes:
        without = f", also without {' or without '.join(map(said, others))}" if others else ""
        return f"{sentence}{without}. No part that was taken out makes them the same{_untold(fates)}."
    (parts, first), *more = causes
    kept = [f"Without {' or without '.join(map(said, others))} they stay apart as well."] if others else []
    bare = alone in fates and fates[alone].group == "uniform"
    if bare and len(alone) > 1 and (parts == alone or len(parts) > 2):
        told, back = _put_back(fates, alone, every)
        return " ".join([f"{sentence}. {told}", *([] if back else kept)])
    because = (
        f"because of {said(parts)}:" if own.group == "apart" else f"and {said(parts)} keep them from it:"
    )
    sentences = [
        f"{sentence} {because} without them they are uniform to {first.there} by layer {first.layer} and "
        f"{first.at_end}."
    ]
    sentences += [
        f"Without {said(each)} they are uniform by layer {found.layer}, too."
        for each, found in more
        if each != alone
    ]
    sentences += kept
    if bare and parts != alone:
        sentences.append(f"Attention alone makes them uniform {fates[alone].at_end}.")
    return " ".join(sentences)


def _untold(fates: dict[frozenset[str], Fate]) -> str:
    """Variants of which that cannot be said."""
    lost = [
        f"without {said(parts)} that cannot be told ({each.end})"
        for parts, each in fates.items()
        if each.group in ("broken", "hidden")
    ]
    return f"; {'; '.join(lost)}" if lost else ""


def _put_back(
    fates: dict[frozenset[str], Fate], bare: frozenset[str], every: frozenset[str]
) -> tuple[str, bool]:
    """Where only attention alone was seen to make tokens the same: what one part put back changes, and
    whether that was measured."""
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
    uniform = f"Attention alone makes them uniform to {alone.there} by layer {alone.layer} and {alone.at_end}"
    return f"{uniform}; {rest}.", bool(told)


def _smallest(fates: dict[frozenset[str], Fate], group: str) -> list[tuple[frozenset[str], Fate]]:
    """Sets of parts with this fate of which no measured subset has it, the smallest first."""
    found = [(parts, each) for parts, each in fates.items() if each.group == group]
    least = [(parts, each) for parts, each in found if not any(other < parts for other, _ in found)]
    return sorted(least, key=lambda pair: (len(pair[0]), pair[1].layer))


def _listing(profile: Profile | Summary, metric: str) -> str:
    """Which networks keep their tokens apart, which make them the same, and by which layer."""
    fates = {
        (variant, arithmetic): fate_of(profile, metric, variant, arithmetic)
        for variant, arithmetic in profile.lines(metric)
    }
    depths = {each.depth for each in fates.values()}
    groups: dict[str, dict[str, list[str]]] = {group: {} for group in LISTED}
    for (variant, arithmetic), found in fates.items():
        name = variant if len(profile.arithmetics) == 1 else f"{variant} in {arithmetic}"
        below = f"below {UNIFORM:g} from layer {found.layer}, " if found.group == "uniform" else ""
        of = f" at layer {found.depth}" if len(depths) > 1 and "from layer" not in found.end else ""
        groups[found.group].setdefault(f"{below}{found.end}{of}", []).append(name)
    listed = "; ".join(f"{LISTED[group]} in {_listed(found)}" for group, found in groups.items() if found)
    return f"{f'At layer {depths.pop()}' if len(depths) == 1 else 'At the last layer of each'} {listed}."


def _listed(found: dict[str, list[str]]) -> str:
    return ", ".join(f"{', '.join(names)} ({detail})" for detail, names in found.items())
