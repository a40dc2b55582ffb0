"""Tasks for small networks, each drawn from a seed and the number of a step.

| task             | a token is            | asked of it                                 |
|------------------|-----------------------|---------------------------------------------|
| `next-character` | a character           | the next one                                |
| `copying`        | a symbol              | after a mark, the symbols before it         |
| `induction`      | a symbol              | what followed it last time                  |
| `digits`         | a patch of an image   | which digit the whole image shows           |

One of your own is a `Task`; packages add theirs by the entry point `rankscope.tasks`, as rankscope-studies does with
the three of figure 4 of Dong et al. 2021 (`sort`, `hull`, `memorization`).
"""

from typing import Any

from rankscope.errors import LabError, require_one_of
from rankscope.lab.tasks.base import UNLABELLED, Batch, Task, drawn_from
from rankscope.lab.tasks.digits import Digits
from rankscope.lab.tasks.sequences import Copying, Induction, NextCharacter
from rankscope.plugins import Group

SHIPPED = (NextCharacter, Copying, Induction, Digits)
TASKS: Group[type[Task]] = Group(
    "tasks", "a class derived from Task", lambda each: isinstance(each, type) and issubclass(each, Task)
)
"""Every task by its name: those of rankscope, then those of other packages."""


def task(name: str, **sizes: Any) -> Task:
    """The task of a name, with its sizes.

    >>> task("copying", length=4)
    Copying(symbols=16, length=4)
    """
    require_one_of("task", name, TASKS, LabError)
    return TASKS[name](**sizes)


__all__ = [
    "TASKS", "UNLABELLED", "Batch", "Copying", "Digits", "Induction", "NextCharacter", "Task",
    "drawn_from", "task",
]  # fmt: skip
