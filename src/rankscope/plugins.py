"""Plugins: what packages that are installed beside rankscope add to it.

A package declares what it adds as entry points, in its pyproject.toml:

    [project.entry-points."rankscope.metrics"]
    energy = "stranger.metrics:energy"            # an object, or a list or table of objects

What rankscope ships is declared in the same way (`SHIPPED`), and goes through the same functions. A room makes a
`Group` of each kind of thing that it takes, and asks it by name. Nothing is imported before it is asked for, and a
plugin that cannot be used is named in one sentence, a `PluginWarning`, once; everything else works.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from rankscope.errors import PluginError, PluginWarning, RankscopeError

T = TypeVar("T")
OWN = "rankscope"
PREFIX = f"{OWN}."
SHIPPED = {
    "metrics": "rankscope.metrics.catalogue:SHIPPED",
    "remedies": "rankscope.remedies.catalogue:SHIPPED",
    "families": "rankscope.sources.families:SHIPPED",
    "observers": "rankscope.live.attention:SHIPPED",
    "alarms": "rankscope.monitor.alarm_rules:SHIPPED",
    "instruments": "rankscope.monitor.monitor:SHIPPED",
    "results": "rankscope.results.kinds:SHIPPED",
    "chapters": "rankscope.report.sections:SHIPPED",
    "jobs": "rankscope.engine.spec:SHIPPED",
    "tasks": "rankscope.lab.tasks:SHIPPED",
    "commands": "rankscope.cli.app:COMMANDS",
    "pages": "rankscope.cli.follow:SHIPPED",
}
"""By group, the object that holds what rankscope itself ships. pyproject.toml declares the same entry points, each
called `rankscope`; they are written here because a source tree is used before it is installed, and after it changed."""


@dataclass(frozen=True)
class EntryPoint:
    """A line by which a package declares something, as `energy = "stranger.metrics:energy"`."""

    group: str
    """Without `rankscope.`, as `metrics`."""
    name: str
    value: str
    package: str
    version: str

    @property
    def shipped(self) -> bool:
        """True of what rankscope itself declares."""
        return self.package == OWN

    def left_out(self, why: str) -> str:
        """The sentence on why what it declares is left out, or some of it, and what to do."""
        declared = f"{PREFIX}{self.group}: {self.name} = {self.value}"
        advice = f"update {self.package}, or pip uninstall {self.package}"
        return f"a plugin of {self.package} {self.version} is left out ({declared}): {why}; {advice}"


def loaded(value: str) -> Any:
    """The object of a line such as `package.module:name.name`. What a stranger's module prints while it is imported
    goes to stderr: stdout has results.

    >>> loaded("math:pi")
    3.141592653589793
    """
    module, _, names = value.partition(":")
    with nullcontext() if value.startswith(PREFIX) else redirect_stdout(sys.stderr):
        target: Any = import_module(module.strip())
    for name in filter(None, names.strip().split(".")):
        target = getattr(target, name)
    return target


@cache
def entry_points() -> tuple[EntryPoint, ...]:
    """What all installed packages declare for rankscope, its own first; read once in a process.

    The same lines as `importlib.metadata` gives of packages in folders, in a sixth of its time, which
    `rankscope --help` would notice: only files that speak of rankscope are taken apart.
    """
    files: dict[str, tuple[str, Path]] = {}
    for path in (path for folder in sys.path for path in Path(folder).glob("*.dist-info/entry_points.txt")):
        package, _, version = path.parent.name.removesuffix(".dist-info").partition("-")
        files.setdefault(package.replace("_", "-").lower(), (version, path))  # the first counts, as it does for imports
    version = files.pop(OWN, ("", None))[0]
    shipped = (EntryPoint(group, OWN, value, OWN, version) for group, value in SHIPPED.items())
    return (*shipped, *(entry for package in sorted(files) for entry in _declared(package, *files[package])))


def _declared(package: str, version: str, path: Path) -> Iterator[EntryPoint]:
    text, group = path.read_text(encoding="utf-8", errors="replace"), ""
    for line in map(str.strip, text.splitlines() if f"[{PREFIX}" in text else ()):
        if line.startswith("["):
            group = line.strip("[] ")
        elif "=" in line and group.startswith(PREFIX) and line[0] not in "#;":
            name, _, value = line.partition("[")[0].partition("=")  # without the extras that it needs
            yield EntryPoint(group.removeprefix(PREFIX), name.strip(), value.strip(), package, version)


_groups: dict[str, "Group[Any]"] = {}
"""Every group that a room has made in this process."""


def every_group() -> "Iterator[Group[Any]]":
    """All groups, in the order of `SHIPPED`; the rooms that make them are imported."""
    for name, value in SHIPPED.items():
        import_module(value.partition(":")[0])
        yield _groups[name]


def refresh() -> None:
    """Look anew at what is installed, as after `pip install` in a notebook."""
    entry_points.cache_clear()
    for group in _groups.values():
        group.__dict__.pop("states", None)


@dataclass(frozen=True)
class PluginState:
    """What an entry point adds, and what of it is left out."""

    entry: EntryPoint
    objects: tuple[str, ...]  # The names of what it adds
    trouble: str = ""  # Why something of it is left out; empty where all of it works


class Group(Mapping[str, T], Generic[T]):
    """The objects of one kind by name: what rankscope ships first, then what plugins add.

    What is shipped is found without a look at plugins; they are imported when a name is asked for that is not shipped,
    or when all are listed.

    Args:
        name: The group of entry points, without `rankscope.`.
        kind: What an object must be, in words, as "a Metric".
        fits: True of an object of that kind.
        named: The name of an object; a table of objects has them by name already.
        read: The objects of an entry point by name, where it is not enough to load and name them.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        fits: Callable[[Any], bool],
        named: Callable[[T], str] = lambda each: str(each.name),  # type: ignore[attr-defined]
        read: Callable[[EntryPoint], Mapping[str, T]] | None = None,
    ) -> None:
        self.name, self.kind = name, kind
        self._fits, self._named, self._read = fits, named, read or self._objects
        _groups[name] = self

    def _objects(self, entry: EntryPoint) -> dict[str, T]:
        """The object, or the objects, that an entry point names."""
        given = loaded(entry.value)
        given = list(given.values()) if isinstance(given, Mapping) else given
        objects = given if isinstance(given, list | tuple) else [given]
        for part in objects:
            if not self._fits(part):
                kind = part.__name__ if isinstance(part, type) else f"a {type(part).__name__}"
                raise PluginError(f"it must name {self.kind}, or a list or table of them; got {kind}")
        return {self._named(part): part for part in objects}

    @cached_property
    def shipped(self) -> dict[str, T]:
        """What rankscope itself ships, by name."""
        return dict(self._read(self._entries()[0]))

    def _entries(self) -> list[EntryPoint]:
        return [entry for entry in entry_points() if entry.group == self.name]  # our own first

    @cached_property
    def states(self) -> list[PluginState]:
        """What each entry point of the group adds, with a warning for each that cannot be used."""
        shipped, *added = self._entries()
        states = [PluginState(shipped, tuple(self.shipped))]
        self._added: dict[str, T] = {}
        self.__dict__["states"] = states  # for a plugin that asks for the group while it is imported
        for entry in added:
            states.append(self._state(entry))
            if states[-1].trouble:
                warnings.warn(states[-1].trouble, PluginWarning, stacklevel=2)
        return states

    @property
    def added(self) -> dict[str, T]:
        """What plugins of other packages add, by name."""
        _ = self.states
        return self._added

    def _state(self, entry: EntryPoint) -> PluginState:
        try:
            objects = dict(self._read(entry))
        except RankscopeError as error:
            return PluginState(entry, (), entry.left_out(str(error)))
        except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
            lines = str(error).strip().splitlines() or [""]
            return PluginState(entry, (), entry.left_out(f"it does not load, {type(error).__name__}: {lines[0]}"))
        taken = [name for name in objects if name in self.shipped or name in self._added]
        new = {name: part for name, part in objects.items() if name not in taken}
        self._added |= new
        why = f"what it calls {', '.join(taken)} must have a name of its own, and that is taken"
        return PluginState(entry, tuple(new), entry.left_out(why) if taken else "")

    def failed(self, name: str, error: BaseException) -> None:
        """Warn that what a plugin adds under this name failed when it was used; what is shipped raises its error."""
        if name in self.shipped:
            raise error
        (entry,) = (state.entry for state in self.states if name in state.objects and not state.entry.shipped)
        warnings.warn(entry.left_out(f"it fails with {type(error).__name__}: {error}"), PluginWarning, stacklevel=2)

    def __getitem__(self, name: str) -> T:
        return self.shipped[name] if name in self.shipped else self.added[name]

    def __iter__(self) -> Iterator[str]:
        return chain(self.shipped, self.added)

    def __len__(self) -> int:
        return len(self.shipped) + len(self.added)


class InOrder(Sequence[T], Generic[T]):
    """The objects of a group one after the other: those of plugins come first, as they are made for less."""

    def __init__(self, group: Group[T]) -> None:
        self.group = group

    def __getitem__(self, index: Any) -> Any:
        return (*self.group.added.values(), *self.group.shipped.values())[index]

    def __len__(self) -> int:
        return len(self.group)

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)  # copied and pickled as what it holds


def source_of(module: str) -> Path | None:
    """The file of a module, found without importing it or the packages that it is in; None where there is none."""
    path = spec = None
    for name in accumulate(module.split("."), "{}.{}".format):
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
