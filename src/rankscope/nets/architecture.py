"""`Architecture`: what a transformer is made of, apart from its weights.

One description covers the families that sources map onto it:

    post-norm (BERT)      X <- norm(a X + attention(X));         X <- norm(m X + mlp(X))
    pre-norm (GPT-2)      X <- a X + attention(norm X);          X <- m X + mlp(norm X)
    sandwich (Gemma 2)    X <- a X + norm(attention(norm X));    X <- m X + norm(mlp(norm X))
    parallel (GPT-NeoX)   X <- a X + attention(norm X) + mlp(norm X)

and a decoder with cross-attention has one more half between the two, of the kind of the first.

with a = `attention_skip` and m = `mlp_skip`; `norm="none"` takes every norm out.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.errors import ArchitectureError, FileError
from rankscope.nets.checks import among, check, check_types
from rankscope.nets.experts import Experts
from rankscope.nets.fields import BIASES, ArchitectureFields
from rankscope.nets.masks import Mask, MaskLike, spec_of
from rankscope.remedies.base import BuiltInRemedy
from rankscope.remedies.catalogue import remedy

DEEPEST = 10**6
"""Layers at most: a depth beyond it is a slip of the hand, and would fill all memory before it is seen."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Architecture(ArchitectureFields):
    """A frozen, validated, serialisable description of a transformer; its fields are in `fields.py`.

    >>> Architecture(layers=12, width=768, heads=12).head_width
    64
    """

    def __post_init__(self) -> None:
        check_types(self)
        self._fill()
        check(self)

    def _fill(self) -> None:
        """Put the usual numbers in place of 0, so that equal networks compare equal."""
        put = object.__setattr__
        for name in ("layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ArchitectureError(
                    f"{name} must be a whole number >= 1; got {getattr(self, name)!r}", subject=name
                )
        if self.layers > DEEPEST:
            raise ArchitectureError(f"layers must be at most {DEEPEST}; got {self.layers}", subject="layers")
        for name in ("head_width", "divisor"):
            if not getattr(self, name) >= 0:
                raise ArchitectureError(
                    f"{name} must be > 0, or 0 for its usual value; got {getattr(self, name)!r}", subject=name
                )
        if not self.head_width:
            if self.width % self.heads:
                raise ArchitectureError(
                    f"width must be a multiple of heads unless head_width is given; got width {self.width} "
                    f"and {self.heads} heads",
                    subject="width",
                )
            put(self, "head_width", self.width // self.heads)
        put(self, "value_width", self.value_width or self.head_width)
        put(self, "key_heads", self.key_heads or self.heads)
        put(self, "divisor", self.divisor or math.sqrt(self.head_width))
        put(self, "mlp_width", self.mlp_width or 4 * self.width)
        biases: Any = self.biases
        if isinstance(biases, str) or not isinstance(biases, bool | tuple | list):
            raise ArchitectureError(
                f"biases must be True, False or a tuple of {', '.join(BIASES)}; got {biases!r}",
                subject="biases",
            )
        put(self, "biases", tuple(biases) if not isinstance(biases, bool) else BIASES if biases else ())
        put(self, "mask", self.mask if isinstance(self.mask, Mask) else mask_spec(self.mask))
        for name in ("kept_heads", "rotary_frequencies", "rotary_scales", "bare_layers", "parts"):
            value = _frozen(getattr(self, name))
            if not isinstance(value, tuple) and (name != "kept_heads" or value is not None):
                raise ArchitectureError(f"{name} must be a tuple; got {value!r}", subject=name)
            put(self, name, value)

    def __repr__(self) -> str:
        """What it takes to write it down: fields at their usual value are left out."""
        usual = {
            "key_heads": self.heads,
            "head_width": self.width / self.heads,
            "value_width": self.head_width,
            "divisor": math.sqrt(self.head_width),
            "mlp_width": 4 * self.width,
        }
        written = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != usual.get(field.name, field.default)
        )
        return f"Architecture({', '.join(written)})"

    def departures(self) -> list[str]:
        """List in a few words each which parts are missing or weighted, and the mask where it is not
        complete: what tells a variant from the whole."""
        skips = {"attention skip": self.attention_skip}
        if self.mlp != "none" and not self.parallel:
            skips["MLP skip"] = self.mlp_skip
        if len(set(skips.values())) == 1:
            skips = {"skip": self.attention_skip}
        departures = [
            f"no {name}" if weight == 0 else f"{name} {weight:g}"
            for name, weight in skips.items()
            if weight != 1
        ]
        departures += [
            f"no {word}" for word, kind in (("MLP", self.mlp), ("norm", self.norm)) if kind == "none"
        ]
        departures += [] if self.kept_heads is None else ["some heads silent"]
        departures += [f"scores times {self.log_gain:g} ln n"] if self.log_gain else []
        departures += ["gated heads"] if self.head_gate else []
        departures += ["latent keys and values"] if self.key_latent else []
        departures += ["cross-attention"] if self.cross_attention else []
        if self.mask != "complete":
            mask = spec_of(self.mask) if isinstance(self.mask, Mask) else self.mask
            departures.append(f"mask {mask if len(mask) <= 40 else mask[:39] + '…'}")
        return departures + [part.name for part in self.parts]

    def replace(self, **changes: Any) -> "Architecture":
        """Return the architecture with some fields changed; widths at their usual value follow along.

        >>> Architecture(layers=12, width=768, heads=12).replace(width=384).mlp_width
        1536
        """
        divides = self.width % self.heads == 0
        follow: dict[str, Any] = {}
        if {"width", "heads"} & changes.keys() and divides and self.head_width == self.width // self.heads:
            follow["head_width"] = 0
        if {"width", "heads", "head_width"} & changes.keys() and self.value_width == self.head_width:
            follow["value_width"] = 0
        if "heads" in changes and self.key_heads == self.heads:
            follow["key_heads"] = 0
        if {"width", "heads", "head_width"} & changes.keys() and self.divisor == math.sqrt(self.head_width):
            follow["divisor"] = 0.0
        if "width" in changes and self.mlp_width == 4 * self.width:
            follow["mlp_width"] = 0
        return dataclasses.replace(self, **{**follow, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain Python, as JSON has it: numbers, strings and lists. What is of one's own is `own:` and its
        name, with the numbers it was made of."""
        return {field.name: _thawed(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any], own: Iterable[Any] = ()) -> "Architecture":
        """The inverse of `to_dict`; fields left out take their usual value. `own` are the objects that it
        speaks of by name: masks, norms, kernels and parts of one's own."""
        objects = {_named(thing): thing for thing in own}
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            among("architecture field", name, known, subject=name)
        for name in ("layers", "width", "heads"):
            if name not in fields:
                raise ArchitectureError(
                    f"an architecture must say its layers, width and heads; {name} is missing", subject=name
                )
        values = {name: _found(_frozen(value), objects) for name, value in fields.items()}
        if isinstance(values.get("experts"), dict):
            values["experts"] = Experts.from_dict(values["experts"])
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path, own: Iterable[Any] = ()) -> "Architecture":
        """An architecture from a JSON file of its fields; `own` as in `from_dict`."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileError(
                f"an architecture is read from a JSON file; there is none at {path}", subject=str(path)
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise FileError(
                f"{path} must be a JSON file of architecture fields; {error}", subject=str(path)
            ) from error
        if not isinstance(fields, dict):
            raise FileError(
                f"{path} must hold a JSON object of architecture fields; got a {type(fields).__name__}",
                subject=str(path),
            )
        return cls.from_dict(fields, own)


def mask_spec(mask: MaskLike) -> str:
    """One canonical string for a mask, or for several joined by `;`, one per layer."""
    if isinstance(mask, str):
        return ";".join(spec_of(part) for part in mask.split(";"))
    return spec_of(mask)


def _thawed(value: Any) -> Any:
    """Tuples as JSON's lists, objects of one's own as their names."""
    if isinstance(value, tuple):
        return [_thawed(item) for item in value]
    if isinstance(value, Experts):
        return value.to_dict()
    if isinstance(value, BuiltInRemedy):
        return f"remedy:{value.spec()}"
    return value if value is None or isinstance(value, str | int | float) else _named(value)


def _named(value: Any) -> str:
    """How a file speaks of an object of one's own."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    numbers = {
        value_of.name: getattr(value, value_of.name)
        for value_of in fields
        if value_of.name not in ("name", "place")
    }
    made_of = [
        f"{name}={value_of!r}"
        for name, value_of in numbers.items()
        if isinstance(value_of, int | float | str)
    ]
    return f"own:{value.name}" + (f"({', '.join(made_of)})" if made_of else "")


def _found(value: Any, objects: dict[str, Any]) -> Any:
    """A value of a file with the objects that it speaks of in their places."""
    if isinstance(value, tuple):
        return tuple(_found(item, objects) for item in value)
    if isinstance(value, str) and value.startswith("remedy:"):
        return remedy(value.removeprefix("remedy:"))
    if not isinstance(value, str) or not value.startswith("own:"):
        return value
    if value not in objects:
        raise ArchitectureError(
            f"this architecture has a part of its own, {value.removeprefix('own:')!r}, which a file cannot "
            f"hold: pass the object, from_dict(fields, own=[...]); got {', '.join(objects) or 'none'}",
            subject=value.removeprefix("own:"),
        )
    return objects[value]


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
