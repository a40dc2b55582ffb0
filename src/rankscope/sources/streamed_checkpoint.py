"""A checkpoint that stays in its files: a model of transformers on the meta device, filled block by block, and the
network that is made of it layer by layer.

transformers itself says which tensors of the files are which of the model, and stacks, splits and renames
them (experts that lie one by one in a file are one tensor in the model). A block is filled in float64, read,
and emptied again; the table of words alone stays, in the dtype of its file. `load` opens it (`StreamedCheckpoint.of`)
and asks for the checked network.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankscope.errors import FileError, SourceError, TooLargeError, require
from rankscope.nets import (
    FLOAT64_BYTES,
    Architecture,
    Layer,
    LayerSource,
    StreamedLayers,
    Transformer,
    assemble_layer,
    assemble_stored,
    check_device,
    check_dtype,
    digests,
    format_bytes,
    free_memory,
)
from rankscope.sources.canonical import refuse_other_depth, refuse_unfit, with_biases
from rankscope.sources.checkpoint import (
    EAGER,
    SETTINGS,
    CheckpointLocation,
    checked,
    clear_errors,
    empty_model,
    quiet,
    read_config,
    refuse_too_large,
    to_be_dequantised,
)
from rankscope.sources.embedding import Embedding, tensors_of
from rankscope.sources.families import Family, family_of
from rankscope.sources.parity import Parity, check

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Floating dtypes by the names that safetensors has for them."""
MOVING = (
    "__get__", "__getitem__", "cat", "chunk", "contiguous", "detach", "expand", "flatten", "permute",
    "reshape", "split", "stack", "transpose", "unbind", "unflatten",
)  # fmt: skip
"""Names of torch functions that move numbers without changing them."""
THREADLESS = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
ASKED = ("revision", "cache_dir", "local_files_only", "token")


def weight_files(location: CheckpointLocation) -> list[str]:
    """The safetensors files of a checkpoint; an empty list where it has none."""
    from transformers.utils import hub

    cached_file: Any = hub.cached_file
    shards_of: Any = hub.get_checkpoint_shard_files

    options = {name: value for name, value in location.options.items() if name in ASKED}
    absent = {"_raise_exceptions_for_missing_entries": False}
    single = cached_file(location.path_or_id, SINGLE, **options, **absent)
    if single is not None:
        return [single]
    index = cached_file(location.path_or_id, INDEX, **options, **absent)
    return [] if index is None else list(shards_of(location.path_or_id, index, **options)[0])


