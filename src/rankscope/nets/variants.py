"""Variants that are often named (`variant_names.py` says what names mean), and those of the 2021 paper."""

from rankscope.nets.transformer import Transformer
from rankscope.nets.variant_names import named_changes

DEFINED = ("san", "san+mlp", "san+skip", "transformer")
"""The four curves of Dong et al. 2021, figure 2, as the paper's text defines them."""
PUBLISHED = {
    "san": "san+norm",
    "san+mlp": "san+norm+mlp+mlp_skip",
    "san+skip": "san+norm+skip",
    "transformer": "transformer",
}
"""The same four as the published code computes them."""


def named_variant(net: Transformer, name: str) -> Transformer:
    """The variant of a network that a name describes, as `net.variant(name)`; for `transformer` the network
    itself.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> named_variant(net, "san+skip").arch.norm
    'none'
    """
    changes = named_changes(net.arch, name)
    return net if name == "transformer" else net.variant(**changes)
