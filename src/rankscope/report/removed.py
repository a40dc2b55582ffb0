"""Which part of a network a variant went without: what lets a verdict name a cause."""

from typing import Any

NAMES = {
    "attention_skip": "the attention skips",
    "mlp_skip": "the skips around the MLPs",
    "mlp": "the MLPs",
    "norm": "the norms",
}
"""Parts that a variant may go without, as a sentence calls them."""
ABSENT = {"attention_skip": 0.0, "mlp_skip": 0.0, "mlp": "none", "norm": "none"}
FOLLOWS = {
    "mlp_width",
    "activation",
    "mlp_skip",
    "norm_place",
    "norm_eps",
    "final_norm",
    "bare_layers",
    "biases",
}
"""Fields that mean nothing, or something else, where a part is gone."""


def removed(whole: dict[str, Any], variant: dict[str, Any]) -> frozenset[str] | None:
    """The parts of one architecture that another has not; None where they differ in more than parts.

    >>> removed({"mlp": "plain", "norm": "layer"}, {"mlp": "none", "norm": "layer"})
    frozenset({'mlp'})
    """
    gone = {
        part
        for part, nothing in ABSENT.items()
        if variant.get(part) == nothing and whole.get(part, nothing) != nothing
    }
    if "mlp" in gone:
        gone.discard("mlp_skip")  # a skip around nothing
    ignored = gone | (FOLLOWS if gone & {"mlp", "norm"} else set())
    if any(whole.get(name) != variant.get(name) for name in {*whole, *variant} - ignored):
        return None
    return frozenset(gone)


def present(whole: dict[str, Any]) -> frozenset[str]:
    """The parts that an architecture has, of those a variant may go without."""
    parts = {part for part, nothing in ABSENT.items() if whole.get(part, nothing) != nothing}
    return frozenset(parts if "mlp" in parts else parts - {"mlp_skip"})


def said(parts: frozenset[str]) -> str:
    """The parts in words.

    >>> said(frozenset({"attention_skip", "mlp_skip"})), said(frozenset({"mlp", "norm"}))
    ('the skips', 'the MLPs and the norms')
    """
    skips = {"attention_skip", "mlp_skip"}
    names = (["the skips"] if skips <= parts else []) + [
        name for part, name in NAMES.items() if part in parts and not (skips <= parts and part in skips)
    ]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
