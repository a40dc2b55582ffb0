"""Trainings of figure 4 that take a moment."""

from typing import Any

from rankscope_studies.dong2021.fig4 import TaskPlan
from rankscope_studies.dong2021.tasks import FixedTask


def small(task: FixedTask, **fields: Any) -> TaskPlan:
    sizes = {"epochs": 4, "batch": 10, "lr": 3e-3, "layers": 2, "dropout": 0.0, "checkpoint_every": 1}
    return TaskPlan(task, 8, 2, **sizes | fields)
