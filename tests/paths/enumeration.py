"""Every path, one at a time: an independent enumeration in numpy, from the definitions.

The forward pass is computed here again, token by token where it matters, and what depends on the tokens is
kept: attention (taken from the network), standard deviations, gates. Then every way through the layers is
walked on its own, from the embedding and from every single bias.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.nets import ACTIVATIONS, Architecture, Experts, Transformer
from rankscope.paths import Decomposition, decompose
from tests.builders import awake, normal

Array = np.ndarray[Any, Any]
EVERY = "every"
BIASES = ("attention_norm", "attention.value", "attention.output", "attention_after", "mlp_norm", "mlp.up",
          "mlp.down", "mlp_after")  # fmt: skip
"""Those that add to the tokens; of queries, keys and gates they are in what is kept."""


@dataclass
class Term:
    """One path's term: where it starts, the heads it names by layer, and what it adds to the output."""

    layer: int
    """Of the bias; -1 of the embedding."""
    head: int | None
    """That it passes in the layer where it starts."""
    choices: tuple[int | None, ...]
    """In the layers after that."""
    value: Array

    @property
    def length(self) -> int:
        return sum(choice is not None for choice in (self.head, *self.choices))

    def head_in(self, layer: int) -> int | None:
        return (None, self.head, *self.choices)[max(layer - self.layer + 1, 0)]


