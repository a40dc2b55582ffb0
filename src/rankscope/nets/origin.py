"""Where a network came from, and with it how text becomes its tokens.

A network takes tokens `[batch, token, width]`. What turns text (or images) into them is not part of it, but
comes along from where it was loaded: the tokenizer and the embedding.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from rankscope.errors import TokensError
from rankscope.shapes import Bool, Float

Inputs = str | Sequence[str] | Tensor
"""Texts; or token ids `[batch, token]`; or, for a network that sees, images `[batch, channel, y, x]`."""


class Encoded(NamedTuple):
    """Tokens of layer 0, ready for `measure(net, *net.encode(texts))`."""

    X: Float[Tensor, "batch token width"]
    padding: Bool[Tensor, "batch token"]
    """True at padded tokens."""


@runtime_checkable
class Origin(Protocol):
    """What a network remembers of where it came from."""

    def encode(self, inputs: Inputs, tokens: int, padding: Tensor | None) -> Encoded:
        """Tokenised, cut to so many tokens, embedded and padded at the end, in float64 on the CPU.
        `padding` comes with token ids, True at padded ones."""

    def words(self, texts: Sequence[str], tokens: int) -> list[list[str]]:
        """The tokens of each text, readable."""

    def described(self) -> dict[str, Any]:
        """For the manifest: plain Python."""

    def fingerprint(self) -> str:
        """A hash of all that turns inputs into tokens: where it is the same, so are they."""


def weights_of(described: Mapping[str, Any]) -> str:
    """What an origin says of the weights, in words: wherever a network is named, this stands beside.

    >>> weights_of({"name": "gpt2", "weights": "random", "seed": 0, "init": "bert"})
    'random weights (seed 0, init bert)'
    """
    weights = f"{described.get('weights', 'given')} weights"
    drawn = ", ".join(f"{key} {described[key]}" for key in ("seed", "init") if key in described)
    return f"{weights} ({drawn})" if drawn else weights


def titled(described: Mapping[str, Any]) -> str:
    """A network's name and what its weights are: the last part of a path or hub id is the name."""
    return f"{Path(str(described.get('name') or 'network')).name}, {weights_of(described)}"


def texts_of(inputs: object) -> list[str]:
    """One text or several, as a list; a sentence for anything else.

    >>> texts_of("Call me Ishmael.")
    ['Call me Ishmael.']
    """
    alone = isinstance(inputs, str) or not isinstance(inputs, Iterable)
    texts: list[Any] = [inputs] if alone else list(inputs)  # type: ignore[call-overload]
    for text in texts:
        if not isinstance(text, str):
            raise TokensError(
                "encode takes texts, or token ids as a tensor [batch, token] of whole numbers; got a "
                f"{type(text).__name__} in the place of a text"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokensError(
                "a text must be whole characters; got one with half a character (a lone surrogate) at "
                f"{error.start}: leave it out"
            ) from error
    return texts
