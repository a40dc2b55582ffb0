"""How much of moby-gpt's output few paths carry, in plain torch, and whether path shares say which layers can go."""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from study_tests.rederived.kept_data import ROOT, near, rows, spread

TRAINED = ROOT / "src/rankscope/data/models/moby-gpt/checkpoint-5120"
FRESH = ROOT / "packages/rankscope-models/src/rankscope_models/moby-gpt/checkpoint-0"
LAYERS, HEADS, GROUPS, SIZE, EPS = 8, 8, 2, 16, 1e-5


@cache
def weights(folder: Path) -> dict[str, Tensor]:
    return {name.removeprefix("model."): w.double() for name, w in load_file(folder / "model.safetensors").items()}


@cache
def texts(count: int = 11, words: int = 64) -> tuple[tuple[int, ...], ...]:
    """The first paragraphs of the bundled prose that are long enough, as tokens: moby-gpt did not learn them."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(TRAINED)
    prose = (ROOT / "src/rankscope/data/moby_dick.txt").read_text(encoding="utf-8")
    long = [part for part in prose.split("\n\n") if len(part.split()) >= words]
    return tuple(tuple([0, *[i for i in tokenizer(part)["input_ids"] if i != 0]][:64]) for part in long[:count])


class Frozen:
    """The maps of a pass with all that depends on tokens held at its measured value: linear in the embedding."""

    def __init__(self, folder: Path, tokens: tuple[int, ...], layers: Sequence[int] = range(LAYERS)) -> None:
        w = self.w = weights(folder)
        self.layers = layers
        X = self.embedded = w["embed_tokens.weight"][list(tokens)]
        n = len(tokens)
        angles = torch.arange(n)[:, None] / 10000.0 ** (torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = (part(angles).repeat(1, 2).double() for part in (torch.cos, torch.sin))
        mask = torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)
        self.scale: dict[tuple[int, str], Tensor] = {}
        self.pattern: dict[int, Tensor] = {}
        self.gates: dict[int, Tensor] = {}
        self.inputs: list[Tensor] = []
        for layer in layers:
            self.inputs.append(X)
            Z = self.normed(X, layer, "input_layernorm", measure=True)
            Q, K = (
                (Z @ w[f"layers.{layer}.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, SIZE)).transpose(0, 1)
                for part in "qk"
            )
            Q, K = (M * cos + torch.cat([-M[..., SIZE // 2 :], M[..., : SIZE // 2]], -1) * sin for M in (Q, K))
            K = K.repeat_interleave(HEADS // GROUPS, 0)
            self.pattern[layer] = (Q @ K.mT / math.sqrt(SIZE) + mask).softmax(-1)
            X = X + self.heads(X, layer)
            Z = self.normed(X, layer, "post_attention_layernorm", measure=True)
            self.gates[layer] = F.silu(Z @ w[f"layers.{layer}.mlp.gate_proj.weight"].T)
            X = self.closed(X, layer)
        self.inputs.append(X)
        self.normed(X, -1, "norm", measure=True)
        self.output = self.last(X)

    def normed(self, X: Tensor, layer: int, name: str, measure: bool = False) -> Tensor:
        if measure:
            self.scale[layer, name] = (X.square().mean(-1, keepdim=True) + EPS).rsqrt()
        gain = self.w["norm.weight" if layer < 0 else f"layers.{layer}.{name}.weight"]
        return X * self.scale[layer, name] * gain

    def heads(self, X: Tensor, layer: int, only: int | None = None) -> Tensor:
        """What all heads of a layer add, or one of them."""
        V = self.normed(X, layer, "input_layernorm") @ self.w[f"layers.{layer}.self_attn.v_proj.weight"].T
        V = V.unflatten(-1, (-1, SIZE)).transpose(0, 1).repeat_interleave(HEADS // GROUPS, 0)
        read = self.pattern[layer] @ V
        if only is not None:
            read = read * (torch.arange(HEADS) == only)[:, None, None]
        return read.transpose(0, 1).flatten(1) @ self.w[f"layers.{layer}.self_attn.o_proj.weight"].T

    def closed(self, X: Tensor, layer: int) -> Tensor:
        """Past the MLP and through it."""
        Z = self.normed(X, layer, "post_attention_layernorm")
        up = Z @ self.w[f"layers.{layer}.mlp.up_proj.weight"].T
        return X + (self.gates[layer] * up) @ self.w[f"layers.{layer}.mlp.down_proj.weight"].T

    def last(self, X: Tensor) -> Tensor:
        return self.normed(X, -1, "norm")

    def by_length(self) -> list[Tensor]:
        """The sum of all paths through so many heads, for each number of heads."""
        sums = [self.embedded]
        for layer in self.layers:
            through = [self.heads(Y, layer) for Y in sums]
            past: list[Tensor] = [*sums, torch.zeros_like(self.embedded)]
            sums = [self.closed(Y + (through[k - 1] if k else 0), layer) for k, Y in enumerate(past)]
        return [self.last(Y) for Y in sums]

    def path(self, choices: tuple[int | None, ...]) -> Tensor:
        """One path: a head of each layer, or None for past them all."""
        Y = self.embedded
        for layer, head in zip(self.layers, choices, strict=True):
            Y = self.closed(Y if head is None else self.heads(Y, layer, head), layer)
        return self.last(Y)

    def shares(self) -> list[float]:
        total = self.output.square().sum()
        return [float((part * self.output).sum() / total) for part in self.by_length()]


def test_the_plain_llama_computes_what_the_model_does_and_its_paths_add_up() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float64, attn_implementation="eager")
    frozen = Frozen(TRAINED, texts()[0])
    with torch.no_grad():
        theirs = model(torch.tensor([texts()[0]])).logits[0]
    assert (
        float((frozen.output @ frozen.w["embed_tokens.weight"].T - theirs).abs().max()) < 1e-4
    )  # transformers takes softmax in float32
    assert float((sum(frozen.by_length()) - frozen.output).norm() / frozen.output.norm()) < 1e-12


def test_every_path_of_two_layers_alone_adds_up_to_its_length() -> None:
    frozen = Frozen(TRAINED, texts()[0][:12], range(2))
    found = [torch.zeros_like(frozen.embedded) for _ in range(3)]
    for choices in product([None, *range(HEADS)], repeat=2):
        found[sum(head is not None for head in choices)] += frozen.path(choices)
    for one_by_one, at_once in zip(found, frozen.by_length(), strict=True):
        assert torch.allclose(one_by_one, at_once, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_the_shortest_paths_carry_most_after_training_and_little_before() -> None:
    trained = [Frozen(TRAINED, text).shares() for text in texts()]
    assert near(spread(shares[0] for shares in trained), (0.52, 0.50, 0.57), 0.015)
    assert near([statistics.mean(shares[1] for shares in trained)], [0.36], 0.01)
    fresh = [Frozen(FRESH, text).shares() for text in texts()]
    assert near([statistics.mean(shares[length] for shares in fresh) for length in (0, 1)], [0.03, 0.03], 0.012)


def test_the_shortest_paths_of_one_text() -> None:
    shares = Frozen(TRAINED, texts()[0]).shares()
    assert shares[0] > 0.5 and shares[1] > 0.3 and abs(sum(shares) - 1) < 1e-9
    assert 0 < statistics.mean(Frozen(FRESH, texts()[0]).shares()[:2]) < 0.1


def loss(tokens: tuple[int, ...], kept: list[int]) -> float:
    """Held-out loss of the model with these layers alone."""
    frozen = Frozen(TRAINED, tokens, kept)
    return float(F.cross_entropy((frozen.output @ frozen.w["embed_tokens.weight"].T)[:-1], torch.tensor(tokens[1:])))


def path_share(frozen: Frozen, layer: int) -> float:
    """The share of the output that passes through a layer's heads or its MLP: what the frozen network loses of it."""
    Y = frozen.embedded
    for other in frozen.layers:
        Y = Y if other == layer else frozen.closed(Y + frozen.heads(Y, other), other)
    return 1 - float((frozen.last(Y) * frozen.output).sum() / frozen.output.square().sum())


