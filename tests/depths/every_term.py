"""Every path of a small network as a term of its own, from the definitions, in numpy.

A term knows where it started (the embedding or a bias), through which layers' branches it passed, and through which
heads. A bias is a new term where it is added, of the layer whose branch has it. Norms and gates are held at what the
sum of all terms shows there; attention is taken from the network.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.nets import ACTIVATIONS, Transformer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Term:
    value: Array
    start: str
    layers: frozenset[int] = frozenset()
    heads: frozenset[tuple[int, int]] = frozenset()
    mlps: frozenset[int] = frozenset()

    def on(self, value: Array, layer: int | None = None, head: int | None = None, mlp: bool = False) -> "Term":
        """The term after a part, of this layer if it is a branch."""
        if layer is None:
            return replace(self, value=value)
        heads = self.heads if head is None else self.heads | {(layer, head)}
        mlps = self.mlps | {layer} if mlp else self.mlps
        return replace(self, value=value, layers=self.layers | {layer}, heads=heads, mlps=mlps)


def total(terms: list[Term]) -> Array:
    return np.sum([term.value for term in terms], axis=0)


def terms_of(net: Transformer, X: Tensor) -> list[Term]:
    """All terms of a sample `[token, width]`; they add up to the output."""
    arch, state = net.arch, {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    P = [each[0].numpy() for each in net.run(X[None], attention=True).attention]
    group = arch.heads // arch.key_heads

    def bias(name: str, like: Array, layer: int) -> list[Term]:
        found = state.get(f"{name}.bias")
        return [] if found is None else [Term(np.broadcast_to(found, like.shape), "bias", frozenset({layer}))]

    def norm(name: str, terms: list[Term]) -> list[Term]:
        Y = total(terms)
        centred = Y - Y.mean(1, keepdims=True) if arch.norm == "layer" else Y
        scale = state[f"{name}.gain"] / np.sqrt((centred**2).mean(1, keepdims=True) + arch.norm_eps)
        off = (lambda V: V - V.mean(1, keepdims=True)) if arch.norm == "layer" else (lambda V: V)
        after = [term.on(off(term.value) * scale) for term in terms]
        found = state.get(f"{name}.bias")  # belongs to no branch: one that it goes into is passed later
        return after if found is None else [*after, Term(np.broadcast_to(found, Y.shape), "bias")]

    def heads(layer: int, terms: list[Term]) -> list[Term]:
        at = f"layers.{layer - 1}.attention"
        out = []
        for h in range(arch.heads):
            V, W = state[f"{at}.value.weight"][:, h // group], state[f"{at}.output.weight"][h]
            values = [term.on(term.value @ V) for term in terms]
            found = state.get(f"{at}.value.bias")
            if found is not None:
                values.append(Term(np.broadcast_to(found[h // group], values[0].value.shape), "bias"))
            out += [value.on(P[layer - 1][h] @ value.value @ W, layer, h) for value in values]
        return [*out, *bias(f"{at}.output", terms[0].value, layer)]

    def mlp(layer: int, terms: list[Term]) -> list[Term]:
        at = f"layers.{layer - 1}.mlp"
        up = [term.on(term.value @ state[f"{at}.up.weight"]) for term in terms]
        found = state.get(f"{at}.up.bias")
        up += [] if found is None else [Term(np.broadcast_to(found, up[0].value.shape), "bias")]
        z = total(up)
        gate = ACTIVATIONS[arch.activation](torch.from_numpy(z)).numpy() / z
        down = [term.on((gate * term.value) @ state[f"{at}.down.weight"], layer, mlp=True) for term in up]
        return [*down, *(term.on(term.value, layer, mlp=True) for term in bias(f"{at}.down", terms[0].value, layer))]

    first = net.run(X[None]).states[0][0].numpy()
    terms = [Term(first, "embedding")]
    for layer in range(1, arch.layers + 1):
        for part, branch in (("attention", heads), ("mlp", mlp)):
            name = f"layers.{layer - 1}.{part}_norm"
            if arch.norm_place == "pre":
                terms = [*terms, *branch(layer, norm(name, terms))]
            else:
                terms = norm(name, [*terms, *branch(layer, terms)])
    return norm("final_norm", terms) if arch.final_norm else terms
