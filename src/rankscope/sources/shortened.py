"""A model of transformers with layers taken out, task head, tokenizer and all, as a folder that transformers loads.

The order: `original` reads the model of a checkpoint in the dtype of its files, with the head for its task;
`_shortened` deletes blocks from a copy of a model and says so in its config; `write_shortened` writes it with what lay
beside the weights (`_copy_beside`), loads what was written (which checks parity), and holds it against the network
without these layers, tensor by tensor: a config that would rebuild other layers is refused, and nothing is left behind.
"""

import copy
import json
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from rankscope.errors import FileError, RankscopeError, SourceError, require
from rankscope.files import writable_folder
from rankscope.nets import Architecture, Transformer
from rankscope.sources.checkpoint import EAGER, CheckpointLocation, HubOptions, clear_errors, hub_options, locate, quiet
from rankscope.sources.families import Family, family_of
from rankscope.sources.loading import load
from rankscope.sources.streamed_checkpoint import ASKED

MODULES = "modules.json"  # In which sentence-transformers lists what follows the network
BESIDE = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json", "*processor_config.json")
"""Files beside the weights that say how a model is used."""
PER_LAYER = ("layer_types", "mlp_layer_types", "attention_layers", "no_rope_layers")
"""Fields of configs that say something of each layer."""
SAVE = "net.without(layers=...).save(folder) writes the network as it is"  # Where no model of transformers holds it


def original(name: str, **options: Unpack[HubOptions]) -> Any:
    """The model of a checkpoint as transformers has it: in the dtype of its files, with the head for its task.

    Args:
        name: "minilm", a directory, or an id on the hub.
        options: Those of `HubOptions`, as `load` takes them.
    """
    location = locate(name, hub_options(options))
    with quiet(), clear_errors(location):
        import transformers

        config = transformers.AutoConfig.from_pretrained(location.path_or_id, **location.options)
        classes = [getattr(transformers, kind, None) for kind in getattr(config, "architectures", None) or ()]
        kind: Any = next((kind for kind in classes if kind is not None), transformers.AutoModel)
        settings = {"dtype": "auto", "weights_only": True, **EAGER, **location.options}
        return kind.from_pretrained(location.path_or_id, **settings).eval()


def _shortened(model: nn.Module, layers: Collection[int], family: str | Family | None) -> Any:
    """A copy of a model of transformers without some of its layers (from 1), to be written and not to be run: blocks
    still know their old numbers. Its head for a task stays."""
    short: Any = copy.deepcopy(model)
    kind = family_of(getattr(short.config, "model_type", None), family, lambda: short)
    core = kind.core(short)
    blocks = kind.blocks(core)
    depth, kept = len(blocks), [index for index in range(len(blocks)) if index + 1 not in layers]
    left = [blocks[index] for index in kept]
    if kind.side == "decoder" or not left:
        what = "of a decoder beside its encoder" if left else "of a model that would keep none"
        raise SourceError(f"layers {what} cannot be taken out here: {SAVE}", subject="layers")
    if len(dict.fromkeys(blocks)) == depth:
        _inherit(blocks[0], left[0])
        for stack in [part for part in core.modules() if isinstance(part, nn.ModuleList) and [*part] == blocks]:
            stack._modules = {str(index): block for index, block in enumerate(left)}
    elif len(dict.fromkeys(blocks)) > 1:
        raise SourceError(f"layers that share weights in groups cannot be taken out: {SAVE}", subject="layers")
    for config in {id(config): config for config in (core.config, short.config)}.values():
        if getattr(config, "num_hidden_layers", None) == depth:
            _describe(config, depth, kept)
    if (contacts := getattr(core, "contact_head", None)) is not None:  # ESM's reads the attention of every layer
        weight = contacts.regression.weight.detach()
        contacts.regression.weight = nn.Parameter(weight.view(1, depth, -1)[:, kept].flatten(1))
    return short


def _describe(config: Any, depth: int, kept: list[int]) -> None:
    """Make a config of `depth` layers say that only those of the indices `kept` are left, with what it says of each."""
    config.num_hidden_layers = len(kept)
    for name in PER_LAYER:
        values = getattr(config, name, None)
        if values is not None and len(values) == depth:
            setattr(config, name, [values[index] for index in kept])
    if hasattr(config, "attention_types"):  # GPT-Neo's, which `attention_layers` writes out
        config.attention_types = [[[kind], 1] for kind in config.attention_layers]
    if hasattr(config, "decoder_sparse_step"):  # Qwen's: every so many layers have experts, but for some
        period, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
        config.mlp_only_layers = [new for new, old in enumerate(kept) if old in dense or (old + 1) % period]
        config.decoder_sparse_step = 1
    if getattr(config, "first_k_dense_replace", None):  # DeepSeek's
        config.first_k_dense_replace = sum(index < config.first_k_dense_replace for index in kept)
    if hasattr(config, "stage_names"):  # DINO's, of which a backbone gives the last
        config.stage_names = config.stage_names[: len(kept) + 1]
        config.out_features = config.stage_names[-1:]


