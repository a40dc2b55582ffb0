"""What was measured, in a sentence or two: whether tokens stay apart, and which part of the network does it.

A cause is named only where taking the part out was measured: the smallest set of parts without which tokens
become the same. What was not measured is not claimed.
"""

from typing import Any

from rankscope.extras import listed
from rankscope.profiles import Ending, Profile, Summary, ending, listing
from rankscope.runs import Manifest

FINEST = ("deviation", "float64", "float32", "bfloat16")
NAMES = {
    "attention_skip": "the attention skips",
    "mlp_skip": "the skips around the MLPs",
    "mlp": "the MLPs",
    "norm": "the norms",
}
"""Parts that a variant may go without, as a sentence calls them."""
ABSENT = {"attention_skip": 0.0, "mlp_skip": 0.0, "mlp": "none", "norm": "none"}
FOLLOWS = {
    "mlp_width", "activation", "mlp_skip", "norm_place", "norm_eps", "final_norm", "bare_layers", "biases",
}  # fmt: skip
"""Fields that mean nothing, or something else, where a part is gone."""


def verdict(profile: Profile | Summary, metric: str = "relative_residual") -> str:
    """Whether tokens stay apart and because of what; or, where there is no whole network to compare with,
    which networks keep them apart and which do not."""
    if metric not in profile.metrics:
        return listing(profile.views())
    return _attributed(profile, metric) or listing(profile.views(metric))


def _attributed(profile: Profile | Summary, metric: str) -> str | None:
    """The verdict on the network called `transformer`, by what its other variants went without."""
    networks = {
        described.variant: described.architecture
        for described in profile.manifest.networks
        if described.architecture is not None
    }
    transformer = networks.get("transformer")
    arithmetic = next((name for name in FINEST if name in profile.arithmetics), None)
    if transformer is None or arithmetic is None or ("transformer", arithmetic) not in profile.lines(metric):
        return None
    endings: dict[frozenset[str], Ending] = {}
    for curve in profile.views(metric):
        known = curve.arithmetic == arithmetic and curve.variant in networks
        gone = removed(transformer, networks[curve.variant]) if known else None
        if gone is not None and gone not in endings:
            endings[gone] = ending(curve)
    overall = endings.pop(frozenset())
    if overall.group in ("broken", "hidden"):
        return f"{overall.sentence}."
    if overall.group == "uniform":
        without = [
            f"Without {in_words(parts)} they stay apart ({fate.end}): {in_words(parts)} draw tokens together here."
            for parts, fate in _smallest(endings, "apart")
        ]
        return " ".join([f"{overall.sentence}.", *without])
    return _apart(endings, present(transformer), overall)


def _apart(endings: dict[frozenset[str], Ending], every: frozenset[str], overall: Ending) -> str:
    alone = every - {"mlp_skip"} if "mlp" in every else every  # what attention alone goes without
    causes = _smallest(endings, "uniform")
    kept_apart = " or without ".join(in_words(parts) for parts, fate in endings.items() if fate.group == "apart")
    sentence = overall.sentence
    if not endings:
        return f"{sentence}. What holds them apart was not measured: no variant without a part was."
    if not causes:
        return f"{sentence}. No part that was taken out makes them the same{_without_each(endings, alone)}."
    (parts, first), *more = causes
    kept = [f"Without {kept_apart} they stay apart as well."] if kept_apart else []
    bare = alone in endings and endings[alone].group == "uniform"
    if bare and len(alone) > 1 and (parts == alone or len(parts) > 2):
        told, back = _put_back(endings, alone, every)
        return " ".join([f"{sentence}. {told}", *([] if back else kept)])
    names = in_words(parts)
    because = f"because of {names}:" if overall.group == "apart" else f"and {names} keep them from it:"
    sentences = [f"{sentence} {because} without them they are {first.uniform}."]
    sentences += [
        f"Without {in_words(gone)} they are uniform by layer {fate.layer}, too." for gone, fate in more if gone != alone
    ]
    sentences += kept
    if bare and parts != alone:
        sentences.append(f"Attention alone makes them uniform {endings[alone].at_end}.")
    return " ".join(sentences)


def _without_each(endings: dict[frozenset[str], Ending], alone: frozenset[str]) -> str:
    """How far apart tokens end without each set of parts, and of which of them that cannot be told."""
    names = {
        parts: "by attention alone" if parts == alone and len(alone) > 1 else f"without {in_words(parts)}"
        for parts in endings
    }
    lost = [parts for parts, fate in endings.items() if fate.group in ("broken", "hidden")]
    known = listed([f"{fate.end} {names[parts]}" for parts, fate in endings.items() if parts not in lost])
    untold = "".join(f"; {names[parts]} that cannot be told ({endings[parts].end})" for parts in lost)
    return f"{f': {known}' if known else ''}{untold}"


