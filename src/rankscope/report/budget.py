"""How large a page may become: of many runs the later chapters leave out what weighs most and says least.

The first chapter is whole, so that a page of one run never lacks anything; tables and findings always stay.
"""

from collections.abc import Sequence

from rankscope.report.chapter import Chapter

BUDGET = 12_000_000
"""Characters of figures, pictures and manifests, beside plotly itself: a page that opens on a phone."""
LEFT_OUT = {
    "cloud": "the tokens layer by layer",
    "spectrum": "the singular values",
    "heads": "the map of the heads",
    "arithmetics": "the arithmetics side by side",
    "manifest": "the manifest",
    "small": "the figures of further metrics",
    "picture": "the pictures",
    "bounds": "the figure of the bounds",
    "lengths": "the figure of the paths",
    "factors": "the figure of the factors",
    "training": "the figures of the training",
    "sweep": "the figure of the sweep",
    "curves": "the figure of the residual",
}
"""Kinds of parts in the order in which they go, and what each is called."""


def fit(chapters: Sequence[Chapter], budget: int = BUDGET) -> None:
    """Take parts out of later chapters, from the last on, until the page is within its budget."""
    total = sum(weight for each in chapters for _, weight in each.weights())
    for kind, name in LEFT_OUT.items():
        for each in reversed(chapters[1:]):
            if total <= budget:
                return
            weight = sum(weight for part, weight in each.weights() if part == kind)
            if weight:
                each.leave_out(kind)
                each.left.append(name)
                total -= weight
