"""The fields of an `Architecture`: what each means, its usual value, what is read off them, and what they must be.

Each check yields the field that is wrong, and a sentence; `architecture.py` raises the first."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from rankscope.errors import ArchitectureError, one_of
from rankscope.nets.kernels import KERNELS, Kernel, kernel_of
from rankscope.nets.masks import Mask
from rankscope.nets.mlp import ACTIVATIONS, Experts
from rankscope.nets.norms import NORMS, Norm
from rankscope.nets.parts import PLACES, Part, Several, pieces

MLP = Literal["plain", "gated", "experts", "none"]
NormPlace = Literal["pre", "post", "sandwich", "output"]
Positions = Literal["none", "absolute", "relative", "rotary", "bias", "alibi", "disentangled"]
BIASES = ("query", "key", "value", "output", "mlp", "norm")


@dataclass(frozen=True, kw_only=True)
class ArchitectureFields:
    """The fields of a transformer, unchecked: `Architecture` is the checked class.

    Heads of keys and values, `key_heads`, for 4 heads of queries:

        key_heads = 4 (0)      key_heads = 2          key_heads = 1
        multi-head             grouped queries        multi-query

        v  v  v  v             v     v                v
        k  k  k  k             k     k                k
        |  |  |  |             |\\    |\\               |\\--\\--\\
        q  q  q  q             q  q  q  q             q  q  q  q
    """

    # ---- size --------------------
    layers: int
    width: int  # Width of a token (d_model, hidden_size)
    heads: int  # Heads of queries in a layer
    key_heads: int = 0  # Heads of keys and values; fewer than `heads` when they are grouped. 0: as many as `heads`
    head_width: int = 0  # Width of a query, key or value. 0: width / heads
    value_width: int = 0  # Width of a value where it differs. 0: head_width
    query_latent: int = 0
    """Queries are linear in a latent of this width, `RMSNorm(x A)` (DeepSeek). 0: in the token itself."""
    key_latent: int = 0
    """Keys and values are linear in one latent of this width. For keys alone, as many entries more of x A as
    are rotated stand beside it, without a norm. 0: in the token itself."""

    # ---- attention: scores, pattern, mask --------------------
    kernel: str | Kernel = "softmax"
    """softmax, gaussian, uniform, sink, sigmoid, linear, sinkhorn:k, linformer:k, or a `Kernel` (`kernels.py`)."""
    divisor: float = 0.0  # Scores are divided by it: the temperature. 0: sqrt(head_width)
    score_cap: float = 0.0
    """Scores s, positions and all, become `cap tanh(s / cap)` (Gemma 2). 0: they stay as they are."""
    log_gain: float = 0.0
    """Scores, positions, cap and all, are multiplied by `log_gain ln n`, n the valid tokens of a sample; in
    cross-attention those of the memory. 0: they stay as they are."""
    mask: str | Mask = "complete"
    """Which tokens see which (`masks.py`). Masks given by layer are joined by `;` and repeat."""
    kept_heads: tuple[tuple[int, ...], ...] | None = None  # The active heads of each layer; None: all

    # ---- positions --------------------
    positions: Positions = "none"
    length: int = 512  # The most tokens a network with an `absolute` table or `linformer` can take
    rotary_base: float = 10000.0
    rotary_share: float = 1.0  # The share of each head that is rotated
    rotary_pairs: Literal["half", "adjacent"] = "half"
    """Entry k is rotated with entry k + half (Llama) or with its neighbour (GPT-J)."""
    rotary_frequencies: tuple[tuple[float, ...], ...] = ()
    """The angle per position of each rotated pair, by layer; given by layer they repeat, as masks do.
    Empty: `rotary_base^(-2k / rotated width)` in every layer."""
    rotary_scales: tuple[float, ...] = ()
    """What rotated entries of queries and keys are multiplied by (yarn, longrope), by layer, repeating. Empty: 1."""
    rotary_reach: int = 0
    """The most tokens for which the angles are right, where they follow the length of the input (dynamic,
    longrope). 0: any number."""
    rotary_grid: tuple[int, ...] = ()
    """(rows, columns, others) where tokens are patches of an image, after so many others that are not rotated
    (DINOv3): the first half of the angles is per row, the second per column, and the image ends at -1 and 1."""
    query_norm: bool = False
    """Every query and key goes through an RMSNorm of its own before positions (Qwen 3, Gemma 3). It belongs
    to the scores: a variant without norms keeps it."""
    query_norm_across: bool = False  # Whether it is one norm of all heads of a token together (OLMo 2), not one of each
    head_gate: bool = False
    """The output of each head is multiplied, entry by entry, by a sigmoid of the query's token (Qwen3-Next)."""
    bias_buckets: int = 32
    """Buckets of distances that the `bias` positions have (T5); of `disentangled` ones, those on each side."""
    bias_reach: int = 128
    """Distance from which the `bias` positions share one bucket (T5), and `disentangled` ones, which have a bucket
    for each distance if it is 1."""
    bias_ahead: bool = True
    """Whether half of the buckets are of tokens ahead; without, those all fall into the bucket of distance 0
    (T5's decoder, where none is seen)."""

    # ---- decoder --------------------
    cross_attention: bool = False
    """Between attention and MLP every block attends to a memory, tokens of another network (`pass_settings.py`)."""

    # ---- MLP --------------------
    mlp: MLP = "plain"
    mlp_width: int = 0  # Inner width of the MLP (intermediate_size). 0: 4 width
    activation: str = "gelu"
    experts: Experts | None = None
    """Of an MLP `experts`: how many, how many each token goes through, their width (`mlp.py`)."""

    # ---- norms --------------------
    norm: str | Norm = "layer"
    """layer (centred, divided by its length), rms, scale (divided by the 2-norm), none, or a `Norm`."""
    norm_place: NormPlace = "post"
    norm_eps: float = 1e-12
    final_norm: bool = False  # One more norm after the last layer, as pre-norm networks have
    bare_layers: tuple[int, ...] = ()
    """Layers (0-based) whose attention reads its input without a norm (ModernBERT: the first)."""

    # ---- block --------------------
    attention_skip: float = 1.0
    """Weight of the skip around attention (lambda), and of that around cross-attention; 0 takes it out. The
    only skip of a parallel block."""
    mlp_skip: float = 1.0  # Weight of the skip around the MLP; 0 takes it out
    parallel: bool = False  # Attention and MLP read the same input and add up, instead of one after the other
    shared: bool = False  # Every layer has the same weights (ALBERT)
    biases: bool | tuple[str, ...] = BIASES
    """Which parts have a bias, of query, key, value, output, mlp, norm. True or False: all or none."""
    parts: tuple[Part | Several, ...] = ()
    """Parts of your own and remedies, in the order in which they act (`parts.py`)."""

    def mixes(self, layer: int) -> bool:
        """Whether the MLP of a layer (0-based) is a mixture of experts."""
        return self.mlp == "experts" and self.experts is not None and layer not in self.experts.dense_layers

    def has_bias(self, part: str) -> bool:
        """Whether query, key, value, output, mlp or norm has a bias."""
        return isinstance(self.biases, tuple) and part in self.biases

    @cached_property
    def pieces(self) -> tuple[Part, ...]:
        """Every part at its one place: those that stand at several are taken apart."""
        return pieces(self.parts)

    @property
    def rotary_width(self) -> int:
        """Entries of each head that are rotated."""
        return round(self.rotary_share * self.head_width)

    @property
    def latent_width(self) -> int:
        """Entries that keys are linear in, where they are of a latent: its own and those beside it."""
        return self.key_latent + (self.rotary_width if self.positions == "rotary" else 0)

    @cached_property
    def linformer_rank(self) -> int | None:
        """k of `linformer:k`; None for every other kernel."""
        return self._kernel_number("linformer")

    @cached_property
    def sinkhorn_rounds(self) -> int | None:
        """k of `sinkhorn:k`; None for every other kernel."""
        return self._kernel_number("sinkhorn")

    def _kernel_number(self, kernel: str) -> int | None:
        name, _, k = self.kernel.partition(":") if isinstance(self.kernel, str) else ("", "", "")
        return int(k) if name == kernel else None

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


