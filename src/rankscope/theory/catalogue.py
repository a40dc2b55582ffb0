"""Every theorem by name, in the order of the docs."""

from collections.abc import Sequence

from rankscope.errors import TheoremError, one_of
from rankscope.theory.dobrushin import DOBRUSHIN
from rankscope.theory.factors import ATTENTION, EXACT, OSCILLATION
from rankscope.theory.lambda_skip import LAMBDA_SKIP
from rankscope.theory.masked import MASKED
from rankscope.theory.pure_attention import GAMMA_ONE, SEVERAL, SINGLE
from rankscope.theory.ranks import NEUTRAL
from rankscope.theory.skip_lower import ALIGNED, ELEMENTARY
from rankscope.theory.sphere import COSINES, FULL_RANK, HEMISPHERE
from rankscope.theory.theorem import Theorem
from rankscope.theory.untouched import UNTOUCHED
from rankscope.theory.with_mlp import WITH_MLP
from rankscope.theory.with_skip import WITH_SKIP

THEOREMS: dict[str, Theorem] = {
    theorem.name: theorem
    for theorem in (
        SINGLE, SEVERAL, GAMMA_ONE, WITH_MLP, WITH_SKIP,
        OSCILLATION, ATTENTION, EXACT, DOBRUSHIN,
        MASKED, FULL_RANK, COSINES, HEMISPHERE,
        ELEMENTARY, ALIGNED, UNTOUCHED, LAMBDA_SKIP, NEUTRAL,
    )
}  # fmt: skip


def theorems_named(names: str | Sequence[str] | None) -> list[Theorem]:
    """Those asked for, all where none is named."""
    chosen = [names] if isinstance(names, str) else list(THEOREMS) if names is None else list(names)
    if not chosen:
        raise TheoremError("certify needs at least one theorem; got none: leave them out for all")
    for name in chosen:
        if name not in THEOREMS:
            raise TheoremError(one_of("theorem", name, THEOREMS))
    return [THEOREMS[name] for name in dict.fromkeys(chosen)]
