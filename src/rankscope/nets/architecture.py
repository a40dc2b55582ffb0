"""`Architecture`: what a transformer is made of, apart from its weights.

One description covers the families that sources map onto it:

    post-norm (BERT)      X <- norm(a X + attention(X));         X <- norm(m X + mlp(X))
    pre-norm (GPT-2)      X <- a X + attention(norm X);          X <- m X + mlp(norm X)
    sandwich (Gemma 2)    X <- a X + norm(attention(norm X));    X <- m X + norm(mlp(norm X))
    parallel (GPT-NeoX)   X <- a X + attention(norm X) + mlp(norm X)

with a = `attention_skip` and m = `mlp_skip`; `norm="none"` takes every norm out.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rankscope.errors import ArchitectureError, FileError, one_of
from rankscope.nets.activations import ACTIVATIONS
from rankscope.nets.experts import Experts
from rankscope.nets.kernels import KERNELS, Kernel
from rankscope.nets.masks import Mask, MaskLike, spec_of
from rankscope.nets.norms import NORMS, Norm
from rankscope.nets.parts import PLACES, Part

MLP = Literal["plain", "gated", "experts", "none"]
NormPlace = Literal["pre", "post", "sandwich"]
Positions = Literal["none", "absolute", "relative", "rotary", "bias", "alibi"]
BIASES = ("query", "key", "value", "output", "mlp", "norm")
DEEPEST = 10**6
"""Layers at most: a depth beyond it is a slip of the hand, and would fill all memory before it is seen."""


LISTED = (
    "kept_heads", "biases", "mask", "rotary_frequencies", "rotary_scales", "bare_layers", "parts", "experts",
)  # fmt: skip
"""Fields that hold more than one number or word."""
CAPPED = ("softmax", "sigmoid", "uniform")
"""Kernels under which scores can be capped."""
OWN: dict[str, type] = {"kernel": Kernel, "mask": Mask, "norm": Norm}
"""Fields that take an object of one's own in the place of a name."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A frozen, validated, serialisable description of a transformer.

    >>> Architecture(layers=12, width=768, heads=12).head_width
    64
    """

    layers: int
    width: int
    heads: int
    key_heads: int = 0
    """Heads of keys and values; fewer than `heads` when they are grouped. 0: as many as `heads`."""
    head_width: int = 0
    """Width of a query, key or value. 0: width / heads."""

    kernel: str | Kernel = "softmax"
    """softmax, gaussian, uniform, sigmoid, linear, linformer:k, or a `Kernel` (see `kernels.py`)."""
    divisor: float = 0.0
    """Scores are divided by it: the temperature. 0: sqrt(head_width)."""
    score_cap: float = 0.0
    """Scores s, positions and all, become `cap tanh(s / cap)` (Gemma 2). 0: they stay as they are."""
    mask: str | Mask = "complete"
    """Who attends to whom (see `masks.py`). Masks given by layer are joined by `;` and repeat."""
    kept_heads: tuple[tuple[int, ...], ...] | None = None
    """The heads that speak in each layer; None: all."""

    positions: Positions = "none"
    length: int = 512
    """The most tokens a network with an `absolute` table or `linformer` can take."""
    rotary_base: float = 10000.0
    rotary_share: float = 1.0
    """The share of each head that is rotated."""
    rotary_pairs: Literal["half", "adjacent"] = "half"
    """Entry k is rotated with entry k + half (Llama) or with its neighbour (GPT-J)."""
    rotary_frequencies: tuple[tuple[float, ...], ...] = ()
    """The angle per position of each rotated pair, by layer; given by layer they repeat, as masks do.
    Empty: `rotary_base^(-2k / rotated width)` in every layer."""
    rotary_scales: tuple[float, ...] = ()
    """What rotated entries of queries and keys are multiplied by (yarn, longrope), by layer, repeating.
    Empty: 1."""
    rotary_reach: int = 0
    """The most tokens for which the angles are right, where they follow the length of the input (dynamic,
    longrope). 0: any number."""
    query_norm: bool = False
    """Every query and key goes through an RMSNorm of its own before positions (Qwen 3, Gemma 3). It belongs
    to the scores: a variant without norms keeps it."""
    head_gate: bool = False
    """What each head says is multiplied, entry by entry, by a sigmoid of the token that it says it to
    (Qwen3-Next)."""
    bias_buckets: int = 32
    bias_reach: int = 128
    """Distance from which the `bias` positions share one bucket (T5)."""

    mlp: MLP = "plain"
    mlp_width: int = 0
    """0: 4 width."""
    activation: str = "gelu"
    experts: Experts | None = None
    """Of an MLP `experts`: how many, how many each token goes through, their width (see `experts.py`)."""

    norm: str | Norm = "layer"
    """layer (centred, divided by its length), rms, scale (divided by the 2-norm), none, or a `Norm`."""
    norm_place: NormPlace = "post"
    norm_eps: float = 1e-12
    final_norm: bool = False
    """One more norm after the last layer, as pre-norm networks have."""
    bare_layers: tuple[int, ...] = ()
    """Layers (0-based) whose attention reads its input without a norm (ModernBERT: the first)."""

    attention_skip: float = 1.0
    """Weight of the skip around attention (lambda); 0 takes it out. The only skip of a parallel block."""
    mlp_skip: float = 1.0
    parallel: bool = False
    """Attention and MLP read the same input and add up, instead of one after the other."""
    shared: bool = False
    """Every layer has the same weights (ALBERT)."""
    biases: bool | tuple[str, ...] = BIASES
    """Which parts have a bias, of query, key, value, output, mlp, norm. True or False: all or none."""
    parts: tuple[Part, ...] = ()
    """Parts of one's own, in the order in which they act (see `parts.py`)."""

    def __post_init__(self) -> None:
        self._check_types()
        self._fill()
        self._check()

    def _check_types(self) -> None:
        """Whole numbers, numbers, words and yes-or-no where each belongs."""
        for field in dataclasses.fields(self):
            value, usual = getattr(self, field.name), field.default
            if field.name in LISTED or isinstance(value, OWN.get(field.name, ())):
                continue
            kind = int if usual is dataclasses.MISSING else type(usual)
            fits = isinstance(value, int | float if kind is float else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                word = {int: "a whole number", float: "a number", str: "a word", bool: "True or False"}[kind]
                raise ArchitectureError(f"{field.name} must be {word}; got {value!r}")
            if kind is float:
                object.__setattr__(self, field.name, float(value))

    def _fill(self) -> None:
        """Put the usual numbers in place of 0, so that equal networks compare equal."""
        put = object.__setattr__
        for name in ("layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ArchitectureError(f"{name} must be a whole number >= 1; got {getattr(self, name)!r}")
        if self.layers > DEEPEST:
            raise ArchitectureError(f"layers must be at most {DEEPEST}; got {self.layers}")
        for name in ("head_width", "divisor"):
            if not getattr(self, name) >= 0:
                raise ArchitectureError(
                    f"{name} must be > 0, or 0 for its usual value; got {getattr(self, name)!r}"
                )
        if not self.head_width:
            if self.width % self.heads:
                raise ArchitectureError(
                    f"width must be a multiple of heads unless head_width is given; got width {self.width} "
                    f"and {self.heads} heads"
                )
            put(self, "head_width", self.width // self.heads)
        put(self, "key_heads", self.key_heads or self.heads)
        put(self, "divisor", self.divisor or math.sqrt(self.head_width))
        put(self, "mlp_width", self.mlp_width or 4 * self.width)
        biases: Any = self.biases
        if isinstance(biases, str) or not isinstance(biases, bool | tuple | list):
            raise ArchitectureError(
                f"biases must be True, False or a tuple of {', '.join(BIASES)}; got {biases!r}"
            )
        put(self, "biases", tuple(biases) if not isinstance(biases, bool) else BIASES if biases else ())
        put(self, "mask", self.mask if isinstance(self.mask, Mask) else mask_spec(self.mask))
        for name in ("kept_heads", "rotary_frequencies", "rotary_scales", "bare_layers", "parts"):
            value = _frozen(getattr(self, name))
            if not isinstance(value, tuple) and (name != "kept_heads" or value is not None):
                raise ArchitectureError(f"{name} must be a tuple; got {value!r}")
            put(self, name, value)

    def _check(self) -> None:
        _among("mlp", self.mlp, get_args(MLP))
        if isinstance(self.norm, str):
            _among("norm", self.norm, (*NORMS, "none"))
        _among("norm_place", self.norm_place, get_args(NormPlace))
        _among("positions", self.positions, get_args(Positions))
        _among("activation", self.activation, ACTIVATIONS)
        if isinstance(self.kernel, str):
            _among("kernel", self.kernel.partition(":")[0], KERNELS)
        _among("rotary_pairs", self.rotary_pairs, ("half", "adjacent"))
        for part in self.biases if isinstance(self.biases, tuple) else ():
            _among("biases", part, BIASES)
        for name in ("key_heads", "head_width", "mlp_width", "length", "bias_buckets", "bias_reach"):
            if getattr(self, name) < 1:
                raise ArchitectureError(f"{name} must be a whole number >= 1; got {getattr(self, name)!r}")
        for name in ("divisor", "rotary_base"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ArchitectureError(f"{name} must be a finite number > 0; got {getattr(self, name)!r}")
        for name in ("attention_skip", "mlp_skip"):
            if not math.isfinite(getattr(self, name)):
                raise ArchitectureError(
                    f"{name} must be a finite number (0 takes the skip out); got {getattr(self, name)!r}"
                )
        if not (math.isfinite(self.norm_eps) and self.norm_eps >= 0):
            raise ArchitectureError(f"norm_eps must be a finite number >= 0; got {self.norm_eps!r}")
        if self.heads % self.key_heads:
            raise ArchitectureError(
                f"heads must be a multiple of key_heads; got {self.heads} and {self.key_heads}"
            )
        if self.parallel and self.mlp_skip != 1.0:
            raise ArchitectureError(
                f"a parallel block has one skip, attention_skip; got mlp_skip {self.mlp_skip}"
            )
        self._check_positions()
        self._check_cap()
        self._check_linformer()
        self._check_kept_heads()
        self._check_bare_layers()
        self._check_experts()
        self._check_parts()

    def _check_positions(self) -> None:
        if self.positions == "rotary" and (
            not 0 < self.rotary_share <= 1 or self.rotary_width < 2 or self.rotary_width % 2
        ):
            raise ArchitectureError(
                "rotary positions need an even rotated width: rotary_share * head_width must be an even "
                f"number >= 2; got {self.rotary_share} * {self.head_width}"
            )
        for frequencies in self.rotary_frequencies:
            if not isinstance(frequencies, tuple) or len(frequencies) != self.rotary_width // 2:
                raise ArchitectureError(
                    f"rotary_frequencies must be tuples of {self.rotary_width // 2} numbers, half the "
                    f"rotated width; got {frequencies!r}"
                )
            if not all(isinstance(number, int | float) and math.isfinite(number) for number in frequencies):
                raise ArchitectureError(f"rotary_frequencies must be finite numbers; got {frequencies!r}")
        if not all(type(scale) in (int, float) and 0 < scale < math.inf for scale in self.rotary_scales):
            raise ArchitectureError(f"rotary_scales must be finite numbers > 0; got {self.rotary_scales!r}")
        if self.rotary_reach < 0:
            raise ArchitectureError(f"rotary_reach must be a number of tokens >= 0; got {self.rotary_reach}")
        if self.positions == "relative" and self.width % 2:
            raise ArchitectureError(f"relative positions need an even width; got {self.width}")
        if self.kernel == "linear" and self.positions in ("relative", "bias", "alibi"):
            raise ArchitectureError(
                f"kernel 'linear' has no scores to add {self.positions} positions to: "
                "use none, absolute or rotary"
            )

    def _check_cap(self) -> None:
        if not 0 <= self.score_cap < math.inf:
            raise ArchitectureError(
                f"score_cap must be a finite number > 0, or 0 for none; got {self.score_cap!r}"
            )
        if self.score_cap and self.kernel not in CAPPED:
            raise ArchitectureError(
                f"scores can be capped under kernel {', '.join(CAPPED)}; got {self.kernel!r}: take the cap "
                "out, score_cap=0"
            )

    def _check_linformer(self) -> None:
        if not isinstance(self.kernel, str):
            return
        name, colon, rank = self.kernel.partition(":")
        if name == "linformer":
            if not (rank.isdecimal() and int(rank) >= 1):
                raise ArchitectureError(
                    f"kernel linformer must be written linformer:k with k >= 1; got {self.kernel!r}"
                )
            if self.mask != "complete":
                raise ArchitectureError(
                    "linformer mixes all tokens before attending, so its mask must be complete; "
                    f"got {self.mask!r}"
                )
            if self.positions in ("relative", "rotary", "bias", "alibi"):
                raise ArchitectureError(
                    "linformer's keys are mixtures of tokens and have no position: positions must be none "
                    f"or absolute; got {self.positions!r}"
                )
        elif colon:
            raise ArchitectureError(f"kernel {name!r} takes no number; got {self.kernel!r}")

    def _check_kept_heads(self) -> None:
        if self.kept_heads is None:
            return
        if not all(isinstance(kept, tuple) for kept in self.kept_heads):
            raise ArchitectureError(
                f"kept_heads must have one tuple of heads per layer; got {self.kept_heads!r}"
            )
        if len(self.kept_heads) != self.layers:
            raise ArchitectureError(
                f"kept_heads must have one tuple per layer ({self.layers}); got {len(self.kept_heads)}"
            )
        for kept in self.kept_heads:
            for head in kept:
                if not (isinstance(head, int) and 0 <= head < self.heads):
                    raise ArchitectureError(f"heads are numbered 0..{self.heads - 1}; got {head!r}")

    def _check_bare_layers(self) -> None:
        if not self.bare_layers:
            return
        if self.norm_place == "post" or self.shared:
            raise ArchitectureError(
                "bare_layers are layers of a pre-norm or sandwich network that do not share their weights; "
                f"got norm_place {self.norm_place!r}, shared {self.shared}"
            )
        for layer in self.bare_layers:
            if not (type(layer) is int and 0 <= layer < self.layers):
                raise ArchitectureError(f"bare_layers are numbered 0..{self.layers - 1}; got {layer!r}")

    def _check_experts(self) -> None:
        if self.experts is not None and not isinstance(self.experts, Experts):
            raise ArchitectureError(
                f"experts must be an Experts(number=, chosen=, width=); got {self.experts!r}"
            )
        if self.mlp == "experts" and self.experts is None:
            raise ArchitectureError(
                "mlp 'experts' must say which: give experts=Experts(number=, chosen=, width=); got none"
            )
        for layer in () if self.experts is None else self.experts.dense_layers:
            if self.shared or not (type(layer) is int and 0 <= layer < self.layers):
                raise ArchitectureError(
                    f"dense_layers are numbered 0..{self.layers - 1}, of layers that do not share their "
                    f"weights; got {layer!r}"
                )

    def mixes(self, layer: int) -> bool:
        """Whether the MLP of a layer (0-based) is a mixture of experts."""
        return self.mlp == "experts" and self.experts is not None and layer not in self.experts.dense_layers

    def _check_parts(self) -> None:
        for part in self.parts:
            if not isinstance(part, Part):
                raise ArchitectureError(
                    "parts must be objects with a name, a place and a rule named plain (see "
                    f"rankscope.nets.parts); got {part!r:.60}"
                )
            _among(f"place of {part.name}", part.place, PLACES)

    def __repr__(self) -> str:
        """What it takes to write it down: fields at their usual value are left out."""
        usual = {
            "key_heads": self.heads,
            "head_width": self.width / self.heads,
            "divisor": math.sqrt(self.head_width),
            "mlp_width": 4 * self.width,
        }
        said = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != usual.get(field.name, field.default)
        )
        return f"Architecture({', '.join(said)})"

    def departures(self) -> list[str]:
        """In a few words, which of its parts are missing or weighted, and its mask where it is not complete:
        what tells a variant from the whole."""
        skips = {"attention skip": self.attention_skip}
        if self.mlp != "none" and not self.parallel:
            skips["MLP skip"] = self.mlp_skip
        if len(set(skips.values())) == 1:
            skips = {"skip": self.attention_skip}
        said = [
            f"no {name}" if weight == 0 else f"{name} {weight:g}"
            for name, weight in skips.items()
            if weight != 1
        ]
        said += [f"no {word}" for word, kind in (("MLP", self.mlp), ("norm", self.norm)) if kind == "none"]
        said += [] if self.kept_heads is None else ["some heads silent"]
        said += ["gated heads"] if self.head_gate else []
        if self.mask != "complete":
            mask = spec_of(self.mask) if isinstance(self.mask, Mask) else self.mask
            said.append(f"mask {mask if len(mask) <= 40 else mask[:39] + '…'}")
        return said + [part.name for part in self.parts]

    def has_bias(self, part: str) -> bool:
        """Whether query, key, value, output, mlp or norm has a bias."""
        return isinstance(self.biases, tuple) and part in self.biases

    @property
    def rotary_width(self) -> int:
        """Entries of each head that are rotated."""
        return round(self.rotary_share * self.head_width)

    @property
    def linformer_rank(self) -> int | None:
        """k of `linformer:k`; None for every other kernel."""
        name, _, rank = self.kernel.partition(":") if isinstance(self.kernel, str) else ("", "", "")
        return int(rank) if name == "linformer" else None

    def rotary_scale_of(self, layer: int) -> float:
        """What rotated entries are multiplied by in a layer (0-based); 1 where nothing is rotated."""
        if self.positions != "rotary" or not self.rotary_scales:
            return 1.0
        return self.rotary_scales[layer % len(self.rotary_scales)]

    def mask_of(self, layer: int) -> str | Mask:
        """The mask of a layer (0-based): by-layer masks repeat."""
        if isinstance(self.mask, Mask):
            return self.mask
        masks = self.mask.split(";")
        return masks[layer % len(masks)]

    def replace(self, **changes: Any) -> "Architecture":
        """The same architecture with some fields changed; widths at their usual value follow along.

        >>> Architecture(layers=12, width=768, heads=12).replace(width=384).mlp_width
        1536
        """
        whole = self.width % self.heads == 0
        follow: dict[str, Any] = {}
        if {"width", "heads"} & changes.keys() and whole and self.head_width == self.width // self.heads:
            follow["head_width"] = 0
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
        objects = {_named(each): each for each in own}
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            _among("architecture field", name, known)
        for name in ("layers", "width", "heads"):
            if name not in fields:
                raise ArchitectureError(
                    f"an architecture must say its layers, width and heads; {name} is missing"
                )
        found = {name: _found(_frozen(value), objects) for name, value in fields.items()}
        if isinstance(found.get("experts"), dict):
            found["experts"] = Experts.from_dict(found["experts"])
        return cls(**found)

    @classmethod
    def read(cls, path: str | Path, own: Iterable[Any] = ()) -> "Architecture":
        """An architecture from a JSON file of its fields; `own` as in `from_dict`."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileError(f"an architecture is read from a JSON file; there is none at {path}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise FileError(f"{path} must be a JSON file of architecture fields; {error}") from error
        if not isinstance(fields, dict):
            raise FileError(
                f"{path} must hold a JSON object of architecture fields; got a {type(fields).__name__}"
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
    return value if value is None or isinstance(value, str | int | float) else _named(value)


def _named(value: Any) -> str:
    """How a file speaks of an object of one's own."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    numbers = {each.name: getattr(value, each.name) for each in fields if each.name not in ("name", "place")}
    made_of = [f"{name}={each!r}" for name, each in numbers.items() if isinstance(each, int | float | str)]
    return f"own:{value.name}" + (f"({', '.join(made_of)})" if made_of else "")


def _found(value: Any, objects: dict[str, Any]) -> Any:
    """A value of a file with the objects that it speaks of in their places."""
    if isinstance(value, tuple):
        return tuple(_found(item, objects) for item in value)
    if not isinstance(value, str) or not value.startswith("own:"):
        return value
    if value not in objects:
        raise ArchitectureError(
            f"this architecture has a part of its own, {value.removeprefix('own:')!r}, which a file cannot "
            f"hold: pass the object, from_dict(fields, own=[...]); got {', '.join(objects) or 'none'}"
        )
    return objects[value]


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _among(what: str, value: object, known: Any) -> None:
    if value not in known:
        raise ArchitectureError(one_of(what, value, known))