DEEPEST = 10**6  # Layers at most: a depth beyond it is a slip of the hand, and would fill all memory before it is seen
TUPLES = ("kept_heads", "rotary_frequencies", "rotary_scales", "rotary_grid", "bare_layers", "parts")
OBJECTS: dict[str, type] = {"kernel": Kernel, "mask": Mask, "norm": Norm}
"""Fields that take an object of the user's own instead of a name."""
WORDS = {int: "a whole number", float: "a number", str: "a word", bool: "True or False"}
Problems = Iterator[tuple[str, str]]  # (subject, sentence) of each thing that is wrong


def raise_first(problems: Problems) -> None:
    """Raise `ArchitectureError` about the first problem, if there is one."""
    for subject, sentence in problems:
        raise ArchitectureError(sentence, subject=subject)


def among(subject: str, value: object, known: Any, what: str = "") -> Problems:
    """A problem of `subject`, called `what`, if its value is not one of those known."""
    if value not in known:
        yield subject, one_of(what or subject, value, known)


def check_types(arch: ArchitectureFields) -> None:
    """Check that every field is of its type, and make numbers of fields that are floats into floats."""
    for field in dataclasses.fields(arch):
        value, usual = getattr(arch, field.name), field.default
        if field.name in (*TUPLES, "biases", "mask", "experts") or isinstance(value, OBJECTS.get(field.name, ())):
            continue
        kind = int if usual is dataclasses.MISSING else type(usual)
        fits = isinstance(value, int | float if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ArchitectureError(f"{field.name} must be {WORDS[kind]}; got {value!r}", subject=field.name)
        if kind is float:
            object.__setattr__(arch, field.name, float(value))


def size_problems(arch: ArchitectureFields) -> Problems:
    """What is wrong with the fields that the usual values of others depend on: (field, sentence), one by one."""
    yield from _unfit(arch, ("layers", "width", "heads"), lambda x: x >= 1, "a whole number >= 1")
    yield from _unfit(arch, ("layers",), lambda x: x <= DEEPEST, f"at most {DEEPEST}")
    yield from _unfit(arch, ("head_width", "divisor"), lambda x: x >= 0, "> 0, or 0 for its usual value")
    if not arch.head_width and arch.width % arch.heads:
        got = f"width {arch.width} and {arch.heads} heads"
        yield "width", f"width must be a multiple of heads unless head_width is given; got {got}"
    if not isinstance(arch.biases, bool | tuple | list):
        yield "biases", f"biases must be True, False or a tuple of {', '.join(BIASES)}; got {arch.biases!r}"
    for name in TUPLES:
        value = getattr(arch, name)
        if not isinstance(value, tuple | list) and (name != "kept_heads" or value is not None):
            yield name, f"{name} must be a tuple; got {value!r}"


def _unfit(arch: ArchitectureFields, names: Iterable[str], fits: Callable[[float], bool], must_be: str) -> Problems:
    """The numbers among these fields that do not fit, and what they must be."""
    for name in names:
        if not fits(getattr(arch, name)):
            yield name, f"{name} must be {must_be}; got {getattr(arch, name)!r}"


def problems(arch: ArchitectureFields) -> Problems:
    """What is wrong with the fields, each alone and several together: (field, sentence), one by one."""
    yield from among("mlp", arch.mlp, get_args(MLP))
    if isinstance(arch.norm, str):
        yield from among("norm", arch.norm, (*NORMS, "none"))
    yield from among("norm_place", arch.norm_place, get_args(NormPlace))
    yield from among("positions", arch.positions, get_args(Positions))
    yield from among("activation", arch.activation, ACTIVATIONS)
    if isinstance(arch.kernel, str):
        yield from among("kernel", arch.kernel.partition(":")[0], KERNELS)
    yield from among("rotary_pairs", arch.rotary_pairs, ("half", "adjacent"))
    for part in arch.biases if isinstance(arch.biases, tuple) else ():
        yield from among("biases", part, BIASES)
    sizes = ("key_heads", "head_width", "value_width", "mlp_width", "length", "bias_buckets", "bias_reach")
    yield from _unfit(arch, sizes, lambda x: x >= 1, "a whole number >= 1")
    yield from _unfit(arch, ("divisor", "rotary_base"), lambda x: 0 < x < math.inf, "a finite number > 0")
    skips = ("attention_skip", "mlp_skip")
    yield from _unfit(arch, skips, math.isfinite, "a finite number (0 takes the skip out)")
    yield from _unfit(arch, ("norm_eps",), lambda x: 0 <= x < math.inf, "a finite number >= 0")
    if arch.heads % arch.key_heads:
        yield "heads", f"heads must be a multiple of key_heads; got {arch.heads} and {arch.key_heads}"
    if arch.parallel and arch.mlp_skip != 1.0:
        yield "mlp_skip", f"a parallel block has one skip, attention_skip; got mlp_skip {arch.mlp_skip}"
    for group in (_positions, _scores, _kernel_number, _layers, _experts, _parts, _cross, _latents):
        yield from group(arch)


def _positions(arch: ArchitectureFields) -> Problems:
    width = arch.rotary_width
    if arch.positions == "rotary" and (not 0 < arch.rotary_share <= 1 or width < 2 or width % 2):
        got = f"{arch.rotary_share} * {arch.head_width}"
        yield "rotary_share", f"rotary_share * head_width, the rotated width, must be even and >= 2; got {got}"
    for angles in arch.rotary_frequencies:
        if not isinstance(angles, tuple) or len(angles) != width // 2:
            sentence = f"rotary_frequencies must be tuples of {width // 2} numbers, half the rotated width"
            yield "rotary_frequencies", f"{sentence}; got {angles!r}"
        if not all(isinstance(angle, int | float) and math.isfinite(angle) for angle in angles):
            yield "rotary_frequencies", f"rotary_frequencies must be finite numbers; got {angles!r}"
    if not all(type(scale) in (int, float) and 0 < scale < math.inf for scale in arch.rotary_scales):
        yield "rotary_scales", f"rotary_scales must be finite numbers > 0; got {arch.rotary_scales!r}"
    yield from _unfit(arch, ("rotary_reach",), lambda x: x >= 0, "a number of tokens >= 0")
    grid = arch.rotary_grid
    if grid and (len(grid) != 3 or not all(type(n) is int and n >= 0 for n in grid) or 0 in grid[:2]):
        yield "rotary_grid", f"rotary_grid must be (rows, columns, other tokens), whole numbers; got {grid!r}"
    if grid and width % 4:
        yield "rotary_grid", f"a rotary_grid needs a rotated width that is a multiple of 4; got {width}"
    if arch.positions == "relative" and arch.width % 2:
        yield "width", f"relative positions need an even width; got {arch.width}"
    if arch.positions == "disentangled":
        if arch.key_heads != arch.heads:
            yield "key_heads", f"disentangled positions need as many key_heads as heads; got {arch.key_heads}"
        if arch.bias_reach != 1 and arch.bias_reach <= max(arch.bias_buckets // 2, 1) + 1:
            sentence = "bias_reach must be 1, for a bucket of each distance, or beyond half of the bias_buckets"
            yield "bias_reach", f"{sentence}; got {arch.bias_reach} and {arch.bias_buckets}"
    if not kernel_of(arch.kernel).has_scores and arch.positions in ("relative", "bias", "alibi", "disentangled"):
        sentence = f"kernel {arch.kernel!r} has no scores to add {arch.positions} positions to"
        yield "positions", f"{sentence}: use none, absolute or rotary"


def _scores(arch: ArchitectureFields) -> Problems:
    if arch.query_norm_across and not arch.query_norm:
        yield "query_norm_across", "query_norm_across says of what the query_norm is: give query_norm=True with it"
    caps = ("score_cap", "log_gain")
    yield from _unfit(arch, caps, lambda x: 0 <= x < math.inf, "a finite number > 0, or 0 for none")
    kernel = kernel_of(arch.kernel)
    if arch.score_cap and not kernel.capped:
        capped = ", ".join(name for name, known in KERNELS.items() if known.capped)
        sentence = f"scores can be capped under kernel {capped}; got {arch.kernel!r}"
        yield "score_cap", f"{sentence}: take the cap out, score_cap=0"
    if arch.log_gain and not kernel.has_scores:
        yield "log_gain", f"kernel {arch.kernel!r} has no scores to multiply by log_gain ln n: use log_gain=0"


def _kernel_number(arch: ArchitectureFields) -> Problems:
    name, colon, k = arch.kernel.partition(":") if isinstance(arch.kernel, str) else ("", "", "")
    if name in ("linformer", "sinkhorn"):
        least = 1 if name == "linformer" else 0
        if not (k.isdecimal() and int(k) >= least):
            yield "kernel", f"kernel {name} must be written {name}:k with k >= {least}; got {arch.kernel!r}"
    elif colon:
        yield "kernel", f"kernel {name!r} takes no number; got {arch.kernel!r}"
    if name == "linformer" and arch.mask != "complete":
        yield "mask", f"linformer mixes all tokens, so its mask must be complete; got {arch.mask!r}"
    if name == "linformer" and arch.positions not in ("none", "absolute"):
        sentence = "linformer's keys are mixtures of tokens: positions must be none or absolute"
        yield "positions", f"{sentence}; got {arch.positions!r}"


def _layers(arch: ArchitectureFields) -> Problems:
    """Fields given by layer: kept_heads and bare_layers."""
    for kept in arch.kept_heads or ():
        if not isinstance(kept, tuple):
            yield "kept_heads", f"kept_heads must have one tuple of heads per layer; got {arch.kept_heads!r}"
        for head in kept:
            if not (isinstance(head, int) and 0 <= head < arch.heads):
                yield "kept_heads", f"heads are numbered 0..{arch.heads - 1}; got {head!r}"
    if arch.kept_heads is not None and len(arch.kept_heads) != arch.layers:
        yield "kept_heads", f"kept_heads must have one tuple per layer ({arch.layers}); got {len(arch.kept_heads)}"
    if arch.bare_layers and (arch.norm_place in ("post", "output") or arch.shared):
        sentence = "bare_layers need norm_place 'pre' or 'sandwich' and layers that do not share weights"
        yield "bare_layers", f"{sentence}; got {arch.norm_place!r}, shared {arch.shared}"
    for layer in arch.bare_layers:
        if not (type(layer) is int and 0 <= layer < arch.layers):
            yield "bare_layers", f"bare_layers are numbered 0..{arch.layers - 1}; got {layer!r}"


def _experts(arch: ArchitectureFields) -> Problems:
    if not isinstance(arch.experts, Experts | None):
        yield "experts", f"experts must be an Experts(number=, chosen=, width=); got {arch.experts!r}"
    elif arch.experts is None:
        if arch.mlp == "experts":
            yield "experts", "mlp 'experts' must say which: give experts=Experts(number=, chosen=, width=)"
    else:
        for layer in arch.experts.dense_layers:
            if arch.shared or not (type(layer) is int and 0 <= layer < arch.layers):
                sentence = f"dense_layers are numbered 0..{arch.layers - 1}, and do not share their weights"
                yield "dense_layers", f"{sentence}; got {layer!r}"


def _parts(arch: ArchitectureFields) -> Problems:
    names = [getattr(part, "name", None) for part in arch.parts]
    if twice := [name for name in names if name and names.count(name) > 1]:
        yield "parts", f"parts must have different names, under which tensors are stored; {twice[0]!r} is there twice"
    for part in arch.pieces:
        if not isinstance(part, Part):
            sentence = "parts must be objects with a name, a place and a rule named plain (rankscope.nets.parts)"
            yield "parts", f"{sentence}; got {part!r:.60}"
        yield from among("place", part.place, PLACES, what=f"place of {part.name}")


def _cross(arch: ArchitectureFields) -> Problems:
    """Queries of cross-attention meet keys of another network, where relative positions mean nothing."""
    excluded = {
        "parallel": arch.parallel,
        "query_norm": arch.query_norm,
        "linformer": arch.linformer_rank is not None,
        "sinkhorn": arch.sinkhorn_rounds is not None,
        "kernel 'sink'": arch.kernel == "sink",
        f"positions {arch.positions!r}": arch.positions in ("relative", "disentangled"),
    }
    for name, present in excluded.items():
        if arch.cross_attention and present:
            sentence = "cross_attention goes with one half after another and plain queries and keys"
            yield "cross_attention", f"{sentence}; got {name}: leave one of them out"


def _latents(arch: ArchitectureFields) -> Problems:
    for name in ("query_latent", "key_latent"):
        width = getattr(arch, name)
        if width < 0 or width == 1:
            yield name, f"{name} must be 0, for none, or a width >= 2, for it has a norm; got {width}"
        if width and (arch.cross_attention or arch.positions in ("relative", "disentangled")):
            sentence = f"{name} goes with attention among tokens and positions that are not 'relative', 'disentangled'"
            got = f"cross_attention {arch.cross_attention}, positions {arch.positions!r}"
            yield name, f"{sentence}; got {got}"
