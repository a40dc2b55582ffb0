"""Which family maps a model type, and what is said of one that none does."""

from difflib import get_close_matches

from rankscope.errors import SourceError, one_of
from rankscope.sources.families import FAMILIES, Family

RECURRENT = ("mamba", "rwkv", "xlstm")
"""How the model types of recurrent models without attention begin or end."""
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
"""Model types whose keys and values come of a latent that goes through a norm of its own."""
SINKS = ("gpt_oss",)
"""Models that leave a share of every row of attention to no token."""
CLOSE = 0.8
"""The likeness, of at most one, from which on a name may be a slip of another."""


def family_of(model_type: str | None, asked: str | Family | None = None) -> Family:
    """The family of a model type, or the one asked for: one's own, or by name."""
    if isinstance(asked, Family):
        return asked
    own = next((family for family in FAMILIES.values() if model_type in family.types), None)
    if asked is None:
        if own is None:
            raise SourceError(_unknown(str(model_type)))
        return own
    if asked not in FAMILIES:
        raise SourceError(one_of("family", asked, FAMILIES))
    if own is not None and own.name != asked:
        raise SourceError(
            f"family is for a config that does not say its model type; this one says {model_type!r}, of "
            f"family {own.name}, and {asked!r} was asked for: leave family out"
        )
    return FAMILIES[asked]


def _unknown(model_type: str) -> str:
    """The sentence for a model type of no family. One that transformers knows is no slip of another."""
    from transformers import CONFIG_MAPPING

    towers = [name for name in FAMILIES if name in (f"{model_type}_text", f"{model_type}_vision")]
    if towers:
        either = " or ".join(map(repr, towers))
        return f"a {model_type} model has two towers; name the one to load, family={either}"
    known = [kind for family in FAMILIES.values() for kind in family.types]
    theirs = model_type in CONFIG_MAPPING
    near = [] if theirs else get_close_matches(model_type, known, n=1, cutoff=CLOSE)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    if model_type.rstrip("0123456789").endswith(RECURRENT):
        hint = ", a recurrent model without attention"
    if model_type in LATENT:
        hint = (
            ", whose keys and values come of a latent that goes through a norm of its own, and whose values "
            "are of another width than its queries: attention here has neither"
        )
    if model_type in SINKS:
        hint = ", whose attention has sinks: its rows do not sum to one"
    return (
        f"load maps model types {', '.join(known)}; this one is {model_type!r}{hint}: watch measures any "
        "model as it is, and docs/models.md says how to add a family"
    )
