"""Text as the tokens of a network that has not learnt anything yet.

A freshly initialised BERT gives each word of its vocabulary a random vector and adds a random vector for the position
and one for the segment, the same for all tokens, then normalises. What text contributes is its shape: which words
repeat, and where. `word_tokens` does just this, with words as the vocabulary. The vocabulary has no end, so a word's
vector is drawn from the word itself and the seed: it is the same in every text and every call.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import TokensError
from rankscope.shapes import Bool, Float

STREAM = 0x5EED_0F_70
"""Added to the seed, so that the embedding is not drawn from the numbers that a network of that seed is.
(torch's generator reads the lower 32 bits alone.)"""
SPREAD = 0.02  # The standard deviation of BERT's embedding at initialisation


def bundled_excerpts(words: int = 128) -> list[str]:
    """The paragraphs of the bundled prose (Moby Dick, chapters 1 to 35) with at least that many words."""
    text = files("rankscope").joinpath("data/moby_dick.txt").read_text(encoding="utf-8")
    return [paragraph for paragraph in text.split("\n\n") if len(split(paragraph)) >= words]


def split(text: str) -> list[str]:
    """Lower-case words and punctuation marks, one each.

    >>> split("Call me Ishmael.")
    ['call', 'me', 'ishmael', '.']
    """
    return re.findall(r"\w+|[^\w\s]", text.lower())


def word_tokens(
    texts: Sequence[str], width: int, length: int = 128, seed: int = 0
) -> tuple[Float[Tensor, "batch token width"], Bool[Tensor, "batch token"]]:
    """(X, padding): the texts' words, cut to `length`, under a random embedding.

    word + position + segment, each N(0, 0.02), then LayerNorm: BERT's embedding at initialisation. A text's
    tokens do not depend on the texts beside it.
    """
    lists = [split(text)[:length] for text in texts]
    if not any(lists):
        message = f"at least one text must hold a word; received {len(lists)} texts without any"
        raise TokensError(message, subject="texts")
    generator = torch.Generator().manual_seed((STREAM + seed) % 2**32)

    def draw(rows: int) -> Tensor:
        return SPREAD * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    position, segment = draw(length), draw(1)
    longest = max(map(len, lists))
    X = torch.zeros(len(lists), longest, width, dtype=torch.float64)
    padding = torch.ones(len(lists), longest, dtype=torch.bool)
    for row, words in enumerate(lists):
        if words:
            drawn = torch.from_numpy(np.stack([_vector(word, width, seed) for word in words]))
            X[row, : len(words)] = drawn + position[: len(words)] + segment
            padding[row, : len(words)] = False
    normalised = torch.nn.functional.layer_norm(X, (width,), eps=1e-12)
    return normalised.masked_fill(padding[..., None], 0.0), padding


@lru_cache(maxsize=4096)
def _vector(word: str, width: int, seed: int) -> Float[np.ndarray, " width"]:
    """N(0, 0.02), drawn from a 128-bit hash of the word and the seed; the usual words are kept."""
    digest = blake2b(word.encode("utf-8", "surrogatepass"), digest_size=16, key=f"{STREAM}:{seed}".encode())
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))
    vector = SPREAD * generator.standard_normal(width)
    vector.flags.writeable = False
    return vector