def _put_back(endings: dict[frozenset[str], Ending], bare: frozenset[str], every: frozenset[str]) -> tuple[str, bool]:
    """Where only attention alone was seen to make tokens the same: what one part put back changes, and
    whether that was measured."""
    alone = endings[bare]
    back = {}
    for parts, fate in endings.items():
        gone = parts | ({"mlp_skip"} & every) if "mlp" in parts else parts
        if parts != bare and len(every - gone) == 1:
            back[in_words(every - gone)] = fate
    holding = [f"{name} ({fate.end})" for name, fate in back.items() if fate.group == "apart"]
    failing = [f"{name} (uniform by layer {fate.layer})" for name, fate in back.items() if fate.group == "uniform"]
    groups = ((holding, "put back alone hold them apart"), (failing, "put back alone do not"))
    told = [f"{' and '.join(names)} {does}" for names, does in groups if names]
    rest = "; ".join(told) or f"which of {in_words(bare)} holds them apart was not measured"
    return f"Attention alone makes them {alone.uniform}; {rest}.", bool(told)


def _smallest(endings: dict[frozenset[str], Ending], group: str) -> list[tuple[frozenset[str], Ending]]:
    """Sets of parts with this fate of which no measured subset has it, the smallest first."""
    candidates = [(parts, fate) for parts, fate in endings.items() if fate.group == group]
    least = [(parts, fate) for parts, fate in candidates if not any(fewer < parts for fewer, _ in candidates)]
    return sorted(least, key=lambda pair: (len(pair[0]), pair[1].layer))


def removed(network: dict[str, Any], variant: dict[str, Any]) -> frozenset[str] | None:
    """The parts of one architecture that another has not; None where they differ in more than parts.

    >>> removed({"mlp": "plain", "norm": "layer"}, {"mlp": "none", "norm": "layer"})
    frozenset({'mlp'})
    """
    gone = {
        part
        for part, nothing in ABSENT.items()
        if variant.get(part) == nothing and network.get(part, nothing) != nothing
    }
    if "mlp" in gone:
        gone.discard("mlp_skip")  # a skip around nothing
    ignored = gone | (FOLLOWS if gone & {"mlp", "norm"} else set())
    if any(network.get(name) != variant.get(name) for name in {*network, *variant} - ignored):
        return None
    return frozenset(gone)


def same_network(one: Manifest, other: Manifest) -> bool:
    """True unless two manifests are of different networks: another model, other random weights, or other sizes.

    Variants of one network are the same network: their architectures differ in parts alone. What a manifest does not
    say is not compared.
    """
    marks = [(network_name(manifest), manifest.seed, manifest.init) for manifest in (one, other)]
    if any(a != b for a, b in zip(*marks, strict=True) if None not in (a, b)):
        return False
    pairs = [(a, b) for b in other.networks for a in one.networks]
    prints = [(a.fingerprint, b.fingerprint) for a, b in pairs if a.variant == b.variant]
    alike = [_same_sizes(a.architecture, b.architecture) for a, b in pairs if a.architecture and b.architecture]
    return all(a == b for a, b in prints if a and b) and (not alike or any(alike))


def network_name(manifest: Manifest) -> str | None:
    """The model that a manifest is of, or the models that were compared; of a live model its class, None of none."""
    compared = manifest.more.get("compared")
    classes = [
        str(network.model["class"]) for network in manifest.networks if network.model and "class" in network.model
    ]
    several = " and ".join(map(str, compared.values())) if isinstance(compared, dict) else ""
    return manifest.model or several or next(iter(classes), None)


def _same_sizes(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two architectures differ in parts alone, in the fields that both versions know."""
    return all(one[name] == other[name] for name in one.keys() & other.keys() - {*ABSENT, *FOLLOWS})


def present(network: dict[str, Any]) -> frozenset[str]:
    """The parts that an architecture has, of those a variant may go without."""
    parts = {part for part, nothing in ABSENT.items() if network.get(part, nothing) != nothing}
    return frozenset(parts if "mlp" in parts else parts - {"mlp_skip"})


def in_words(parts: frozenset[str]) -> str:
    """The parts in words.

    >>> in_words(frozenset({"attention_skip", "mlp_skip"})), in_words(frozenset({"mlp", "norm"}))
    ('the skips', 'the MLPs and the norms')
    """
    skips = {"attention_skip", "mlp_skip"}
    names = (["the skips"] if skips <= parts else []) + [
        name for part, name in NAMES.items() if part in parts and not (skips <= parts and part in skips)
    ]
    return listed(names)
