"""`certify`: theorems on a network and an input, next to what is measured; `Certificates`: the table of them.

One row per theorem, sample and layer:

| column           | meaning                                                                            |
|------------------|------------------------------------------------------------------------------------|
| `met`            | every hypothesis of the theorem holds, on this network and input, up to this layer |
| `log10_bound`    | the guarantee; null where a hypothesis is not met                                  |
| `log10_measured` | the same quantity as measured, in deviation arithmetic                             |
| `log10_size`     | the same measure of the tokens themselves                                          |
| `slack`          | decades between bound and measurement; not negative, or the theorem is wrong       |
| `below_floor`    | the measured side is rounding: passes that round otherwise differ on it            |
| `vacuous`        | met, but it says no more than is known anyway                                      |
| `why`            | the hypotheses that are not met, with their numbers                                |
| `hypotheses`     | in words, the number found, the limit, and whether it is met; where the            |
|                  | architecture fails one already, those of the architecture alone                    |

An upper bound is vacuous when it is as large as the tokens themselves, a lower bound when it is zero.
"""

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar, TypedDict, Unpack, cast, get_args

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MetricError, TheoremError, TokensError, require, require_one_of
from rankscope.extras import counted
from rankscope.figures import Chart
from rankscope.metrics import valid_tokens
from rankscope.nets import Architecture, usual_modes
from rankscope.profiles import Progress
from rankscope.results import Section, TableResult
from rankscope.runs import manifest_of
from rankscope.sources import InputsLike, NetworkLike, inputs_of
from rankscope.theory.bounds import (
    PURE,
    aligned_skip,
    attention,
    dobrushin,
    elementary_skip,
    exact,
    lambda_skip,
    norm_rank,
    oscillation,
    untouched,
    with_mlp,
    with_skip,
)
from rankscope.theory.figures import BoundView, bound_views, bounds_chart, bounds_section, overview, proved_sentence
from rankscope.theory.logs import TEN
from rankscope.theory.observation import observe_batch
from rankscope.theory.rounding import COPIES, layer_bounds, noisy_layers
from rankscope.theory.theorem import Centre, Hypothesis, Passes, Theorem, outside, own_objects
from rankscope.theory.weight_norms import WeightNorms
from rankscope.theory.wu2024 import cosines, full_rank, in_hemisphere, masked

Chosen = str | Theorem | Sequence[str | Theorem] | None  # Theorems as a caller names them
THEOREMS: dict[str, Theorem] = {
    theorem.name: theorem
    for theorem in (
        *PURE, with_mlp, with_skip, oscillation, attention, exact, dobrushin, masked, full_rank, cosines, in_hemisphere,
        elementary_skip, aligned_skip, untouched, lambda_skip, norm_rank,
    )
}  # fmt: skip
"""Every theorem by name, in the order of the docs."""

HYPOTHESIS = pl.Struct({"says": pl.String, "number": pl.Float64, "limit": pl.String, "met": pl.Boolean})
SCHEMA: dict[str, Any] = {
    "theorem": pl.String, "sample": pl.Int64, "layer": pl.Int64, "quantity": pl.String, "kind": pl.String,
    "met": pl.Boolean, "vacuous": pl.Boolean, "log10_bound": pl.Float64, "log10_measured": pl.Float64,
    "log10_size": pl.Float64, "slack": pl.Float64, "below_floor": pl.Boolean, "why": pl.String,
    "hypotheses": pl.List(HYPOTHESIS),
}  # fmt: skip


SAYS = pl.col("met") & ~pl.col("vacuous") & ~pl.col("below_floor")  # Rows that are a guarantee


