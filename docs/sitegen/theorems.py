"""Every theorem: what it says, of what, and the hypotheses that are checked before it counts."""

import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module

from rankscope import Architecture, Transformer, certify
from rankscope.sources import word_tokens
from rankscope.theory import THEOREMS, Theorem
from sitegen.coverage import COVERAGE, Refusal
from sitegen.docstrings import markdown, of
from sitegen.formulas import GREEK, tex
from sitegen.markdown import formulas, table

QUANTITIES = {
    "residual": "the residual `||res X||_{1,inf}`",
    "mu": "the residual's Frobenius norm `mu(X) = ||res X||_F`",
    "diameter": "the largest distance of two tokens",
    "affine_rank": "the dimension of the affine space that tokens span",
}


def page() -> str:
    """A section for each theorem; those of one derivation have it once, after the last of them."""
    parts, all_theorems = [], list(THEOREMS.values())
    for here, after in zip(all_theorems, [*all_theorems[1:], None], strict=True):
        parts.append(entry(here))
        home = here.evaluate.__module__
        if after is None or after.evaluate.__module__ != home:
            shown = [each.name for each in all_theorems if each.evaluate.__module__ == home]
            parts.append(_derivation(home, shown))
    return "\n\n".join(parts)


def coverage() -> str:
    """A row for each thing that theorems need: the theorems, and the features that they refuse for want of it."""
    refused: dict[Refusal, list[str]] = {}
    for feature, refusals in COVERAGE.items():
        for refusal in refusals:
            refused.setdefault(refusal, []).append(feature)
    rows = []
    for refusal, features in refused.items():
        everyone = refusal.theorems == set(THEOREMS)
        names = "all theorems" if everyone else _code(name for name in THEOREMS if name in refusal.theorems)
        rows.append([names, refusal.needs, _code(features)])
    covered = _code(feature for feature, refusals in COVERAGE.items() if not refusals)
    return table(["theorems", "need", "and refuse"], rows) + f"\nNo theorem refuses {covered}.\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def entry(theorem: Theorem) -> str:
    """One theorem."""
    bound = "An upper bound of" if theorem.kind == "upper" else "A lower bound of"
    quantity = QUANTITIES.get(theorem.quantity, theorem.quantity)
    rows = [
        [says, limit.removeprefix("= ").replace("<=", "≤").replace(">=", "≥")]
        for says, limit in hypotheses()[theorem.name]
    ]
    lines = [
        f"## {theorem.name}",
        f"*{theorem.source[0].upper()}{theorem.source[1:]}.* {bound} {formulas(quantity)}:",
        statement(theorem.says),
        table(["hypothesis, checked at every layer", "must be"], rows),
    ]
    return "\n\n".join(lines)


def statement(says: str) -> str:
    """The formula, and in words what is said after it."""
    pieces = says.split(", ")
    head, said = pieces[0], pieces[1:]
    while said and head.count("(") != head.count(")"):
        head, said = f"{head}, {said[0]}", said[1:]
    words = re.search(r" (at every layer|under a norm)$", head)
    if words:
        head, said = head[: words.start()], [words[1], *said]
    formula = tex(head.replace("product of", "prod"), words=True)
    after = ", ".join(re.sub(r"\b[a-z]+\b", lambda word: GREEK.get(word[0], word[0]), each) for each in said)
    return f"```{{math}}\n{formula}\n```" + (f"\n\nwith: {after}." if after else "")


@cache
def hypotheses() -> dict[str, list[tuple[str, str]]]:
    """{theorem: (what is asked, what it must be)}, as the theorems ask it of a small network."""
    net = Transformer.random(Architecture(layers=1, width=8, heads=2, mlp_width=8))
    X = word_tokens(["call me Ishmael"], 8)[0]
    rows = certify(net, X).table.filter(layer=1, sample=0)
    return {
        row["theorem"]: [(each["says"], each["limit"]) for each in row["hypotheses"]]
        for row in rows.iter_rows(named=True)
    }


def _derivation(home: str, names: list[str]) -> str:
    said = markdown(of(import_module(home)))
    what = ", ".join(f"`{name}`" for name in names)
    return f":::::{{dropdown}} Derivation of {what}\n\n{said}\n:::::"
