"""Every theorem by name, in the order of the docs."""

from collections.abc import Sequence

from rankscope.errors import TheoremError, one_of
from rankscope.theory.dong2021 import PURE, with_mlp, with_skip
from rankscope.theory.factors import attention, dobrushin, exact, oscillation
from rankscope.theory.lower_bounds import aligned_skip, elementary_skip, lambda_skip, norm_rank, untouched
from rankscope.theory.masked_attention import masked
from rankscope.theory.sphere import cosines, full_rank, in_hemisphere
from rankscope.theory.theorem import Theorem

Chosen = str | Theorem | Sequence[str | Theorem] | None  # Theorems as a caller names them
THEOREMS: dict[str, Theorem] = {
    theorem.name: theorem
    for theorem in (
        *PURE, with_mlp, with_skip, oscillation, attention, exact, dobrushin, masked, full_rank, cosines, in_hemisphere,
        elementary_skip, aligned_skip, untouched, lambda_skip, norm_rank,
    )
}  # fmt: skip


def theorems_named(chosen: Chosen) -> list[Theorem]:
    """The theorems of a list of names and `Theorem` objects, each once; all theorems for None."""
    names = [chosen] if isinstance(chosen, str | Theorem) else list(THEOREMS) if chosen is None else list(chosen)
    if not names:
        raise TheoremError("theorems must name at least one; got none: leave it out", subject="theorems")
    theorems_by_name: dict[str, Theorem] = {}
    for name in names:
        if not isinstance(name, Theorem) and name not in THEOREMS:
            raise TheoremError(one_of("theorem", name, THEOREMS), subject="theorem")
        theorem = name if isinstance(name, Theorem) else THEOREMS[name]
        if theorems_by_name.setdefault(theorem.name, theorem) is not theorem:
            sentence = f"theorems must differ in name; two are called {theorem.name!r}: rename one"
            raise TheoremError(sentence, subject="theorems")
    return list(theorems_by_name.values())
