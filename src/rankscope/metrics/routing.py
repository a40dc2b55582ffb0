"""How a mixture of experts routes the tokens of a sample.

p is `[*batch, token, expert]`, the weight of each expert for each token, 0 of those that it does not go
through; padding is `[*batch, token]`. The **load** of an expert is the share of valid tokens that go through
it: with k experts chosen for each token, loads sum to k. A sample without tokens has no value: NaN.
"""

import torch
from torch import Tensor

from rankscope.errors import TokensError, require
from rankscope.metrics.base import Meaning, Metric, valid_tokens
from rankscope.shapes import Float

Values = Float[Tensor, "*batch"]


def loads(p: Tensor, padding: Tensor | None = None) -> Float[Tensor, "*batch expert"]:
    """The share of valid tokens that go through each expert."""
    sentence = f"routing must be floating weights [batch, token, expert]; received {p.dtype} of {tuple(p.shape)}"
    require(p.ndim >= 2 and p.is_floating_point(), sentence, TokensError, "p")
    valid = valid_tokens(p.shape[:-1], padding, p.device)
    taken = ((p > 0) & valid[..., None]).sum(-2).to(torch.float64)
    return taken / valid.sum(-1, keepdim=True)


def expert_load(p: Tensor, padding: Tensor | None = None) -> Values:
    """`max_e load_e`, the share of tokens that go through the busiest expert: k / E where all experts take as
    many, 1 where every token goes through it."""
    return loads(p, padding).amax(-1)


def expert_entropy(p: Tensor, padding: Tensor | None = None) -> Values:
    """`-sum_e s_e log s_e`, in nats, with `s_e = load_e / sum load`: log E where all experts take as many
    tokens, log k where all tokens go through the same k."""
    load = loads(p, padding)
    return torch.special.entr(load / load.sum(-1, keepdim=True)).sum(-1)


_BALANCED = "all E experts take as many tokens"
METRICS = [
    Metric("expert_load", expert_load, "max load", r"\max_e\,\mathrm{load}_e", "routing",
        meaning=Meaning("k/E to 1", _BALANCED, "every token goes through one of them (1)",
            "k experts are chosen for each token.", equal="1")),
    Metric("expert_entropy", expert_entropy, "H(load)", r"H(\mathrm{load})", "routing",
        meaning=Meaning("log k to log E", "all tokens go through the same k experts", _BALANCED, equal="log k")),
]  # fmt: skip
