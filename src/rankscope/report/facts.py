"""What was run on what, and whether it came to its end: the line beneath a chapter's finding."""

from datetime import UTC, datetime

from rankscope.cards import counted
from rankscope.profiles import Summary
from rankscope.report.run import Run
from rankscope.runs.training import TrainingRun

SIZES = ("layers", "heads", "width")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip


def stopped(run: Run) -> str:
    """That a run ended before it was through, where it did."""
    early, text = run.manifest.stopped, run.manifest.text
    if early is not None:
        done = ", ".join(early.finished) or "none"
        return f"This run was stopped early: of {early.asked} there are {len(early.finished)} ({done})."
    if text is not None and text.read_to_the_end is False:
        return "This run was stopped before it had read all of the text."
    return ""


def excerpts(run: Run) -> int:
    """How many were measured."""
    if run.measured is None:
        return 0
    if isinstance(run.measured, Summary):
        return run.measured.excerpts
    return run.measured.table["sample"].n_unique()


def facts(run: Run) -> list[str]:
    """What was run on what, in a few words each."""
    found = []
    described = [each.architecture for each in run.manifest.networks]
    sizes = [
        f"{counted(arch['layers'], 'layer')} of {counted(arch['heads'], 'head')}, width {arch['width']}"
        for arch in described
        if arch is not None and all(isinstance(arch.get(name), int) for name in SIZES)
    ]
    if len(set(sizes)) == 1:
        found.append(sizes[0])
    elif sizes:
        found.append(f"{len(set(sizes))} sizes of network")
    if run.measured is not None:
        found.append(counted(excerpts(run), "excerpt"))
        found.append(f"{', '.join(run.measured.arithmetics)} arithmetic")
    if run.training is not None and run.measured is None:
        found += _trained(run.training)
    if run.sweep is not None and run.measured is None:
        found += [counted(run.sweep.cells, "cell"), f"{len(run.sweep.first.varied)} factors that differ"]
    if run.manifest.created:
        found.append(_when(run.manifest.created))
    return found


def _trained(training: TrainingRun) -> list[str]:
    """How large the model is that was trained, and how often it was looked at."""
    sizes = [(network.model or {}).get("parameters") for network in training.manifest.networks]
    said = [f"{size:,} parameters" for size in sizes[:1] if isinstance(size, int)]
    return [*said, counted(len(training.steps), "look")]


def _when(created: str) -> str:
    """A time as one says it.

    >>> _when("2026-03-01T09:05:00+00:00")
    '1 March 2026, 09:05 UTC'
    """
    try:
        time = datetime.fromisoformat(created).astimezone(UTC)
    except (ValueError, OverflowError):
        return created
    return f"{time.day} {MONTHS[time.month - 1]} {time.year}, {time:%H:%M} UTC"
