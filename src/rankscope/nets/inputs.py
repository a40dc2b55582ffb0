"""What `measure`, `certify` and `decompose` are given: a network, and tokens, texts or what `encode` gave."""

from collections.abc import Sequence

from torch import Tensor, nn

from rankscope.errors import SourceError, TokensError
from rankscope.nets.origin import Encoded
from rankscope.nets.transformer import Transformer

TokensOf = Tensor | Encoded | str | Sequence[str]
"""Tokens `[batch, token, width]`; what `net.encode` gave; or texts, which `net.encode` reads."""


def tokens_of(
    who: str, net: Transformer, X: TokensOf, padding: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(X, padding) of what was given; a sentence where `net` is no network, as a model of Hugging Face's."""
    if not isinstance(net, Transformer):
        raise SourceError(_no_network(who, net))
    texts = isinstance(X, str) or (isinstance(X, list | tuple) and X and all(isinstance(x, str) for x in X))
    if not texts and not isinstance(X, Encoded):
        return X, padding  # type: ignore[return-value]  # what is no tensor is refused where tensors are
    if padding is not None:
        what = "texts" if texts else "what encode gave"
        raise TokensError(
            f"padding goes with tokens; {who} was given {what}, which say it themselves: leave it out"
        )
    return X if isinstance(X, Encoded) else net.encode(X)


def _no_network(who: str, net: object) -> str:
    if isinstance(net, str):
        return f"{who} takes a network; got the name {net!r}: load it, as in {who}(load({net!r}), texts)"
    kind = type(net).__name__
    if isinstance(net, nn.Module):
        return (
            f"{who} takes a network of rankscope; got a {kind}: load(model) makes one of it, as in "
            f"{who}(load(model), texts), and watch(model) measures it as it runs"
        )
    return f"{who} takes a network, as load or fresh gives it; got a {kind}"
