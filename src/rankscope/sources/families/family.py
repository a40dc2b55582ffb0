"""What a family file says: how one kind of Hugging Face model maps onto `Architecture`, weights, embedding.

To add a family, write a file with a subclass of `Family` and put it into the table of `__init__.py`:

    class Bert(Family):
        name, types = "bert", ("bert",)            # config.model_type
        stack = "encoder.layer"                    # where the model keeps its blocks
        parts = {"attention.query": ..., ...}      # where a block keeps each part, by nets.weights' names
        embedded = {"words": ..., "norm": ...}     # where the model keeps the parts of layer 0
        def architecture(self, config): ...        # without biases: they are found in the weights
        def tiny(self): ...                        # small configs: every branch of the above in one of them

`final_norm` is the place of the last norm. A family of one's own, given to `load(model, family=)`, needs no
`types` and no `tiny`, and its model may be any module: `config` is then what the model has by that name, or
the model itself. Where places do not say it all, `blocks`, `layer`, `embedding` and
`others` (tensors outside the blocks) are methods to write anew. Nothing has to be said about parity: every
load checks it, and `rankscope models` and the tests run it on each config of `tiny`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import signature
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor, nn

from rankscope.errors import SourceError
from rankscope.nets import Architecture
from rankscope.nets.norms import NormWeights
from rankscope.nets.weights import Linear
from rankscope.sources.embedding import Convolution, Embedding, TextEmbedding

Tensors = dict[str, Tensor]
Places = Mapping[str, str]
"""Where a module keeps its parts, by our names: `{"mlp.up": "intermediate.dense"}`."""

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL_TEXT: dict[str, Any] = {**SMALL, "vocab_size": 60, "max_position_embeddings": 32}
"""Sizes of the configs of `tiny`."""
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "linear": "identity",
}
"""Hugging Face's names of the nonlinearities that `Architecture` knows."""


