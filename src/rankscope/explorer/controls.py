"""The controls of the explorer's page, checked: everything that a page can ask for is one `Controls`.

Limits keep an answer within seconds. A value out of range is refused with a sentence, never clipped: a link
shows what it says, or says why not. Sentences for the page use the words that stand beside its controls, in
place of the names of fields (`control_name`, `in_page_words`).
"""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankscope.errors import SettingError
from rankscope.nets import Architecture

RANDOM = "random"
"""The name of a network that is drawn at random, of the shape that comes with it."""
MOST_WEIGHTS = 20_000_000
"""Weights of a random network: 160 MB in float64."""
MOST_TEXT = 4000
MOST_TOKENS = 64
MOST_DEPTH = 96
PYDANTIC_WORDS = {
    "Input should be": "must be", "String should have": "must have", "less than or equal to": "at most",
    "greater than or equal to": "at least", "a valid boolean": "on or off (true or false)",
    "a valid integer": "a whole number", "a valid number": "a number", "a valid string": "text",
}  # fmt: skip
"""Words of pydantic's messages, and ours in place of them."""
_SHAPE = "of the random network"
CONTROL_NAMES = {
    "model": "the model", "text": "the text", "tokens": "the number of tokens", "skip": "the skip weight",
    "mlp": "the MLP", "norm": "the norm", "mask": "the mask", "window": "the window",
    "divisor": "the score divisor", "temperature": "the temperature", "layers": "the depth",
    "remedies": "the remedies", "shape": "the shape of the random network",
    "shape.layers": f"the number of layers {_SHAPE}", "shape.width": f"the width {_SHAPE}",
    "shape.heads": f"the number of heads {_SHAPE}", "shape.seed": f"the seed {_SHAPE}",
    "shape.init": f"the weights {_SHAPE}", "shape.mlp": f"the MLP {_SHAPE}",
    "shape.norm": f"the norm {_SHAPE}", "shape.place": f"the place of the norm {_SHAPE}",
    "shape.positions": f"the positions {_SHAPE}", "shape.parallel": f"parallel branches {_SHAPE}",
}  # fmt: skip
"""What a control of the page is called in a sentence."""
FIELD_NAMES = {
    "attention_skip": "the skip around attention", "mlp_skip": "the skip around the MLP",
    "norm_place": "the place of the norm", "head_width": "the width of a head",
    "mlp_width": "the width of the MLP", "key_heads": "the number of key heads",
}  # fmt: skip
"""Fields of an architecture that its errors name, in the page's words."""
_NAME = re.compile(r"'[^']*'|\"[^\"]*\"|\b[a-z]+(?:_[a-z]+)+\b")
Part = Literal["curve", "cloud", "paths", "bounds"]
PARTS: tuple[Part, ...] = ("curve", "cloud", "paths", "bounds")
"""What an answer consists of, in the order in which it comes."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class RandomShape(_Strict):
    """The shape of a random network, and how its weights are drawn."""

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
        """The architecture of this shape; numbers that do not fit together are refused."""
        if self.width % self.heads:
            raise SettingError(
                "heads share the width of a random network, so it must be a multiple of their number; got "
                f"width {self.width} and {self.heads} heads",
                subject="shape.width",
            )
        head_width = self.width // self.heads
        if self.positions == "rotary" and head_width % 2:
            raise SettingError(
                "rotary positions turn coordinates in pairs, so width / heads must be even; got "
                f"{self.width} / {self.heads} = {head_width}",
                subject="shape.width",
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
                "narrower layers",
                subject="shape.layers",
            )
        return arch


class Controls(_Strict):
    """A network, a text, and the positions of all controls.

    >>> {Controls(skip=0.5): "half"}[Controls(skip=0.5)]
    'half'
    """

    model: Annotated[str, Field(min_length=1, max_length=300)] = RANDOM
    shape: RandomShape = RandomShape()
    """The shape of a random network; no effect on others."""
    text: Annotated[str, Field(max_length=MOST_TEXT)] = "Call me Ishmael."
    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 32
    """The text is cut to this many tokens."""
    skip: Annotated[float | None, Field(ge=-2, le=2)] = None
    """The weight of both skips; None: the model's own."""
    mlp: bool = True
    norm: bool = True
    mask: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    """As `nets.masks` spells it; None: the model's own."""
    window: Annotated[int | None, Field(ge=0, le=MOST_TOKENS)] = None
    """Tokens see no further than this, whatever the mask."""
    divisor: Annotated[float | None, Field(ge=1e-3, le=1e6)] = None
    """Divides the scores; None: the model's own."""
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """Multiplies the divisor."""
    layers: Annotated[int | None, Field(ge=1, le=MOST_DEPTH)] = None
    """Layers are repeated, or cut, to this depth; None: as many as the model has."""
    remedies: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    """As the command line spells each, joined by `;`: `attnscale:w=0.5;sqrtl`."""


class PageRequest(_Strict):
    """What the page asks for: its controls, those of two pins, and which parts of the answer."""

    setting: Controls
    A: Controls | None = None
    B: Controls | None = None
    focus: Literal["now", "A", "B"] = "now"
    """Which of the three the paths and bounds are of."""
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=len(PARTS), strict=False)] = PARTS

    @property
    def pinned(self) -> dict[str, Controls]:
        """The controls of the pins, by name."""
        return {name: pin for name, pin in (("A", self.A), ("B", self.B)) if pin is not None}


def read_request(body: bytes) -> PageRequest:
    """Read a request from its JSON; the error's sentence says what is wrong with it."""
    try:
        return PageRequest.model_validate_json(body)
    except ValidationError as error:
        location = error.errors(include_url=False, include_context=False)[0]["loc"]
        raise SettingError(_sentence(error), subject=str(location[-1]) if location else "") from error


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong with a request, in a sentence.

    >>> try:
    ...     Controls(skip=7.0)
    ... except ValidationError as error:
    ...     _sentence(error)
    'the skip weight must be at most 2; got 7.0'
    """
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return "a request must be JSON as the page writes it; what came is none"
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:40]
        return f"there is no control named {name!r} on this page: take it out of the address"
    if first["type"] == "missing":
        return f"a request must have a {first['loc'][-1]}; it has none"
    message = first["msg"]
    for theirs, ours in PYDANTIC_WORDS.items():
        message = message.replace(theirs, ours)
    return f"{control_name(first['loc'])} {message[:1].lower()}{message[1:]}; got {_short(first['input'])}"


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}..."


def control_name(location: tuple[int | str, ...]) -> str:
    """What a reader of the page calls the control at this location of a request.

    >>> control_name(("setting", "shape", "width")), control_name(("A", "skip"))
    ('the width of the random network', 'the skip weight of pin A')
    """
    steps = [str(step) for step in location if step not in ("setting", "parts")]
    pin = steps.pop(0) if steps[:1] in (["A"], ["B"]) else ""
    field = ".".join(steps)
    name = CONTROL_NAMES.get(field, field.replace("_", " ")) or "a request"
    return f"{name} of pin {pin}" if pin else name


def in_page_words(sentence: str) -> str:
    """A sentence without the names of fields; what stands in quotes stays as it is.

    >>> in_page_words("norm_place must be 'post'; got 'a_b'")
    "the place of the norm must be 'post'; got 'a_b'"
    """

    def words(match: re.Match[str]) -> str:
        name = match[0]
        return name if name[0] in "'\"" else FIELD_NAMES.get(name, name.replace("_", " "))

    return _NAME.sub(words, sentence)
