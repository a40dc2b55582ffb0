"""A network that shall say what comes next must not read it.

A mask forbids it, and a remedy may do it all the same: the rounds of Sinkhorn attention divide columns, which
hold the weights of later tokens. What such a network says of the next symbol is no prediction.
"""

import torch

from rankscope.errors import ArchitectureError
from rankscope.nets import Transformer

TOKENS = 6
SHAKEN = 0.1
"""What is added to every number, times a normal one: a remedy at its zero would hide what it does later."""
SEEN = 1e-9
"""Of a change of size one in later tokens, more than rounding brings to earlier ones."""


def reads_ahead(net: Transformer) -> bool:
    """Whether a token depends on later ones in some layer, found by changing these. In all layers, not the
    last alone: where tokens become the same, what was read is below rounding there.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2, mask="causal"))
    >>> reads_ahead(net), reads_ahead(net.with_remedy("shaped")), reads_ahead(net.with_remedy("sinkhorn"))
    (False, False, True)
    """
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    state = {name: each.double().cpu() for name, each in net.state().items()}
    shaken = {name: each + SHAKEN * normal(*each.shape) for name, each in state.items()}
    asked = Transformer.from_weights(net.arch, shaken)
    X = normal(1, TOKENS, net.arch.width)
    later = X.clone()
    later[:, TOKENS // 2 :] += normal(1, TOKENS - TOKENS // 2, net.arch.width)
    return any(
        bool((one.state - other.state)[:, : TOKENS // 2].abs().max() > SEEN)
        for one, other in zip(asked.steps(X), asked.steps(later), strict=True)
    )


def refuse_reading_ahead(net: Transformer, remedies: str) -> None:
    """A sentence where a causal network reads what it is asked for."""
    if net.arch.mask == "causal" and reads_ahead(net):
        raise ArchitectureError(
            f"under a causal mask no token may read later ones; with {remedies or 'its parts'} this network "
            "does, and would look up what it is asked for: take a task for encoders (sort, digits)"
        )
