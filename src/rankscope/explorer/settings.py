"""What a visitor of the explorer can turn, checked: everything that comes from a page is one `Setting`.

Limits keep an answer within seconds. What is out of range is refused with a sentence, never clipped: a link
shows what it says, or says why not.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankscope.errors import SettingError
from rankscope.explorer.words import control
from rankscope.nets import Architecture

RANDOM = "random"
"""The name of a network that is drawn at random, of the shape that comes with it."""
MOST_WEIGHTS = 20_000_000
"""Of a random network: 160 MB in float64."""
MOST_TEXT = 4000
MOST_TOKENS = 64
MOST_DEPTH = 96
WORDS = {
    "Input should be": "must be", "String should have": "must have", "less than or equal to": "at most",
    "greater than or equal to": "at least", "a valid boolean": "on or off (true or false)",
    "a valid integer": "a whole number", "a valid number": "a number", "a valid string": "text",
}  # fmt: skip
"""What pydantic says, as we say it."""
Part = Literal["curve", "cloud", "paths", "bounds"]
PARTS: tuple[Part, ...] = ("curve", "cloud", "paths", "bounds")
"""What an answer consists of, in the order in which it comes."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Shape(_Strict):
    """A random network: what it is built of."""

    layers: Annotated[int, Field(ge=1, le=24)] = 6
    width: Annotated[int, Field(ge=2, le=512)] = 64
    heads: Annotated[int, Field(ge=1, le=32)] = 4
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    init: Literal["bert", "xavier", "kaiming", "orthogonal"] = "bert"
    mlp: Literal["plain", "gated"] = "plain"
    norm: Literal["layer", "rms", "scale"] = "layer"
    place: Literal["post", "pre", "sandwich"] = "post"
    positions: Literal["none", "rotary", "bias", "alibi", "relative"] = "none"
    parallel: bool = False

    def architecture(self) -> Architecture:
        """As a network of it is described; a shape that is none says which numbers do not fit."""
        if self.width % self.heads:
            raise SettingError(
                "heads share the width of a random network, so it must be a multiple of their number; got "
                f"width {self.width} and {self.heads} heads"
            )
        each = self.width // self.heads
        if self.positions == "rotary" and each % 2:
            raise SettingError(
                "rotary positions turn coordinates in pairs, so width / heads must be even; got "
                f"{self.width} / {self.heads} = {each}"
            )
        arch = Architecture(
            layers=self.layers, width=self.width, heads=self.heads, mlp=self.mlp, norm=self.norm,
            norm_place=self.place, positions=self.positions, parallel=self.parallel,
        )  # fmt: skip
        per_layer = self.width * (4 * self.width + (3 if self.mlp == "gated" else 2) * arch.mlp_width)
        if self.layers * per_layer > MOST_WEIGHTS:
            raise SettingError(
                f"a random network may have {MOST_WEIGHTS / 1e6:.0f} million weights here; {self.layers} "
                f"layers of width {self.width} have {self.layers * per_layer / 1e6:.0f}: take fewer or "
                "narrower layers"
            )
        return arch


class Setting(_Strict):
    """A network, a text, and how its parts are turned.

    >>> {Setting(skip=0.5): "half"}[Setting(skip=0.5)]
    'half'
    """

    model: Annotated[str, Field(min_length=1, max_length=300)] = RANDOM
    shape: Shape = Shape()
    """Of a random network; of no effect on others."""
    text: Annotated[str, Field(max_length=MOST_TEXT)] = "Call me Ishmael."
    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 32
    """The text is cut to so many."""
    skip: Annotated[float | None, Field(ge=-2, le=2)] = None
    """The weight of both skips; None: the model's own."""
    mlp: bool = True
    norm: bool = True
    mask: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    """As `nets.masks` spells it; None: the model's own."""
    window: Annotated[int | None, Field(ge=0, le=MOST_TOKENS)] = None
    """Tokens see no further than this, whatever the mask."""
    divisor: Annotated[float | None, Field(ge=1e-3, le=1e6)] = None
    """Of scores; None: the model's own."""
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """Multiplies the divisor."""
    layers: Annotated[int | None, Field(ge=1, le=MOST_DEPTH)] = None
    """Layers are repeated, or cut, to this depth; None: as many as the model has."""
    remedies: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    """As the command line spells each, joined by `;`: `attnscale:w=0.5;sqrtl`."""


class Request(_Strict):
    """What the page asks for: a setting, those pinned beside it, and which parts of the answer."""

    setting: Setting
    A: Setting | None = None
    B: Setting | None = None
    focus: Literal["now", "A", "B"] = "now"
    """Whose paths and bounds."""
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=len(PARTS), strict=False)] = PARTS

    @property
    def pinned(self) -> dict[str, Setting]:
        """The pinned settings by name."""
        return {name: pin for name, pin in (("A", self.A), ("B", self.B)) if pin is not None}


def read_request(body: bytes) -> Request:
    """A request from its JSON; one sentence for what is wrong with it."""
    try:
        return Request.model_validate_json(body)
    except ValidationError as error:
        raise SettingError(_said(error)) from error


def _said(error: ValidationError) -> str:
    """The first thing that is wrong, in a sentence.

    >>> try:
    ...     Setting(skip=7.0)
    ... except ValidationError as error:
    ...     _said(error)
    'the skip weight must be at most 2; got 7.0'
    """
    first = error.errors(include_url=False, include_context=False)[0]
    what = control(first["loc"])
    if first["type"] == "json_invalid":
        return "a request must be JSON as the page writes it; what came is none"
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:40]
        return f"there is no control named {name!r} on this page: take it out of the address"
    if first["type"] == "missing":
        return f"a request must have a {first['loc'][-1]}; it has none"
    said = first["msg"]
    for theirs, ours in WORDS.items():
        said = said.replace(theirs, ours)
    return f"{what} {said[:1].lower()}{said[1:]}; got {_short(first['input'])}"


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}..."
