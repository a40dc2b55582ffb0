"""Where the commands are: the functions that rankscope and plugins declare, found without importing their modules.

A plugin declares a command in its pyproject.toml, under the name that it is called by:

    [project.entry-points."rankscope.commands"]
    study = "rankscope_studies.cli:study"

The function is one for typer, or one with groups of options (`rankscope.cli.flattened`); the first paragraph of its
docstring is its line in `rankscope --help`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankscope.errors import PluginError, RankscopeError
from rankscope.extras import EXTRAS
from rankscope.plugins import PREFIX, EntryPoint, Group, loaded, source_of


@dataclass(frozen=True)
class CommandSource:
    """A command that is not imported yet."""

    value: str
    """Where its function is, as "package.module:function"."""
    docstring: str

    def load(self) -> Any:
        """The function of the command; its module is imported."""
        try:
            return loaded(self.value)
        except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
            missing = isinstance(error, ModuleNotFoundError) and error.name in EXTRAS
            if missing or isinstance(error, RankscopeError) or self.value.startswith(PREFIX):
                raise
            why = f"{type(error).__name__}: {error}"
            raise PluginError(f"the command must be importable from {self.value}; it is not, {why}") from error


def _sources_of(entry: EntryPoint) -> dict[str, CommandSource]:
    """The command that an entry point names, or all of a table that says where the function of each name is."""
    source = _source(entry.value)
    if source is not None:
        return {entry.name: source}
    given = entry.load()
    if callable(given):  # made by a decorator, or imported from elsewhere
        return {entry.name: CommandSource(entry.value, given.__doc__ or "")}
    if not isinstance(given, Mapping):
        raise PluginError(f"it must name a function, or a table of where functions are; got {type(given).__name__}")
    sources = {name: _source(str(value)) for name, value in given.items()}
    if lost := [f"{name} = {given[name]}" for name, source in sources.items() if source is None]:
        raise PluginError(f"a command must be a function of a module; there is none at {', '.join(lost)}")
    return {name: source for name, source in sources.items() if source is not None}


def _source(value: str) -> CommandSource | None:
    """The function at a place such as "package.module:function", by the text of its file; None if there is none."""
    module, _, name = value.partition(":")
    path = source_of(module.strip())
    if path is None or path.suffix != ".py":
        return None
    body = path.read_text(encoding="utf-8").partition(f"\ndef {name.strip()}(")[2].partition("\ndef ")[0]
    return CommandSource(value, [*body.split('"""'), "", ""][1]) if body else None


SOURCES: Group[CommandSource] = Group(
    "commands", "a function", lambda each: isinstance(each, CommandSource), read=_sources_of
)
"""Every command by its name."""
