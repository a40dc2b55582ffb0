"""Small networks, trained under watch.

    task = Induction()
    training = Training(task, task.architecture(6, 64), remedies=["attnscale"], run="runs/induction")
    training.finish().tried()

`Training` has any task (`tasks/`), any architecture, seeds, remedies and devices; `Trainable` is the
canonical network as a torch module, for a loop of one's own. `training` is the small GPT of the demo.
"""

from rankscope.lab.gpt import GPT, Shape
from rankscope.lab.model import Interface, Model
from rankscope.lab.module import Trainable
from rankscope.lab.recipe import Recipe, pace
from rankscope.lab.reparametrised import SigmaReparam, reparametrise
from rankscope.lab.tasks import TASKS, Batch, Task, task
from rankscope.lab.text import Characters, characters
from rankscope.lab.training import Beginning, Training, Tried
from rankscope.lab.writing import METRICS, training

__all__ = [
    "GPT", "METRICS", "TASKS", "Batch", "Beginning", "Characters", "Interface", "Model", "Recipe", "Shape",
    "SigmaReparam", "Task", "Trainable", "Training", "Tried", "characters", "pace", "reparametrise", "task",
    "training",
]  # fmt: skip
