"""What a run says, in a sentence or two: of measurements the verdict, else what its tables come to."""

import polars as pl

from rankscope.report.run import Run
from rankscope.report.verdict import verdict
from rankscope.theory import Certificates


def finding(run: Run) -> str:
    """What the run says, in a sentence or two."""
    if run.measured is not None:
        return verdict(run.measured)
    if run.outcomes:
        agrees = [
            each.get("agrees") for _, outcome in run.outcomes for each in outcome.get("comparisons", [])
        ]
        return _met(agrees.count(True), agrees.count(False))
    if "lengths" in run.tables:
        return _carried(run)
    return " ".join(_proved(variant, found) for variant, found in run.certificates.items())


def _proved(variant: str, found: Certificates) -> str:
    """Of certificates: how many theorems apply, and how many of these say something."""
    rows = found.summary()
    holds, says = rows.filter(pl.col("met_to") > 0).height, rows["says_at"].drop_nulls().len()
    return f"Of {rows.height} theorems {holds} hold for {variant}, and {says} say more than is known anyway."


def _met(yes: int, no: int) -> str:
    """Of studies: how much of what was published came out."""
    if not yes + no:
        return "No published number to compare with."
    if not no:
        return f"All of {yes} published numbers came out." if yes > 1 else "The published number came out."
    differ = (
        "1 differs, with the reason beside it" if no == 1 else f"{no} differ, with the reasons beside them"
    )
    return f"Of {yes + no} published numbers, {yes} came out; {differ}."


def _carried(run: Run) -> str:
    """Of a decomposition: which length carries most."""
    rows = run.tables["lengths"].filter(pl.col("start") == "all", pl.col("share").is_finite())
    means = rows.group_by("length").agg(pl.col("share").mean(), pl.col("paths").first()).sort("share")
    if means.is_empty():
        return ""
    most = means.row(-1, named=True)
    heads = (
        "no head" if most["length"] == 0 else "one head" if most["length"] == 1 else f"{most['length']} heads"
    )
    what = "most of the output" if most["share"] > 0.5 else "more of the output than any other length"
    return f"Paths through {heads} carry {what}: {most['share']:.0%} of it."
