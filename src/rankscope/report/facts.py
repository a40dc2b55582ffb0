"""What was run on what, and whether it came to its end: the line beneath a chapter's finding."""

from datetime import UTC, datetime
from typing import Any

from rankscope.cards import counted
from rankscope.profiles import Summary
from rankscope.report.run import Run

SIZES = ("layers", "heads", "width")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip


def stopped(run: Run) -> str:
    """That a run ended before it was through, where it did."""
    early, text = run.manifest.get("stopped"), run.manifest.get("text")
    if isinstance(early, dict) and isinstance(early.get("finished"), list):
        done = ", ".join(map(str, early["finished"])) or "none"
        number = len(early["finished"])
        return f"This run was stopped early: of {early.get('asked')} there are {number} ({done})."
    if isinstance(text, dict) and text.get("read_to_the_end") is False:
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
    manifest: dict[str, Any] = run.manifest
    found = []
    networks = manifest.get("networks")
    networks = networks if isinstance(networks, list) else []
    described = [each.get("architecture") for each in networks if isinstance(each, dict)]
    sizes = [
        f"{counted(arch['layers'], 'layer')} of {counted(arch['heads'], 'head')}, width {arch['width']}"
        for arch in described or [manifest.get("architecture")]
        if isinstance(arch, dict) and all(isinstance(arch.get(name), int) for name in SIZES)
    ]
    if len(set(sizes)) == 1:
        found.append(sizes[0])
    elif sizes:
        found.append(f"{len(set(sizes))} sizes of network")
    if run.measured is not None:
        found.append(counted(excerpts(run), "excerpt"))
        found.append(f"{', '.join(run.measured.arithmetics)} arithmetic")
    if manifest.get("created"):
        found.append(_when(str(manifest["created"])))
    return found


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
