"""`Architecture`: what a transformer is made of, apart from its weights.

One description covers the families that sources map onto it:

    post-norm (BERT)      X <- norm(a X + attention(X));         X <- norm(m X + mlp(X))
    pre-norm (GPT-2)      X <- a X + attention(norm X);          X <- m X + mlp(norm X)
    sandwich (Gemma 2)    X <- a X + norm(attention(norm X));    X <- m X + norm(mlp(norm X))
    output (OLMo 2)       X <- a X + norm(attention(X));         X <- m X + norm(mlp(X))
    parallel (GPT-NeoX)   X <- a X + attention(norm X) + mlp(norm X)

with a = `attention_skip` and m = `mlp_skip`. `norm="none"` takes every norm out; a decoder with
cross-attention has one more half between the two, of the kind of the first.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.errors import ArchitectureError, FileError, require
from rankscope.nets.fields import (
    BIASES,
    TUPLES,
    ArchitectureFields,
    among,
    check_types,
    problems,
    raise_first,
    size_problems,
)
from rankscope.nets.masks import Mask, mask_spec
from rankscope.nets.mlp import Experts
from rankscope.remedies import NamedRemedy, remedy

FOLLOWING = {
    "head_width": ("width", "heads"),
    "value_width": ("width", "heads", "head_width"),
    "key_heads": ("heads",),
    "divisor": ("width", "heads", "head_width"),
    "mlp_width": ("width",),
}
"""The fields whose usual value (0) is made of others, and those others."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Architecture(ArchitectureFields):
    """A frozen, validated, serialisable description of a transformer; its fields are in `fields.py`.

    >>> Architecture(layers=12, width=768, heads=12).head_width
    64
    """

    def __post_init__(self) -> None:
        check_types(self)
        raise_first(size_problems(self))
        self._fill()
        raise_first(problems(self))

    def _fill(self) -> None:
        """Put the usual numbers in place of 0, and tuples in place of lists, so that equal networks compare equal."""
        put, biases = object.__setattr__, self.biases
        put(self, "head_width", self.head_width or self.width // self.heads)
        for name, value in self._usual().items():
            put(self, name, getattr(self, name) or value)
        put(self, "biases", tuple(biases) if not isinstance(biases, bool) else BIASES if biases else ())
        put(self, "mask", mask_spec(self.mask))
        for name in TUPLES:
            put(self, name, _with_tuples(getattr(self, name)))

    def _usual(self) -> dict[str, float]:
        """The values that stand for 0."""
        return {
            "head_width": self.width / self.heads,
            "value_width": self.head_width,
            "key_heads": self.heads,
            "divisor": math.sqrt(self.head_width),
            "mlp_width": 4 * self.width,
        }

    def __repr__(self) -> str:
        """The call that makes it: fields at their usual value are left out."""
        return f"Architecture({', '.join(f'{name}={value!r}' for name, value in self.unusual().items())})"

    def unusual(self) -> dict[str, Any]:
        """The fields that are not at their usual value, by name: those that a call must give."""
        usual = self._usual()
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != usual.get(field.name, field.default)
        }

    def _repr_html_(self) -> str:
        """For notebooks: the fields that are not at their usual value."""
        from rankscope.results import card

        rows = [[name.replace("_", " "), str(value)] for name, value in self.unusual().items()]
        return card("Architecture", None, ("field", ""), rows)

    def departures(self) -> list[str]:
        """List in a few words what tells a variant from the full network: parts missing or weighted, and its mask."""
        skips = {"attention skip": self.attention_skip}
        if self.mlp != "none" and not self.parallel:
            skips["MLP skip"] = self.mlp_skip
        if len(set(skips.values())) == 1:
            skips = {"skip": self.attention_skip}
        departures = [
            f"no {name}" if weight == 0 else f"{name} {weight:g}" for name, weight in skips.items() if weight != 1
        ]
        noted = {
            "no MLP": self.mlp == "none",
            "no norm": self.norm == "none",
            "some heads silent": self.kept_heads is not None,
            f"scores times {self.log_gain:g} ln n": self.log_gain,
            "gated heads": self.head_gate,
            "latent keys and values": self.key_latent,
            "cross-attention": self.cross_attention,
        }
        departures += [words for words, present in noted.items() if present]
        if self.mask != "complete":
            mask = self.mask.name if isinstance(self.mask, Mask) else self.mask
            departures.append(f"mask {mask if len(mask) <= 40 else mask[:39] + '…'}")
        return departures + [part.name for part in self.parts]

    def replace(self, **changes: Any) -> "Architecture":
        """Return the architecture with some fields changed; widths at their usual value follow along.

        >>> Architecture(layers=12, width=768, heads=12).replace(width=384).mlp_width
        1536
        """
        usual = self._usual()
        follow = {
            name: self.__dataclass_fields__[name].default
            for name, sources in FOLLOWING.items()
            if changes.keys() & {*sources} and getattr(self, name) == usual[name]
        }
        return dataclasses.replace(self, **{**follow, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python, as JSON has it: numbers, strings and lists. An object of the user's own is
        written `own:` and its name, with the numbers it was made of."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any], own: Iterable[Any] = ()) -> "Architecture":
        """Make the architecture that `to_dict` wrote; fields left out take their usual value. `own` are the
        masks, norms, kernels and parts of the user's own that it names."""
        objects = {_label(item): item for item in own}
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            raise_first(among(name, name, known, what="architecture field"))
        for name in ("layers", "width", "heads"):
            sentence = f"an architecture needs layers, width and heads; {name} is missing"
            require(name in fields, sentence, ArchitectureError, name)
        values = {name: _resolved(_with_tuples(value), objects) for name, value in fields.items()}
        if isinstance(values.get("experts"), dict):
            values["experts"] = Experts.from_dict(values["experts"])
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path, own: Iterable[Any] = ()) -> "Architecture":
        """Read an architecture from a JSON file of its fields; `own` as in `from_dict`."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            sentence = f"an architecture is read from a JSON file; there is none at {path}"
            raise FileError(sentence, subject=str(path)) from None
        except (OSError, ValueError, RecursionError) as error:
            sentence = f"{path} must be a JSON file of architecture fields; {error}"
            raise FileError(sentence, subject=str(path)) from error
        sentence = f"{path} must hold a JSON object of architecture fields; got a {type(fields).__name__}"
        require(isinstance(fields, dict), sentence, FileError, str(path))
        return cls.from_dict(fields, own)


def _plain(value: Any) -> Any:
    """Tuples as JSON's lists, objects of the user's own as their labels."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Experts):
        return value.to_dict()
    if isinstance(value, NamedRemedy):
        return f"remedy:{value.spec()}"
    return value if value is None or isinstance(value, str | int | float) else _label(value)


def _label(value: Any) -> str:
    """What a file calls an object of the user's own."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = [field.name for field in fields if field.name not in ("name", "place")]
    numbers = [f"{name}={held!r}" for name in names if isinstance(held := getattr(value, name), int | float | str)]
    return f"own:{value.name}" + (f"({', '.join(numbers)})" if numbers else "")


def _resolved(value: Any, objects: dict[str, Any]) -> Any:
    """A value of a file, labels replaced by the objects that they name."""
    if isinstance(value, tuple):
        return tuple(_resolved(item, objects) for item in value)
    if isinstance(value, str) and value.startswith("remedy:"):
        return remedy(value.removeprefix("remedy:"))
    if not isinstance(value, str) or not value.startswith("own:"):
        return value
    if value not in objects:
        name = value.removeprefix("own:")
        sentence = f"a file cannot hold the user's own part {name!r}: pass it, from_dict(fields, own=[...])"
        raise ArchitectureError(f"{sentence}; got {', '.join(objects) or 'none'}", subject=name)
    return objects[value]


def _with_tuples(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value