class Certificates(TableResult):
    """What theorems guarantee of a network on an input, and where they do not apply: see `certify`."""

    kind = "certificates"
    schemas: ClassVar = {"certificates": SCHEMA}

    @property
    def title(self) -> str:
        """How many theorems there are, and of how many the hypotheses are met."""
        met, samples = sum(view.met_to > 0 for view in self.views()), counted(self.samples, "sample")
        return f"Certificates: {counted(len(self.theorems), 'theorem')}, hypotheses of {met} met, {samples}"

    @property
    def samples(self) -> int:
        """How many samples were certified."""
        return self.table["sample"].n_unique()

    def overview(self) -> Section:
        """What is proved in a sentence, and bounds beside the measurement as a figure and a table."""
        proved = proved_sentence(self.guarantees(), self.samples)
        return overview(self.title, proved, self.views(), self.table, len(self.broken()))

    def sections(self) -> list[Section]:
        """What is proved, with every hypothesis that fails."""
        variant = ", ".join(network.variant for network in self.manifest.networks)
        return [bounds_section({variant: self.proved()})]

    def proved(self) -> tuple[pl.DataFrame, list[BoundView], int]:
        """The table, what each theorem says, and how many guarantees are contradicted."""
        return self.table, self.views(), len(self.broken())

    @property
    def theorems(self) -> list[str]:
        """The theorems that were evaluated, in order."""
        return self.table["theorem"].unique(maintain_order=True).to_list()

    def of(self, theorem: str, sample: int | None = None) -> pl.DataFrame:
        """The rows of one theorem, of one sample or all."""
        require_one_of("theorem", theorem, self.theorems, TheoremError)
        sentence = f"sample must lie in 0..{self.samples - 1}; got {sample!r}"
        require(sample is None or sample in range(self.samples), sentence, TheoremError, "sample")
        rows = self.table.filter(theorem=theorem)
        return rows if sample is None else rows.filter(sample=sample)

    def guarantees(self) -> pl.DataFrame:
        """Rows that say something: hypotheses met, not vacuous, and the measured side above its floor."""
        return self.table.filter(SAYS)

    def broken(self) -> pl.DataFrame:
        """Guarantees that the measurement contradicts. There should be none: bounds have been moved outward
        by more than rounding could make of either side."""
        return self.table.filter(pl.col("met") & ~pl.col("below_floor") & (pl.col("slack") < 0))

    def summary(self) -> pl.DataFrame:
        """A row per theorem: up to which layer its hypotheses hold for every sample, up to which it says
        something, the last such layer's numbers (the loosest sample's), and the first reason why not.

        For code: ten columns that a terminal cuts. To read what is proved, and every reason whole, print the
        certificates themselves."""
        rows = []
        for name in self.theorems:
            part = self.of(name)
            layers = part.group_by("layer", maintain_order=True).agg(pl.col("met").all(), SAYS.all().alias("says"))
            held = leading(layers["met"].to_list())
            says = [layer for layer, yes in layers.select("layer", "says").iter_rows() if yes]
            last = part.filter(layer=says[-1] if says else max(held, 1))
            bad = part.filter(pl.col("why").is_not_null())
            numbers = last.select("log10_bound", "log10_measured", "log10_size", "slack")
            slacks = numbers["slack"].fill_null(-1.0).to_list()
            worst = numbers.row(slacks.index(max(slacks)), named=True)
            rows.append({
                "theorem": name, "kind": part["kind"][0], "quantity": part["quantity"][0], "met_to": held,
                "says_at": says[-1] if says else None, **(worst if held else dict.fromkeys(worst)),
                "why": None if bad.is_empty() else bad["why"][0],
            })  # fmt: skip
        return pl.DataFrame(rows, schema_overrides={"says_at": pl.Int64, "why": pl.String})

    def views(self) -> list[BoundView]:
        """What each theorem says: all that is printed and told of it."""
        return bound_views(self.summary(), self.table)

    def charts(self, sample: int = 0) -> list[Chart]:
        """Bounds and measurement of a sample on one axis of powers of ten, a panel per quantity."""
        return [bounds_chart(self.table, sample)]


def theorems_named(chosen: Chosen) -> list[Theorem]:
    """The theorems of a list of names and `Theorem` objects, each once; all theorems for None."""
    names = [chosen] if isinstance(chosen, str | Theorem) else list(THEOREMS) if chosen is None else list(chosen)
    require(names, "theorems must name at least one; got none: leave it out", TheoremError, "theorems")
    theorems_by_name: dict[str, Theorem] = {}
    for name in names:
        if not isinstance(name, Theorem):
            require_one_of("theorem", name, THEOREMS, TheoremError)
        theorem = name if isinstance(name, Theorem) else THEOREMS[name]
        first = theorems_by_name.setdefault(theorem.name, theorem)
        sentence = f"theorems must differ in name; two are called {theorem.name!r}: rename one"
        require(first is theorem, sentence, TheoremError, "theorems")
    return list(theorems_by_name.values())


def leading(met: list[bool]) -> int:
    """How many layers from the first on are True."""
    return next((layer for layer, yes in enumerate(met) if not yes), len(met))


