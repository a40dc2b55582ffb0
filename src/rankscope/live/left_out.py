"""What a user names to be left out of a model: layers and heads by number, branches, norms and skips by their modules.

`Watch.without` calls `choose`, which checks all of it. The `LeftOut` that it gives is part of the watch's plan
(`plan.py`): `without/` attaches hooks for it, `attention_readings.py` asks it for heads, and notes, manifest and the
name of the variant have its words.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from numbers import Integral
from typing import Any, TypeGuard

from torch import nn

from rankscope.errors import WatchError, one_of, require
from rankscope.live.modules import submodules
from rankscope.live.plan import LeftOut, words_of

HeadsOut = Mapping[int, Iterable[int]] | Iterable[tuple[int, int]]  # {layer: heads}, or pairs (layer, head)
Names = str | Iterable[str]  # dotted names of modules; `*` stands for one step of a name


def choose(
    model: nn.Module, blocks: list[nn.Module], layers: Iterable[int], heads: HeadsOut, branches: Names, norms: Names,
    skips: Names,
) -> LeftOut:  # fmt: skip
    """The parts that a user named, checked against the model.

    Args:
        model: The model, whose modules `branches`, `norms` and `skips` name.
        blocks: The blocks of the stack that is watched, layer by layer.
        layers, heads, branches, norms, skips: As in `Watch.without`.
    """
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise WatchError(f"layers must be a list, as [3, 4]; got {layers!r}", subject="layers")
    chosen_layers = [_layer(layer, blocks, "layers") for layer in layers]
    try:
        by_layer: Any = heads.items() if isinstance(heads, Mapping) else ((layer, [head]) for layer, head in heads)
        pairs = [(layer, head) for layer, some in by_layer for head in some]
    except (TypeError, ValueError) as error:
        expected = "{layer: heads}, as {1: [0, 3]}, or pairs, as [(1, 0), (1, 3)]"
        raise WatchError(f"heads must be {expected}; got {heads!r}", subject="heads") from error
    chosen_heads: dict[int, set[int]] = {}
    for layer, head in pairs:
        if not _is_whole(head) or head < 0:
            raise WatchError(f"heads are numbered from 0; got {head!r} in layer {layer}", subject="heads")
        chosen_heads.setdefault(_layer(layer, blocks, "heads"), set()).add(int(head))
    named = {"branches": branches, "norms": norms, "skips": skips}
    patterns = {kind: _patterns(names, kind) for kind, names in named.items()}
    modules = {kind: _modules(model, kind, names) for kind, names in patterns.items()}
    for name, norm in modules["norms"].items():
        sentence = "norms must name single norms, which then give what they take"
        found = f"{name} is a {type(norm).__name__}: name it in branches="
        require(not (norm._modules or isinstance(norm, nn.Linear)), f"{sentence}; {found}", WatchError, "norms")
    in_lists = {part for block in blocks if isinstance(block, nn.ModuleList) for part in submodules(block)}
    for name, branch in modules["skips"].items():
        sentence = f"a skip can be left out in a layer that is one module; the layer of {name} is a list of parts"
        require(branch not in in_lists, sentence, WatchError, "skips")  # its output is made outside, known by its skips
    heads_out = {layer: frozenset(some) for layer, some in sorted(chosen_heads.items())}
    words = words_of(set(chosen_layers), heads_out, tuple(patterns.values()))
    return LeftOut(frozenset(chosen_layers), heads_out, **modules, asked=tuple(words))


def _patterns(names: Names, kind: str) -> list[str]:
    """The names that a user gave, as a list."""
    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    for name in listed:
        sentence = f"{kind} must be names of modules, as 'layers.*.mlp'; got {name!r:.60}"
        require(isinstance(name, str), sentence, WatchError, kind)
    return listed


def _is_whole(number: object) -> TypeGuard[int]:
    """True for a whole number of Python or numpy."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _layer(layer: object, blocks: list[nn.Module], what: str) -> int:
    """The number of a layer, whose block must stand for this layer alone and be called itself."""
    if not _is_whole(layer) or not 1 <= layer <= len(blocks):
        raise WatchError(f"layers are numbered 1..{len(blocks)}; got {layer!r}", subject=what)
    block = blocks[layer - 1]
    if isinstance(block, nn.ModuleList):
        found = f"layer {layer} is a list of parts: name these parts in branches="
        raise WatchError(f"a layer must be a module that is called to be left out; {found}", subject=what)
    require(sum(candidate is block for candidate in blocks) == 1, several_layers(layer, block), WatchError, what)
    return int(layer)


def several_layers(layer: int, block: nn.Module) -> str:
    """The sentence for a block that is called more than once."""
    name = type(block).__name__
    return f"a block must be one layer to be left out, or its heads; the {name} of layer {layer} is several"


def _modules(model: nn.Module, kind: str, patterns: list[str]) -> dict[str, nn.Module]:
    """The modules of the model that these names mean, without the marks that `torch.compile` leaves in names."""
    by_name = {name.replace("_orig_mod.", ""): part for name, part in model.named_modules(remove_duplicate=False)}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        expression = re.escape(pattern).replace(r"\*", r"[^.]+")
        matches = {name: part for name, part in by_name.items() if name and re.fullmatch(expression, name)}
        if not matches:
            near = [name for name in by_name if name and name.count(".") <= pattern.count(".")]
            raise WatchError(one_of(kind, pattern, islice(near, 40)), subject=kind)
        chosen |= matches
    return chosen
