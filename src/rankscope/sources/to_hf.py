"""Back into a model of transformers: the inverse of a family's mapping, whatever the family.

A family says how a canonical tensor T is made of a model's parameters p: by putting them in another order, at
times scaled, or moved by one: `T = A p + b`, every row of A with one entry. So

    p = A^T (T - b) / (A^T A 1),

with b the mapping at p = 0, A 1 the mapping at 1 less b, and A^T its gradient. What comes out is mapped again
and compared with the network, tensor by tensor, and then held against it in the parity check: a mapping that
is not of this kind, or a variant that the family has no config for, does not get through.
"""

import copy
import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import SourceError, require
from rankscope.nets import Architecture, Transformer
from rankscope.sources.embedding import Embedding, tensors_of
from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.parity import check

SAVE = "save it as it is, net.save(folder)"  # The advice for a network that no model of transformers can hold
WITHIN = 1e-13  # Relative difference up to which a tensor that was mapped again is the network's


def to_hf(net: Transformer, family_name: str, embedding: Embedding, config: Any) -> Any:
    """A model of transformers, without a head for a task, that computes what the network does.

    Parts that the network does not have (a pooler) are drawn from seed 0."""
    message = f"a family of one's own, {family_name!r}, has no model of transformers to write: {SAVE}"
    require(family_name in FAMILIES, message, SourceError, "family")
    family, wide = FAMILIES[family_name], net.to(torch.float64, "cpu")
    message = f"an encoder-decoder is not written from one of its sides; got its {family.side}: {SAVE}"
    require(not family.side, message, SourceError, "family")
    config = _fitting(config, family, wide.arch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.random_model(config)
    core = family.prepare_for_float64(family.core(model))
    _fill(core, family, wide)
    _embed(core, family, embedding)
    check(wide, family, copy.deepcopy(core), embedding, f"the {config.model_type} model of this network")
    return model.to(net.dtype)


def _fitting(config: Any, family: Family, arch: Architecture) -> Any:
    """The config, for as many layers; refused where the family has none for this architecture."""
    require(
        config is not None, "the config of the model to write is not known: net.to_hf(config)", SourceError, "config"
    )
    config = copy.deepcopy(config)
    if getattr(config, "model_type", None) not in family.types:
        kind = getattr(config, "model_type", type(config).__name__)
        expected = f"config must be one of {family.name}, model type {' or '.join(family.types)}"
        raise SourceError(f"{expected}; got {kind!r}", subject="config")
    config._attn_implementation = "eager"  # a config may name a kernel, which would be fetched from the hub
    theirs = family.architecture(config)
    if theirs.layers != arch.layers and getattr(config, "layer_types", None) is None:
        config.num_hidden_layers = arch.layers
        theirs = family.architecture(config)
    fields = [field.name for field in dataclasses.fields(arch) if field.name != "biases"]
    unlike = [name for name in fields if getattr(arch, name) != getattr(theirs, name)]
    if unlike:
        name = unlike[0]
        has, says = (reprlib.repr(getattr(described, name)) for described in (arch, theirs))
        message = f"{config.model_type} must be able to express the network; this one has {name} {has}, and the"
        raise SourceError(f"{message} config says {says}: {SAVE}, or pass another config", subject=name)
    return config


@torch.no_grad()
def _at(core: Any, family: Family, arch: Architecture, value: float) -> dict[str, Tensor]:
    """The mapping where every parameter has this value."""
    for parameter in _numbers(core):
        parameter.fill_(value)
    return {name: part.clone() for name, part in family.tensors(core, arch).items()}


def _numbers(core: Any) -> list[Tensor]:
    """All that a mapping may read: parameters, and buffers such as the corrections of DeepSeek V3's routers."""
    return [*core.parameters(), *(buffer for buffer in core.buffers() if buffer.is_floating_point())]


def _fill(core: Any, family: Family, net: Transformer) -> None:
    """Put the network's tensors into the model's parameters."""
    arch, state = net.arch, net.state_dict()
    before = [parameter.detach().clone() for parameter in _numbers(core)]
    at_zero, at_one = _at(core, family, arch, 0.0), _at(core, family, arch, 1.0)
    if at_zero.keys() != state.keys():
        odd = sorted(at_zero.keys() ^ state.keys())[0]
        whose = "the network lacks" if odd in at_zero else "the model has no place for"
        reason = f"{family.name} must be able to express the network; {whose} {odd}"
        raise SourceError(f"{reason}: {SAVE}, or pass another config", subject="weights")
    parameters = _numbers(core)
    for parameter in parameters:
        parameter.requires_grad_(True)
    tensors = family.tensors(core, arch)
    made = [name for name in state if tensors[name].requires_grad]  # not terms that a config leaves out, zero for all
    outputs = [tensors[name] for name in made]

    def transposed(values: Mapping[str, Tensor]) -> list[Tensor | None]:
        moved = [values[name] - at_zero[name] for name in made]
        return list(torch.autograd.grad(outputs, parameters, moved, retain_graph=True, allow_unused=True))

    moved, square = transposed(state), transposed(at_one)
    with torch.no_grad():
        for parameter, kept, above, below in zip(parameters, before, moved, square, strict=True):
            parameter.requires_grad_(False)
            parameter.copy_(kept)
            if above is not None and below is not None:
                parameter.copy_(torch.where(below == 0, kept, above / below.masked_fill(below == 0, 1.0)))
        for name, part in family.tensors(core, arch).items():
            size = float(state[name].abs().max()) if state[name].numel() else 0.0
            back = float((part - state[name]).abs().amax() if part.numel() else 0.0) <= WITHIN * size
            reason = f"{family.name} must be able to express the network; {name} does not come back"
            require(back, f"{reason}: {SAVE}", SourceError, "weights")


@torch.no_grad()
def _embed(core: Any, family: Family, embedding: Embedding) -> None:
    """The embedding's tensors share the model's memory: they are written where they lie."""
    present = family.embedding(core)
    mine, theirs = tensors_of(embedding), tensors_of(present)
    shapes = [{name: part.shape for name, part in field.items()} for field in (mine, theirs)]
    if shapes[0] != shapes[1]:
        reason = f"the config must describe the network's own embedding, {embedding!r}; it describes {present!r}"
        raise SourceError(f"{reason}: pass the config that the network came with", subject="config")
    for name, part in theirs.items():
        part.copy_(mine[name])
    for name, part in tensors_of(family.embedding(core)).items():
        reason = f"{family.name} must be able to express the embedding; {name} does not come back"
        require(torch.equal(part, mine[name].to(part)), f"{reason}: {SAVE}", SourceError, "embedding")
