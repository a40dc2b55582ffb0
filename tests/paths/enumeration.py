"""Every path, one at a time: an independent enumeration in numpy, from the definitions.

The forward pass is computed here again, token by token where it matters, and what depends on the tokens is
kept: attention (taken from the network), standard deviations, gates. Then every way through the layers is
walked on its own, from the embedding and from every single bias.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.nets import Transformer
from rankscope.nets.activations import ACTIVATIONS

Array = np.ndarray[Any, Any]


@dataclass
class Term:
    """One path's term: where it starts, the heads it names by layer, and what it adds to the output."""

    start: str
    choices: tuple[int | None, ...]
    length: int
    value: Array


class Enumeration:
    """One sample without padding."""

    def __init__(self, net: Transformer, X: Tensor) -> None:
        self.arch, self.state = net.arch, {k: v.numpy() for k, v in net.state().items()}
        run = net.run(X[None], attention=True)
        self.P = [P[0].numpy() for P in run.attention]
        self.output = run.output[0].numpy()
        self.X = run.states[0][0].numpy()
        self.measured: dict[tuple[int, str], Array] = {}
        Y = self.X
        for layer in range(self.arch.layers):
            Y = self.forward(layer, Y)
        if self.arch.final_norm:
            Y = self.normed(-1, "final_norm", Y)
        np.testing.assert_allclose(Y, self.output, rtol=1e-10, atol=1e-12)

    def tensor(self, layer: int, name: str) -> Array | None:
        here = 0 if self.arch.shared else layer
        return self.state.get(name if layer < 0 else f"layers.{here}.{name}")

    # The forward pass, once more, noting scales and gates.

    def normed(self, layer: int, name: str, Y: Array) -> Array:
        if self.arch.norm == "none":
            return Y
        centred = Y - Y.mean(1, keepdims=True) if self.arch.norm == "layer" else Y
        square = (centred**2).sum(1) if self.arch.norm == "scale" else (centred**2).mean(1)
        self.measured[layer, name] = np.sqrt(square + self.arch.norm_eps)
        return self.frozen_norm(layer, name, Y) + self.norm_bias(layer, name)

    def forward(self, layer: int, X: Array) -> Array:
        arch = self.arch
        post, sandwich = arch.norm_place == "post", arch.norm_place == "sandwich"
        bare = post or layer in arch.bare_layers
        Z = X if bare else self.normed(layer, "attention_norm", X)
        branch = sum(self.head(layer, h, Z) + self.value_bias(layer, h) for h in range(arch.heads))
        branch = branch + self.bias(layer, "attention.output")
        branch = self.normed(layer, "attention_after", branch) if sandwich else branch
        if arch.parallel and arch.mlp != "none":
            branch = branch + self.forward_mlp(layer, X)
        Y = arch.attention_skip * X + branch
        Y = self.normed(layer, "attention_norm", Y) if post else Y
        if arch.mlp == "none" or arch.parallel:
            return Y
        Y = arch.mlp_skip * Y + self.forward_mlp(layer, Y)
        return self.normed(layer, "mlp_norm", Y) if post else Y

    def forward_mlp(self, layer: int, Y: Array) -> Array:
        place = self.arch.norm_place
        Y = Y if place == "post" else self.normed(layer, "mlp_norm", Y)
        up = Y @ self.need(layer, "mlp.up.weight") + self.bias(layer, "mlp.up")
        act = ACTIVATIONS[self.arch.activation]
        if self.arch.mlp == "gated":
            gate = Y @ self.need(layer, "mlp.gate.weight") + self.bias(layer, "mlp.gate")
            self.measured[layer, "gate"] = act(torch.from_numpy(gate)).numpy()
        else:
            self.measured[layer, "gate"] = act(torch.from_numpy(up)).numpy() / up
        out = (self.measured[layer, "gate"] * up) @ self.need(layer, "mlp.down.weight")
        out = out + self.bias(layer, "mlp.down")
        return self.normed(layer, "mlp_after", out) if place == "sandwich" else out

    # The frozen parts.

    def need(self, layer: int, name: str) -> Array:
        found = self.tensor(layer, name)
        assert found is not None
        return found

    def bias(self, layer: int, name: str) -> Array:
        found = self.tensor(layer, f"{name}.bias")
        return np.zeros(1) if found is None else found

    def norm_bias(self, layer: int, name: str) -> Array:
        return self.bias(layer, name)

    def frozen_norm(self, layer: int, name: str, Y: Array) -> Array:
        if self.arch.norm == "none":
            return Y
        Y = Y - Y.mean(1, keepdims=True) if self.arch.norm == "layer" else Y
        Y = Y / self.measured[layer, name][:, None]
        gain = self.tensor(layer, f"{name}.gain")
        return Y if gain is None else Y * gain

    def head(self, layer: int, h: int, Z: Array) -> Array:
        g = h // (self.arch.heads // self.arch.key_heads)
        W = self.need(layer, "attention.value.weight")[:, g] @ self.need(layer, "attention.output.weight")[h]
        return self.P[layer][h] @ Z @ W

    def value_bias(self, layer: int, h: int) -> Array:
        found = self.tensor(layer, "attention.value.bias")
        if found is None:
            return np.zeros(1)
        value = np.ones((len(self.X), 1)) * found[h // (self.arch.heads // self.arch.key_heads)]
        return self.P[layer][h] @ value @ self.need(layer, "attention.output.weight")[h]

    def frozen_mlp(self, layer: int, Y: Array) -> Array:
        place = self.arch.norm_place
        Y = Y if place == "post" else self.frozen_norm(layer, "mlp_norm", Y)
        out = (self.measured[layer, "gate"] * (Y @ self.need(layer, "mlp.up.weight"))) @ self.need(
            layer, "mlp.down.weight"
        )
        return self.frozen_norm(layer, "mlp_after", out) if place == "sandwich" else out

    # Walking.

    def inside(self, layer: int, Y: Array) -> Array:
        bare = self.arch.norm_place == "post" or layer in self.arch.bare_layers
        return Y if bare else self.frozen_norm(layer, "attention_norm", Y)

    def after_heads(self, layer: int, Y: Array) -> Array:
        return self.frozen_norm(layer, "attention_after", Y) if self.arch.norm_place == "sandwich" else Y

    def attention_step(self, layer: int, Y: Array, choice: int | None) -> Array:
        """Past the heads or through one, up to the end of the attention step."""
        if choice is not None:
            return self.after_heads(layer, self.head(layer, choice, self.inside(layer, Y)))
        rest = self.arch.attention_skip * Y
        if self.arch.parallel and self.arch.mlp != "none":
            rest = rest + self.frozen_mlp(layer, Y)
        return rest

    def settled(self, layer: int, Y: Array) -> Array:
        return self.frozen_norm(layer, "attention_norm", Y) if self.arch.norm_place == "post" else Y

    def mlp_step(self, layer: int, Y: Array) -> Array:
        if self.arch.mlp == "none" or self.arch.parallel:
            return Y
        return self.finished(layer, self.arch.mlp_skip * Y + self.frozen_mlp(layer, Y))

    def finished(self, layer: int, Y: Array) -> Array:
        return self.frozen_norm(layer, "mlp_norm", Y) if self.arch.norm_place == "post" else Y

    def onward(self, layer: int, Y: Array, choices: tuple[int | None, ...]) -> Array:
        """From the end of `layer` to the output, through these choices."""
        for index, choice in enumerate(choices, layer + 1):
            Y = self.mlp_step(index, self.settled(index, self.attention_step(index, Y, choice)))
        return self.frozen_norm(-1, "final_norm", Y) if self.arch.final_norm else Y

    def ways(self, layers: int) -> Iterator[tuple[int | None, ...]]:
        arch = self.arch
        past = arch.attention_skip != 0 or (arch.parallel and arch.mlp != "none")
        return product([*([None] if past else []), *range(arch.heads)], repeat=layers)

    def embedding_terms(self) -> list[Term]:
        return [
            Term("embedding", way, _length(way), self.onward(-1, self.X, way))
            for way in self.ways(self.arch.layers)
        ]

    def bias_terms(self) -> list[Term]:
        found = []
        for layer in range(self.arch.layers):
            for name, first, Y in self.starts(layer):
                for way in self.ways(self.arch.layers - layer - 1):
                    found.append(Term(name, way, first + _length(way), self.onward(layer, Y, way)))
        last = self.tensor(-1, "final_norm.bias") if self.arch.norm == "layer" else None
        if last is not None:
            found.append(Term("final_norm", (), 0, self.spread(last)))
        return found

    def spread(self, bias: Array) -> Array:
        return np.ones((len(self.X), 1)) * bias

    def starts(self, layer: int) -> Iterator[tuple[str, int, Array]]:
        """(name, heads passed in this layer, tokens at the end of this layer) of every bias of a layer."""
        arch, place = self.arch, self.arch.norm_place

        def have(name: str) -> Array | None:
            norm = name.startswith(("attention_norm", "attention_after", "mlp_norm", "mlp_after"))
            return None if norm and arch.norm != "layer" else self.tensor(layer, f"{name}.bias")

        def close(Y: Array) -> Array:
            return self.mlp_step(layer, self.settled(layer, Y))

        before = have("attention_norm")
        for h in range(arch.heads):
            if place != "post" and layer not in arch.bare_layers and before is not None:
                Y = self.head(layer, h, self.spread(before))
                yield "before heads", 1, close(self.after_heads(layer, Y))
            if self.tensor(layer, "attention.value.bias") is not None:
                yield "value", 1, close(self.after_heads(layer, self.value_bias(layer, h)))
        output = have("attention.output")
        if output is not None:
            yield "output", 0, close(self.after_heads(layer, self.spread(output)))
        after = have("attention_after")
        if place == "sandwich" and after is not None:
            yield "after heads", 0, close(self.spread(after))
        if place == "post" and before is not None:
            yield "settled", 0, self.mlp_step(layer, self.spread(before))
        if arch.mlp != "none":
            end = close if arch.parallel else (lambda Y: self.finished(layer, Y))
            yield from ((name, 0, end(Y)) for name, Y in self.mlp_starts(layer))
            last = have("mlp_norm")
            if place == "post" and not arch.parallel and last is not None:
                yield "finished", 0, self.spread(last)

    def mlp_starts(self, layer: int) -> Iterator[tuple[str, Array]]:
        place, gate = self.arch.norm_place, self.measured[layer, "gate"]
        down = self.need(layer, "mlp.down.weight")

        def out(Y: Array) -> Array:
            return self.frozen_norm(layer, "mlp_after", Y) if place == "sandwich" else Y

        normed = self.arch.norm == "layer"
        before = self.tensor(layer, "mlp_norm.bias")
        if place != "post" and normed and before is not None:
            yield "before mlp", out((gate * (self.spread(before) @ self.need(layer, "mlp.up.weight"))) @ down)
        up, last = self.tensor(layer, "mlp.up.bias"), self.tensor(layer, "mlp.down.bias")
        if up is not None:
            yield "up", out((gate * self.spread(up)) @ down)
        if last is not None:
            yield "down", out(self.spread(last))
        after = self.tensor(layer, "mlp_after.bias")
        if place == "sandwich" and normed and after is not None:
            yield "after mlp", self.spread(after)


def _length(way: tuple[int | None, ...]) -> int:
    return sum(choice is not None for choice in way)
