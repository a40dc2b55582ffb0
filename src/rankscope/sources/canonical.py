"""The canonical network of a model that is in memory (`canonical`), and what is refused of any model.

`load` and `network_on_batch` call `canonical`; `streamed_checkpoint.py` does the same layer by layer."""

from torch import Tensor

from rankscope.errors import SourceError, require
from rankscope.nets import BIASES, Architecture, Transformer
from rankscope.sources.checkpoint import Checkpoint
from rankscope.sources.embedding import Embedding, tensors_of


def canonical(checkpoint: Checkpoint, name: str) -> tuple[Transformer, Embedding]:
    """The canonical network of a model in float64, and its embedding."""
    family = checkpoint.family
    core = family.prepare_for_float64(family.core(checkpoint.model))
    core.requires_grad_(False)
    arch = family.architecture_of(core)
    refuse_other_depth(arch, len(family.blocks(core)), name)
    tensors, embedding = family.tensors(core, arch), family.embedding(core)
    refuse_unfit(checkpoint, [*tensors.values(), *tensors_of(embedding).values()], name)
    arch, shared = with_biases(arch, tensors), dict[int, Tensor]()
    weights = {name: shared.setdefault(id(tensor), tensor.contiguous()) for name, tensor in tensors.items()}
    return Transformer.from_weights(arch, weights), embedding


def with_biases(arch: Architecture, tensors: dict[str, Tensor]) -> Architecture:
    """The architecture with those biases that the weights have."""
    places = {"mlp": ("mlp.up",), "norm": ("attention_norm", "mlp_norm", "mlp_after")}
    names = {part: places.get(part, (f"attention.{part}", f"attention.{part}_latent")) for part in BIASES}
    biases = [part for part in BIASES if any(f"layers.0.{name}.bias" in tensors for name in names[part])]
    return arch.replace(biases=tuple(biases))


def refuse_other_depth(arch: Architecture, blocks: int, name: str) -> None:
    """Raise `SourceError` unless a model has as many blocks as its config says layers."""
    message = f"the config of {name} says {arch.layers} layers; the model has {blocks} blocks"
    require(blocks == arch.layers, message, SourceError, "layers")


def refuse_unfit(checkpoint: Checkpoint, used: list[Tensor], name: str) -> None:
    """Raise `SourceError` for weights that the files lack (transformers would draw them) or that are not finite.

    Tensors are told apart by the memory that they occupy."""
    places = {tensor.untyped_storage().data_ptr() for tensor in used} if checkpoint.missing else ()
    parameters = dict(checkpoint.model.named_parameters()) if checkpoint.missing else {}
    present = [key for key in checkpoint.missing if key in parameters]
    lacking = [key for key in present if parameters[key].untyped_storage().data_ptr() in places]
    if lacking:
        message = f"the weights of {name} must fit its config; {len(lacking)} that it asks for are missing"
        raise SourceError(f"{message}, {lacking[0]} among them", subject="weights")
    # A sum of finite numbers may overflow, and then each is looked at: that takes three times as long.
    finite = all(bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()) for tensor in used)
    message = f"the weights of {name} must be finite; some are not: the checkpoint is damaged, or training diverged"
    require(finite, message, SourceError, "weights")
