"""The tables of a run folder: columns, types and meanings.

Columns and types are those of the schemas that write them, or of tables made here from a small network.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import polars as pl

from rankscope import Architecture, Transformer, decompose
from rankscope.engine.sweeping import STATUS
from rankscope.profiles import Profile, Summary
from rankscope.profiles.cloud import CLOUD
from rankscope.profiles.cloud import SPECTRUM as SPECTRA
from rankscope.sources import word_tokens
from rankscope.theory import Certificates
from rankscope.trainings.training import ALARMS, CERTIFICATES, TRAINING
from sitegen.markdown import table

WRITTEN = {
    "profile": "`measure`, `demo`, `compare`: every number of every layer.",
    "summary": "`measure --text`: statistics over the excerpts of a corpus.",
    "cloud": "`measure`, `demo`: tokens on the two leading axes of all layers, of the first sample.",
    "spectrum": "`measure`, `demo`: singular values of the residual, the 64 largest of each layer.",
    "lengths": "`paths`, `demo`: all paths of one length, summed.",
    "layers": "`paths`: everything that passes through one part of a layer.",
    "heads": "`paths`, `demo`: everything that passes through one head.",
    "single_paths": "`paths`: paths drawn one by one.",
    "certificates": "`bounds`, `demo`: each theorem at each layer; of several variants a file each.",
    "training": "`Monitor`, `checkpoints`; grows while it is written.",
    "alarms": "`Monitor`: what its rules said; grows while it is written.",
    "training_certificates": "`Monitor(paths_every=)`: theorems of the probe; grows while it is written.",
    "kept": "`sweep`: how each cell ended; grows while it is written.",
}
"""Which command writes a table, and what a row of it is about."""
MEANINGS: dict[str, str] = {
    "variant": "which network: `transformer`, `san`, or the name it was given",
    "arithmetic": "`deviation`, `float64`, `float32`, `bfloat16`: what the network was run in",
    "sample": "which text or batch entry, from 0",
    "layer": "0 is the input, l what block l gives; null where a number is of the whole run",
    "head": "from 0; null where a number is not of a head",
    "metric": "its name, as in [metrics](metrics.md)",
    "value": "the number; 0 where it underflows, null or NaN where there is none",
    "log10": "log10 of the value's size, also where the value itself underflows",
    "floor": "below it a value is rounding; 0 where there is no floor",
    "below_floor": "whether the value is rounding; of a summary, the share of excerpts where it is",
    "digits": "decimal digits of the value that rounding left, by a second pass; null where there was none",
    "count": "how many excerpts have a number here",
    "mean": "over excerpts",
    "sd": "standard deviation over excerpts",
    "least": "the smallest",
    "most": "the largest",
    "zeros": "excerpts whose value is exactly zero",
    "not_finite": "excerpts whose value is no number",
    "token": "its place in the sample, from 0",
    "text": "the token as the tokenizer writes it",
    "x": "its place on the first axis, in units of the layer's own spread",
    "y": "its place on the second axis, in the same units",
    "log10_scale": "log10 of that spread as a share of a token's length, which is `relative_mu`",
    "shown": "the share of the layer's variance that lies in the plane of the two axes",
    "index": "which singular value, 1 the largest",
    "length": "the number of heads in a path",
    "start": "where paths begin: `embedding`, `bias`, or `all` for both together",
    "paths": "how many, a whole number of any size, as text",
    "norm": "Frobenius norm of what is summed",
    "residual": "its residual, as the metric of that name",
    "relative_residual": "its residual, as the metric of that name",
    "share": "of the output: `<term, output> / <output, output>`",
    "residual_share": "the same of the output's residual",
    "cosine": "of the term and the output",
    "part": "`heads` or `mlp`",
    "contraction": "the residual of what a head adds, as a share of that of what it reads",
    "averaging": "the same of attention alone, without values and outputs",
    "dobrushin": "Dobrushin's coefficient of its attention",
    "path": "for each layer the number of its head, or · where the path goes past the heads",
    "theorem": "its name, as in [theorems](theorems.md)",
    "quantity": "what is bounded",
    "kind": "`upper` or `lower`",
    "met": "whether every hypothesis holds up to this layer",
    "vacuous": "whether the bound says nothing: it allows what is possible anyway",
    "log10_bound": "log10 of the bound",
    "log10_measured": "log10 of the same quantity, measured",
    "log10_size": "log10 of the tokens' own size",
    "slack": "decades between bound and measurement",
    "why": "the first hypothesis that fails, with its number",
    "hypotheses": "each hypothesis: what it says, the number found, its limit, whether it is met",
    "step": "of the optimiser; of a sweep, the order in which cells ended",
    "spread": "standard deviation over samples",
    "samples": "how many the value is a mean of",
    "broken": "samples without a number; of certificates, guarantees that the measurement contradicts",
    "since": "the first measurement at which it was so",
    "rule": "which rule spoke",
    "action": "what it did: `warn`, `stop`, or `call` (a function)",
    "sentence": "what it said",
    "met_to": "hypotheses hold from layer 1 to this one; 0: nowhere",
    "says_at": "the last layer at which the bound says something",
    "cell": "the key of a cell: a hash of all that decides its numbers",
    "reason": "why a cell failed; null where it did not",
    "lasting": "whether it would end the same if it were run again",
    "seconds": "how long it took",
}
"""A column means the same in every table."""


@cache
def schemas() -> dict[str, Mapping[str, Any]]:
    """{table: {column: type}}."""
    net = Transformer.random(Architecture(layers=1, width=8, heads=2, mlp_width=8))
    d = decompose(net, *word_tokens(["call me Ishmael"], 8))
    return {
        "profile": Profile.schemas["profile"],
        "summary": Summary.schemas["summary"],
        "cloud": CLOUD,
        "spectrum": SPECTRA,
        "lengths": d.by_length().table.schema,
        "layers": d.by_layer().schema,
        "heads": d.by_head().schema,
        "single_paths": d.residuals().schema,
        "certificates": Certificates.schemas["certificates"],
        "training": TRAINING,
        "alarms": ALARMS,
        "training_certificates": CERTIFICATES,
        "kept": STATUS,
    }


def meaning(column: str) -> str:
    """What is in a column; quantiles and logs of statistics by what they are of."""
    if column in MEANINGS:
        return MEANINGS[column]
    if column.startswith("log10_"):
        return f"the same as {column.removeprefix('log10_')}, of log10"
    if column.startswith("q") and column[1:].isdigit():
        return f"quantile {int(column[1:]) / 100:g} over excerpts"
    raise KeyError(column)


def page() -> str:
    """A section for each table."""
    parts = []
    for name, columns in schemas().items():
        shown = [
            each
            for each in columns
            if not each.startswith(("log10_q", "log10_m", "log10_l", "log10_s", "log10_c")) or name != "summary"
        ]
        rows = [[f"`{each}`", kind(columns[each]), meaning(each)] for each in shown]
        if name == "summary":
            rows.append(["`log10_count` to `log10_most`", "as those above", "the same statistics of log10"])
        parts += [f"### {name}", WRITTEN[name], table(["column", "type", "meaning"], rows)]
    return "\n\n".join(parts)


def kind(found: Any) -> str:
    """A type by its name in Parquet's words."""
    if isinstance(found, pl.List):
        return "list of structs"
    name = str(found() if isinstance(found, type) else found)
    return {"String": "text", "Int64": "int64", "Float64": "float64", "Boolean": "boolean"}.get(name, name)
