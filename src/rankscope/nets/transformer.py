"""`Transformer`: an architecture and its weights, run layer by layer."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError, TokensError, require, require_one_of
from rankscope.files import writable_folder
from rankscope.nets import storage, variants
from rankscope.nets.architecture import Architecture
from rankscope.nets.devices import Conversion, check_device, check_dtype, check_memory, usual_modes
from rankscope.nets.norms import normalise
from rankscope.nets.origin import LENGTH, Encoded, Inputs, Origin, encoded, texts_of, weights_of
from rankscope.nets.pass_settings import Memory, PassSettings, TokenOrder, Tokens, Valid, padding_from, prepare_tokens
from rankscope.nets.plain import ForwardPass, Plain, Step
from rankscope.nets.structures import converted, named
from rankscope.nets.tensors import assemble, layer_shapes, random_tensors, shapes, with_parts
from rankscope.nets.traversal import Arithmetic, Block, traverse
from rankscope.nets.variants import HeadsOut, VariantOptions
from rankscope.nets.weights import Weights
from rankscope.remedies import Remedy
from rankscope.remedies import remedy as named_remedy


@dataclass(frozen=True, eq=False, repr=False)
class Transformer:
    """A network. Its variants share its tensors; nothing is ever copied or changed in place.

    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2), seed=0)
    >>> net.run(torch.randn(1, 5, 8, dtype=torch.float64)).output.shape
    torch.Size([1, 5, 8])
    """

    arch: Architecture
    weights: Weights
    origin: Origin | None = None  # Where it came from, if from somewhere; variants keep it
    memory: Memory | None = None  # The tokens that cross-attention reads (`with_memory`); variants keep it

    def __repr__(self) -> str:
        arch = self.arch
        described = {} if self.origin is None else self.origin.described()
        drawn = [weights_of(described)] if described.get("weights") == "random" else []
        name = [] if self.origin is None else [str(described["name"]), *drawn]
        size = [f"{arch.layers} layer{'s'[: arch.layers > 1]}", f"width {arch.width}"]
        size.append(f"{arch.heads} head{'s'[: arch.heads > 1]}")
        return f"Transformer({', '.join([*name, *size, *arch.departures()])}, {self.dtype} on {self.device})"

    def _repr_html_(self) -> str:
        """For notebooks: what it is, and the fields of its architecture that are not at their usual value."""
        from rankscope.results import card

        described = {} if self.origin is None else self.origin.described()
        rows = [[str(name).replace("_", " "), str(value)] for name, value in described.items()][:2]
        rows += [[name.replace("_", " "), str(value)] for name, value in self.arch.unusual().items()]
        return card(repr(self), None, ("field", ""), rows)

    @classmethod
    @usual_modes()
    def random(
        cls,
        arch: Architecture,
        seed: int = 0,
        init: str = "bert",
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> "Transformer":
        """Draw random weights by a scheme of `tensors.py`: bert, xavier, kaiming or orthogonal, and each with
        `/sqrt(L)`. The draw depends on the seed alone, not on dtype or device."""
        check_memory(arch)
        return cls(arch, assemble(arch, random_tensors(arch, seed, init))).to(dtype, device)

    @classmethod
    def from_weights(cls, arch: Architecture, tensors: Mapping[str, Tensor]) -> "Transformer":
        """A network on given tensors, named and shaped as `shapes(arch)` lists them."""
        return cls(arch, assemble(arch, tensors))

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name: the inverse of `from_weights`, for variants as well."""
        sentence = "all layers must be in memory; these are read one at a time: load with stream=False"
        require(not self.streamed, sentence, ArchitectureError, "stream")
        mine = shapes(self.arch)
        return {name: tensor for name, tensor in named(self.weights).items() if name in mine}

    def num_parameters(self) -> int:
        """How many numbers the weights have, those of layers that share them counted once.

        >>> Transformer.random(Architecture(layers=2, width=8, heads=2)).variant(layers=24).num_parameters()
        1744
        """
        index_of = {(id(of), at): index for index, (of, at) in enumerate(self.weights.layers.places())}
        sizes = [shape for name, shape in shapes(self.arch).items() if not name.startswith("layers.")]
        for index in index_of.values():
            sizes += layer_shapes(self.arch, index).values()
        return sum(map(math.prod, sizes))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every tensor of the network."""
        return self.weights.like.dtype

    @property
    def device(self) -> torch.device:
        """The device of every tensor of the network."""
        return self.weights.like.device

    @property
    def streamed(self) -> bool:
        """Whether its layers are read one at a time, and are not in memory."""
        return self.weights.layers.streamed

    def to(
        self,
        dtype: torch.dtype | torch.device | str | None = None,
        device: torch.device | str | torch.dtype | None = None,
    ) -> "Transformer":
        """The network in another dtype or on another device, in either order as of a tensor; itself where nothing
        changes."""
        kind: Any = dtype
        target: Any = device
        named_dtype = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)  # refused below
        if (isinstance(dtype, str | torch.device) and not named_dtype) or isinstance(device, torch.dtype):
            kind, target = target, kind  # net.to("cuda")
        if kind is not None:
            check_dtype(kind)
        if target is not None:
            check_device(target, kind or self.dtype)
        if kind in (None, self.dtype) and (target is None or torch.device(target) == self.device):
            return self
        convert, memory = Conversion(kind, target), self.memory
        if memory is not None:
            memory = Memory(convert(memory.tokens), memory.valid.to(device=target))
        return replace(self, weights=converted(self.weights, convert), memory=memory)

    def held(self) -> "Transformer":
        """The network with all its layers in memory."""
        held = replace(self.weights, layers=self.weights.layers.in_memory())
        return replace(self, weights=held) if self.streamed else self

    def with_memory(
        self, M: Tensor, padding: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> "Transformer":
        """Return this decoder with the tokens that its cross-attention reads. `save` does not write them.

        Args:
            M: Tokens `[batch, source, width]`, as an encoder's output: one sample for each that will run, or
                one for all.
            padding: `[batch, source]`, True at padded tokens.
            attention_mask: Instead of `padding`, 1 at tokens and 0 at padding (Hugging Face's convention).

        >>> arch = Architecture(layers=1, width=8, heads=2, cross_attention=True)
        >>> net = Transformer.random(arch).with_memory(torch.randn(1, 7, 8))
        >>> net.run(torch.randn(3, 5, 8, dtype=torch.float64), attention=True).cross[0].shape
        torch.Size([3, 2, 5, 7])
        """
        sentence = "a memory needs a network with cross-attention: Architecture(cross_attention=True)"
        require(self.arch.cross_attention, sentence, ArchitectureError, "cross_attention")
        padding = padding_from(padding, attention_mask)
        return replace(self, memory=Memory.of(M, padding, self.arch.width, self.weights.like))

    def for_samples(self, start: int, stop: int) -> "Transformer":
        """The network for some of the samples that its memory is of."""
        return self if self.memory is None else replace(self, memory=self.memory.samples(start, stop))

    def settings(self, X: Tensor, valid: Tensor) -> PassSettings:
        """Return what the layers share in a pass over prepared tokens."""
        return PassSettings.of(self.arch, self.weights, X, valid, self.memory)

    def save(self, folder: str | Path) -> Path:
        """Write the network into a folder that `rankscope.load` reads back bit for bit: its fields, weights,
        and the embedding and tokenizer of the model it came from, if any."""
        tensors, save_origin = self.state_dict(), getattr(self.origin, "save", None)
        writable_folder(folder)
        fingerprint = replace(self, memory=None).fingerprint
        origin = None if save_origin is None else save_origin(Path(folder))
        return storage.write(folder, self.arch, tensors, {"fingerprint": fingerprint, "origin": origin})

    def to_hf(self, config: Any = None) -> Any:
        """Return a model of transformers, without a head for a task, that computes what this network does.
        `config` is that of the model the network came from, if left out; a variant that the family has no
        config for, as one without skips, is refused."""
        export = getattr(self.origin, "to_hf", None)
        if export is None:
            sentence = "a network that was not loaded has no embedding; net.save(folder) writes this one"
            raise ArchitectureError(sentence, subject="origin")
        return export(self, config)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the architecture and every tensor: the same network gives the same string."""
        kept = {} if self.memory is None else {"memory": self.memory.tokens, "real": self.memory.valid}
        return storage.fingerprint(self.arch, self.weights, kept)

    def encode(
        self,
        inputs: Inputs,
        max_length: int | None = None,
        padding: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Encoded:
        """Return (X, padding) of texts: tokenised as the model does, cut to `max_length` (128), embedded, padded.
        Token ids `[batch, token]` and images are not cut unless `max_length` is given; with token ids comes their
        padding, as `padding` or as `attention_mask` (those of `steps`)."""
        X, padding = encoded(self.origin, inputs, max_length, padding_from(padding, attention_mask))
        return Encoded(X.to(dtype=self.dtype, device=self.device), padding.to(self.device))

    def words(self, texts: str | Sequence[str], max_length: int = LENGTH) -> list[list[str]]:
        """The tokens that `encode` makes of each text, readable; padding has none."""
        if self.origin is None:
            raise TokensError("a network made of an architecture has no tokenizer: load one", subject="texts")
        return self.origin.words(texts_of(texts), max_length)

    def steps(self, X: Tensor, padding: Tensor | None = None, attention_mask: Tensor | None = None) -> Iterator[Step]:
        """Yield the forward pass one layer at a time: only one layer is in memory unless you keep more.

        Args:
            X: Tokens `[batch, token, width]`.
            padding: `[batch, token]`, True at padded tokens, which no token sees and no average counts.
            attention_mask: Instead of `padding`, 1 at tokens and 0 at padding (Hugging Face's convention).
        """
        X, valid, order = self.prepared(X, padding_from(padding, attention_mask))
        rules = Plain(self.arch, self.settings(X, valid))
        yield Step(0, X if order is None else order.restored(X), None)
        for step in self.traversed(X, valid, rules):
            yield step if order is None else step.restored(order)

    def traversed(self, X: Tensor, valid: Tensor, rules: Arithmetic) -> Iterator[Step]:
        """Layers 1, 2, ... of prepared tokens by any rules on tensors; padding stays zero."""
        padding = None if bool(valid.all()) else ~valid[..., None]
        for block in self.blocks:
            X, *rest = traverse(block, rules, X)
            X = X if padding is None else X.masked_fill(padding, 0.0)
            yield Step(block.index + 1, X, *rest)
        self.weights.layers.release()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The layers of the network, each with the order of its parts."""
        layers = self.weights.layers
        return tuple(Block.of(self.arch, index, layers, index) for index in range(len(layers)))

    def prepared(
        self, X: Tensor, padding: Tensor | None, positions: bool = True
    ) -> tuple[Tokens, Valid, TokenOrder | None]:
        """Check tokens and prepare them (`prepare_tokens`); absolute positions are added if `positions`."""
        return prepare_tokens(self.arch, self.weights, self.memory is not None, X, padding, positions)

    def finish(self, X: Tokens) -> Tokens:
        """The last state through the final norm, where there is one."""
        if not self.arch.final_norm:
            return X
        return normalise(X, self.arch.norm, self.weights.final_norm, self.arch.norm_eps)

    def __call__(self, X: Tensor, padding: Tensor | None = None, attention_mask: Tensor | None = None) -> Tokens:
        """Return the tokens after the last layer, through the final norm where there is one, as a call of the original
        model gives them: the `output` of `run`. The arguments are those of `steps`.

        >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
        >>> net(torch.randn(1, 5, 8, dtype=torch.float64)).shape
        torch.Size([1, 5, 8])
        """
        for step in self.steps(X, padding, attention_mask):
            X = step.state
        return self.finish(X)

    def run(
        self, X: Tensor, padding: Tensor | None = None, attention_mask: Tensor | None = None, *, attention: bool = False
    ) -> ForwardPass:
        """Return the forward pass with the tokens after every layer, and with `attention=True` its attention
        patterns; the other arguments are those of `steps`."""
        dropped: dict[str, Any] = dict.fromkeys(("heads", "routing") + (() if attention else ("attention", "cross")))
        kept = [step._replace(**dropped) for step in self.steps(X, padding, attention_mask)]
        return ForwardPass(
            states=tuple(step.state for step in kept),
            attention=tuple(step.attention for step in kept if step.attention is not None),
            output=self.finish(kept[-1].state),
            cross=tuple(step.cross for step in kept if step.cross is not None),
        )

    def with_remedy(self, remedy: "str | Remedy", **numbers: int | float) -> "Transformer":
        """Return the network with a remedy against collapse (`rankscope/remedies`). Tensors that a remedy
        trains start at its published values.

        Args:
            remedy: A name, or an object of your own.
            numbers: The numbers of a remedy that was named; those left out are as published.

        >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
        >>> net.with_remedy("attnscale", w=0.5).arch.parts
        (AttnScale(w=0.5),)
        """
        chosen_remedy = named_remedy(remedy, **numbers) if isinstance(remedy, str) else remedy
        if not isinstance(chosen_remedy, Remedy) or (numbers and chosen_remedy is remedy):
            sentence = "a remedy must be a name and numbers, as ('attnscale', w=0.5), or have name and applied(arch)"
            raise ArchitectureError(f"{sentence}; got {remedy!r}{' and numbers' * bool(numbers)}", subject="remedy")
        arch = chosen_remedy.applied(self.arch)
        state = with_parts(arch, self.state_dict(), self.weights.like)
        changed = getattr(chosen_remedy, "tensors", lambda arch, state: state)(arch, state)
        mine = shapes(arch)  # without those of norms that it takes out
        return replace(self, arch=arch, weights=assemble(arch, {k: changed[k] for k in changed if k in mine}))

    def variant(self, name: str | None = None, /, **options: Unpack[VariantOptions]) -> "Transformer":
        """Return the network with parts taken out or changed, on the same weights. What is not named stays.

        Args:
            name: "san", "san+skip", "transformer-norm" and others (`variants.py`); the options change what it gives.
            options: What else is changed; None leaves a part as it is (`VariantOptions` has their types):

                - `skip`: the weight of both skips; False or 0 takes them out, True is 1;
                - `attention_skip`: the weight of the skip around attention alone;
                - `mlp_skip`: the weight of the skip around the MLP alone;
                - `mlp`: False or "none" takes out the MLP, its skip and its norm;
                - `norm`: False or "none" takes out every norm. A kind other than the network's own is refused, as of
                  `mlp`: there are no weights for it;
                - `mask`: which tokens see which, as in `Architecture`; so are the next four;
                - `divisor`: what scores are divided by;
                - `score_cap`: the cap on scores; 0 takes it out;
                - `kernel`: how scores become the pattern;
                - `activation`: the nonlinearity of the MLP;
                - `heads`: the active heads, numbered from 0, in every layer, or by layer {3: [0, 5]};
                - `layers`: a depth (12 layers repeated to 128), or the layers to apply, in order ([1] * 300), numbered
                  from 1. A mask or heads named along with it describe the new depth.

        Raises:
            ArchitectureError: An option that does not exist, or what the network cannot be made into.

        >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
        >>> net.variant("san", layers=6)
        Transformer(6 layers, width 8, 2 heads, no skip, no MLP, no norm, torch.float64 on cpu)
        """
        for option in options:
            known = VariantOptions.__annotations__
            require_one_of("option of a variant", option, known, ArchitectureError, "variant")
        if name is not None:
            base = self if name == "transformer" else self.variant(**variants.named_changes(self.arch, name))
            return base.variant(**options) if options else base
        arch, chosen = variants.changed(self.arch, options)
        return replace(self, arch=arch, weights=replace(self.weights, layers=self.weights.layers.picked(chosen)))

    def without(self, layers: Iterable[int] = (), heads: HeadsOut = ()) -> "Transformer":
        """Return a smaller network: these layers and heads are taken out, and what is left computes as before.

        What a head adds, `P_h (X W_V + b_V) W_O`, vanishes; the output bias of its layer stays. Tensors of heads are
        removed where the architecture can hold the rest: every layer loses as many, and key heads that are shared
        lose all heads that share them, or equally many each. Elsewhere the heads stay in memory and are not active:
        the network then says "some heads silent". Other tensors are shared with this network.

        Args:
            layers: Layers, numbered from 1 as in every table.
            heads: Heads, numbered from 0, by layer {3: [0, 5]} or as pairs [(3, 0), (3, 5)]; layers are those of
                this network, whichever of them are taken out as well.

        Raises:
            ArchitectureError: No layer would be left, or a part acts by the number of a layer.

        >>> net = Transformer.random(Architecture(layers=4, width=8, heads=2))
        >>> net.without(layers=[2, 3])
        Transformer(2 layers, width 8, 2 heads, torch.float64 on cpu)
        >>> net.without(heads={layer: [0] for layer in (1, 2, 3, 4)})
        Transformer(4 layers, width 8, 1 head, torch.float64 on cpu)
        """
        active, left = variants.heads_left(self.arch, heads), variants.layers_left(self.arch, layers)
        cut = (self if active is None else self.variant(heads=dict(enumerate(active, 1)))).variant(layers=left)
        if active is None or self.streamed or not variants.can_narrow(cut.arch):
            return cut
        arch, tensors = variants.narrowed(cut.arch, cut.state_dict())
        return replace(cut, arch=arch, weights=assemble(arch, tensors))
