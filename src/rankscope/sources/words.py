"""Text as the tokens of a network that has not learnt anything yet.

A freshly initialised BERT gives each word of its vocabulary a random vector and adds a random vector for
the position and one for the segment, the same for all tokens, then normalises. What text contributes is
its shape: which words repeat, and where. `word_tokens` does just this, with words as the vocabulary.
"""

import re
from collections.abc import Sequence
from importlib.resources import files

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import TokensError

STREAM = 0x5EED_0F_70
"""Added to the seed, so that the embedding is not drawn from the numbers that a network of that seed is.
(torch's generator reads the lower 32 bits alone.)"""


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

    word + position + segment, each N(0, 0.02), then LayerNorm: BERT's embedding at initialisation.
    """
    lists = [split(text)[:length] for text in texts]
    if not any(lists):
        raise TokensError(f"at least one text must hold a word; received {len(lists)} texts without any")
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(w for ws in lists for w in ws))}
    generator = torch.Generator().manual_seed((STREAM + seed) % 2**32)

    def draw(rows: int) -> Tensor:
        return 0.02 * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    position, segment, word = draw(length), draw(1), draw(len(vocabulary))
    longest = max(map(len, lists))
    X = torch.zeros(len(lists), longest, width, dtype=torch.float64)
    padding = torch.ones(len(lists), longest, dtype=torch.bool)
    for row, words in enumerate(lists):
        ids = torch.tensor([vocabulary[w] for w in words], dtype=torch.long)
        X[row, : len(ids)] = word[ids] + position[: len(ids)] + segment
        padding[row, : len(ids)] = False
    normalised = torch.nn.functional.layer_norm(X, (width,), eps=1e-12)
    return normalised.masked_fill(padding[..., None], 0.0), padding
