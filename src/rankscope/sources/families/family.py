"""What a family says: how one kind of Hugging Face model maps onto `Architecture`, weights, embedding.

To add a family, write a subclass of `Family`, beside its kin or in a file of its own, and put it into the table of
`__init__.py`:

    class Bert(Family):
        name, types = "bert", ("bert",)            # config.model_type
        stack = "encoder.layer"                    # where the model keeps its blocks
        parts = {"attention.query": ..., ...}      # where a block keeps each part, by nets.weights' names
        embedding_parts = {"words": ..., "norm": ...}     # where the model keeps the parts of layer 0
        fixed = {"mask": "causal"}                 # what of the architecture is the same in all of its models
        reads = {"width": "dim"}                   # names of config fields, where unlike those of `USUAL`
        only = {"add_cross_attention": False}      # values of config fields that are mapped; others are refused

and put small configs that reach every branch of it into `data/tiny_models.json`. A family without methods of its own is
one call, `Roberta = Bert.like("roberta", "RoBERTa: a BERT with other positions.", types=...)`. `final_norm` is the path
of the last norm. What follows from a config in another way, `architecture` adds to `described`. A family of one's own,
given to `load(model, family=)`, needs no `types` and no small configs, and its model may be any module: `config` is
then the model's attribute of that name, or the model itself. Where paths are not enough, override `blocks`, `layer`,
`embedding` and `other_tensors` (tensors outside the blocks). Parity needs no code: every load checks it, and `rankscope
models` and the tests check each of the small configs.
"""

import copy
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from inspect import signature
from typing import Any, ClassVar

from torch import Tensor, nn

from rankscope.errors import SourceError, require
from rankscope.nets import Architecture
from rankscope.sources.embedding import Embedding, TextEmbedding
from rankscope.sources.families.parts import (
    ModulePaths,
    Tensors,
    find,
    image_embedding,
    norm,
    read_block,
    scaled,
    text_embedding,
)

ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu",
    "swish": "silu", "tanh": "tanh", "linear": "identity",
}  # fmt: skip
"""Hugging Face's names of the nonlinearities that `Architecture` knows."""
USUAL = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "mlp_width": "intermediate_size", "activation": "hidden_act", "norm_eps": "layer_norm_eps",
}  # fmt: skip
"""What most configs call the fields of `Architecture` that they say."""
PRE: dict[str, Any] = {"norm_place": "pre", "final_norm": True}
CAUSAL: dict[str, Any] = {"mask": "causal", **PRE}
"""The `fixed` of most encoders of images, and of most decoders."""