class Enumeration:
    """One sample without padding."""

    def __init__(self, net: Transformer, X: Tensor) -> None:
        self.arch, self.state = net.arch, {k: v.numpy() for k, v in net.state_dict().items()}
        run = net.run(X[None], attention=True)
        self.P = [P[0].numpy() for P in run.attention]
        self.output = run.output[0].numpy()
        self.X = run.states[0][0].numpy()
        self.measured: dict[tuple[int, str], Array] = {}
        self.routed: dict[tuple[int, int], list[tuple[int, Array]]] = {}
        """By layer and token: the experts chosen, and their gates at the weights they have."""
        self.biases = EVERY
        """Which are added: every one in the forward pass, in which scales and gates are noted; later one."""
        Y = self.X
        for layer in range(self.arch.layers):
            Y = self.through(layer, Y, range(self.arch.heads), past=True)
        np.testing.assert_allclose(self.onward(self.arch.layers - 1, Y, ()), self.output, rtol=1e-10, atol=1e-12)
        self.biases = ""

    def tensor(self, layer: int, name: str) -> Array | None:
        here = 0 if self.arch.shared else layer
        return self.state.get(name if layer < 0 else f"layers.{here}.{name}")

    def weight(self, layer: int, name: str) -> Array:
        found = self.tensor(layer, f"{name}.weight")
        assert found is not None
        return found

    def bias(self, layer: int, name: str, part: Any = ...) -> Array:
        found = self.tensor(layer, f"{name}.bias")
        return np.zeros(1) if found is None or self.biases not in (EVERY, name) else found[part]

    def norm(self, layer: int, name: str, Y: Array) -> Array:
        if self.arch.norm == "none":
            return Y
        centred = Y - Y.mean(1, keepdims=True) if self.arch.norm == "layer" else Y
        if self.biases == EVERY:
            square = (centred**2).sum(1) if self.arch.norm == "scale" else (centred**2).mean(1)
            self.measured[layer, name] = np.sqrt(square + self.arch.norm_eps)[:, None]
        gain = self.tensor(layer, f"{name}.gain")
        scaled = centred / self.measured[layer, name]
        return (scaled if gain is None else scaled * gain) + self.bias(layer, name)

    def head(self, layer: int, h: int, Z: Array) -> Array:
        g = h // (self.arch.heads // self.arch.key_heads)
        V = Z @ self.weight(layer, "attention.value")[:, g] + self.bias(layer, "attention.value", g)
        said = self.P[layer][h] @ V
        if self.arch.head_gate:
            if self.biases == EVERY:
                z = Z @ self.weight(layer, "attention.gate")[:, h] + self.bias(layer, "attention.gate", h)
                self.measured[layer, f"head {h}"] = 1 / (1 + np.exp(-z))
            said = said * self.measured[layer, f"head {h}"]
        return said @ self.weight(layer, "attention.output")[h]

    def mlp(self, layer: int, Y: Array) -> Array:
        place, act = self.arch.norm_place, ACTIVATIONS[self.arch.activation]
        Y = Y if place == "post" else self.norm(layer, "mlp_norm", Y)
        if self.arch.mixes(layer):
            out = self.mixture(layer, Y)
            return self.norm(layer, "mlp_after", out) if place == "sandwich" else out
        up = Y @ self.weight(layer, "mlp.up") + self.bias(layer, "mlp.up")
        if self.biases == EVERY:
            gated = self.arch.mlp != "plain"
            gate = Y @ self.weight(layer, "mlp.gate") + self.bias(layer, "mlp.gate") if gated else up
            opened = act(torch.from_numpy(gate)).numpy()
            self.measured[layer, "gate"] = opened if gated else opened / up
        out = (self.measured[layer, "gate"] * up) @ self.weight(layer, "mlp.down")
        out = out + self.bias(layer, "mlp.down")
        return self.norm(layer, "mlp_after", out) if place == "sandwich" else out

    def mixture(self, layer: int, Y: Array) -> Array:
        """Token by token, through the experts that the token of the forward pass chose, at their weights."""
        experts, act = self.arch.experts, ACTIVATIONS[self.arch.activation]
        assert experts is not None
        w = {part: self.weight(layer, f"experts.{part}") for part in ("router", "gate", "up", "down")}
        out = np.zeros_like(Y)
        for i, y in enumerate(Y):
            if self.biases == EVERY:
                scores = np.exp(y @ w["router"])
                best = np.argsort(-scores)[: experts.chosen]
                total = scores[best].sum() if experts.renormalised else scores.sum()
                opened = [act(torch.from_numpy(y @ w["gate"][:, e])).numpy() for e in best]
                self.routed[layer, i] = [(e, scores[e] / total * gate) for e, gate in zip(best, opened, strict=True)]
            for e, gate in self.routed[layer, i]:
                out[i] += (gate * (y @ w["up"][:, e])) @ w["down"][e]
        if not experts.shared_width:
            return out
        if self.biases == EVERY:
            gate = act(torch.from_numpy(Y @ self.weight(layer, "experts.shared.gate"))).numpy()
            share = 1 / (1 + np.exp(-Y @ self.weight(layer, "experts.shared_gate")))
            self.measured[layer, "shared"] = share * gate
        shared = self.measured[layer, "shared"] * (Y @ self.weight(layer, "experts.shared.up"))
        return out + shared @ self.weight(layer, "experts.shared.down")

    def through(self, layer: int, X: Array, heads: Sequence[int], past: bool) -> Array:
        """Through a layer: through these heads, and past them by the skip (or a parallel MLP)."""
        arch, post = self.arch, self.arch.norm_place == "post"
        Z = X if post or layer in arch.bare_layers else self.norm(layer, "attention_norm", X)
        Y = sum((self.head(layer, h, Z) for h in heads), np.zeros_like(X))
        Y = Y + self.bias(layer, "attention.output")
        Y = self.norm(layer, "attention_after", Y) if arch.norm_place == "sandwich" else Y
        if past:
            Y = Y + arch.attention_skip * X
            Y = Y + self.mlp(layer, X) if arch.parallel and arch.mlp != "none" else Y
        Y = self.norm(layer, "attention_norm", Y) if post else Y
        if arch.mlp == "none" or arch.parallel:
            return Y
        Y = arch.mlp_skip * Y + self.mlp(layer, Y)
        return self.norm(layer, "mlp_norm", Y) if post else Y

    def onward(self, layer: int, Y: Array, choices: tuple[int | None, ...]) -> Array:
        """From the end of `layer` to the output, through these choices."""
        for index, choice in enumerate(choices, layer + 1):
            Y = self.through(index, Y, () if choice is None else (choice,), past=choice is None)
        return self.norm(-1, "final_norm", Y) if self.arch.final_norm else Y

    def terms(self, layer: int, head: int | None, Y: Array) -> list[Term]:
        """All that starts as Y at the end of a layer."""
        arch = self.arch
        past = arch.attention_skip != 0 or (arch.parallel and arch.mlp != "none")
        ways = product([*([None] if past else []), *range(arch.heads)], repeat=arch.layers - layer - 1)
        return [Term(layer, head, way, self.onward(layer, Y, way)) for way in ways]

    @cached_property
    def embedding_terms(self) -> list[Term]:
        return self.terms(-1, None, self.X)

    @cached_property
    def bias_terms(self) -> list[Term]:
        starts = (start for layer in range(self.arch.layers) for start in self.starts(layer))
        found = [term for start in starts for term in self.terms(*start)]
        last = self.tensor(-1, "final_norm.bias")
        if last is not None:
            found.append(Term(self.arch.layers, None, (), np.zeros_like(self.X) + last))
        return found

    def starts(self, layer: int) -> Iterator[tuple[int, int | None, Array]]:
        """(layer, the head it passes there, tokens at the end of this layer) of every bias of a layer: those
        of values, and of a norm before the heads, through each head; the others past them."""
        inside = {"attention.value"} | (set() if self.arch.norm_place == "post" else {"attention_norm"})
        for name in BIASES:
            if self.tensor(layer, f"{name}.bias") is None:
                continue
            for head in range(self.arch.heads) if name in inside else [None]:
                self.biases = name
                heads = () if head is None else (head,)
                Y = self.through(layer, np.zeros_like(self.X), heads, past=head is None)
                self.biases = ""
                yield layer, head, Y


