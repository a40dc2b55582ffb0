"""Small networks, trained under a monitor.

    task = Induction()
    training = Training(task, task.architecture(6, 64), remedies=["attnscale"], run="runs/induction")
    training.finish().evaluate()

`Training` takes any task (`tasks/`), any architecture, seeds, remedies and devices; `Trainable` is the
canonical network as a torch module, for a loop of one's own.
"""

from rankscope.lab.model import Interface, Model
from rankscope.lab.module import Trainable
from rankscope.lab.recipe import Initialisation, Recipe
from rankscope.lab.sigma_reparam import SigmaReparam, reparametrise
from rankscope.lab.tasks import TASKS, Batch, Task, task
from rankscope.lab.training import TaskEvaluation, Training

__all__ = [
    "TASKS", "Batch", "Initialisation", "Interface", "Model", "Recipe", "SigmaReparam", "Task",
    "TaskEvaluation", "Trainable", "Training", "reparametrise", "task",
]  # fmt: skip