class _Header:
    """A tensor of a file as far as its shape: what transformers makes of it has no numbers."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def __getitem__(self, whole: Any) -> "_Header":
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.shape, dtype=dtype, device="meta")


def refuse_stream(stream: bool | None, name: str, why: str) -> None:
    """Raise `SourceError` if `stream=True` was asked for and cannot be had, because `name` `why`."""
    needed = "stream=True needs a checkpoint in safetensors, its weights ordinary numbers"
    require(not stream, f"{needed}; {name} {why}: leave stream out", SourceError, "stream")


class StreamedCheckpoint:
    """A model of transformers without numbers, and the files that have them.

    `filled(block)` gives a block its numbers for a while; `running()` runs the original block by block; `checked`
    gives the network, with its parity.
    """

    @classmethod
    def of(
        cls, location: CheckpointLocation, family: str | Family | None, stream: bool | None
    ) -> "StreamedCheckpoint | None":
        """Open a checkpoint whose layers stay in their files; None where it can only be read whole."""
        with quiet(), clear_errors(location):
            files = weight_files(location)
            if files:
                refuse_too_large(location, whole=False)
                if not to_be_dequantised(read_config(location, family)):
                    return cls(location, files, family)
            refuse_stream(stream, location.name, "has quantised ones" if files else "has none")
            return None

    def __init__(self, location: CheckpointLocation, files: Sequence[str], family: str | Family | None) -> None:
        import transformers

        headers: dict[str, _Header] = {}
        self._dtypes: dict[str, str] = {}
        self.files: dict[str, str] = {}
        for path in files:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (no mapping)
                    header = file.get_slice(key)
                    headers[key], self._dtypes[key] = _Header(header.get_shape()), header.get_dtype()
                    self.files[key] = path
        self._stamps = {path: _stamp(path) for path in files}
        config = read_config(location, family)
        kind = family_of(config.model_type, family, lambda: empty_model(config))
        loader: Any = getattr(transformers, kind.loader)
        if hasattr(loader, "from_config"):  # one of transformers' automatic classes: which it would be
            with torch.device("meta"):
                trusted = {"trust_remote_code": location.options.get("trust_remote_code")}
                loader = type(loader.from_config(copy.deepcopy(config), **trusted, **EAGER))
        model, report = loader.from_pretrained(None, config=config, state_dict=headers, **SETTINGS)
        model.config.name_or_path = location.path_or_id
        self.checkpoint = checked(location, kind, model, report)
        self.model, self.family, self.name = model, kind, location.name
        self.core = kind.prepare_for_float64(kind.core(model))
        self.core.requires_grad_(False)
        self.blocks: list[nn.Module] = kind.blocks(self.core)
        self._paths = {id(part): path for path, part in model.named_modules()}
        self._random = {id(weight) for weight in model.parameters() if not weight.is_meta}
        """Those that the files lack, which transformers has drawn."""
        self._seen: set[int] = set()  # Layers whose weights were checked to be finite and present
        self.words = self._fill_around()

    @cached_property
    def _mapping(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return list(get_model_conversion_mapping(self.model))

    @cached_property
    def _sources(self) -> dict[str, list[str]]:
        """The tensors of the files that each of the model's is made of."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [item for item in self._mapping if isinstance(item, WeightRenaming)]
        converters = [item for item in self._mapping if isinstance(item, WeightConverter)]
        state_dict, prefix = self.model.state_dict(), self.model.base_model_prefix
        location: dict[str, list[str]] = {}
        for key in self.files:
            target, _ = rename_source_key(key, renamings, converters, prefix, state_dict)
            if target not in state_dict and key in state_dict:
                target, _ = rename_source_key(key, [], [], prefix, state_dict)
            location.setdefault(target, []).append(key)
        return location

    def _inside(self, part: nn.Module) -> list[str]:
        """Names, in the model, of what is inside a part."""
        path = self._paths[id(part)]
        return [name for name in self._sources if not path or name.startswith(f"{path}.")]

    def _load(self, names: Sequence[str]) -> None:
        """Put tensors of the files into the model, in float64; in this thread, as short-lived threads of transformers
        leave memory behind that cannot be used again."""
        from unittest.mock import patch

        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        keys = [key for name in names for key in self._sources[name]]
        # Whatever lifts float32 to float64 while the original runs must leave the files' own dtypes alone.
        with ExitStack() as opened, quiet(), patch.dict(os.environ, THREADLESS), torch._C.DisableTorchFunction():
            changed = [path for path, stamp in self._stamps.items() if _stamp(path) != stamp]
            if changed:
                message = f"the files of {self.name} must stay as they are; {changed[0]} is gone or changed"
                raise FileError(f"{message}: load it again", subject="files")
            paths = {self.files[key] for key in keys}
            files = {path: opened.enter_context(safe_open(path, "pt")) for path in paths}
            tensors = {key: files[self.files[key]].get_slice(key) for key in keys}
            how = LoadStateDictConfig(dtype=torch.float64, weight_mapping=self._mapping)
            convert_and_load_state_dict_in_model(self.model, tensors, how)

    def _fill_around(self) -> nn.Embedding | None:
        """Fill all that is in no block; the table of words, if there is one, in its own dtype."""
        ties = dict(getattr(self.model, "all_tied_weights_keys", {}))
        inside = {name for block in self.blocks for name in self._inside(block)}
        path = self._paths[id(self.core)]
        own_names = [name for name in self.model.state_dict() if not path or name.startswith(f"{path}.")]
        around = set(own_names) - inside
        around |= {end for pair in ties.items() for end in pair if around & set(pair)}
        has_words = hasattr(self.core, "get_input_embeddings") and not self.family.continuous_inputs
        words = self.core.get_input_embeddings() if has_words else None
        words = words if isinstance(words, nn.Embedding) else None
        if words is not None:
            name = f"{self._paths[id(words)]}.weight"
            same = {name} | {end for pair in ties.items() for end in pair if name in pair}
            keys = [key for item in same for key in self._sources.get(item, ())]
            around -= same
            with safe_open(self.files[keys[0]], "pt") as file:
                words.weight = nn.Parameter(file.get_tensor(keys[0]).clone(), requires_grad=False)
        self._load([name for name in around if name in self._sources])
        for name in around:
            weight = self.model.get_parameter_or_buffer(name)
            weight.data = weight.data.clone()  # it may share the memory of a file
        for pair in ties.items():
            self._tie(*pair)
        self.core.requires_grad_(False)
        return words

    def _tie(self, name_a: str, name_b: str) -> None:
        """Where one of two names of a tensor is filled, so is the other."""
        for name, tied in ((name_a, name_b), (name_b, name_a)):
            weight = self.model.get_parameter(tied)
            if self.model.get_parameter(name).is_meta and not weight.is_meta:
                path, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(path), leaf, weight)

    @contextmanager
    def filled(self, block: nn.Module) -> Iterator[nn.Module]:
        """A context manager in which a block has its numbers, in the dtype of its files: compute with them
        inside `Widened`."""
        kinds = {self._dtypes[key] for name in self._inside(block) for key in self._sources[name]}
        self.empty(block, DTYPES.get(kinds.pop(), torch.float64) if len(kinds) == 1 else torch.float64)
        self.fill(block)
        try:
            yield block
        finally:
            self.empty(block)

    def fill(self, block: nn.Module) -> None:
        """Read the numbers of a block from its files into the model."""
        self._load(self._inside(block))
        block.requires_grad_(False)
        for name, weight in block.named_parameters():
            if weight.is_meta:
                message = f"streamed layers must each have their own weights; {name} of {self.name} belongs to another"
                raise SourceError(f"{message} part of the model: stream=False reads it whole", subject="stream")

    def empty(self, block: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        """Drop the numbers of a block; `dtype` is the one that it will be filled with next."""
        for part in block.modules():
            for name, weight in part.named_parameters(recurse=False):
                if id(weight) not in self._random:
                    setattr(part, name, nn.Parameter(weight.to("meta", dtype), requires_grad=False))

    @contextmanager
    def running(self) -> Iterator[Any]:
        """A context manager that gives the original to run: each block is filled while it runs, and of the
        table of words only the rows in use are widened."""
        handles = []
        for block in dict.fromkeys(self.blocks):
            handles.append(block.register_forward_pre_hook(self._before))
            empty = lambda block, args, output: self.empty(block)  # noqa: E731
            handles.append(block.register_forward_hook(empty, always_call=True))
        if self.words is not None:
            handles.append(self.words.register_forward_pre_hook(_few_words))
            weight = self.words.weight
            restore = lambda table, args, output: setattr(table, "weight", weight)  # noqa: E731
            handles.append(self.words.register_forward_hook(restore, always_call=True))
        try:
            yield self.core
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, block: nn.Module, args: Any) -> None:
        if "forward" not in vars(block):  # else it only notes what it is given
            self.fill(block)

    def checked_network(
        self, dtype: torch.dtype, device: torch.device | str, stream: bool | None
    ) -> tuple[Transformer, Embedding, Parity]:
        """The network in a dtype on a device, its embedding, and its parity, measured one layer at a time.

        Layers are left in their files with `stream=True`, or if they do not fit into the memory that is free.
        """
        check_dtype(dtype)
        check_device(device, dtype)
        counts = [sum(weight.numel() for weight in part.parameters()) for part in (self.core, *self.blocks)]
        bytes_needed = counts[0] * dtype.itemsize + max(counts[1:]) * FLOAT64_BYTES
        bytes_free = free_memory(torch.device(device))
        if bytes_free is not None and bytes_needed > bytes_free:
            if stream is False:
                sizes = f"{format_bytes(bytes_needed)} in {dtype}, and {format_bytes(bytes_free)} are free on {device}"
                message = f"a network must fit into memory; {self.name} takes {sizes}: leave stream out"
                raise TooLargeError(message, subject="memory")
            stream = True
        wide, _ = self._network(torch.float64, "cpu")
        with self.running() as core:
            parity = check(wide, self.family, core, self._around[2], self.name)
        net, layers = self._network(dtype, device)
        if stream:
            layers.source.note = digests
        return net if stream else net.held(), self._around[2], parity

    @cached_property
    @torch.no_grad()
    def _around(self) -> tuple[Architecture, dict[str, Tensor], Embedding]:
        """The architecture, of whose biases the first layer tells, the tensors of no layer, and the embedding."""
        arch = self.family.architecture_of(self.core)
        refuse_other_depth(arch, len(self.blocks), self.name)
        with self.filled(self.blocks[0]) as first:
            with Widened():
                other_tensors, embedding = self.family.other_tensors(self.core), self.family.embedding(self.core)
                layer = {f"layers.0.{name}": tensor for name, tensor in self.family.layer(first, arch).items()}
            tensors = [*other_tensors.values(), *tensors_of(embedding).values()]
            reason = f"layers that are read one at a time must each have their own weights; {self.name} shares some"
            loaded = not any(tensor.is_meta for tensor in tensors)
            require(loaded, f"{reason}: stream=False reads it whole", SourceError, "stream")
            refuse_unfit(self.checkpoint, [*tensors, *layer.values()], self.name)
        return with_biases(arch, layer), other_tensors, embedding

    def _network(self, dtype: torch.dtype, device: torch.device | str) -> tuple[Transformer, StreamedLayers[Layer]]:
        """The network in a dtype on a device, its layers still in their files, and these layers."""
        arch, others, _ = self._around
        first = {id(block): index for index, block in reversed([*enumerate(self.blocks)])}
        like = torch.empty(0, dtype=dtype, device=device)
        source = LayerSource(lambda place: self._layer(place, like), like)
        layers = StreamedLayers(source, [first[id(block)] for block in self.blocks])
        others = {name: _copied(tensor, like) for name, tensor in others.items()}
        return Transformer(arch, assemble_stored(arch, layers, others)), layers

    @torch.no_grad()
    def _layer(self, index: int, like: Tensor) -> Layer:
        """Read one layer from its files, in the dtype and on the device of `like`."""
        arch = self._around[0]
        with self.filled(self.blocks[index]) as block:
            with Widened():
                tensors = self.family.layer(block, arch)
            if index not in self._seen:
                refuse_unfit(self.checkpoint, [*tensors.values()], self.name)
                self._seen.add(index)
        # The block holds them no more: what is copied is let go, tensor by tensor.
        copies = {name: _copied(tensors.pop(name), like) for name in [*tensors]}
        return assemble_layer(arch, index, copies)


def _copied(tensor: Tensor, like: Tensor) -> Tensor:
    """A contiguous copy that shares no memory with a file."""
    copy = tensor.detach().to(like).contiguous()  # converted first: torch transposes fast within a dtype
    return copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy


class Widened(TorchFunctionMode):
    """A context manager in which torch computes in float64; what is only moved keeps its dtype."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = args, kwargs or {}
        args, named = arguments if func.__name__ in MOVING else _wide(arguments)
        return func(*args, **named)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _wide(item) for name, item in value.items()}
    return type(value)(map(_wide, value)) if type(value) in (list, tuple) else value


def _stamp(path: str) -> tuple[int, int] | None:
    """Size and time of a file, by which a change is noticed; None where it is gone."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _few_words(table: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A pre-hook that replaces the table of words by the rows in use, in float64."""
    ids, indices = args[0].unique(return_inverse=True)
    table.weight = nn.Parameter(table.weight[ids].double(), requires_grad=False)
    table.padding_idx = None  # matters to gradients alone, and may be no row of the smaller table
    return indices, *args[1:]
