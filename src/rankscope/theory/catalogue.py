"""Every theorem by name, in the order of the docs."""

from collections.abc import Sequence

from rankscope.errors import TheoremError, one_of
from rankscope.theory.dobrushin import DOBRUSHIN
from rankscope.theory.factors import ATTENTION, EXACT, OSCILLATION
from rankscope.theory.free_directions import UNTOUCHED
from rankscope.theory.lambda_skip import LAMBDA_SKIP
from rankscope.theory.masked_attention import MASKED
from rankscope.theory.pure_attention import GAMMA_ONE, SEVERAL, SINGLE
from rankscope.theory.ranks import NEUTRAL
from rankscope.theory.skip_lower import ALIGNED, ELEMENTARY
from rankscope.theory.sphere import COSINES, FULL_RANK, HEMISPHERE
from rankscope.theory.theorem import Theorem
from rankscope.theory.with_mlp import WITH_MLP
from rankscope.theory.with_skip import WITH_SKIP

Chosen = str | Theorem | Sequence[str | Theorem] | None
"""Theorems as a caller names them."""
THEOREMS: dict[str, Theorem] = {
    theorem.name: theorem
    for theorem in (
        SINGLE, SEVERAL, GAMMA_ONE, WITH_MLP, WITH_SKIP,
        OSCILLATION, ATTENTION, EXACT, DOBRUSHIN,
        MASKED, FULL_RANK, COSINES, HEMISPHERE,
        ELEMENTARY, ALIGNED, UNTOUCHED, LAMBDA_SKIP, NEUTRAL,
    )
}  # fmt: skip


def theorems_named(chosen: Chosen) -> list[Theorem]:
    """The theorems of a list of names and `Theorem` objects, each once; all theorems for None."""
    names = (
        [chosen] if isinstance(chosen, str | Theorem) else list(THEOREMS) if chosen is None else list(chosen)
    )
    if not names:
        raise TheoremError(
            "certify needs at least one theorem; got none: leave them out for all", subject="theorems"
        )
    theorems_by_name: dict[str, Theorem] = {}
    for item in names:
        if not isinstance(item, Theorem) and item not in THEOREMS:
            raise TheoremError(one_of("theorem", item, THEOREMS), subject="theorem")
        theorem = item if isinstance(item, Theorem) else THEOREMS[item]
        if theorems_by_name.setdefault(theorem.name, theorem) is not theorem:
            raise TheoremError(
                f"theorems must differ in name; two are called {theorem.name!r}: rename one",
                subject="theorems",
            )
    return list(theorems_by_name.values())
