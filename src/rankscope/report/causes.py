"""What was measured, in a sentence or two: whether tokens stay apart, and which part of the network does it.

A cause is named only where taking the part out was measured: the smallest set of parts without which tokens
become the same. What was not measured is not claimed.
"""

from rankscope.profiles import Profile, Summary
from rankscope.profiles.verdict import Ending, ending, listing
from rankscope.report.removed import present, removed, said

FINEST = ("deviation", "float64", "float32", "bfloat16")


def verdict(profile: Profile | Summary, metric: str = "relative_residual") -> str:
    """Whether tokens stay apart and because of what; or, where there is no whole network to compare with,
    which networks keep them apart and which do not."""
    if metric not in profile.metrics:
        return listing(profile.views())
    return _attributed(profile, metric) or listing(profile.views(metric))


def _attributed(profile: Profile | Summary, metric: str) -> str | None:
    """The verdict on the network called `transformer`, by what its other variants went without."""
    networks = {
        each.variant: each.architecture for each in profile.manifest.networks if each.architecture is not None
    }
    whole = networks.get("transformer")
    arithmetic = next((name for name in FINEST if name in profile.arithmetics), None)
    if whole is None or arithmetic is None or ("transformer", arithmetic) not in profile.lines(metric):
        return None
    endings: dict[frozenset[str], Ending] = {}
    for curve in profile.views(metric):
        known = curve.arithmetic == arithmetic and curve.variant in networks
        gone = removed(whole, networks[curve.variant]) if known else None
        if gone is not None and gone not in endings:
            endings[gone] = ending(curve)
    own = endings.pop(frozenset())
    if own.group in ("broken", "hidden"):
        return f"{own.sentence}."
    if own.group == "uniform":
        without = [
            f"Without {said(parts)} they stay apart ({each.end}): {said(parts)} draw tokens together here."
            for parts, each in _smallest(endings, "apart")
        ]
        return " ".join([f"{own.sentence}.", *without])
    return _apart(endings, present(whole), own)


def _apart(endings: dict[frozenset[str], Ending], every: frozenset[str], own: Ending) -> str:
    alone = every - {"mlp_skip"} if "mlp" in every else every  # what attention alone goes without
    causes = _smallest(endings, "uniform")
    others = [parts for parts, each in endings.items() if each.group == "apart"]
    sentence = own.sentence
    if not endings:
        return f"{sentence}. What holds them apart was not measured: no variant without a part was."
    if not causes:
        without = f", also without {' or without '.join(map(said, others))}" if others else ""
        return f"{sentence}{without}. No part that was taken out makes them the same{_untold(endings)}."
    (parts, first), *more = causes
    kept = [f"Without {' or without '.join(map(said, others))} they stay apart as well."] if others else []
    bare = alone in endings and endings[alone].group == "uniform"
    if bare and len(alone) > 1 and (parts == alone or len(parts) > 2):
        told, back = _put_back(endings, alone, every)
        return " ".join([f"{sentence}. {told}", *([] if back else kept)])
    because = (
        f"because of {said(parts)}:" if own.group == "apart" else f"and {said(parts)} keep them from it:"
    )
    sentences = [f"{sentence} {because} without them they are {first.uniform}."]
    sentences += [
        f"Without {said(each)} they are uniform by layer {found.layer}, too."
        for each, found in more
        if each != alone
    ]
    sentences += kept
    if bare and parts != alone:
        sentences.append(f"Attention alone makes them uniform {endings[alone].at_end}.")
    return " ".join(sentences)


def _untold(endings: dict[frozenset[str], Ending]) -> str:
    """Variants of which that cannot be said."""
    lost = [
        f"without {said(parts)} that cannot be told ({each.end})"
        for parts, each in endings.items()
        if each.group in ("broken", "hidden")
    ]
    return f"; {'; '.join(lost)}" if lost else ""


def _put_back(
    endings: dict[frozenset[str], Ending], bare: frozenset[str], every: frozenset[str]
) -> tuple[str, bool]:
    """Where only attention alone was seen to make tokens the same: what one part put back changes, and
    whether that was measured."""
    alone = endings[bare]
    back = {}
    for parts, each in endings.items():
        gone = parts | ({"mlp_skip"} & every) if "mlp" in parts else parts
        if parts != bare and len(every - gone) == 1:
            back[said(every - gone)] = each
    holding = [f"{name} ({each.end})" for name, each in back.items() if each.group == "apart"]
    failed_hypotheses = [
        f"{name} (uniform by layer {each.layer})" for name, each in back.items() if each.group == "uniform"
    ]
    groups = ((holding, "put back alone hold them apart"), (failed_hypotheses, "put back alone do not"))
    told = [f"{' and '.join(names)} {does}" for names, does in groups if names]
    rest = "; ".join(told) or f"which of {said(bare)} holds them apart was not measured"
    return f"Attention alone makes them {alone.uniform}; {rest}.", bool(told)


def _smallest(endings: dict[frozenset[str], Ending], group: str) -> list[tuple[frozenset[str], Ending]]:
    """Sets of parts with this fate of which no measured subset has it, the smallest first."""
    found = [(parts, each) for parts, each in endings.items() if each.group == group]
    least = [(parts, each) for parts, each in found if not any(other < parts for other, _ in found)]
    return sorted(least, key=lambda pair: (len(pair[0]), pair[1].layer))