class CertifyOptions(TypedDict, total=False):
    """The options of `certify` and `collapse_depth`; what is not given is as said here."""

    centre: str
    """What `||res X||_{1,inf}` is about: the "mean" (if left out), or the "argmin" of the definition (linear
    programmes: for small inputs), whose bounds are lower by the factor `2 (1 - 1/n)` that the mean may lose."""
    variant: str  # The name of the network in the manifest; "as given" if left out
    progress: Progress | None  # Called as `progress(done, total)` after each sample
    device: str | torch.device | None
    """Where to run; the CPU if left out: small matrices and linear programmes gain little elsewhere."""
    batch_size: int | None  # How many samples go through the network together; as many as fit if left out
    norms: WeightNorms | None
    """Cached norms of weights from an earlier call with this network or a variant of it, whose weights have not changed
    since."""


@usual_modes()
def certify(
    net: NetworkLike,
    X: InputsLike,
    padding: Tensor | None = None,
    theorems: Chosen = None,
    *,
    attention_mask: Tensor | None = None,
    **options: Unpack[CertifyOptions],
) -> Certificates:
    """Evaluate theorems on a network and tokens, layer by layer, next to the measurement.

    A theorem whose hypotheses fail says so and gives no number. Bounds are moved outward by more than
    rounding could have changed them (`rounding.py`). They are of the tokens after each layer, before a final norm.

    What is certified is the network of these weights and tokens in float64, wherever it runs: weights in float32 or
    bfloat16 are taken as they are, without the rounding of a pass in their own dtype. Masks are those of the padded
    batch, since whom a token sees may depend on the number of positions (`bigbird`, `strided`).

    Args:
        net: The network, or a Hugging Face model in memory, which is loaded as one.
        X: Texts, what `net.encode` gave, token ids `[batch, token]`, or tokens `[batch, token, width]`.
        padding: `[batch, token]`, True at padding, which masks count and measures do not.
        theorems: Names or `Theorem` objects; all if left out.
        attention_mask: Instead of `padding`, 1 at tokens and 0 at padding (Hugging Face's convention).
        options: `centre`, `variant`, `progress`, `device`, `batch_size`, `norms`: `CertifyOptions` describes each.

    Returns:
        `Certificates`: a table of every theorem, sample and layer, with a summary and a figure.

    Raises:
        TheoremError: A theorem that does not exist, a network that no theorem covers, or padding beside a kernel or
            part of the user's own, which may count it.
        TokensError: Tokens of the wrong shape or dtype, or a sample without a token.

    >>> from rankscope.nets import Architecture, Transformer
    >>> san = Transformer.random(Architecture(layers=3, width=16, heads=2)).variant("san")
    >>> found = certify(san, 0.1 * torch.randn(1, 5, 16), theorems="dong2021-2.3")
    >>> bool(found.table["met"].all()), len(found.broken())
    (True, 0)
    """
    for option in options:
        require_one_of("option of certify", option, CertifyOptions.__annotations__, TheoremError, "options")
    centre, batch_size, progress = options.get("centre", "mean"), options.get("batch_size"), options.get("progress")
    require(
        batch_size is None or batch_size > 0, f"batch_size must be > 0; got {batch_size}", TheoremError, "batch_size"
    )
    original_net, X, padding = inputs_of("certify", net, X, padding, attention_mask)
    chosen = theorems_named(theorems)
    reason = outside(original_net.arch)
    message = f"no theorem covers this network, which has {reason}: measure it instead"
    require(not reason, message, TheoremError, "architecture")
    require_one_of("centre", centre, get_args(Centre), MetricError)
    net = original_net.to(torch.float64, options.get("device") or "cpu")
    sentence = f"tokens must be [batch, token, width] of width {net.arch.width}; received {tuple(X.shape)}"
    require(X.ndim == 3 and X.shape[-1] == net.arch.width, sentence, TokensError, "X")
    X = X.to(dtype=torch.float64, device=net.device)
    valid = valid_tokens(X.shape[:-1], padding, X.device)
    some = bool(valid.any(-1).all()) and len(X)
    require(some, "every sample must have a token; one is all padding: drop it", TokensError, "padding")
    if not bool(valid.all()) and (parts := own_objects(net.arch)):
        message = f"padding must be out of sight of {parts}, the user's own, which may count it"
        raise TheoremError(f"{message}: certify one sample at a time, without its padding", subject="padding")
    norms, columns, arithmetic = options.get("norms") or WeightNorms(), _Columns(), ""
    memo: dict[Any, Any] = {}
    for start, stop, left_out in _batches(net.arch, X, valid, batch_size):
        batch = observe_batch(net, X[start:stop], cast(Centre, centre), norms, COPIES, left_out, memo, start)
        for sample, passes in enumerate(batch, start):
            arithmetic, marked = passes.facts[0].arithmetic, noisy_layers(passes)
            for theorem in chosen:
                columns.add(theorem, passes, marked, sample)
            if progress is not None:
                progress(sample + 1, len(X))
    names = [theorem.name for theorem in chosen]
    table = columns.table(names)
    read = original_net if original_net.dtype == net.dtype else net  # whose weights were read for it, if they ever were
    description = {"architecture": net.arch.to_dict(), "fingerprint": read.fingerprint}
    checks = {"centre": centre, "samples": len(X), "tokens": valid.sum(-1).tolist()}
    checks |= {"network_device": str(original_net.device), "network_dtype": str(original_net.dtype)}
    manifest = manifest_of(description, str(net.device), options.get("variant", "as given"), arithmetic, names, checks)
    return Certificates(table, manifest)


