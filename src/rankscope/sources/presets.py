"""`fresh`: a network of a usual size, or of your own, with random weights, nothing downloaded; its text has a random
embedding.

A freshly initialised BERT gives each word of its vocabulary a random vector and adds a random vector for the position
and one for the segment, the same for all tokens, then normalises. What text contributes is its shape: which words
repeat, and where. `word_tokens` does just this, with words as the vocabulary. The vocabulary has no end, so a word's
vector is drawn from the word itself and the seed: it is the same in every text and every call.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError, TokensError, one_of, require
from rankscope.naming import forgiven
from rankscope.nets import Architecture, Encoded, Inputs, Transformer
from rankscope.shapes import Bool, Float

_FIELDS = json.loads(files("rankscope").joinpath("data/presets.json").read_text(encoding="utf-8"))
PRESETS: dict[str, Architecture] = {name: Architecture.from_dict(fields) for name, fields in _FIELDS.items()}
"""The usual sizes. Absolute positions belong to the embedding, and so come with the tokens."""

STREAM = 0x5EED_0F_70
"""Added to the seed, so that the embedding is not drawn from the numbers that a network of that seed is.
(torch's generator reads the lower 32 bits alone.)"""
SPREAD = 0.02  # The standard deviation of BERT's embedding at initialisation


def preset(name: str) -> Architecture:
    """The architecture of that name, case and hyphens forgiven.

    >>> preset("bert-base").layers, preset("BERT base").layers
    (12, 12)
    """
    if not isinstance(name, str) or forgiven(name, PRESETS) not in PRESETS:
        raise ArchitectureError(one_of("model", name, PRESETS), subject="model")
    return PRESETS[forgiven(name, PRESETS)]


@dataclass(frozen=True)
class RandomOrigin:
    """The origin of a network with random weights: text gets a random embedding (`word_tokens`)."""

    name: str
    width: int
    seed: int
    init: str

    def encode(self, inputs: Inputs, max_length: int, padding: Tensor | None = None) -> Encoded:
        """Turn texts into tokens: their words under an embedding drawn from the network's seed."""
        if isinstance(inputs, Tensor):
            message = f"an untrained network has no vocabulary: encode takes texts; got a {inputs.dtype} tensor"
            raise TokensError(message, subject="texts")
        texts = [inputs] if isinstance(inputs, str) else inputs
        return Encoded(*word_tokens(texts, self.width, max_length, self.seed))

    def words(self, texts: Sequence[str], max_length: int) -> list[list[str]]:
        """The words of each text."""
        return [split(text)[:max_length] for text in texts]

    def save(self, folder: Path) -> dict[str, Any]:
        """Return the fields from which the embedding can be drawn again; nothing is written."""
        return {"kind": "untrained", **asdict(self)}

    def described(self) -> dict[str, Any]:
        """The fields of this origin that go into a run's manifest."""
        return {"name": self.name, "weights": "random", "seed": self.seed, "init": self.init}

    def fingerprint(self) -> str:
        """A text that identifies the embedding: its width and seed."""
        return f"words of width {self.width}, seed {self.seed}"


def fresh(
    model: str | Architecture,
    seed: int = 0,
    init: str = "bert",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    *,
    name: str | None = None,
) -> Transformer:
    """Build a network with random weights, and a random embedding for text.

    Args:
        model: An architecture, or the name of one in `PRESETS`, case and hyphens forgiven.
        seed: The seed of weights and embedding.
        init: The initialisation scheme: "bert" draws weights from N(0, 0.02), others are in `nets/tensors.py`.
        dtype: The dtype of the weights.
        device: Where the weights are.
        name: What reports call the network; the name of the preset if left out, or the size of the architecture.

    >>> fresh("bert-tiny").arch.layers
    2
    >>> fresh(Architecture(layers=3, width=8, heads=2)).words(["Call me Ishmael."])
    [['call', 'me', 'ishmael', '.']]
    """
    arch = model if isinstance(model, Architecture) else preset(model)
    name = name or (forgiven(model, PRESETS) if isinstance(model, str) else f"random {arch.layers}x{arch.width}")
    net = Transformer.random(arch, seed=seed, init=init, dtype=dtype, device=device)
    return replace(net, origin=RandomOrigin(name, arch.width, seed, init))


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
    texts: Sequence[str], width: int, max_length: int = 128, seed: int = 0
) -> tuple[Float[Tensor, "batch token width"], Bool[Tensor, "batch token"]]:
    """(X, padding): the texts' words, cut to `max_length`, under a random embedding.

    word + position + segment, each N(0, 0.02), then LayerNorm: BERT's embedding at initialisation. A text's
    tokens do not depend on the texts beside it.
    """
    lists = [split(text)[:max_length] for text in texts]
    message = f"at least one text must hold a word; received {len(lists)} texts without any"
    require(any(lists), message, TokensError, "texts")
    generator = torch.Generator().manual_seed((STREAM + seed) % 2**32)

    def draw(rows: int) -> Tensor:
        return SPREAD * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    position, segment = draw(max_length), draw(1)
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
