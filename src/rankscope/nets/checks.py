"""What an `Architecture` must be, and the sentence where it is not."""

import dataclasses
import math
from typing import Any, get_args

from rankscope.errors import ArchitectureError, one_of
from rankscope.nets.activations import ACTIVATIONS
from rankscope.nets.experts import Experts
from rankscope.nets.fields import BIASES, MLP, ArchitectureFields, NormPlace, Positions
from rankscope.nets.kernels import KERNELS, Kernel
from rankscope.nets.masks import Mask
from rankscope.nets.norms import NORMS, Norm
from rankscope.nets.parts import PLACES, Part, pieces

LISTED = (
    "kept_heads", "biases", "mask", "rotary_frequencies", "rotary_scales", "bare_layers", "parts", "experts",
)  # fmt: skip
"""ArchitectureFields that hold more than one number or word."""
CAPPED = ("softmax", "sinkhorn", "sigmoid", "uniform")
"""Kernels under which scores can be capped."""
OWN: dict[str, type] = {"kernel": Kernel, "mask": Mask, "norm": Norm}
"""ArchitectureFields that take an object of one's own in the place of a name."""


def check_types(arch: ArchitectureFields) -> None:
    """Whole numbers, numbers, words and yes-or-no where each belongs."""
    for field in dataclasses.fields(arch):
        value, usual = getattr(arch, field.name), field.default
        if field.name in LISTED or isinstance(value, OWN.get(field.name, ())):
            continue
        kind = int if usual is dataclasses.MISSING else type(usual)
        fits = isinstance(value, int | float if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            word = {int: "a whole number", float: "a number", str: "a word", bool: "True or False"}[kind]
            raise ArchitectureError(f"{field.name} must be {word}; got {value!r}", subject=field.name)
        if kind is float:
            object.__setattr__(arch, field.name, float(value))


def check(arch: ArchitectureFields) -> None:
    """Every field, and what fields must be together."""
    among("mlp", arch.mlp, get_args(MLP))
    if isinstance(arch.norm, str):
        among("norm", arch.norm, (*NORMS, "none"))
    among("norm_place", arch.norm_place, get_args(NormPlace))
    among("positions", arch.positions, get_args(Positions))
    among("activation", arch.activation, ACTIVATIONS)
    if isinstance(arch.kernel, str):
        among("kernel", arch.kernel.partition(":")[0], KERNELS)
    among("rotary_pairs", arch.rotary_pairs, ("half", "adjacent"))
    for part in arch.biases if isinstance(arch.biases, tuple) else ():
        among("biases", part, BIASES)
    for name in (
        "key_heads",
        "head_width",
        "value_width",
        "mlp_width",
        "length",
        "bias_buckets",
        "bias_reach",
    ):
        if getattr(arch, name) < 1:
            raise ArchitectureError(
                f"{name} must be a whole number >= 1; got {getattr(arch, name)!r}", subject=name
            )
    for name in ("divisor", "rotary_base"):
        if not (math.isfinite(getattr(arch, name)) and getattr(arch, name) > 0):
            raise ArchitectureError(
                f"{name} must be a finite number > 0; got {getattr(arch, name)!r}", subject=name
            )
    for name in ("attention_skip", "mlp_skip"):
        if not math.isfinite(getattr(arch, name)):
            raise ArchitectureError(
                f"{name} must be a finite number (0 takes the skip out); got {getattr(arch, name)!r}",
                subject=name,
            )
    if not (math.isfinite(arch.norm_eps) and arch.norm_eps >= 0):
        raise ArchitectureError(
            f"norm_eps must be a finite number >= 0; got {arch.norm_eps!r}", subject="norm_eps"
        )
    if arch.heads % arch.key_heads:
        raise ArchitectureError(
            f"heads must be a multiple of key_heads; got {arch.heads} and {arch.key_heads}", subject="heads"
        )
    if arch.parallel and arch.mlp_skip != 1.0:
        raise ArchitectureError(
            f"a parallel block has one skip, attention_skip; got mlp_skip {arch.mlp_skip}", subject="mlp_skip"
        )
    _positions(arch)
    _cap(arch)
    _gain(arch)
    _kernel_number(arch)
    _kept_heads(arch)
    _bare_layers(arch)
    _experts(arch)
    _parts(arch)
    _cross(arch)
    _latents(arch)


def _positions(arch: ArchitectureFields) -> None:
    if arch.positions == "rotary" and (
        not 0 < arch.rotary_share <= 1 or arch.rotary_width < 2 or arch.rotary_width % 2
    ):
        raise ArchitectureError(
            "rotary positions need an even rotated width: rotary_share * head_width must be an even "
            f"number >= 2; got {arch.rotary_share} * {arch.head_width}",
            subject="rotary_share",
        )
    for frequencies in arch.rotary_frequencies:
        if not isinstance(frequencies, tuple) or len(frequencies) != arch.rotary_width // 2:
            raise ArchitectureError(
                f"rotary_frequencies must be tuples of {arch.rotary_width // 2} numbers, half the "
                f"rotated width; got {frequencies!r}",
                subject="rotary_frequencies",
            )
        if not all(
            isinstance(frequency, int | float) and math.isfinite(frequency) for frequency in frequencies
        ):
            raise ArchitectureError(
                f"rotary_frequencies must be finite numbers; got {frequencies!r}",
                subject="rotary_frequencies",
            )
    if not all(type(scale) in (int, float) and 0 < scale < math.inf for scale in arch.rotary_scales):
        raise ArchitectureError(
            f"rotary_scales must be finite numbers > 0; got {arch.rotary_scales!r}", subject="rotary_scales"
        )
    if arch.rotary_reach < 0:
        raise ArchitectureError(
            f"rotary_reach must be a number of tokens >= 0; got {arch.rotary_reach}", subject="rotary_reach"
        )
    if arch.positions == "relative" and arch.width % 2:
        raise ArchitectureError(f"relative positions need an even width; got {arch.width}", subject="width")
    if arch.kernel == "linear" and arch.positions in ("relative", "bias", "alibi"):
        raise ArchitectureError(
            f"kernel 'linear' has no scores to add {arch.positions} positions to: "
            "use none, absolute or rotary",
            subject="positions",
        )


def _cap(arch: ArchitectureFields) -> None:
    if not 0 <= arch.score_cap < math.inf:
        raise ArchitectureError(
            f"score_cap must be a finite number > 0, or 0 for none; got {arch.score_cap!r}",
            subject="score_cap",
        )
    kernel = arch.kernel.partition(":")[0] if isinstance(arch.kernel, str) else arch.kernel
    if arch.score_cap and kernel not in CAPPED:
        raise ArchitectureError(
            f"scores can be capped under kernel {', '.join(CAPPED)}; got {arch.kernel!r}: take the cap "
            "out, score_cap=0",
            subject="score_cap",
        )


def _gain(arch: ArchitectureFields) -> None:
    if not 0 <= arch.log_gain < math.inf:
        raise ArchitectureError(
            f"log_gain must be a finite number > 0, or 0 for none; got {arch.log_gain!r}", subject="log_gain"
        )
    if arch.log_gain and arch.kernel == "linear":
        raise ArchitectureError(
            "kernel 'linear' has no scores to multiply by log_gain ln n: use another, or log_gain=0",
            subject="log_gain",
        )


def _kernel_number(arch: ArchitectureFields) -> None:
    if not isinstance(arch.kernel, str):
        return
    name, colon, rank = arch.kernel.partition(":")
    if name == "linformer":
        if not (rank.isdecimal() and int(rank) >= 1):
            raise ArchitectureError(
                f"kernel linformer must be written linformer:k with k >= 1; got {arch.kernel!r}",
                subject="kernel",
            )
        if arch.mask != "complete":
            raise ArchitectureError(
                "linformer mixes all tokens before attending, so its mask must be complete; "
                f"got {arch.mask!r}",
                subject="mask",
            )
        if arch.positions in ("relative", "rotary", "bias", "alibi"):
            raise ArchitectureError(
                "linformer's keys are mixtures of tokens and have no position: positions must be none "
                f"or absolute; got {arch.positions!r}",
                subject="positions",
            )
    elif name == "sinkhorn":
        if not rank.isdecimal():
            raise ArchitectureError(
                f"kernel sinkhorn must be written sinkhorn:k with k >= 0 rounds; got {arch.kernel!r}",
                subject="kernel",
            )
    elif colon:
        raise ArchitectureError(f"kernel {name!r} takes no number; got {arch.kernel!r}", subject="kernel")


def _kept_heads(arch: ArchitectureFields) -> None:
    if arch.kept_heads is None:
        return
    if not all(isinstance(kept, tuple) for kept in arch.kept_heads):
        raise ArchitectureError(
            f"kept_heads must have one tuple of heads per layer; got {arch.kept_heads!r}",
            subject="kept_heads",
        )
    if len(arch.kept_heads) != arch.layers:
        raise ArchitectureError(
            f"kept_heads must have one tuple per layer ({arch.layers}); got {len(arch.kept_heads)}",
            subject="kept_heads",
        )
    for kept in arch.kept_heads:
        for head in kept:
            if not (isinstance(head, int) and 0 <= head < arch.heads):
                raise ArchitectureError(
                    f"heads are numbered 0..{arch.heads - 1}; got {head!r}", subject="kept_heads"
                )


def _bare_layers(arch: ArchitectureFields) -> None:
    if not arch.bare_layers:
        return
    if arch.norm_place == "post" or arch.shared:
        raise ArchitectureError(
            "bare_layers are layers of a pre-norm or sandwich network that do not share their weights; "
            f"got norm_place {arch.norm_place!r}, shared {arch.shared}",
            subject="bare_layers",
        )
    for layer in arch.bare_layers:
        if not (type(layer) is int and 0 <= layer < arch.layers):
            raise ArchitectureError(
                f"bare_layers are numbered 0..{arch.layers - 1}; got {layer!r}", subject="bare_layers"
            )


def _experts(arch: ArchitectureFields) -> None:
    if arch.experts is not None and not isinstance(arch.experts, Experts):
        raise ArchitectureError(
            f"experts must be an Experts(number=, chosen=, width=); got {arch.experts!r}", subject="experts"
        )
    if arch.mlp == "experts" and arch.experts is None:
        raise ArchitectureError(
            "mlp 'experts' must say which: give experts=Experts(number=, chosen=, width=); got none",
            subject="experts",
        )
    for layer in () if arch.experts is None else arch.experts.dense_layers:
        if arch.shared or not (type(layer) is int and 0 <= layer < arch.layers):
            raise ArchitectureError(
                f"dense_layers are numbered 0..{arch.layers - 1}, of layers that do not share their "
                f"weights; got {layer!r}",
                subject="dense_layers",
            )


def _parts(arch: ArchitectureFields) -> None:
    names = [getattr(part, "name", None) for part in arch.parts]
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise ArchitectureError(
            f"parts must have names of their own, under which their tensors lie; {twice[0]!r} is there twice",
            subject="parts",
        )
    for part in pieces(arch.parts):
        if not isinstance(part, Part):
            raise ArchitectureError(
                "parts must be objects with a name, a place and a rule named plain (see "
                f"rankscope.nets.parts); got {part!r:.60}",
                subject="parts",
            )
        among(f"place of {part.name}", part.place, PLACES)


def _cross(arch: ArchitectureFields) -> None:
    """Queries of cross-attention meet keys of another network: what makes scores of positions, or of norms
    on both, has no meaning there."""
    unlike = {
        "parallel": arch.parallel,
        "query_norm": arch.query_norm,
        "linformer": arch.linformer_rank is not None,
        "sinkhorn": arch.sinkhorn_rounds is not None,
        "positions 'relative'": arch.positions == "relative",
    }
    for what in (name for name, present in unlike.items() if present):
        if arch.cross_attention:
            raise ArchitectureError(
                f"cross_attention goes with one half after another and plain queries and keys; got {what}: "
                "leave one of them out",
                subject="cross_attention",
            )


def _latents(arch: ArchitectureFields) -> None:
    for name in ("query_latent", "key_latent"):
        if getattr(arch, name) < 0 or getattr(arch, name) == 1:
            raise ArchitectureError(
                f"{name} must be 0, for none, or a width >= 2: through its norm one entry is but a sign; got "
                f"{getattr(arch, name)}",
                subject=name,
            )
        if getattr(arch, name) and (arch.cross_attention or arch.positions == "relative"):
            raise ArchitectureError(
                f"{name} goes with attention among tokens and positions none, absolute, rotary, bias or alibi"
                f"; got cross_attention {arch.cross_attention}, positions {arch.positions!r}",
                subject=name,
            )


def among(what: str, value: object, known: Any, subject: str = "") -> None:
    """Raise `ArchitectureError` about `subject`, or about `what`, if a value is not one of those known."""
    if value not in known:
        raise ArchitectureError(one_of(what, value, known), subject=subject or what.partition(" ")[0])
