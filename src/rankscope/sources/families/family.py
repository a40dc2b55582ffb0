"""What a family file says: how one kind of Hugging Face model maps onto `Architecture`, weights, embedding.

To add a family, write a file with a subclass of `Family` and put it into the table of `__init__.py`:

    class Bert(Family):
        name, types = "bert", ("bert",)            # config.model_type
        def architecture(self, config): ...        # without biases: they are found in the weights
        def blocks(self, model): ...               # modules in the order they are applied
        def layer(self, block, arch): ...          # {"attention.query.weight": ..., ...}, nets.shapes' names
        def embedding(self, model): ...            # layer 0
        def tiny(self): ...                        # small configs: every branch of `layer` in one of them

`others` gives tensors outside the blocks (final norm, bias table). Nothing has to be said about parity:
every load checks it, and `rankscope models` and the tests run it on each config of `tiny`.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from rankscope.errors import SourceError
from rankscope.nets import Architecture
from rankscope.nets.norms import NormWeights
from rankscope.nets.weights import Linear
from rankscope.sources.embedding import Embedding

Tensors = dict[str, Tensor]

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
    types: ClassVar[tuple[str, ...]]
    """`config.model_type` of the models it maps."""
    loader: ClassVar[str] = "AutoModel"
    """The class of transformers that reads a checkpoint."""
    sees: ClassVar[bool] = False
    """Whether it is given images instead of token ids."""
    tokens_first: ClassVar[bool] = False
    """Whether its blocks take [token, batch, width]."""

    def core(self, model: nn.Module) -> Any:
        """The stack itself, without heads for tasks."""
        return getattr(model, "base_model", model)

    @abstractmethod
    def architecture(self, config: Any) -> Architecture:
        """What the config describes. Biases, and angles of rotary positions, are taken from the weights."""

    @abstractmethod
    def blocks(self, model: Any) -> list[Any]:
        """The blocks in the order they are applied; one may come several times."""

    @abstractmethod
    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """The tensors of one block, by the names of `nets.weights.layer_shapes`."""

    @abstractmethod
    def embedding(self, model: Any) -> Embedding:
        """Layer 0."""

    @abstractmethod
    def tiny(self) -> dict[str, Any]:
        """Small configs, by a word for what sets each apart."""

    def others(self, model: Any) -> Tensors:
        """Tensors that belong to no block."""
        return {}

    def widen(self, model: Any) -> Any:
        """The model, a copy of our own, with parts that run in float32 alone put in a form that runs in
        float64."""
        return model

    def output(self, model: Any) -> bool:
        """Whether the model's `last_hidden_state` is the network's output (OPT may project it further)."""
        return True


def matrix(linear: Any) -> Tensor:
    """`[in, out]` of a torch Linear, or of GPT-2's Conv1D, which has it so already."""
    return linear.weight.T if isinstance(linear, nn.Linear) else linear.weight


def dense(name: str, linear: Any) -> Tensors:
    """A linear map under a name."""
    return {f"{name}.weight": matrix(linear), **_bias(name, linear.bias)}


def heads_in(name: str, linear: Any, heads: int) -> Tensors:
    """Queries, keys or values: `[width, head, head_width]`."""
    weight = matrix(linear)
    bias = None if linear.bias is None else linear.bias.reshape(heads, -1)
    return {
        f"attention.{name}.weight": weight.reshape(len(weight), heads, -1),
        **_bias(f"attention.{name}", bias),
    }


def heads_out(linear: Any, heads: int) -> Tensors:
    """The output projection: `[head, head_width, width]`."""
    weight = matrix(linear)
    return {
        "attention.output.weight": weight.reshape(heads, -1, weight.shape[1]),
        **_bias("attention.output", linear.bias),
    }


def norm(name: str, module: Any) -> Tensors:
    """Gain and bias of a LayerNorm or RMSNorm."""
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