@pytest.mark.slow
def test_layers_of_least_influence_cost_no_more_than_layers_of_least_path_share() -> None:
    """One more GPT, of another design than those of the finding: chosen on four texts, read on seven others."""
    frozen = [Frozen(TRAINED, text) for text in texts()[:4]]
    shares = [statistics.mean(path_share(each, layer) for each in frozen) for layer in range(LAYERS)]
    influences = [
        statistics.mean(
            float(1 - F.cosine_similarity(each.inputs[layer], each.inputs[layer + 1], dim=-1).mean()) for each in frozen
        )
        for layer in range(LAYERS)
    ]
    costs = dict[tuple[str, int], float]()
    for name, numbers in (("share", shares), ("influence", influences)):
        order = sorted(range(LAYERS), key=numbers.__getitem__)
        for out in (1, 2, 4):
            costs[name, out] = statistics.mean(loss(text, sorted(order[out:])) for text in texts()[4:])
    assert all(costs["influence", out] <= costs["share", out] + 0.02 for out in (1, 2, 4)), costs


def test_sums_of_all_short_paths_and_samples_of_them_differ_in_attention_too() -> None:
    """On sorting: all twelve paths of length 1 under attention of their own are hardly better than a few of them; most
    of what exact sums have more is the attention of the full network."""
    curves = rows("number-or-length", "curves").filter(task="sort", length=1)
    found = {
        (kind, number): statistics.median(curves.filter(kind=kind, number=number)["head"])
        for kind in ("own", "shared") for number in (5, 12)
    }  # fmt: skip
    assert near([found["own", 5], found["own", 12], found["shared", 5]], [0.61, 0.70, 0.75], 0.03), found
    assert found["shared", 12] > found["own", 12] + 0.1, found
