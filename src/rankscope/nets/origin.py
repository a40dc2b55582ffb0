"""Where a network came from, and with it how text becomes its tokens.

A network takes tokens `[batch, token, width]`. What turns text (or images) into them is not part of it, but
comes along from where it was loaded: the tokenizer and the embedding.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from rankscope.errors import TokensError, require
from rankscope.shapes import Bool, Float

Inputs = str | Sequence[str] | Tensor
"""Texts; or token ids `[batch, token]`; or, for a network that sees, images `[batch, channel, y, x]`."""


LENGTH = 128  # Tokens that a text is cut to, unless told


class Encoded(NamedTuple):
    """Tokens of layer 0, ready for `measure(net, net.encode(texts))`."""

    X: Float[Tensor, "batch token width"]
    padding: Bool[Tensor, "batch token"]  # True at padded tokens


@runtime_checkable
class Origin(Protocol):
    """What a network remembers of where it came from."""

    def encode(self, inputs: Inputs, max_length: int, padding: Tensor | None) -> Encoded:
        """Tokenised, cut to `max_length` tokens, embedded and padded at the end, in float64 on the CPU.
        `padding` comes with token ids, True at padded ones."""

    def words(self, texts: Sequence[str], max_length: int) -> list[list[str]]:
        """The tokens of each text, readable."""

    def described(self) -> dict[str, Any]:
        """For the manifest: plain Python."""

    def fingerprint(self) -> str:
        """A hash of all that turns inputs into tokens: where it is the same, so are they."""


def weights_of(described: Mapping[str, Any]) -> str:
    """The kind of a network's weights in words, for wherever the network is named.

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
    expected = "encode takes texts, or token ids as a tensor [batch, token] of whole numbers"
    for text in texts:
        require(isinstance(text, str), f"{expected}; got a {type(text).__name__}", TokensError, "texts")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            sentence = f"a text must be whole characters; got a lone surrogate at {error.start}: leave it out"
            raise TokensError(sentence, subject="texts") from error
    return texts


def encoded(origin: Origin | None, inputs: Inputs, max_length: int | None, padding: Tensor | None) -> Encoded:
    """What an origin makes of checked inputs, in float64 on the CPU; options as of `Transformer.encode`."""
    if origin is None:
        sentence = "a network made of an architecture has no tokenizer and no embedding: load one, or pass tokens X"
        raise TokensError(sentence, subject="texts")
    if max_length is None:
        max_length = max([1, *inputs.shape[-1:]]) if isinstance(inputs, Tensor) else LENGTH
    count = isinstance(max_length, int) and max_length >= 1
    require(count, f"max_length must be a whole number, at least 1; got {max_length}", TokensError, "max_length")
    if not isinstance(inputs, Tensor):
        inputs = texts_of(inputs)
        require(padding is None, "padding comes with token ids; texts are padded here", TokensError, "padding")
    sentence = f"padding must be a boolean tensor, True at padding; received {type(padding).__name__}"
    require(isinstance(padding, Tensor | None), sentence, TokensError, "padding")
    return origin.encode(inputs, max_length, padding)