class Family(ABC):
    """One kind of model."""

    name: ClassVar[str]
    types: ClassVar[tuple[str, ...]] = ()
    """`config.model_type` of the models it maps."""
    loader: ClassVar[str] = "AutoModel"
    """The class of transformers that reads a checkpoint."""
    side: ClassVar[str] = ""
    """Which side of an encoder-decoder it is, where `loader` reads both: "encoder", or "decoder", whose
    blocks attend to what the encoder gives."""
    sees: ClassVar[bool] = False
    """Whether it is given images, or sound, instead of token ids."""
    takes: ClassVar[str] = "pixel_values"
    """What the original calls them."""
    tokens_first: ClassVar[bool] = False
    """Whether its blocks take [token, batch, width]."""
    stack: ClassVar[str]
    """Where the model keeps its blocks."""
    parts: ClassVar[Places]
    """Where a block keeps each part. Several names, as in "mlp.gate, mlp.up": side by side in one matrix."""
    embedded: ClassVar[Places]
    """Where the model keeps words, positions, segment and norm of its embedding, those that it has."""
    final_norm: ClassVar[str] = ""
    """Where the model keeps its last norm."""

    def core(self, model: nn.Module) -> Any:
        """The stack itself, without heads for tasks."""
        return getattr(model, "base_model", model)

    @abstractmethod
    def architecture(self, config: Any) -> Architecture:
        """What the config describes. Biases, and angles of rotary positions, are taken from the weights."""

    def tiny(self) -> dict[str, Any]:
        """Small configs, by a word for what sets each apart."""
        return {}

    def call(
        self, model: Any, given: Mapping[str, Any], attention: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Run the original on what it is `given`, by transformers' names: its output, None where that is its
        last norm's or its last block's, and the attention of each layer, where it is asked for and to be had.

        A module that is no model of transformers is given the ids, and the rest by name as far as its forward
        takes it."""
        if is_of_transformers(model):
            model.config.return_dict = True  # some ask their config, whatever the call says
            cached = {} if self.sees or not hasattr(model.config, "use_cache") else {"use_cache": False}
            found = model(**given, **cached, output_attentions=attention, return_dict=True)
            if not attention:
                return found.last_hidden_state, []
            crossed = getattr(found, "cross_attentions", None) or ()
            return found.last_hidden_state, [*found.attentions, *crossed]
        first, *others = given
        taken = signature(model.forward).parameters
        model(given[first], **{name: given[name] for name in others if name in taken})
        return None, []

    def blocks(self, model: Any) -> list[Any]:
        """The blocks in the order they are applied; one may come several times."""
        return list(attrgetter(self.stack)(model))

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """The tensors of one block, by the names of `nets.weights.layer_shapes`."""
        return read(block, self.parts, arch)

    def embedding(self, model: Any) -> Embedding:
        """Layer 0."""
        return self.text(model)

    def text(self, model: Any, **more: Any) -> TextEmbedding:
        """Tokens from ids by the parts that are `embedded`, and `more`; the segment is 0."""
        found = {name: attrgetter(place)(model) for name, place in self.embedded.items()}
        if "positions" in found:
            more["positions"] = found["positions"].weight.detach()[self.first_position(model) :]
        if "segment" in found:
            more["segment"] = found["segment"].weight.detach()[0]
        if "norm" in found:
            more |= {"norm": norm_weights(found["norm"]), "norm_eps": found["norm"].eps}
        return TextEmbedding(words=found["words"].weight.detach(), **more)

    def first_position(self, model: Any) -> int:
        """The row of the position table that the first token has."""
        return 0

    def others(self, model: Any) -> Tensors:
        """Tensors that belong to no block: the last norm, where there is one."""
        last = attrgetter(self.final_norm)(model) if self.final_norm else None
        return {} if last is None else norm("final_norm", last)

    def widen(self, model: Any) -> Any:
        """The model, a copy of our own, with parts that run in float32 alone put in a form that runs in
        float64."""
        return model

    def output(self, model: Any) -> bool:
        """Whether the model's `last_hidden_state` is the network's output (OPT may project it further)."""
        return True


def is_of_transformers(model: Any) -> bool:
    """Whether it is one of transformers' models, and not a module of one's own."""
    return hasattr(model, "set_attn_implementation")


def config_of(model: Any) -> Any:
    """What describes a model: its config, or the model itself where it has none."""
    return getattr(model, "config", model)


def described(config: Any, **fields: Any) -> Architecture:
    """An architecture of the sizes that most configs name alike; `fields` are the family's own."""
    if "mlp_width" not in fields:
        fields["mlp_width"] = config.intermediate_size
    if "activation" not in fields:
        fields["activation"] = activation(config.hidden_act)
    fields.setdefault("layers", config.num_hidden_layers)
    return Architecture(width=config.hidden_size, heads=config.num_attention_heads, **fields)


def read(block: Any, parts: Places, arch: Architecture) -> Tensors:
    """The tensors of a block's parts (`Family.parts`)."""
    found: Tensors = {}
    for names, place in parts.items():
        module, apart = attrgetter(place)(block), names.split(", ")
        modules = [module] if len(apart) == 1 else _split(module, len(apart))
        for name, part in zip(apart, modules, strict=True):
            kind = name.removeprefix("attention.").removeprefix("cross.")
            if name.endswith(("_norm", "_after")):
                found |= norm(name, part)
            elif kind == "output":
                found |= heads_out(name, part, arch.heads)
            elif kind in ("query", "key", "value"):
                found |= heads_in(name, part, arch.heads if kind == "query" else arch.key_heads)
            else:
                found |= dense(name, part)
    return found


def _split(linear: Any, number: int) -> list[Linear]:
    """The maps that lie side by side in one."""
    biases = [None] * number if linear.bias is None else linear.bias.chunk(number)
    return [Linear(*each) for each in zip(matrix(linear).chunk(number, 1), biases, strict=True)]


def matrix(linear: Any) -> Tensor:
    """`[in, out]` of a torch Linear, or of GPT-2's Conv1D or our own, which have it so already."""
    return linear.weight.T if isinstance(linear, nn.Linear) else linear.weight


def dense(name: str, linear: Any) -> Tensors:
    """A linear map under a name."""
    return {f"{name}.weight": matrix(linear), **_bias(name, linear.bias)}


def heads_in(name: str, linear: Any, heads: int) -> Tensors:
    """Queries, keys or values: `[width, head, head_width]`."""
    weight = matrix(linear)
    bias = None if linear.bias is None else linear.bias.reshape(heads, -1)
    return {f"{name}.weight": weight.reshape(len(weight), heads, -1), **_bias(name, bias)}


def heads_out(name: str, linear: Any, heads: int) -> Tensors:
    """The output projection: `[head, head_width, width]`."""
    weight = matrix(linear)
    return {f"{name}.weight": weight.reshape(heads, -1, weight.shape[1]), **_bias(name, linear.bias)}


def norm(name: str, module: Any) -> Tensors:
    """Gain and bias of a LayerNorm or RMSNorm; the identity in place of one has neither."""
    if isinstance(module, nn.Identity):
        return {}
    if module.weight is None:
        raise SourceError(
            f"a norm must have a gain; {name} of this model has none: watch measures it as it is"
        )
    return {f"{name}.gain": module.weight, **_bias(name, getattr(module, "bias", None))}


def norm_weights(module: Any) -> NormWeights:
    """The same, for an embedding."""
    return NormWeights(module.weight.detach(), None if module.bias is None else module.bias.detach())


def linear_weights(module: Any) -> Linear:
    """A linear map, for an embedding."""
    return Linear(matrix(module).detach(), None if module.bias is None else module.bias.detach())


def convolution(module: Any) -> Convolution:
    """A convolution along time, for an embedding."""
    bias = None if module.bias is None else module.bias.detach()
    return Convolution(module.weight.detach(), bias, int(module.stride[0]), int(module.padding[0]))


def activation(name: Any) -> str:
    """Our name of a nonlinearity."""
    if name not in ACTIVATIONS:
        raise SourceError(
            f"the activation must be one of {', '.join(ACTIVATIONS)}; this model's config says {name!r}: "
            "watch measures it as it is"
        )
    return ACTIVATIONS[name]


def refuse(config: Any, **fields: Any) -> None:
    """A sentence where the config asks for what the canonical network does not have."""
    for name, usual in fields.items():
        if getattr(config, name, usual) != usual:
            raise SourceError(
                f"{config.model_type} is mapped with {name}={usual!r}; this config has "
                f"{getattr(config, name)!r}: watch measures it as it is"
            )


def _bias(name: str, bias: Tensor | None) -> Tensors:
    return {} if bias is None else {f"{name}.bias": bias}
