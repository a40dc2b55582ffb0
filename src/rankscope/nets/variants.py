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

DEFINED = ("san", "san+mlp", "san+skip", "transformer")
"""The four curves of Dong et al. 2021, figure 2, as the paper's text defines them."""
PUBLISHED = {
    "san": "san+norm",
    "san+mlp": "san+norm+mlp+mlp_skip",
    "san+skip": "san+norm+skip",
    "transformer": "transformer",
}
"""The same four curves as the published code computes them."""
VARIANT_PARTS = ("skip", "attention_skip", "mlp_skip", "mlp", "norm")


def named_changes(arch: Architecture, name: str) -> dict[str, Any]:
    """Return the arguments of `net.variant` that a variant's name stands for.

    >>> named_changes(Architecture(layers=2, width=8, heads=2), "san+norm")
    {'skip': 0.0, 'attention_skip': None, 'mlp_skip': None, 'mlp': False, 'norm': True}
    """
    removes = isinstance(name, str) and name.startswith("transformer")
    base, *parts = str(name).split("-" if removes else "+")
    if base not in ("transformer", "san"):
        raise ArchitectureError(
            "a variant must be 'transformer', or 'san' and parts joined by +, as in san+skip+norm, or the "
            f"whole less parts, as in transformer-norm; got {name!r}",
            subject="variant",
        )
    for part in parts:
        if part not in VARIANT_PARTS:
            raise ArchitectureError(one_of("variant part", part, VARIANT_PARTS), subject="variant")
    if removes:
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
