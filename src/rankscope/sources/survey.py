"""Measures the parity of every family on small random models. `rankscope models` shows the result."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rankscope.sources.checkpoint import quiet
from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.load import load
from rankscope.sources.parity import Parity


class FamilyParity(NamedTuple):
    """The parity measured for one config of one family."""

    family: str
    config: str
    """What sets it apart within the family."""
    types: tuple[str, ...]
    parity: Parity


def survey(progress: Callable[[int, int], None] | None = None) -> list[FamilyParity]:
    """Load a small random model of every config of every family, and return the parities."""
    with quiet():  # configs may warn of themselves
        cases = [(family, label) for family in FAMILIES.values() for label in family.tiny_configs()]
    parities = []
    for done, (family, label) in enumerate(cases, 1):
        with quiet():
            net: Any = load(random_model(family.name, label), family=_named(family))
        parities.append(FamilyParity(family.name, label, family.types, net.origin.parity))
        if progress is not None:
            progress(done, len(cases))
    return parities


def _named(family: Family) -> str | None:
    """The `family=` argument for `load`: needed for decoders only, since encoders are the default."""
    return family.name if family.side == "decoder" else None


def random_model(name: str, label: str, seed: int = 0) -> Any:
    """A small random model of a family, by the label of its config."""
    return built(FAMILIES[name], FAMILIES[name].tiny_configs()[label], seed)


def built(family: Family, config: Any, seed: int = 0) -> Any:
    """A random model of a config in float64, with every parameter moved off its initial zero or one."""
    import transformers

    kind: Any = getattr(transformers, family.loader)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        model = model.double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return model
