"""`Transformer`: an architecture and its weights, run layer by layer."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import ArchitectureError, TokensError
from rankscope.metrics.tokens import real_tokens
from rankscope.nets.architecture import Architecture, mask_spec
from rankscope.nets.block import Setting, block
from rankscope.nets.initial import random_tensors
from rankscope.nets.masks import MaskLike
from rankscope.nets.norms import normalise
from rankscope.nets.weights import Weights, assemble, converted, named, shapes


class Step(NamedTuple):
    """What one layer gives: its number (0 is the input), its tokens, its attention (none at 0)."""

    layer: int
    state: Float[Tensor, "batch token width"]
    attention: Float[Tensor, "batch head token token"] | None


@dataclass(frozen=True)
class Run:
    """A forward pass, kept."""

    states: tuple[Tensor, ...]
    """Tokens before layer 1 and after each layer, `[batch, token, width]`."""
    attention: tuple[Tensor, ...]
    """Of layer 1, 2, ...: `[batch, head, token, token]`; empty unless asked for."""
    output: Tensor
    """The last state, through the final norm where there is one."""


@dataclass(frozen=True)
class Transformer:
    """A network. Its variants share its tensors; nothing is ever copied or changed in place.

    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2), seed=0)
    >>> net.run(torch.randn(1, 5, 8, dtype=torch.float64)).output.shape
    torch.Size([1, 5, 8])
    """

    arch: Architecture
    weights: Weights

    @classmethod
    def random(
        cls,
        arch: Architecture,
        seed: int = 0,
        init: str = "bert",
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> "Transformer":
        """Random weights by a scheme of `initial.py`: bert, xavier, kaiming or orthogonal, and each with
        `/sqrt(L)`. The draw depends on the seed alone, not on dtype or device."""
        return cls(arch, assemble(arch, random_tensors(arch, seed, init))).to(dtype, device)

    @classmethod
    def from_weights(cls, arch: Architecture, tensors: Mapping[str, Tensor]) -> "Transformer":
        """A network on given tensors, named and shaped as `shapes(arch)` lists them."""
        return cls(arch, assemble(arch, tensors))

    def state(self) -> dict[str, Tensor]:
        """Every tensor by name: the inverse of `from_weights`, for variants as well."""
        mine = shapes(self.arch)
        return {name: tensor for name, tensor in named(self.weights).items() if name in mine}

    @property
    def dtype(self) -> torch.dtype:
        """Of every tensor."""
        return self.weights.layers[0].attention.query.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of every tensor."""
        return self.weights.layers[0].attention.query.weight.device

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "Transformer":
        """The network in another dtype or on another device; itself where nothing changes."""
        if dtype is not None and not dtype.is_floating_point:
            raise ArchitectureError(f"a network's dtype must be floating; got {dtype}")
        if dtype in (None, self.dtype) and (device is None or torch.device(device) == self.device):
            return self
        moved = converted(self.weights, lambda tensor: tensor.to(device=device, dtype=dtype))
        return Transformer(self.arch, moved)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the architecture and every tensor: the same network gives the same string."""
        digest = hashlib.sha256(json.dumps(self.arch.to_dict(), sort_keys=True).encode())
        for name, tensor in sorted(self.state().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def steps(self, X: Tensor, padding: Tensor | None = None) -> Iterator[Step]:
        """The forward pass one layer at a time: only one state is alive unless you keep more.

        X is `[batch, token, width]`; `padding` `[batch, token]`, True at padded tokens, which are seen by
        no token and stay out of every average.
        """
        real = self._checked(X, padding)
        X = X.masked_fill(~real[..., None], 0.0)
        if self.weights.positions is not None:
            X = X + self.weights.positions[: X.shape[1]]
        setting = Setting.of(self.arch, self.weights, X, real)
        yield Step(0, X, None)
        for index, layer in enumerate(self.weights.layers):
            X, P = block(self.arch, index, layer, X, setting)
            yield Step(index + 1, X, P)

    def finish(self, X: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """The last state through the final norm, where there is one."""
        if not self.arch.final_norm:
            return X
        return normalise(X, self.arch.norm, self.weights.final_norm, self.arch.norm_eps)

    def run(self, X: Tensor, padding: Tensor | None = None, *, attention: bool = False) -> Run:
        """The forward pass with all its states, and with all attention matrices when asked."""
        steps = [step if attention else step._replace(attention=None) for step in self.steps(X, padding)]
        return Run(
            states=tuple(step.state for step in steps),
            attention=tuple(step.attention for step in steps if step.attention is not None),
            output=self.finish(steps[-1].state),
        )

    def _checked(self, X: Tensor, padding: Tensor | None) -> Bool[Tensor, "batch token"]:
        if not isinstance(X, Tensor) or X.ndim != 3 or X.shape[-1] != self.arch.width:
            got = tuple(X.shape) if isinstance(X, Tensor) else type(X).__name__
            raise TokensError(
                f"tokens must be a tensor [batch, token, width] of width {self.arch.width}; received {got}"
            )
        if X.dtype != self.dtype or X.device != self.device:
            raise TokensError(
                f"tokens must be {self.dtype} on {self.device} like the network; received {X.dtype} on "
                f"{X.device}: use X.to or net.to"
            )
        limited = self.arch.positions == "absolute" or self.arch.linformer_rank is not None
        if limited and X.shape[1] > self.arch.length:
            raise TokensError(f"this network takes at most {self.arch.length} tokens; received {X.shape[1]}")
        return real_tokens(X.shape[:-1], padding, X.device)

    def variant(
        self,
        *,
        skip: float | bool | None = None,
        attention_skip: float | bool | None = None,
        mlp_skip: float | bool | None = None,
        mlp: bool = True,
        norm: bool = True,
        mask: MaskLike | None = None,
        divisor: float | None = None,
        kernel: str | None = None,
        activation: str | None = None,
        heads: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
        layers: int | Sequence[int] | None = None,
    ) -> "Transformer":
        """The same weights with parts taken out or changed. What is not named stays as it is.

        skip, attention_skip, mlp_skip: a weight; False or 0 takes the skip out, True is 1.
        mlp=False: without the MLP, its skip and its norm. norm=False: without any norm.
        mask, divisor, kernel, activation: as in `Architecture`.
        heads: the heads that speak, in every layer or by layer {3: [0, 5]}.
        layers: a depth (12 layers repeated to 128), or the layers to apply, in order ([0] * 300).
        """
        chosen = _chosen_layers(layers, self.arch.layers)
        changes: dict[str, Any] = {}
        for name, weight in (
            ("attention_skip", skip if attention_skip is None else attention_skip),
            ("mlp_skip", skip if mlp_skip is None else mlp_skip),
        ):
            if weight is not None and not (name == "mlp_skip" and self.arch.parallel and mlp_skip is None):
                changes[name] = float(weight)
        if not mlp:
            changes |= {"mlp": "none", "mlp_skip": 1.0}
        if not norm:
            changes |= {"norm": "none"}
        if mask is not None:
            changes["mask"] = mask_spec(mask)
        given = {"divisor": divisor, "kernel": kernel, "activation": activation}
        changes |= {name: value for name, value in given.items() if value is not None}
        if heads is not None:
            changes["kept_heads"] = self._kept(heads)
        if layers is not None:
            changes |= _follow(self.arch.replace(**changes), chosen)
        if kernel is not None and self.arch.replace(**changes).linformer_rank != self.arch.linformer_rank:
            raise ArchitectureError(
                f"kernel {kernel!r} needs weights of its own: build the network with "
                "Transformer.random(arch.replace(kernel=...))"
            )
        stored = tuple(self.weights.layers[index] for index in chosen)
        weights = Weights(stored, self.weights.positions, self.weights.bias_table, self.weights.final_norm)
        return Transformer(self.arch.replace(**changes), weights)

    def _kept(self, heads: Sequence[int] | Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        before = self.arch.kept_heads or (tuple(range(self.arch.heads)),) * self.arch.layers
        if not isinstance(heads, Mapping):
            return (tuple(heads),) * self.arch.layers
        for layer in heads:
            if not 0 <= layer < self.arch.layers:
                raise ArchitectureError(f"layers are numbered 0..{self.arch.layers - 1}; got {layer!r}")
        return tuple(tuple(heads.get(layer, kept)) for layer, kept in enumerate(before))


def _chosen_layers(layers: int | Sequence[int] | None, depth: int) -> list[int]:
    """The layers to apply, in order."""
    if layers is None:
        return list(range(depth))
    if isinstance(layers, int):
        if layers < 1:
            raise ArchitectureError(f"a network must have at least one layer; got layers={layers}")
        return [index % depth for index in range(layers)]
    chosen = list(layers)
    if not chosen or not all(isinstance(index, int) and 0 <= index < depth for index in chosen):
        raise ArchitectureError(f"layers must name layers 0..{depth - 1}, at least one; got {chosen[:8]}")
    return chosen


def _follow(arch: Architecture, chosen: list[int]) -> dict[str, Any]:
    """What is said by layer follows the layers that were chosen."""
    changes: dict[str, Any] = {"layers": len(chosen)}
    if ";" in arch.mask:
        changes["mask"] = ";".join(arch.mask_of(index) for index in chosen)
    if arch.kept_heads is not None:
        changes["kept_heads"] = tuple(arch.kept_heads[index] for index in chosen)
    return changes
