"""Which weights of any module are of queries, keys, values, outputs, MLPs, the embedding and the head.

`live_module.py` calls `weight_kinds`. Inside blocks names tell (`monitor/weight_gradients.py`), fused matrices are
taken apart; the head is the module that gave the logits. What cannot be told is None, never a part of what it is:

| kind                   | is not known where                                                                        |
|------------------------|--------------------------------------------------------------------------------------------|
| query, key, value, ... | attention has a matrix of no known name, or a layer that attends has none of this kind      |
| mlp                    | a block has a matrix of no known name outside its attention                                 |
| embedding              | a matrix outside the blocks is neither the head's nor named as an embedding; or it is tied  |
| head                   | no module gave the logits as they are; or the head is tied to the embedding                 |
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from rankscope.forecasts.readings import IN_BLOCKS, WeightKinds, WeightPart
from rankscope.monitor import Kind, ParameterSlice, attending, kind_slices

EMBEDDING = {"wte", "wpe"}  # Names of embeddings, beside all that have "emb" or "pos" in them


def weight_kinds(
    model: nn.Module, blocks: Sequence[nn.Module], weights: Mapping[str, Tensor], head: nn.Module | None
) -> WeightKinds:
    """Every kind of `readings.py` with its weights, "all" and "blocks" among them; None of kinds that are not known.
    Blocks are in order, layers are counted from 1, `weights` are what is trained, by name, and the head is the module
    that gave the logits, None if none is known.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> kinds = weight_kinds(model, list(model.layers), dict(model.named_parameters()), None)
    >>> len(kinds["query"]), kinds["head"]
    (6, None)
    """
    names = {id(weight): name for name, weight in weights.items()}
    inside: dict[str, WeightPart] = {}
    by_kind: dict[str, list[WeightPart]] = {kind: [] for kind in IN_BLOCKS}
    unnamed: set[bool] = set()  # True if a matrix in attention has no known name, False of one outside it
    attend: set[int] = set()  # the layers that do
    for layer, block in enumerate(dict.fromkeys(blocks), 1):
        for path, weight in block.named_parameters():
            if (name := names.get(id(weight))) is None or name in inside:
                continue
            inside[name] = WeightPart(name, layer)
            slices, words = _slices(block, path), path.split(".")[:-1]
            on_the_way = [block.get_submodule(".".join(words[: k + 1])) for k in range(len(words))]
            in_attention = any(attending(words, on_the_way)) or any(kind != "mlp" for kind, _ in slices)
            for kind, part in slices:
                by_kind[kind].append(WeightPart(name, layer, part.entries))
            if in_attention and slices:
                attend.add(layer)
            if not slices and weight.ndim > 1:
                unnamed.add(in_attention)
    kinds: dict[str, list[WeightPart] | None] = {"all": [WeightPart(name) for name in weights]}
    kinds["blocks"] = list(inside.values())
    for kind in ("query", "key", "value", "output"):
        complete = attend and attend == {part.layer for part in by_kind[kind]} and True not in unnamed
        kinds[kind] = by_kind[kind] if complete else None
    kinds["mlp"] = by_kind["mlp"] if False not in unnamed else None
    return kinds | _outside(model, weights, inside, head)


def _outside(
    model: nn.Module, weights: Mapping[str, Tensor], inside: Mapping[str, WeightPart], head: nn.Module | None
) -> dict[str, list[WeightPart] | None]:
    """The kinds embedding and head."""
    owners = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    of_head = {id(weight) for weight in head.parameters()} if head is not None else set()
    tied = any(owners[weight] > 1 for weight in of_head)
    kinds: dict[str, list[WeightPart]] = {"embedding": [], "head": []}
    unnamed = False
    for name, weight in weights.items():
        if name in inside:
            continue
        owner, leaf = _owner(model, name)
        words = name.lower().split(".")
        named = isinstance(owner, nn.Embedding) or any("emb" in word or "pos" in word for word in words)
        if id(weight) in of_head:
            kinds["head"].append(WeightPart(name))
        elif named or EMBEDDING & {*words}:
            kinds["embedding"] += [WeightPart(name)] if weight.ndim > 1 or _matrix_beside(owner, leaf) else []
        else:
            unnamed |= weight.ndim > 1
    embedding = None if tied or unnamed or head is None else kinds["embedding"] or None
    return {"embedding": embedding, "head": kinds["head"] if of_head and not tied else None}


def _slices(block: nn.Module, path: str) -> list[tuple[Kind, ParameterSlice]]:
    """The slices of a weight of a block; those of a bias are those of the matrix beside it."""
    owner, leaf = _owner(block, path)
    if (matrix := _matrix_beside(owner, leaf)) is not None:
        beside = kind_slices(block, path.removesuffix(leaf) + matrix, getattr(owner, matrix))
        return [(kind, replace(part, name=leaf)) for kind, part in beside]
    weight = getattr(owner, leaf)
    return kind_slices(block, path, weight) if weight.ndim > 1 else []


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """(The module that has a weight, the weight's name in it)."""
    before, _, leaf = path.rpartition(".")
    return module.get_submodule(before), leaf


def _matrix_beside(owner: nn.Module, leaf: str) -> str | None:
    """The name of the matrix that a bias is added after, in the same module; None if this is no such bias."""
    matrix = leaf.replace("bias", "weight")
    weight = getattr(owner, matrix, None)
    return matrix if matrix != leaf and isinstance(weight, Tensor) and weight.ndim > 1 else None
