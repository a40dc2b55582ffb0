"""Kinds of results by name, and `read`, which gives back the class that was saved."""

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rankscope.errors import FileError, PluginError, PluginWarning, one_of
from rankscope.plugins import EntryPoint, Group, loaded
from rankscope.results.result import Result
from rankscope.runs import Run
from rankscope.runs import read as read_run

SHIPPED = {
    "profile": "rankscope.profiles:Profile",
    "summary": "rankscope.profiles:Summary",
    "certificates": "rankscope.theory:Certificates",
    "collapse": "rankscope.theory:CollapseDepth",
    "decomposition": "rankscope.paths:Decomposition",
    "by_length": "rankscope.paths:ByLength",
    "depth": "rankscope.depths:DepthCard",
    "cut": "rankscope.depths:Cut",
    "forecast": "rankscope.forecasts:Forecast",
    "sweep": "rankscope.engine:Sweep",
    "training": "rankscope.trainings:TrainingRun",
    "comparison": "rankscope.trainings:RunComparison",
    "spikes": "rankscope.trainings:Spikes",
}
"""By the kind that a manifest names, where its class is."""


def _places(entry: EntryPoint) -> Mapping[str, str]:
    """Where the class of each kind is: a plugin's entry point has the name of the kind, and is not imported here."""
    return SHIPPED if entry.shipped else {entry.name: entry.value}


KINDS: Group[str] = Group("results", "a class of results", lambda each: isinstance(each, str), read=_places)
"""Where the class of each kind is: those that rankscope ships, and those of plugins."""


def class_of(kind: str) -> type[Result]:
    """The class of a kind of result; raises FileError if none of that name is known."""
    if kind not in KINDS:
        raise FileError(one_of("a kind of result", kind, KINDS), subject="kind")
    try:
        kind_class = loaded(KINDS[kind])
    except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
        if kind in KINDS.shipped:
            raise
        sentence = f"{KINDS[kind]}, the class of the results called {kind}, does not load"
        raise PluginError(f"{sentence} ({type(error).__name__}: {error}): update its package") from error
    if not (isinstance(kind_class, type) and issubclass(kind_class, Result)):
        raise PluginError(
            f"{KINDS[kind]}, the class of the results called {kind}, must be a Result; got {kind_class!r}"
        )
    if kind_class.kind != kind:
        sentence = f"{KINDS[kind]}, the class of the results called {kind}, must be of that kind; it is of kind"
        raise PluginError(f"{sentence} {kind_class.kind!r}, which is how its entry point must be called")
    return kind_class


def results_of(run: Run, but: Collection[str] = ()) -> dict[str, Result]:
    """Every result in a run folder by the entry that holds it; entries of no kind that is known here are left out, and
    those of kinds in `but`."""
    kinds = {name: entry.kind for name, entry in run.entries.items() if entry.kind in KINDS and entry.kind not in but}
    results: dict[str, Result] = {}
    for name, kind in kinds.items():
        try:
            kind_class = class_of(kind)
        except PluginError as error:  # a stranger's kind takes no other with it
            warnings.warn(str(error), PluginWarning, stacklevel=2)
            continue
        results[name] = kind_class.of_run(run, name)
    return results


def read(folder: str | Path) -> Any:
    """The result in a folder, as the class that was saved.

    Args:
        folder: A run folder, as `save`, a `Monitor` or a command with `-o` has written it.

    Returns:
        The result; where a folder holds several, none that is known, or is of a version that named no kinds, the `Run`,
        which has `names`, `tables` and `manifests`.

    Raises:
        FileError: There is no such folder, or a file in it is damaged.

    >>> import tempfile
    >>> from rankscope import fresh, measure
    >>> profile = measure(fresh("bert-tiny"), ["Call me Ishmael."])
    >>> again = read(profile.save(tempfile.mkdtemp()))
    >>> type(again).__name__, again.equals(profile)
    ('Profile', True)
    """
    run = read_run(folder)
    known = [name for name, entry in run.entries.items() if entry.kind in KINDS]
    if len(known) != 1:
        return run
    return class_of(run.entries[known[0]].kind).of_run(run, known[0])
