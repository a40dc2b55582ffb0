"""What is read off each layer of a depth card while the network runs once.

`card.py` calls `read_forward`, which goes through the network block by block by the plain rules and takes of each layer
what its tokens, branches, norms and attention show. Where the network can be frozen, what started at the embedding and
at biases is carried along for the shares of paths (`paths/by_part.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.metrics import Values, affine_rank_with_doubt, entropy, first_token_mass, unit_of
from rankscope.nets import Block, Half, Plain, Tokens, Transformer, contributions, traverse
from rankscope.paths import FreezingRules, TwoPasses
from rankscope.shapes import Bool, Float

Valid = Bool[Tensor, "batch token"]
SINK = 0.3  # The mass on the first token above which a head has a sink (Gu et al. 2025)


NormRank = tuple[dict[str, Any], dict[str, Values]]
"""The layer and name of a norm, and by column the affine rank of the tokens before and after it, each of a sample, with
whether rounding may have decided one of them."""


@dataclass
class ForwardReadings:
    """What a pass forward gives: the tokens before each layer, the last ones, and numbers by layer, head and norm."""

    inputs: list[Tokens] = field(default_factory=list)
    last: Tokens = field(init=False)
    layers: list[dict[str, Values]] = field(default_factory=list)
    heads: list[dict[str, Float[Tensor, "batch head"]]] = field(default_factory=list)
    norms: list[NormRank] = field(default_factory=list)


class _Readings(Plain):
    """A mixin before rules on tensors: records ranks at norms, and cosines of branches with the stream."""

    def __init__(self, net: Transformer, X: Tokens, valid: Valid) -> None:
        super().__init__(net.arch, net.settings(X, valid))
        self.valid, self.unit = valid, unit_of(X.dtype)
        self.norms: list[NormRank] = []
        self.cosines: dict[str, Values] = {}  # By branch, of the layer at hand
        self.branches: list[Tokens] = []

    def norm(self, block: Block, name: str, X: Tokens) -> Tokens:
        """The norm, after which ranks are recorded."""
        Y = super().norm(block, name, X)
        self.norms.append(_norm_rank(block.index + 1, name, X, Y, self.valid, self.unit))
        return Y

    def add(self, block: Block, half: Half, X: Tokens, branches: dict[str, Tokens]) -> Tokens:
        """The sum, whose branches are compared with the stream first."""
        for name, branch in branches.items():
            self.cosines[name] = mean_cosine_of(branch, X, self.valid)
            self.branches.append(branch)
        return super().add(block, half, X, branches)


class _FreezingReadings(_Readings, FreezingRules):
    """The same, of a network that is frozen for its paths."""


def _norm_rank(layer: int, name: str, X: Tokens, Y: Tokens, valid: Valid, unit: float) -> NormRank:
    """The affine ranks of tokens X before and Y after a norm of a layer; `unit` is the eps of the arithmetic that the
    network runs in."""
    (before, first), (after, second) = (affine_rank_with_doubt(Z, ~valid, unit=unit) for Z in (X, Y))
    ranks = {"rank_before": before, "rank_after": after, "rank_doubtful": first | second}
    return {"layer": layer, "norm_name": name}, ranks


@torch.no_grad()
def read_forward(
    net: Transformer, X: Tokens, valid: Valid, paths: TwoPasses | None, progress: Callable[[int], None]
) -> ForwardReadings:
    """Run the network once over tokens X, valid ones first (`net.prepared`), and read every layer. `paths` is shown
    each, frozen (None where the network has no linear rules), and `progress` is called with 1 after each.

    Raises:
        ArchitectureError: A part leaves something to later layers, so that these cannot run without it.
    """
    rules = (_Readings if paths is None else _FreezingReadings)(net, X, valid)
    forward, unit = ForwardReadings(), unit_of(X.dtype)
    for block in net.blocks:
        forward.inputs.append(X)
        output = traverse(block, rules, X)
        if rules.carried:
            names = ", ".join(map(str, rules.carried))
            sentence = f"a depth card takes layers out one by one; a part leaves {names} to later layers"
            raise ArchitectureError(f"{sentence}, which cannot run without it: measure the network instead",
                                    subject="parts")  # fmt: skip
        after = output.state.masked_fill(~valid[..., None], 0.0)
        P, padding = output.pattern, ~valid
        of_heads = {
            "cosine": mean_cosine_of(contributions(block.weights, output.heads), X[:, None], valid[:, None]),
            "entropy": entropy(P, padding), "sink": first_token_mass(P, padding),
        }  # fmt: skip
        active = torch.zeros(net.arch.heads, dtype=torch.bool, device=X.device)
        active[list(block.active_heads)] = True
        of_heads = {name: values.masked_fill(~active, torch.nan) for name, values in of_heads.items()}
        rank, doubtful = affine_rank_with_doubt(after, padding, unit=unit)
        forward.layers.append({
            "influence": influence(X, after, valid),
            "cosine": mean_cosine_of(sum(rules.branches[1:], rules.branches[0]), X, valid),
            "cosine_attention": rules.cosines.pop("attention"),
            "cosine_mlp": rules.cosines.pop("mlp", torch.full_like(rank, torch.nan)),
            "entropy": of_heads["entropy"].nanmean(-1), "sink": of_heads["sink"].nanmean(-1),
            "sink_heads": (of_heads["sink"] > SINK).double().sum(-1) / max(1, len(block.active_heads)),
            "rank": rank, "rank_doubtful": doubtful,
        })  # fmt: skip
        rules.branches.clear()
        forward.heads.append(of_heads)
        if paths is not None:
            assert isinstance(rules, FreezingRules)
            paths.forward(rules.layers.pop(block.index), X)
        X = after
        progress(1)
    forward.norms, forward.last = rules.norms, X
    if net.arch.final_norm:
        forward.norms.append(_norm_rank(net.arch.layers, "final_norm", X, net.finish(X), valid, unit))
    net.weights.layers.release()
    return forward


def influence(X: Tokens, Y: Tokens, valid: Valid) -> Values:
    """The mean over tokens of `1 - cos(x, y)` (block influence of Men et al. 2024), as half the square of what unit
    vectors differ by."""
    u, v = _directions(X), _directions(Y)
    rest = 2 - u.square().sum(-1) - v.square().sum(-1)  # 0, but for a token of length zero, whose cosine is 0
    return _over_tokens(((u - v).square().sum(-1) + rest) / 2, valid)


def mean_cosine_of(Y: Tensor, X: Tensor, valid: Tensor) -> Values:
    """The mean over tokens of `cos(y, x)`; 0 of a token of length zero."""
    return _over_tokens((_directions(Y) * _directions(X)).sum(-1), valid)


def _directions(X: Tensor) -> Tensor:
    """Unit vectors in float64; a token of length zero stays zero."""
    largest = X.abs().amax(-1, keepdim=True).double()
    unit = X.double() / largest.masked_fill(largest == 0, 1.0)  # squares could leave the range
    length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    return unit / length.masked_fill(length == 0, 1.0)


def _over_tokens(values: Tensor, counted: Tensor) -> Values:
    """The mean over the tokens that count; NaN where none does."""
    return values.masked_fill(~counted, 0.0).sum(-1) / counted.sum(-1)