BASE: dict[str, Any] = {"layers": 3, "width": 6, "heads": 2, "head_width": 4, "mlp_width": 5, "length": 8}
CASES: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm with a last norm": {"norm_place": "pre", "final_norm": True},
    "sandwich": {"norm_place": "sandwich", "final_norm": True},
    "no norm": {"norm": "none"},
    "scale-only, gated": {"norm": "scale", "mlp": "gated", "norm_place": "pre"},
    "rms, rotary, grouped, causal": {
        "norm": "rms", "positions": "rotary", "key_heads": 1, "mask": "causal", "norm_place": "pre",
        "mlp": "gated", "activation": "silu", "query_norm": True,
    },
    "parallel": {"parallel": True, "norm_place": "pre", "activation": "relu"},
    "parallel, post": {"parallel": True},
    "pure attention": {"norm": "none", "mlp": "none", "attention_skip": 0.0},
    "attention and skips": {"norm": "none", "mlp": "none", "attention_skip": 0.7},
    "no skip past heads": {"attention_skip": 0.0, "mlp_skip": 0.5},
    "no skip past the MLP": {"mlp_skip": 0.0},
    "shared, windowed, relative": {"shared": True, "mask": "window:1", "positions": "relative"},
    "bias positions, no biases": {"positions": "bias", "biases": False, "divisor": 1.0},
    "sigmoid": {"kernel": "sigmoid"},
    "linformer": {"kernel": "linformer:2", "positions": "absolute"},
    "mixture of experts": {
        "norm_place": "pre", "mlp": "experts",
        "experts": Experts(number=4, chosen=2, width=3, renormalised=True, dense_layers=(1,)),
    },
    "shared expert, no skip past the MLP": {
        "mlp": "experts", "mlp_skip": 0.0, "activation": "silu",
        "experts": Experts(number=3, chosen=1, width=3, shared_width=5, shared_gate=True),
    },
    "capped": {"score_cap": 0.5},
    "gated heads": {"norm_place": "pre", "head_gate": True, "key_heads": 1},
    "bare first layer": {"norm_place": "pre", "bare_layers": (0,)},
}  # fmt: skip


def network(fields: dict[str, Any], seed: int = 0) -> Transformer:
    return awake(Architecture(**{**BASE, **fields}), seed, 0.4)


def tokens(seed: int = 1, samples: int = 1) -> torch.Tensor:
    return normal(samples, 4, BASE["width"], seed=seed)


@cache
def both(case: str) -> tuple[Decomposition, Enumeration]:
    net, X = network(CASES[case]), tokens()
    return decompose(net, X), Enumeration(net, X[0])


def sums(terms: list[Term], lengths: int, like: Any) -> Any:
    total = [np.zeros_like(like) for _ in range(lengths)]
    for term in terms:
        total[term.length] += term.value
    return np.stack(total)


def close(mine: torch.Tensor, theirs: Any, scale: Any) -> None:
    np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-10, atol=1e-11 * max(np.abs(scale).max(), 1e-300))
