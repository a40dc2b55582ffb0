"""The command `rankscope`, and what a command of a plugin takes from it.

| for | names |
|---|---|
| options: a single one, one that several commands share, a group of them, names that they take | `options` (as `opt`) |
| sentences, tables and JSON on stdout | `say`, `say_where`, `say_report`, `console`, `titled`, `machine` |
| progress on stderr, a line there | `progress`, `complain` |
| Ctrl-C, with what was kept; what is closed when a command ends | `Interruption`, `ending` |
| a folder with figures and a report needs packages | `require_report` |
| the command line as it was typed; names between commas | `command_line`, `split_names` |

`docs/extending.md` has a command of a plugin. Nothing here imports torch, nor anything before it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankscope.cli.app import app, ending, main

if TYPE_CHECKING:
    from rankscope.cli import options
    from rankscope.cli.inputs import command_line, split_names
    from rankscope.cli.output import require_report
    from rankscope.cli.show import (
        Interruption,
        complain,
        console,
        machine,
        progress,
        say,
        say_report,
        say_where,
        titled,
    )

__all__ = [
    "Interruption", "app", "command_line", "complain", "console", "ending", "machine", "main", "options",
    "progress", "require_report", "say", "say_report", "say_where", "split_names", "titled",
]  # fmt: skip
_FILES = {"command_line": "inputs", "split_names": "inputs", "require_report": "output"}  # all others: show


def __getattr__(name: str) -> Any:
    if name not in __all__ or name == "options":  # which is a module
        raise AttributeError(f"module 'rankscope.cli' has no attribute {name!r}")
    return getattr(import_module(f"rankscope.cli.{_FILES.get(name, 'show')}"), name)
