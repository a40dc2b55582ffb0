"""A check that a network which predicts the next token does not read it.

The mask forbids it, and a remedy may do it all the same: the rounds of Sinkhorn attention divide columns,
which hold the attention of later tokens. What such a network says of the next symbol is no prediction.
"""

import torch

from rankscope.errors import ArchitectureError
from rankscope.nets import Transformer

TOKENS = 6
PERTURBATION = 0.1
"""Times a normal number, added to every parameter: a remedy at its zero would hide what it does later."""
TOLERANCE = 1e-9
"""Of a change of size one in later tokens, more than rounding brings to earlier ones."""


def reads_ahead(net: Transformer) -> bool:
    """True if a token depends on later ones in some layer, found by changing these. All layers are compared,
    not the last alone: where tokens become the same, what was read is below rounding there.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2, mask="causal"))
    >>> reads_ahead(net), reads_ahead(net.with_remedy("shaped")), reads_ahead(net.with_remedy("sinkhorn"))
    (False, False, True)
    """
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    state = {name: tensor.double().cpu() for name, tensor in net.state().items()}
    perturbed = {name: tensor + PERTURBATION * normal(*tensor.shape) for name, tensor in state.items()}
    copy = Transformer.from_weights(net.arch, perturbed)
    X = normal(1, TOKENS, net.arch.width)
    changed = X.clone()
    changed[:, TOKENS // 2 :] += normal(1, TOKENS - TOKENS // 2, net.arch.width)
    return any(
        bool((before.state - after.state)[:, : TOKENS // 2].abs().max() > TOLERANCE)
        for before, after in zip(copy.steps(X), copy.steps(changed), strict=True)
    )


def refuse_lookahead(net: Transformer, remedies: str) -> None:
    """Raise an `ArchitectureError` if a causal network reads the tokens that it is to predict."""
    if net.arch.mask == "causal" and reads_ahead(net):
        raise ArchitectureError(
            f"under a causal mask no token may read later ones; with {remedies or 'its parts'} this network "
            "does, and would look up what it is asked for: take a task for encoders (sort, digits)",
            subject="mask",
        )
