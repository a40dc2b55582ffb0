"""`Design`: everything that decides a training of the lab, and designs drawn at random from a wide space.

`trainings.py` trains such designs, and reads them before they are trained. What is drawn:

| part            | values                                                                                 |
|-----------------|----------------------------------------------------------------------------------------|
| task            | the next character (two thirds), induction                                             |
| depth           | 3 to 48 layers, uniform in their log                                                   |
| norm            | LayerNorm, RMSNorm, none; before branches or after skips; a last norm or not           |
| skips           | 1 (half), 0 (a fifth), or anything between; that of the MLP mostly that of attention   |
| MLP             | plain, gated or none; GELU, ReLU, SiLU or tanh                                         |
| initialisation  | the schemes of `nets/tensors.py`, also `/sqrt(L)`; embedding of entries 1 or 1/8       |
| gains           | of queries and keys 0.3 to 3, of values 0.5 to 2                                       |
| mask, positions | causal, or a causal window; a table of positions, rotary, ALiBi or none                |
| remedy          | none (four fifths), or one that goes onto a decoder                                    |
| learning rate   | 1e-3, or 3e-3                                                                          |
"""

import hashlib
import json
import math
import random
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rankscope.forecasts import STEPS, Plan, goes_onto
from rankscope.lab import Initialisation, Recipe, Task, Training, task
from rankscope.nets import Architecture

WIDTH, HEADS = 64, 4
TASKS = ("next-character", "next-character", "induction")
SCHEMES = ("xavier", "bert", "kaiming", "orthogonal", "xavier/sqrt(L)", "bert/sqrt(L)")
ACTIVATIONS = ("gelu", "relu", "silu", "tanh")
REMEDIES = ("shaped", "attnscale", "rezero", "skipinit", "lambda", "gate", "lnscale", "neutreno", "featscale")
"""Remedies that a decoder of any of these designs may have, though not every design."""


@dataclass(frozen=True)
class Design:
    """A training of the lab, described so that it can be written down and made again.

    Args:
        task: The name of what is learnt.
        layers: How deep the network is.
        fields: Fields of its architecture that are not those of the task's usual network.
        scheme: How its weights are drawn (`nets/tensors.py`).
        query_gain: Factor of the weights of queries and of keys as drawn.
        value_gain: Factor of the weights of values as drawn.
        embedding_std: Standard deviation of the entries of embedding and positions.
        remedy: A remedy as `--remedy` has it; "" for none.
        lr: The largest learning rate.
        steps: Steps of the training.
        width: The width of tokens.
        heads: Heads of a layer.

    >>> design = Design("next-character", 6, {"norm_place": "post", "final_norm": False})
    >>> design.architecture.layers, len(design.key)
    (6, 16)
    """

    task: str
    layers: int
    fields: dict[str, Any]
    scheme: str = "xavier"
    query_gain: float = 1.0
    value_gain: float = 1.0
    embedding_std: float = 1.0
    remedy: str = ""
    lr: float = 1e-3
    steps: int = STEPS
    width: int = WIDTH
    heads: int = HEADS

    @property
    def lab_task(self) -> Task:
        """The task by its name."""
        return task(self.task)

    @property
    def architecture(self) -> Architecture:
        """The network, without its remedy."""
        return self.lab_task.architecture(self.layers, self.width, self.heads, **self.fields)

    @property
    def initialisation(self) -> Initialisation:
        """How the weights of the network are drawn before its training."""
        gains = {
            "attention.query.weight": self.query_gain,
            "attention.key.weight": self.query_gain,
            "attention.value.weight": self.value_gain,
        }
        scaled = tuple((name, gain) for name, gain in gains.items() if gain != 1.0)
        return Initialisation(self.scheme, self.embedding_std, gains=scaled)

    @property
    def key(self) -> str:
        """A digest that tells this design from every other."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def plan(self, seed: int = 0) -> Plan:
        """The network, what it learns and how."""
        recipe, remedies = Recipe(steps=self.steps, lr=self.lr, seed=seed), [self.remedy] if self.remedy else []
        return Plan(self.architecture, self.lab_task, recipe, self.initialisation, remedies)

    def training(self, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Training:
        """The training of this design, not begun yet."""
        return self.plan(seed).training(device, dtype)


def draw_design(seed: int) -> Design:
    """The design of a seed, from the space of the module's table."""
    for attempt in range(100):
        design = _drawn(random.Random(f"{seed}, attempt {attempt}"))
        if not design.remedy or goes_onto(design.architecture, design.remedy):
            return design
    raise AssertionError("no design can be made")  # a hundred in a row: none is without a remedy


def _drawn(draw: random.Random) -> Design:
    norm, norm_place = draw.choice(("layer", "layer", "rms", "none")), draw.choice(("pre", "post"))
    skip = _skip(draw)
    fields: dict[str, Any] = {
        "norm": norm, "norm_place": norm_place, "attention_skip": skip,
        "mlp_skip": skip if draw.random() < 0.7 else _skip(draw),
        "mlp": draw.choice(("plain", "plain", "plain", "gated", "none")), "activation": draw.choice(ACTIVATIONS),
        "final_norm": norm != "none" and draw.random() < (0.8 if norm_place == "pre" else 0.4),
    }  # fmt: skip
    if draw.random() < 0.15:
        fields["mask"] = draw.choice(("causal&window:4", "causal&window:16"))
    if draw.random() < 0.2:
        fields["positions"] = draw.choice(("rotary", "alibi", "none"))
    return Design(
        draw.choice(TASKS), round(math.exp(draw.uniform(math.log(2.6), math.log(48)))), fields,
        scheme=draw.choice(SCHEMES),
        query_gain=_gain(draw, 0.3, 3.0),
        value_gain=_gain(draw, 0.5, 2.0),
        embedding_std=draw.choice((1.0, 0.125)),
        remedy=draw.choice(REMEDIES) if draw.random() < 0.2 else "",
        lr=draw.choice((1e-3, 1e-3, 1e-3, 3e-3)),
    )  # fmt: skip


def _skip(draw: random.Random) -> float:
    return draw.choice((1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, *(round(draw.random(), 3) for _ in range(3))))


def _gain(draw: random.Random, low: float, high: float) -> float:
    return 1.0 if draw.random() < 0.3 else round(math.exp(draw.uniform(math.log(low), math.log(high))), 3)
