"""Small real models of every family."""

from typing import Any

import pytest

from rankscope.sources import FAMILIES
from rankscope.sources.loading import random_model

EVERY = [(name, label) for name, family in FAMILIES.items() for label in family.tiny_configs()]
CASES = [case for case in EVERY if FAMILIES[case[0]].side != "decoder"]
DECODERS = [case for case in EVERY if case not in CASES]
"""Networks that read a memory (`test_decoders.py`)."""


def model_of(name: str, label: str, seed: int = 5) -> Any:
    """In float64, with eager attention."""
    model = random_model(name, label, seed)
    model.set_attn_implementation("eager")
    FAMILIES[name].prepare_for_float64(FAMILIES[name].core(model))
    return model


FIRST = dict(reversed(CASES))
FIRST_QUICK = [
    pytest.param(name, label, marks=[] if FIRST[name] == label else pytest.mark.slow) for name, label in CASES
]
"""Every case; those that are not the first of their family are slow."""
