"""The inputs on which `parity.py` compares the original with the canonical network.

Two networks that agree on 24 tokens may differ on 60: behind a window, in a far bucket of relative positions.
So the inputs are longer than every such length that the config names, where that can be afforded. Three
samples: without padding, padded at the end, padded at the beginning.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer
from rankscope.sources.embedding import Embedding
from rankscope.sources.families import Family
from rankscope.sources.families.family import config_of

SHORTEST = 24  # Tokens of the inputs where the config names no length
PADDING = (0, 7, 15)  # Padded tokens of the three samples: none, at the end, at the beginning
SOURCE = 17  # Tokens of the memory that a decoder reads
LENGTHS = re.compile("window|chunk|distance|buckets|relative_positions|local_attention|original_max_position")
"""Names of config fields that hold a number of tokens at which something changes."""
WORK = 1e11  # Most weights x tokens of inputs longer than `ALWAYS`: a few seconds in float64
ALWAYS = 192
ROOM = 1e9  # Most bytes of all its attention matrices


def named_lengths(config: Any) -> list[int]:
    """Every number of tokens at which the config may mean something to change, in ascending order."""

    def found(fields: Mapping[Any, Any]) -> Iterator[int]:
        for name, value in fields.items():
            if isinstance(value, Mapping):
                yield from found(value)
            elif type(value) is int and value > 0 and LENGTHS.search(str(name)):  # a bool is no length
                yield value

    fields = config.to_dict() if hasattr(config, "to_dict") else config
    return sorted(set(found(fields if isinstance(fields, Mapping) else vars(fields))))


def beyond(length: int) -> int:
    """The number of tokens with which every sample, less its padding, is longer than `length`."""
    return length + max(PADDING) + 9


def affordable(n: int, arch: Architecture, weights: int) -> bool:
    """True if original and network can both run on inputs of n tokens in reasonable time and memory."""
    samples = len(PADDING)
    works = n <= ALWAYS or samples * n * weights <= WORK
    return works and 8 * samples * n * n * arch.heads * arch.layers <= ROOM


@dataclass(frozen=True)
class ParityInputs:
    """The inputs of a parity check: ids or images, with padding, positions and a decoder's memory."""

    inputs: Tensor  # Token ids, or images
    padding: Tensor | None
    position_ids: Tensor | None = None
    """The position of each valid token, for a model that would otherwise count padding as well."""
    memory: Tensor | None = None  # What a decoder reads `[batch, source, width]`, padded on either side where it can be
    memory_padding: Tensor | None = None

    @classmethod
    def of(cls, family: Family, core: Any, embedding: Embedding, arch: Architecture) -> "ParityInputs":
        """Random inputs from a fixed seed, as long as the config asks for and can be afforded."""
        weights = sum(weight.numel() for weight in core.parameters())
        lengths = [SHORTEST, *map(beyond, named_lengths(config_of(core)))]
        longest = max(n for n in lengths if n == SHORTEST or affordable(n, arch, weights))
        return cls.long(family, core, embedding, min(longest, arch.rotary_reach or longest))

    @classmethod
    def long(cls, family: Family, core: Any, embedding: Embedding, n: int) -> "ParityInputs":
        """Random inputs of n tokens, or of as many as the model has positions for."""
        generator = torch.Generator().manual_seed(0)
        if family.continuous_inputs:
            image_embedding: Any = embedding
            shape = (2, *image_embedding.shape)
            return cls(torch.randn(shape, generator=generator, dtype=torch.float64), None)
        words: Any = embedding
        n = n if words.positions is None else min(n, len(words.positions))
        padding = torch.zeros(len(PADDING), n, dtype=torch.bool)
        parameters = inspect.signature(core.forward).parameters
        if "attention_mask" in parameters:  # a module of one's own may know no padding
            padding[1, max(n - PADDING[1], 1) :] = True
            padding[2, : min(PADDING[2], n - 1)] = True
        ids = torch.randint(0, len(words.words), padding.shape, generator=generator)
        pad = int(getattr(config_of(core), "pad_token_id", None) or 0)
        # RoBERTa tells padding by the id itself.
        ids = torch.where(ids == pad, (pad + 1) % len(words.words), ids)
        # A table whose first rows are spare is read by a count of real tokens; else the count is given.
        counts = words.positions is not None and family.first_position(core) == 0
        positions = ((~padding).cumsum(1) - 1).clamp(min=0)
        position_ids = positions if counts and "position_ids" in parameters else None
        inputs = ids.masked_fill(padding, pad), padding, position_ids
        if family.side != "decoder":
            return cls(*inputs)
        shape = len(PADDING), SOURCE, core.config.hidden_size
        memory = torch.randn(shape, generator=generator, dtype=torch.float64)
        memory_padding = torch.zeros(shape[:2], dtype=torch.bool)
        memory_padding[1, : PADDING[1]] = memory_padding[2, -PADDING[1] :] = True
        return cls(*inputs, memory, memory_padding if "encoder_attention_mask" in parameters else None)

    def attach_memory(self, net: Transformer) -> Transformer:
        """A decoder with these inputs' memory attached; any other network unchanged."""
        return net if self.memory is None else net.with_memory(self.memory, self.memory_padding)

    @property
    def tokens(self) -> int:
        """The length of the samples in tokens; 0 for images, which have one size."""
        return 0 if self.padding is None else self.padding.shape[1]

    def arguments(self, family: Family) -> dict[str, Tensor]:
        """The inputs as keyword arguments of the original's `forward`."""
        if family.continuous_inputs:
            return {family.input_name: self.inputs}
        assert self.padding is not None
        arguments = {
            "input_ids": self.inputs,
            "attention_mask": (~self.padding).long(),
            "position_ids": self.position_ids,
            "encoder_hidden_states": self.memory,
            "encoder_attention_mask": None if self.memory_padding is None else (~self.memory_padding).long(),
        }
        return {name: value for name, value in arguments.items() if value is not None}


def relative(a: Tensor, b: Tensor, real: Tensor) -> float:
    """The largest difference at valid tokens, relative to the largest entry there; infinite for NaN."""
    difference = float((a - b)[real].abs().max() / b[real].abs().max().clamp(min=1e-300))
    return math.inf if math.isnan(difference) else difference
