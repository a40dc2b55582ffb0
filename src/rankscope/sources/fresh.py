"""`fresh`: a network of a usual size, or of your own, with random weights, nothing downloaded."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError, TokensError, one_of
from rankscope.naming import forgiven
from rankscope.nets import Architecture, Encoded, Inputs, Transformer
from rankscope.sources.random_embedding import split, word_tokens

_FIELDS = json.loads(files("rankscope").joinpath("data/presets.json").read_text(encoding="utf-8"))
PRESETS: dict[str, Architecture] = {name: Architecture.from_dict(fields) for name, fields in _FIELDS.items()}
"""The usual sizes. Absolute positions belong to the embedding, and so come with the tokens."""


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
    """The origin of a network with random weights: text gets a random embedding (`random_embedding.py`)."""

    name: str
    width: int
    seed: int
    init: str

    def encode(self, inputs: Inputs, length: int, padding: Tensor | None = None) -> Encoded:
        """Turn texts into tokens: their words under an embedding drawn from the network's seed."""
        if isinstance(inputs, Tensor):
            message = f"an untrained network has no vocabulary: encode takes texts; got a {inputs.dtype} tensor"
            raise TokensError(message, subject="texts")
        texts = [inputs] if isinstance(inputs, str) else inputs
        return Encoded(*word_tokens(texts, self.width, length, self.seed))

    def words(self, texts: Sequence[str], length: int) -> list[list[str]]:
        """The words of each text."""
        return [split(text)[:length] for text in texts]

    def save(self, folder: Path) -> dict[str, Any]:
        """Return the fields from which the embedding can be drawn again; nothing is written."""
        return {"kind": "untrained", **asdict(self)}

    def described(self) -> dict[str, Any]:
        """The fields of this origin that go into a run's manifest."""
        return {"name": self.name, "weights": "random", "seed": self.seed, "init": self.init}

    def fingerprint(self) -> str:
        """A text that identifies the embedding: its width and seed."""
        return f"words of width {self.width}, seed {self.seed}"


def untrained(
    arch: Architecture,
    name: str,
    seed: int = 0,
    init: str = "bert",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Transformer:
    """Build a network of this architecture with random weights and a random embedding for text.

    Args:
        arch: The architecture.
        name: What reports call the network.
        seed: The seed of weights and embedding.
        init: The initialisation scheme (`nets/initial.py`).
        dtype: The dtype of the weights.
        device: Where the weights are.
    """
    net = Transformer.random(arch, seed=seed, init=init, dtype=dtype, device=device)
    return replace(net, origin=RandomOrigin(name, arch.width, seed, init))


def fresh(
    model: str | Architecture,
    seed: int = 0,
    init: str = "bert",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Transformer:
    """An architecture, or the one of that name, with untrained weights: N(0, 0.02), or as `init` says.

    >>> fresh("bert-tiny").arch.layers
    2
    >>> fresh(Architecture(layers=3, width=8, heads=2)).words(["Call me Ishmael."])
    [['call', 'me', 'ishmael', '.']]
    """
    if isinstance(model, Architecture):
        return untrained(model, f"random {model.layers}x{model.width}", seed, init, dtype, device)
    return untrained(preset(model), forgiven(model, PRESETS), seed, init, dtype, device)
