"""Objects that rankscope cannot take."""

from rankscope.metrics import Metric
from rankscope.monitor import AlarmRule
from rankscope.results import Result

taken = Metric("mu", lambda X, padding=None: X.sum((-2, -1)))
of_no_kind = ["residual"]


class Rule(AlarmRule):
    """A rule without the method that says what is wrong."""

    name = "nothing"


class Misnamed(Result):
    """A result of another kind than its entry point says."""

    kind = "count"


def failing_sections(run):
    """Fail on every run."""
    raise KeyError("width")


def measure() -> None:
    """Take the name of a command that there is."""
