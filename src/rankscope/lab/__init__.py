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
    Induction,
    NextCharacter,
    Task,
    drawn_from,
    task,
)
from rankscope.lab.tasks.sequences import HELD_SHARE
from rankscope.lab.training import Recipe, TaskEvaluation, Training

__all__ = [
    "Batch", "Copying", "Digits", "HELD_SHARE", "Induction", "Initialisation", "Interface",
    "Model", "NextCharacter", "Recipe", "SigmaReparam", "TASKS", "Task",
    "TaskEvaluation", "Trainable", "Training", "UNLABELLED", "drawn_from", "eval_mode", "optimizer_step",
    "release_memory", "reparametrise", "task", "with_gains",
]  # fmt: skip
