"""What a run says, in a sentence or two: of measurements the verdict, else what its tables come to."""

from rankscope.paths.views import carried, length_views
from rankscope.report.causes import verdict
from rankscope.report.run import Run
from rankscope.report.sweep import sweep_said
from rankscope.report.training import training_said
from rankscope.theory.views import bounds_sentence


def finding(run: Run) -> str:
    """What the run says, in a sentence or two."""
    if run.measured is not None:
        return verdict(run.measured)
    if run.training is not None:
        return training_said(run.training)
    if run.sweep is not None:
        return sweep_said(run.sweep)
    if len(run.outcomes) == 1 and run.outcomes[0][1].get("said"):
        return str(run.outcomes[0][1]["said"])
    if run.outcomes:
        agrees = [
            each.get("agrees") for _, outcome in run.outcomes for each in outcome.get("comparisons", [])
        ]
        return _met(agrees.count(True), agrees.count(False))
    if "lengths" in run.tables:
        return carried(length_views(run.tables["lengths"]))
    return " ".join(bounds_sentence(found.views(), f"for {name}") for name, found in run.certificates.items())


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
