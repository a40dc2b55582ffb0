"""Changes of a network that may let it train: each a sentence and a changed plan, which `forecast.py` forecasts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from rankscope.errors import LabError, one_of
from rankscope.forecasts.plan import Plan, goes_onto

GAINS = (0.25, 0.5, 2.0, 4.0)
REMEDIES = ("rezero", "skipinit", "lnscale", "shaped", "attnscale", "neutreno", "featscale", "gate")
PARTS = ("norm", "skips", "gains", "temperature", "initialisation", "remedies", "rate", "depth")


def changes(plan: Plan, parts: tuple[str, ...] = PARTS) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield (what is changed, a function that makes the changed plan, which may refuse) of all that can be tried.

    Args:
        plan: The network that is to be mended.
        parts: What may be changed, of `PARTS`.

    Raises:
        LabError: A part is none of those.
    """
    for part in parts:
        if part not in PARTS:
            raise LabError(one_of("parts", part, PARTS), subject="parts")
    arch, start = plan.arch, plan.initialisation
    if "norm" in parts:
        if arch.norm == "none":
            yield (
                "a LayerNorm before each branch",
                partial(plan.changed, norm="layer", norm_place="pre", final_norm=True),
            )
        elif arch.norm_place == "post":
            yield "norms before branches, and a last one", partial(plan.changed, norm_place="pre", final_norm=True)
        else:
            yield "norms after skips", partial(plan.changed, norm_place="post", final_norm=False)
    if "skips" in parts and (arch.attention_skip < 1 or arch.mlp_skip < 1):
        yield "skips of weight 1", partial(plan.changed, attention_skip=1.0, mlp_skip=1.0)
    if "gains" in parts:
        for gain in GAINS:
            scaled = tuple((f"attention.{name}.weight", gain) for name in ("query", "key"))
            yield f"queries and keys drawn {gain:g} times as large", partial(_with, plan, gains=(*start.gains, *scaled))
            scaled = (("attention.value.weight", gain),)
            yield f"values drawn {gain:g} times as large", partial(_with, plan, gains=(*start.gains, *scaled))
    if "temperature" in parts:
        for factor in (0.25, 4.0):
            yield f"a temperature {factor:g} times as high", partial(plan.changed, divisor=arch.divisor * factor)
    if "initialisation" in parts:
        for scheme in ("xavier", "xavier/sqrt(L)", "bert/sqrt(L)", "orthogonal"):
            if scheme != start.scheme:
                yield f"weights drawn by {scheme} instead of {start.scheme}", partial(_with, plan, scheme=scheme)
    if "remedies" in parts and not plan.remedies:
        for remedy in REMEDIES:
            if goes_onto(plan.arch, remedy):
                yield f"the remedy {remedy}", partial(plan.changed, remedy)
    if "rate" in parts:
        for factor in (1 / 3, 3.0):
            yield f"a learning rate of {plan.recipe.lr * factor:.2g}", partial(plan.changed, lr=plan.recipe.lr * factor)
    if "depth" in parts and arch.layers > 3:
        for layers in sorted({max(2, arch.layers // 2), max(2, arch.layers // 4)}, reverse=True):
            yield f"{layers} layers", partial(plan.changed, layers=layers)


def _with(plan: Plan, **fields: object) -> Plan:
    """The plan with another initialisation."""
    return plan.changed(initialisation=replace(plan.initialisation, **fields))  # type: ignore[arg-type]
