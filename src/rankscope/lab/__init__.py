"""Small networks, trained under watch."""

from rankscope.lab.gpt import GPT, Shape
from rankscope.lab.text import Characters, characters
from rankscope.lab.training import METRICS, Recipe, pace, training

__all__ = ["GPT", "METRICS", "Characters", "Recipe", "Shape", "characters", "pace", "training"]