class Family:
    """How one kind of Hugging Face model maps onto `Architecture`, weights and embedding."""

    name: ClassVar[str]
    types: ClassVar[tuple[str, ...]] = ()  # `config.model_type` of the models that this family maps
    loader: ClassVar[str] = "AutoModel"  # The class of transformers that reads a checkpoint
    side: ClassVar[str] = ""
    """Which side of an encoder-decoder it is, where `loader` reads both: "encoder", or "decoder", whose
    blocks attend to what the encoder gives."""
    continuous_inputs: ClassVar[bool] = False  # True if the model takes images or sound instead of token ids
    input_name: ClassVar[str] = "pixel_values"  # The name of the argument that takes images or sound
    tokens_first: ClassVar[bool] = False  # True if blocks take [token, batch, width]
    stack: ClassVar[str]  # Dotted path of the list of blocks
    parts: ClassVar[ModulePaths]
    """Dotted path of each part in a block. Several names, "mlp.gate, mlp.up": side by side in one matrix;
    "attention.query | attention.key": head by head, of each head first the query, then the key. A path may be
    "mlp.fc1 or mlp.up_proj", the first of them that there is, and "q_norm or none", which blocks may lack."""
    fixed: ClassVar[Mapping[str, Any]] = {}  # Fields of `Architecture` that are the same in all models
    reads: ClassVar[Mapping[str, str | Callable[[Any], Any]]] = {}
    """What configs call the fields of `Architecture` that they say, by our names, where unlike `USUAL`; or a function
    that finds a field in a config."""
    further: ClassVar[tuple[Callable[[Any], Mapping[str, Any]], ...]] = ()
    """Functions that find several fields in a config, as those of `rotary.py`."""
    only: ClassVar[Mapping[str, Any]] = {}  # Fields of configs that are mapped with this value alone
    embedding_parts: ClassVar[ModulePaths]
    """Dotted paths of the parts of the embedding: of text its `words` and, as far as the model has them, `positions`,
    `segment`, `norm`, `scale`, and the maps `before` and `after`; of images what `image_embedding` reads."""
    counts_padding: ClassVar[bool] = False  # True if positions of text count padded tokens as well
    gain_at_zero: ClassVar[float] = 0.0  # What norms multiply by where their weight is 0: 1 in Gemma
    scales: ClassVar[ModulePaths] = {}  # Dotted paths, in a block, of what multiplies the output of a part
    final_norm: ClassVar[str] = ""  # Dotted path of the last norm; empty where there is none
    inside: ClassVar[str] = ""
    """The attribute of a larger model (encoder and decoder, text and images) that holds this network."""
    computed: ClassVar[
        tuple[str, ...]
    ] = ()  # Ends of the names of tensors that files may lack: the model computes them
    tiny_fields: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]] | None] = None
    """Small configs, by label (config class of transformers, fields); if left out, those of `data/tiny_models.json`."""

    @classmethod
    def like(cls, name: str, says: str, **fields: Any) -> "type[Family]":
        """A family of this name whose models are built as those of this one, but for `fields`, which are attributes of
        the class; `says` is its docstring."""
        return type(name, (cls,), {"name": name, "__doc__": says, "__module__": cls.__module__, **fields})

    def core(self, model: nn.Module) -> Any:
        """The model without task heads (`base_model`), and of a larger one the part `inside` it."""
        base: Any = getattr(model, "base_model", model)
        return getattr(base, self.inside, base) if self.inside else base

    def architecture(self, config: Any) -> Architecture:
        """The architecture that a config describes. Biases are found in the weights later."""
        return self.described(config)

    def described(self, config: Any, **fields: Any) -> Architecture:
        """The architecture with what the config says by `reads`, `further` and `USUAL`, what is `fixed`, and `fields`,
        which go first. The activation is Hugging Face's."""
        refuse_others(config, **self.only)
        found = {name: value for function in self.further for name, value in function(config).items()}
        fields = {**self.fixed, **found, **fields}
        for name, theirs in {**USUAL, **self.reads}.items():
            if name not in fields:
                fields[name] = getattr(config, theirs) if isinstance(theirs, str) else theirs(config)
        return Architecture(**{**fields, "activation": activation(fields["activation"])})

    def architecture_of(self, model: Any) -> Architecture:
        """The architecture of a model, where its buffers may say more than its config."""
        return self.architecture(config_of(model))

    def tiny_configs(self) -> dict[str, Any]:
        """Small configs that together reach every branch of this family, each under its label."""
        import transformers

        tiny_fields = self.tiny_fields
        if tiny_fields is None:
            sizes, models = _tiny_models()
            names = (getattr(base, "name", "") for base in type(self).__mro__)  # a subclass has its parent's
            cases: dict[str, Any] = next((models[name] for name in names if name in models), {})
            tiny_fields = {label: (kind, sizes[size] | more) for label, (kind, size, more) in cases.items()}
        fields = copy.deepcopy(tiny_fields)  # transformers adds to what it is given
        return {label: getattr(transformers, kind)(**values) for label, (kind, values) in fields.items()}

    def random_model(self, config: Any) -> Any:
        """A model of this config in float64, with weights drawn from torch's generator."""
        import transformers

        kind: Any = getattr(transformers, self.loader)
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        return model.double().eval()

    def call(self, model: Any, arguments: Mapping[str, Any], attention: bool) -> tuple[Tensor | None, list[Tensor]]:
        """Run the original on `arguments` (transformers' names); return its output and attention patterns.

        The output is None where it is that of the last norm or block, as in a module that is no model of
        transformers: that is called with the ids, and with those other arguments that its `forward` takes.
        Patterns are an empty list where `attention` is False or the model returns none."""
        if is_of_transformers(model):
            model.config.return_dict = True  # some ask their config, whatever the call says
            caches = not self.continuous_inputs and hasattr(model.config, "use_cache")
            options = {"use_cache": False} if caches else {}
            tensors = model(**arguments, **options, output_attentions=attention, return_dict=True)
            if not attention:
                return tensors.last_hidden_state, []
            crossed = getattr(tensors, "cross_attentions", None) or ()
            return tensors.last_hidden_state, [*tensors.attentions, *crossed]
        first, *rest = arguments
        parameters = signature(model.forward).parameters
        model(arguments[first], **{name: arguments[name] for name in rest if name in parameters})
        return None, []

    def fits(self, model: nn.Module) -> bool:
        """True if a module that is none of transformers is laid out as those that this family maps."""
        return False

    def attach(self, block: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
        """Attach hooks that see what enters a block and what leaves it; return their handles."""
        return [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]

    def blocks(self, model: Any) -> list[Any]:
        """The blocks in the order they are applied; one may come several times."""
        return list(find(model, self.stack))

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """The tensors of one block, by the names of `nets.layer_shapes`."""
        tensors = read_block(block, self.parts, arch, self.gain_at_zero)
        for part, path in self.scales.items():
            if (scale := find(block, path)) is not None:
                tensors = scaled(tensors, part, scale)
        return tensors

    def tensors(self, model: Any, arch: Architecture) -> Tensors:
        """Every tensor of the canonical network; a block that comes several times keeps one set of them."""
        tensors, blocks = dict(self.other_tensors(model)), self.blocks(model)
        layers: dict[int, Tensors] = {}
        for index, block in enumerate(blocks[:1] if arch.shared else blocks):
            layer = layers[id(block)] = layers.get(id(block)) or self.layer(block, arch)
            tensors |= {f"layers.{index}.{name}": part for name, part in layer.items()}
        return tensors

    def embedding(self, model: Any) -> Embedding:
        """The embedding: what turns the model's inputs into tokens of layer 0."""
        return image_embedding(model, self.embedding_parts) if self.continuous_inputs else self.text(model)

    def text(self, model: Any, **more: Any) -> TextEmbedding:
        """The embedding of token ids, from `embedding_parts` and the fields of `more`."""
        more.setdefault("by_column", self.counts_padding)
        return text_embedding(model, self.embedding_parts, self.first_position(model), **more)

    def first_position(self, model: Any) -> int:
        """The row of the position table that the first token has."""
        return 0

    def other_tensors(self, model: Any) -> Tensors:
        """Tensors that belong to no block: the last norm, where there is one."""
        last = find(model, self.final_norm or "none")
        return {} if last is None else norm("final_norm", last, self.gain_at_zero)

    def prepare_for_float64(self, model: Any) -> Any:
        """Change a copy of the model so that parts which only run in float32 run in float64."""
        return model

    def output(self, model: Any) -> bool:
        """True if the model's `last_hidden_state` is the network's output (OPT may project it further)."""
        return True


def usual_head_width(config: Any) -> int:
    """The width of a head where all of them together are as wide as a token."""
    return int(config.hidden_size // config.num_attention_heads)


def after_padding(family: Family, model: Any) -> int:
    """A `first_position`, after fairseq's habit: rows of the table up to the padding id are not used."""
    return int(model.config.pad_token_id) + 1


@cache
def _tiny_models() -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields that small configs share, by name; by family and label (config class, name of those, more fields))."""
    models = json.loads(files("rankscope").joinpath("data/tiny_models.json").read_text(encoding="utf-8"))
    return models.pop("sizes"), models


def is_of_transformers(model: Any) -> bool:
    """True if the model is one of transformers', False for a module of one's own."""
    return hasattr(model, "set_attn_implementation")


def config_of(model: Any) -> Any:
    """The config of a model, or the model itself where it has none."""
    return getattr(model, "config", model)


def activation(name: Any) -> str:
    """Our name of an activation that Hugging Face calls `name`."""
    message = f"the activation must be one of {', '.join(ACTIVATIONS)}; this model's config says {name!r}"
    require(name in ACTIVATIONS, f"{message}: watch measures it as it is", SourceError, "activation")
    return ACTIVATIONS[name]


def refuse_others(config: Any, **fields: Any) -> None:
    """Raise `SourceError` unless the config has these values, the only ones that the family maps."""
    for name, usual in fields.items():
        if getattr(config, name, usual) != usual:
            has = f"this config has {getattr(config, name)!r}: watch measures it as it is"
            raise SourceError(f"{config.model_type} is mapped with {name}={usual!r}; {has}", subject=name)
