"""Variants by name: `san+skip+norm` is pure attention with its skips and norms, and no MLP.

`transformer` is the network as it stands; each `-part` takes one out, as in `transformer-attention_skip`.
`san` is pure attention: no skip, no MLP, no norm; each `+part` puts one back. Parts: `skip` (both),
`attention_skip`, `mlp_skip`, `mlp`, `norm`.

What the 2021 paper's code calls SAN keeps its norms, and takes only the attention skip out, so its four
curves are `san+norm`, `san+norm+mlp+mlp_skip`, `san+norm+skip` and `transformer` (`PUBLISHED`).
"""

from typing import Any

from rankscope.errors import ArchitectureError, one_of
from rankscope.nets.architecture import Architecture

PARTS = ("skip", "attention_skip", "mlp_skip", "mlp", "norm")


def named_changes(arch: Architecture, name: str) -> dict[str, Any]:
    """What `net.variant` changes for this name.

    >>> named_changes(Architecture(layers=2, width=8, heads=2), "san+norm")
    {'skip': 0.0, 'attention_skip': None, 'mlp_skip': None, 'mlp': False, 'norm': True}
    """
    whole = isinstance(name, str) and name.startswith("transformer")
    base, *parts = str(name).split("-" if whole else "+")
    if base not in ("transformer", "san"):
        raise ArchitectureError(
            "a variant must be 'transformer', or 'san' and parts joined by +, as in san+skip+norm, or the "
            f"whole less parts, as in transformer-norm; got {name!r}"
        )
    for part in parts:
        if part not in PARTS:
            raise ArchitectureError(one_of("variant part", part, PARTS))
    if whole:
        return {
            "skip": 0.0 if "skip" in parts else None,
            "attention_skip": 0.0 if "attention_skip" in parts else None,
            "mlp_skip": 0.0 if "mlp_skip" in parts and not arch.parallel else None,
            "mlp": "mlp" not in parts,
            "norm": "norm" not in parts,
        }
    return {
        "skip": None if "skip" in parts else 0.0,
        "attention_skip": arch.attention_skip if "attention_skip" in parts else None,
        "mlp_skip": arch.mlp_skip if "mlp_skip" in parts and not arch.parallel else None,
        "mlp": "mlp" in parts,
        "norm": "norm" in parts,
    }
