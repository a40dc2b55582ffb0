"""Studies of the 2024 paper at sizes that take a moment."""

from collections.abc import Callable
from functools import partial

from rankscope.nets import Transformer
from rankscope.sources import fresh, preset
from rankscope_studies import Setup, StudyResult, chosen
from rankscope_studies.wu2024 import fig6
from rankscope_studies.wu2024.networks import StudyInputs


def tiny(name: str, device: str = "cpu") -> Transformer:
    """A preset, two layers deep and 16 wide."""
    return fresh(preset(name).replace(layers=2, width=16, heads=2, mlp_width=32), device=device, name=name)


SMALL = StudyInputs(fresh=tiny, trained=lambda setup: {}, samples=2, length=12)
"""Two excerpts of 12 tokens; nothing trained."""


def small_run(figure: str) -> Callable[[Setup], StudyResult]:
    """The function that runs a figure, on small networks."""
    (study,) = chosen("wu2024", figure)
    sizes = {"size": fig6.DeepSize(1, 12, 64, depth=3)} if figure == "fig6" else {"inputs": SMALL}
    return partial(study.run, **sizes)
