"""Small real models of every family, every parameter moved off its initial zero or one."""

from typing import Any

import torch
import transformers

from rankscope.sources.families import FAMILIES

CASES = [(name, label) for name, family in FAMILIES.items() for label in family.tiny()]


def model_of(name: str, label: str, seed: int = 5) -> Any:
    """A model of transformers in float64."""
    family = FAMILIES[name]
    kind: Any = getattr(transformers, family.loader)
    config = family.tiny()[label]
    torch.manual_seed(seed)
    model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.set_attn_implementation("eager")
    return model
