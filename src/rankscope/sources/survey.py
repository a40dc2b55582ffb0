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
            # Encoders are the default where a model has both sides.
            named = family.name if family.side == "decoder" else None
            net: Any = load(random_model(family.name, label), family=named)
        parities.append(FamilyParity(family.name, label, family.types, net.origin.parity))
        if progress is not None:
            progress(done, len(cases))
    return parities


def random_model(name: str, label: str, seed: int = 0) -> Any:
    """A small random model of a family, by the label of its config."""
    return built(FAMILIES[name], FAMILIES[name].tiny_configs()[label], seed)


def built(family: Family, config: Any, seed: int = 0) -> Any:
    """A random model of a config in float64, with every parameter moved off its initial zero or one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = family.random_model(config)
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model
