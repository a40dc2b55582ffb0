"""Tasks for small networks, each drawn from a seed and the number of a step.

| task             | a token is            | asked of it                                 |
|------------------|-----------------------|---------------------------------------------|
| `next-character` | a character           | the next one                                |
| `copying`        | a symbol              | after a mark, the symbols before it         |
| `induction`      | a symbol              | what followed it last time                  |
| `digits`         | a patch of an image   | which digit the whole image shows           |
| `sort`           | a symbol              | the one that is here when all are sorted    |
| `hull`           | a point of the plane  | whether it is on the convex hull            |
| `memorization`   | a word                | its label, drawn at random                  |

The last three are those of figure 4 of Dong et al. 2021. One of your own is a `Task`.
"""

from typing import Any

from rankscope.errors import LabError, require_one_of
from rankscope.lab.tasks.base import UNLABELLED, Batch, Task
from rankscope.lab.tasks.fixed import Digits, Hull, Memorization, Sort
from rankscope.lab.tasks.sequences import Copying, Induction, NextCharacter

TASKS: dict[str, type[Task]] = {
    kind.name: kind for kind in (NextCharacter, Copying, Induction, Digits, Sort, Hull, Memorization)
}


def task(name: str, **sizes: Any) -> Task:
    """The task of a name, with its sizes.

    >>> task("copying", length=4)
    Copying(symbols=16, length=4)
    """
    require_one_of("task", name, TASKS, LabError)
    return TASKS[name](**sizes)


__all__ = [
    "TASKS", "UNLABELLED", "Batch", "Copying", "Digits", "Hull", "Induction", "Memorization", "NextCharacter",
    "Sort", "Task", "task",
]  # fmt: skip
