"""`certify`: every theorem on a network and an input, its hypotheses checked, next to what is measured."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MetricError, TheoremError, TokensError, one_of
from rankscope.metrics.tokens import valid_tokens
from rankscope.profiles.propagation import Progress
from rankscope.runs import manifest_of
from rankscope.sources.inputs import InputsLike, NetworkLike, inputs_of
from rankscope.theory.catalogue import Chosen, theorems_named
from rankscope.theory.certificates import SCHEMA, Certificates
from rankscope.theory.facts import Centre, Facts
from rankscope.theory.hypotheses import Hypothesis, outside
from rankscope.theory.logs import TEN
from rankscope.theory.observation import observe
from rankscope.theory.rounding import COPIES, layer_bounds, noisy_layers
from rankscope.theory.theorem import Theorem
from rankscope.theory.weight_norms import WeightNorms


def certify(
    net: NetworkLike,
    X: InputsLike,
    padding: Tensor | None = None,
    theorems: Chosen = None,
    *,
    attention_mask: Tensor | None = None,
    centre: str = "mean",
    variant: str = "as given",
    progress: Progress | None = None,
    device: str | torch.device | None = None,
    norms: WeightNorms | None = None,
) -> Certificates:
    """Evaluate theorems on a network and tokens, layer by layer, next to the measurement.

    A theorem whose hypotheses fail says so and gives no number. Bounds are moved outward by more than
    rounding could have changed them (`rounding.py`).

    Args:
        net: The network, or a Hugging Face model in memory, which is loaded as one.
        X: Texts, what `net.encode` gave, token ids `[batch, token]`, or tokens `[batch, token, width]`.
        padding: `[batch, token]`, True at padding.
        theorems: Names or `Theorem` objects; all if left out.
        attention_mask: Instead of `padding`, 1 at tokens and 0 at padding (Hugging Face's convention).
        centre: What `||res X||_{1,inf}` is about: the `mean`, or the `argmin` of the definition (linear
            programmes: for small inputs), whose bounds are lower by the factor `2 (1 - 1/n)` that the mean
            may lose.
        variant: The name of the network in the manifest.
        progress: Called as `progress(done, total)` after each sample.
        device: Where to run; the CPU if left out: small matrices and linear programmes gain little elsewhere.
        norms: Cached norms of weights from an earlier call with this network or a variant of it, whose
            weights have not changed since.

    Returns:
        `Certificates`: a table of every theorem, sample and layer, with a summary and a figure.

    Raises:
        TheoremError: A theorem that does not exist, or a network that no theorem covers.
        TokensError: Tokens of the wrong shape or dtype, or a sample without a token.

    >>> from rankscope.nets import Architecture, Transformer
    >>> san = Transformer.random(Architecture(layers=3, width=16, heads=2)).variant("san")
    >>> found = certify(san, 0.1 * torch.randn(1, 5, 16), theorems="dong2021-2.3")
    >>> bool(found.table["met"].all()), len(found.broken())
    (True, 0)
    """
    original_net, X, padding = inputs_of("certify", net, X, padding, attention_mask)
    chosen = theorems_named(theorems)
    if reason := outside(original_net.arch):
        raise TheoremError(
            "the theorems are of attention among tokens, linear in them but for its weights; this network "
            f"has {reason}: measure it instead",
            subject="architecture",
        )
    if centre not in get_args(Centre):
        raise MetricError(one_of("centre", centre, get_args(Centre)), subject="centre")
    net = original_net.to(torch.float64, "cpu" if device is None else device)
    if X.ndim != 3 or X.shape[-1] != net.arch.width:
        raise TokensError(
            f"tokens must be a tensor [batch, token, width] of width {net.arch.width}; received "
            f"{tuple(X.shape)}",
            subject="X",
        )
    X = X.to(dtype=torch.float64, device=net.device)
    real = valid_tokens(X.shape[:-1], padding, X.device)
    if not bool(real.any(-1).all()) or not len(X):
        raise TokensError(
            "every sample must have at least one real token; one has none: leave it out", subject="padding"
        )
    norms = WeightNorms() if norms is None else norms
    rows: list[dict[str, Any]] = []
    arithmetic = ""
    for sample, (sample_tokens, valid) in enumerate(zip(X, real, strict=True)):
        copies = [observe(net, sample_tokens[valid], centre, norms, seed) for seed in (None, *range(COPIES))]  # type: ignore[arg-type]
        arithmetic = copies[0].arithmetic
        marked = noisy_layers(copies)
        for theorem in chosen:
            rows += _rows(theorem, copies, marked, sample)
        if progress is not None:
            progress(sample + 1, len(X))
    names = [theorem.name for theorem in chosen]
    table = pl.DataFrame(rows, schema=SCHEMA).with_columns(
        pl.col("theorem").cast(pl.Enum(names)).alias("order")
    )
    table = table.sort("order", "sample", "layer").drop("order")
    description = {"architecture": net.arch.to_dict(), "fingerprint": net.fingerprint}
    checks = {
        "centre": centre,
        "samples": len(X),
        "tokens": real.sum(-1).tolist(),
        "network_device": str(original_net.device),
    }
    manifest = manifest_of(description, str(net.device), variant, arithmetic, names, checks)
    return Certificates(table, manifest)


def _rows(
    theorem: Theorem, copies: Sequence[Facts], marked: Sequence[bool], sample: int
) -> list[dict[str, Any]]:
    rows, upper = [], theorem.kind == "upper"
    for layer, layer_bound in enumerate(layer_bounds(theorem, copies, marked), 1):
        unmet = [str(hypothesis) for hypothesis in layer_bound.hypotheses if not hypothesis.met]
        bound, value = layer_bound.bound / TEN, layer_bound.measured / TEN
        size = copies[0].sizes[layer].of_tokens.get(theorem.quantity, 0.0) / TEN
        met = not unmet
        rows.append(
            {
                "theorem": theorem.name,
                "sample": sample,
                "layer": layer,
                "quantity": theorem.quantity,
                "kind": theorem.kind,
                "met": met,
                "vacuous": met and (bound >= size if upper else bound == -math.inf),
                "log10_bound": bound if met else None,
                "log10_measured": None if math.isnan(value) else value,
                "log10_size": size,
                "slack": _slack(bound, value, upper) if met else None,
                "below_floor": layer_bound.noise,
                "why": "; ".join(unmet) if unmet else None,
                "hypotheses": [_described(hypothesis) for hypothesis in layer_bound.hypotheses],
            }
        )
    return rows


def _described(hypothesis: Hypothesis) -> dict[str, Any]:
    return {
        "says": hypothesis.says,
        "number": hypothesis.number,
        "limit": hypothesis.limit,
        "met": hypothesis.met,
    }


def _slack(bound: float, measured: float, upper: bool) -> float:
    """Decades by which the guarantee is kept; two zeros, or two infinities, are equal."""
    if bound == measured:
        return 0.0
    return bound - measured if upper else measured - bound
