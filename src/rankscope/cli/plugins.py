"""`rankscope plugins`: what installed packages add, group by group, and what is wrong where something is left out."""

import warnings
from dataclasses import replace
from typing import Any

from rankscope.cli import options as opt
from rankscope.cli.show import console, machine, say, titled
from rankscope.cli.sources import SOURCES
from rankscope.errors import PluginWarning, RankscopeError, one_of
from rankscope.plugins import SHIPPED, PluginState, entry_points, every_group

SHOWN = 4  # Names of what a package adds that a row of the table has


def plugins(printing: opt.PrintOptions = opt.PrintOptions()) -> None:
    """List the plugins: what each installed package adds to rankscope, and what is wrong with one that is left out.

    Everything that is listed is imported, here and now. What rankscope itself ships is found in the same way, and has
    the first row of each group.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # listed here
        states = [_tried(state) for group in every_group() for state in group.states]
    for entry in (entry for entry in entry_points() if entry.group not in SHIPPED):
        states.append(PluginState(entry, (), entry.left_out(one_of("a group of rankscope", entry.group, SHIPPED))))
    if printing.as_json:
        return machine([_row(state) for state in states])
    table = titled("What is found, by group", words=["group", "package", "adds"])
    for state in states:
        names = ", ".join(state.objects[:SHOWN]) + (", ..." if len(state.objects) > SHOWN else "")
        counted = f"{len(state.objects)}: {names}" if state.objects else "nothing"
        table.add_row(state.entry.group, f"{state.entry.package} {state.entry.version}", counted)
    console().print(table)
    say(*(line for state in states if state.trouble for line in ("", state.trouble)))
    if not printing.quiet:
        say("", "A package adds something with an entry point: the page on parts of your own has one of each.")


def _tried(state: PluginState) -> PluginState:
    """The state of an entry point; commands, which are not imported to be listed, are imported here."""
    if state.entry.group != SOURCES.name or state.entry.shipped:
        return state
    for name in state.objects:
        try:
            SOURCES[name].load()
        except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
            why = str(error) if isinstance(error, RankscopeError) else f"{type(error).__name__}: {error}"
            return replace(state, trouble=state.entry.left_out(why))
    return state


def _row(state: PluginState) -> dict[str, Any]:
    entry = state.entry
    given = {name: getattr(entry, name) for name in ("group", "name", "value", "package", "version")}
    return {**given, "adds": list(state.objects), "trouble": state.trouble or None}