AT_ONCE = {"cpu": 2**30}
"""Bytes that samples may take that go through the network together, by device; 2^34 elsewhere."""


def _batches(
    arch: Architecture, X: Tensor, valid: Tensor, batch_size: int | None
) -> Iterator[tuple[int, int, Tensor | None]]:
    """(first sample, the one after the last, their padding) of batches of samples that have equally many tokens, so
    that none has padding in the pass, and that fit into memory."""
    counts, n = valid.sum(-1).tolist(), X.shape[1]
    attention, states = 12 * arch.heads * n * n, n * (16 * arch.layers * arch.width + 4 * arch.mlp_width)
    most = max(1, AT_ONCE.get(X.device.type, 2**34) // ((1 + COPIES) * 8 * max(1, attention + states)))
    most, start = most if batch_size is None else batch_size, 0
    while start < len(counts):
        same = next((k for k in range(start, len(counts)) if counts[k] != counts[start]), len(counts))
        stop = min(same, start + most)
        yield start, stop, None if counts[start] == n else ~valid[start:stop]
        start = stop


class _Columns:
    """The columns of a table of certificates, row by row; hypotheses of all rows lie one after the other."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {name: [] for name in SCHEMA if name != "hypotheses"}
        self.hypotheses: list[Hypothesis] = []
        self.row_of: list[int] = []  # The row of each hypothesis

    def add(self, theorem: Theorem, passes: Passes, marked: Sequence[bool], sample: int) -> None:
        """Add the rows of one theorem on one sample."""
        upper, sizes, columns = theorem.kind == "upper", passes.facts[0].sizes, list(self.rows.values())
        for layer, (log_bound, hypotheses, log_measured, noise) in enumerate(layer_bounds(theorem, passes, marked), 1):
            unmet = [hypothesis.sentence for hypothesis in hypotheses if not hypothesis.met]
            met, bound, measured = not unmet, log_bound / TEN, log_measured / TEN
            size = sizes[layer].of_tokens.get(theorem.quantity, 0.0) / TEN
            # Two zeros, or two infinities, are equal.
            slack = 0.0 if bound == measured else bound - measured if upper else measured - bound
            self.row_of += [len(columns[0])] * len(hypotheses)
            self.hypotheses += hypotheses
            row = (
                theorem.name, sample, layer, theorem.quantity, theorem.kind,
                met, met and (bound >= size if upper else bound == -math.inf), bound if met else None,
                None if math.isnan(measured) else measured, size, slack if met and not math.isnan(slack) else None,
                noise, "; ".join(unmet) or None,
            )  # fmt: skip
            for column, value in zip(columns, row, strict=True):
                column.append(value)

    def table(self, theorems: Sequence[str]) -> pl.DataFrame:
        """The rows in the order of the theorems, by sample and layer."""
        distinct = {id(hypothesis): hypothesis for hypothesis in self.hypotheses}  # most are those of many rows
        places = dict(zip(distinct, range(len(distinct)), strict=True))
        parts = {name: list(map(attrgetter(name), distinct.values())) for name in HYPOTHESIS.to_schema()}
        structs = pl.DataFrame(parts, schema=HYPOTHESIS.to_schema()).to_struct("hypotheses")
        structs = structs.gather([places[id(hypothesis)] for hypothesis in self.hypotheses])
        of_rows = pl.DataFrame([pl.Series("row", self.row_of, dtype=pl.UInt32), structs])
        by_row = of_rows.group_by("row").agg("hypotheses")
        table = pl.DataFrame(self.rows, schema={name: SCHEMA[name] for name in self.rows}).with_row_index("row")
        table = table.join(by_row, "row", "left").with_columns(pl.col("hypotheses").fill_null([])).select(list(SCHEMA))
        return table.sort(pl.col("theorem").cast(pl.Enum(theorems)), "sample", "layer")
