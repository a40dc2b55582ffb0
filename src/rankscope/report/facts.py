"""What a run says, in a sentence or two, and beneath it what was run on what and whether it came to its
end."""

from datetime import UTC, datetime

from rankscope.cards import counted
from rankscope.paths.views import carried, length_views
from rankscope.report.causes import verdict
from rankscope.report.reported_run import ReportedRun
from rankscope.report.studies import agreement
from rankscope.report.sweep import sweep_sentences
from rankscope.report.training import training_sentences
from rankscope.runs.training import TrainingRun
from rankscope.theory.views import bounds_sentence

SIZES = ("layers", "heads", "width")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip


def finding(run: ReportedRun) -> str:
    """What the run says, in a sentence or two: of measurements the verdict, else what its tables come to."""
    if run.measured is not None:
        return verdict(run.measured)
    if run.training is not None:
        return training_sentences(run.training)
    if run.sweep is not None:
        return sweep_sentences(run.sweep)
    if len(run.outcomes) == 1 and run.outcomes[0][1].get("said"):
        return str(run.outcomes[0][1]["said"])
    if run.outcomes:
        return agreement(run.outcomes)
    if "lengths" in run.tables:
        return carried(length_views(run.tables["lengths"]))
    bounds = [bounds_sentence(found.views(), f"for {name}") for name, found in run.certificates.items()]
    return " ".join(bounds)


def stopped(run: ReportedRun) -> str:
    """A sentence where the run ended before it was through; nothing where it did not."""
    early, text = run.manifest.stopped, run.manifest.text
    if early is not None:
        done = ", ".join(early.finished) or "none"
        return f"This run was stopped early: of {early.asked} there are {len(early.finished)} ({done})."
    if text is not None and text.read_to_the_end is False:
        return "This run was stopped before it had read all of the text."
    return ""


def facts(run: ReportedRun) -> list[str]:
    """What was run on what, in a few words each."""
    architectures = [network.architecture for network in run.manifest.networks]
    sizes = [
        f"{counted(arch['layers'], 'layer')} of {counted(arch['heads'], 'head')}, width {arch['width']}"
        for arch in architectures
        if arch is not None and all(isinstance(arch.get(name), int) for name in SIZES)
    ]
    words = sizes[:1] if len(set(sizes)) == 1 else [f"{len(set(sizes))} sizes of network"] if sizes else []
    if run.measured is not None:
        words += [counted(run.excerpts, "excerpt"), f"{', '.join(run.measured.arithmetics)} arithmetic"]
    if run.training is not None and run.measured is None:
        words += _trained(run.training)
    if run.sweep is not None and run.measured is None:
        words += [counted(run.sweep.cells, "cell"), f"{len(run.sweep.first.varied)} factors that differ"]
    return [*words, _when(run.manifest.created)] if run.manifest.created else words


def _trained(training: TrainingRun) -> list[str]:
    """How large the model is that was trained, and how often it was measured."""
    sizes = [(network.model or {}).get("parameters") for network in training.manifest.networks]
    known = [f"{size:,} parameters" for size in sizes[:1] if isinstance(size, int)]
    return [*known, counted(len(training.steps), "measurement")]


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