def _inherit(first: nn.Module, new_first: nn.Module) -> None:
    """Give what the first block keeps for all, as T5 its table of position biases, to the block that is first now.

    Parts of another kind (an MLP where the first has experts) stay as they are."""
    had, has = dict(first.named_modules()), dict(new_first.named_modules())
    for path, module in had.items():
        parent, _, leaf = path.rpartition(".")
        if path not in has and type(has.get(parent)) is type(had[parent]):
            setattr(has[parent], leaf, module)


def _copy_beside(location: CheckpointLocation, folder: Path) -> None:
    """Copy what lies beside a checkpoint's weights and says how the model is used: how images become its input and, of
    sentence-transformers, prompts and the modules after the network (pooling, normalisation). Files that the folder
    has stay as they are; the README is not copied, since it describes the whole model."""

    def fetched(names: list[str]) -> Path:
        if location.local:
            return Path(location.path_or_id)
        from huggingface_hub import snapshot_download

        asked = {name: value for name, value in location.options.items() if name in ASKED}
        return Path(snapshot_download(location.path_or_id, allow_patterns=names, **asked))

    names = [*BESIDE]
    source = fetched(names)
    if (source / MODULES).is_file():
        try:
            listed = [Path(module["path"]) for module in json.loads((source / MODULES).read_text(encoding="utf-8"))]
        except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
            message = f"{MODULES} of {location.name} must list modules with their paths; it does not ({error})"
            raise FileError(f"{message}: copy it again", subject=MODULES) from error
        if outside := next((path for path in listed if path.is_absolute() or ".." in path.parts), None):
            message = f"{MODULES} of {location.name} must name folders inside it; it names {outside}"
            raise FileError(f"{message}: correct it", subject=MODULES)
        names += [f"{path}/**/*" for path in listed if path.parts]
        source = fetched([name.replace("**/", "") for name in names])
    for path in sorted({path for name in names for path in source.glob(name) if path.is_file()}):
        written = folder / path.relative_to(source)
        if not written.exists():
            written.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, written)


def write_shortened(
    model: nn.Module,
    net: Transformer,
    layers: Collection[int],
    folder: str | Path,
    location: CheckpointLocation | None = None,
) -> Any:
    """Write a model without some of its layers into a folder that transformers and `load` read; return it as
    read from there.

    Args:
        model: The whole model, of transformers, which is not changed.
        net: The network of the whole model, as `load` gave it.
        layers: The layers to take out, numbered from 1.
        folder: A folder that is new or empty.
        location: Where the whole model lies: what its folder says of its use (pooling, normalisation and prompts of
            sentence-transformers; how images become its input) is copied.

    Raises:
        FileError: The folder holds something already, or cannot be written.
        SourceError: The model's config cannot describe what is left; nothing is written then.
    """
    target, family = Path(folder), getattr(net.origin, "family", None)
    writable_folder(target)
    empty = not any(target.iterdir())
    require(empty, f"{target} must be a new or empty folder; it holds files already", FileError, str(target))
    short, cut = _shortened(model, layers, family), net.without(layers=layers)
    with tempfile.TemporaryDirectory(dir=target, prefix=".writing-") as temporary, quiet():
        short.save_pretrained(temporary)
        with suppress(AttributeError, RankscopeError):  # no tokenizer came along
            net.origin.tokenizer.save_pretrained(temporary)  # type: ignore[union-attr]
        if location is not None:
            with clear_errors(location):
                _copy_beside(location, Path(temporary))
        try:
            again = load(temporary, family=family, stream=False)
        except SourceError as error:
            raise SourceError(f"what is left cannot be loaded again ({error}): {SAVE}", subject="layers") from error
        new, kept = again.state_dict(), cut.state_dict()
        same = new.keys() == kept.keys() and all(
            torch.allclose(new[name].double().cpu(), kept[name].double().cpu(), rtol=1e-6, atol=0) for name in new
        )
        if not same or _by_layer(again.arch) != _by_layer(cut.arch):
            message = f"a config of {short.config.model_type} must describe what is left without layers"
            listed = ", ".join(map(str, sorted(layers)))
            raise SourceError(f"{message} {listed}; it describes other layers: {SAVE}", subject="layers")
        mode = (Path(temporary) / "config.json").stat().st_mode  # weights may come readable by their owner alone
        for path in Path(temporary).iterdir():
            if path.is_file():
                path.chmod(mode)
            path.rename(target / path.name)
        return type(short).from_pretrained(target, dtype="auto").eval()


def _by_layer(arch: Architecture) -> Architecture:
    """The architecture with all that is given by layer, and repeats, written out for every layer."""
    layers = range(arch.layers)
    changes: dict[str, Any] = {}
    if isinstance(arch.mask, str):
        changes["mask"] = ";".join(str(arch.mask_of(index)) for index in layers)
    for name in ("rotary_frequencies", "rotary_scales"):
        if repeated := getattr(arch, name):
            changes[name] = tuple(repeated[index % len(repeated)] for index in layers)
    return arch.replace(**changes)
