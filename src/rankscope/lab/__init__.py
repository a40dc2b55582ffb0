"""Small networks, trained under a monitor.

    task = Induction()
    training = Training(task, task.architecture(6, 64), remedies=["attnscale"], run="runs/induction")
    training.finish().evaluate()

`Training` takes any task (`tasks/`), any architecture, seeds, remedies and devices; `Trainable` is the
canonical network as a torch module, for a loop of one's own.
"""

from rankscope.lab.model import Initialisation, Interface, Model, Trainable, eval_mode, with_gains
from rankscope.lab.sigma_reparam import SigmaReparam, reparametrise
from rankscope.lab.steps import optimizer_step, release_memory
from rankscope.lab.tasks import (
    TASKS,
    UNLABELLED,
    Batch,
    Copying,
    Digits,
    Hull,
    Induction,
    Memorization,
    NextCharacter,
    Sort,
    Task,
    task,
)
from rankscope.lab.tasks.fixed import POINTS, SORTED, FixedTask, attention_alone
from rankscope.lab.tasks.sequences import HELD_SHARE
from rankscope.lab.training import Recipe, TaskEvaluation, Training

__all__ = [
    "Batch", "Copying", "Digits", "FixedTask", "HELD_SHARE", "Hull", "Induction", "Initialisation", "Interface",
    "Memorization", "Model", "NextCharacter", "POINTS", "Recipe", "SORTED", "SigmaReparam", "Sort", "TASKS", "Task",
    "TaskEvaluation", "Trainable", "Training", "UNLABELLED", "attention_alone", "eval_mode", "optimizer_step",
    "release_memory", "reparametrise", "task", "with_gains",
]  # fmt: skip
