"""The controls of the explorer's page, checked: everything that a page can ask for is one `Controls`.

Limits keep an answer within seconds. A value out of range is refused with a sentence, never clipped: a link
shows what it says, or says why not. Sentences for the page use the words that stand beside its controls (the
`title` of each field), in place of the names of fields (`control_name`, `in_page_words`).
"""

import math
import re
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankscope.errors import SettingError, require
from rankscope.nets import Architecture

RANDOM = "random"  # the name of a network that is drawn at random, of the shape that comes with it
MOST_WEIGHTS = 20_000_000  # of a random network: 160 MB in float64
MOST_TEXT, MOST_TOKENS, MOST_DEPTH = 4000, 64, 96
PYDANTIC_WORDS = {
    "Input should be": "must be",
    "String should have": "must have",
    "less than or equal to": "at most",
    "greater than or equal to": "at least",
    "a valid boolean": "on or off (true or false)",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
}  # words of pydantic's messages, and ours in place of them
FIELD_NAMES = {
    "attention_skip": "the skip around attention",
    "mlp_skip": "the skip around the MLP",
    "norm_place": "the place of the norm",
    "head_width": "the width of a head",
    "mlp_width": "the width of the MLP",
    "key_heads": "the number of key heads",
}  # fields of an architecture that its errors name, in the page's words
_NAME = re.compile(r"'[^']*'|\"[^\"]*\"|\b[a-z]+(?:_[a-z]+)+\b")
Part = Literal["curve", "cloud", "paths", "bounds"]
PARTS: tuple[Part, ...] = get_args(Part)  # what an answer consists of, in the order in which it comes


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class RandomShape(_Strict):
    """The shape of a random network, and how its weights are drawn."""

    layers: int = Field(default=6, ge=1, le=24, title="the number of layers")
    width: int = Field(default=64, ge=2, le=512, title="the width")
    heads: int = Field(default=4, ge=1, le=32, title="the number of heads")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, title="the seed")
    init: Literal["bert", "xavier", "kaiming", "orthogonal"] = Field(default="bert", title="the weights")
    mlp: Literal["plain", "gated"] = Field(default="plain", title="the MLP")
    norm: Literal["layer", "rms", "scale"] = Field(default="layer", title="the norm")
    place: Literal["post", "pre", "sandwich"] = Field(default="post", title="the place of the norm")
    positions: Literal["none", "rotary", "bias", "alibi", "relative"] = Field(default="none", title="the positions")
    parallel: bool = Field(default=False, title="parallel branches")

    def architecture(self) -> Architecture:
        """The architecture of this shape; numbers that do not fit together are refused."""
        sentence = f"width must be a multiple of the number of heads; got width {self.width} and {self.heads} heads"
        require(self.width % self.heads == 0, sentence, SettingError, "shape.width")
        if self.positions == "rotary" and self.width // self.heads % 2:
            each = f"{self.width} / {self.heads} = {self.width // self.heads}"
            sentence = f"rotary positions turn coordinates in pairs, so width / heads must be even; got {each}"
            raise SettingError(sentence, subject="shape.width")
        same = self.model_dump(include={"layers", "width", "heads", "mlp", "norm", "positions", "parallel"})
        arch = Architecture(norm_place=self.place, **same)
        weights = self.layers * self.width * (4 * self.width + (3 if self.mlp == "gated" else 2) * arch.mlp_width)
        sentence = (
            f"a random network may have {MOST_WEIGHTS / 1e6:.0f} million weights here; {self.layers} layers of "
            f"width {self.width} have {weights / 1e6:.0f}: take fewer or narrower layers"
        )
        require(weights <= MOST_WEIGHTS, sentence, SettingError, "shape.layers")
        return arch


class Controls(_Strict):
    """A network, a text, and the positions of all controls.

    >>> {Controls(skip=0.5): "half"}[Controls(skip=0.5)]
    'half'
    """

    model: str = Field(default=RANDOM, min_length=1, max_length=300, title="the model")
    shape: RandomShape = Field(default=RandomShape(), title="the shape of the random network")
    """The shape of a random network; no effect on others."""
    text: str = Field(default="Call me Ishmael.", max_length=MOST_TEXT, title="the text")
    tokens: int = Field(default=32, ge=1, le=MOST_TOKENS, title="the number of tokens")
    """The text is cut to this many tokens."""
    skip: float | None = Field(default=None, ge=-2, le=2, title="the skip weight")
    """The weight of both skips; None: the model's own."""
    mlp: bool = Field(default=True, title="the MLP")
    norm: bool = Field(default=True, title="the norm")
    mask: str | None = Field(default=None, min_length=1, max_length=200, title="the mask")
    """As `nets.masks` spells it; None: the model's own."""
    window: int | None = Field(default=None, ge=0, le=MOST_TOKENS, title="the window")
    """Tokens see no further than this, whatever the mask."""
    divisor: float | None = Field(default=None, ge=1e-3, le=1e6, title="the score divisor")
    """Divides the scores; None: the model's own."""
    temperature: float = Field(default=1.0, ge=0.01, le=100.0, title="the temperature")  # Multiplies the divisor
    layers: int | None = Field(default=None, ge=1, le=MOST_DEPTH, title="the depth")
    """Layers are repeated, or cut, to this depth; None: as many as the model has."""
    remedies: str | None = Field(default=None, min_length=1, max_length=200, title="the remedies")
    """As the command line spells each, joined by `;`: `attnscale:w=0.5;sqrtl`."""


CONTROL_NAMES = {
    **{name: str(field.title) for name, field in Controls.model_fields.items()},
    **{f"shape.{name}": f"{field.title} of the random network" for name, field in RandomShape.model_fields.items()},
}  # what a control of the page is called in a sentence


class PageRequest(_Strict):
    """What the page asks for: its controls, those of two pins, and which parts of the answer."""

    setting: Controls
    A: Controls | None = None
    B: Controls | None = None
    focus: Literal["now", "A", "B"] = "now"  # Which of the three the paths and bounds are of
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=len(PARTS), strict=False)] = PARTS

    @property
    def pinned(self) -> dict[str, Controls]:
        """The controls of the pins, by name."""
        return {name: pin for name, pin in (("A", self.A), ("B", self.B)) if pin is not None}


class ForecastRequest(_Strict):
    """What the page's panel of forecasts asks for."""

    setting: Controls
    large: bool = False  # Whether a network is forecast that takes long, too
    mends: bool = False  # Whether changes that would mend it are forecast as well


Asked = TypeVar("Asked", bound=_Strict)


def read_request(body: bytes, kind: type[Asked]) -> Asked:
    """Read a request of this kind from its JSON; the error's sentence says what is wrong with it."""
    try:
        return kind.model_validate_json(body)
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
        return "a request must be JSON as the page writes it; this one is not"
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
