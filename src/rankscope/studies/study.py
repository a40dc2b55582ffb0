"""A study: one figure of a paper, run again, with the published numbers beside ours.

Each study is a file that reads as the method section of a paper: a function from a `Setup` to an `Outcome`.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from rankscope.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Setup:
    """How a study is to be run."""

    folder: Path
    """Where it keeps what it has done: an interrupted study goes on from there."""
    full: bool = False
    """At the papers' sizes; else at sizes that take minutes on two cores."""
    device: str = "cpu"
    models: tuple[str, ...] = ()
    """Hub ids or directories in place of the trained models at hand."""
    say: Callable[[str], None] = lambda _: None
    """Told what is being done."""

    def kept(self, name: str, compute: Callable[[], pl.DataFrame], **settings: object) -> pl.DataFrame:
        """A table computed once: read back where an earlier run with the same settings has left it."""
        key = json.dumps({"full": self.full, "models": self.models, **settings}, sort_keys=True, default=str)
        path = self.folder / "parts" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.parquet"
        if path.is_file():
            return pl.read_parquet(path)
        self.say(name)
        table = compute()
        with atomic(path) as temporary:
            table.write_parquet(temporary)
        return table


@dataclass(frozen=True)
class Comparison:
    """One thing the paper says, and what came out here."""

    what: str
    published: str
    ours: str
    agrees: bool | None
    """None where there is no published number to hold it against."""
    because: str = ""
    """The reason for a disagreement, or what to know of the agreement."""


@dataclass(frozen=True)
class Outcome:
    """What a study gives."""

    figures: "dict[str, Figure]"
    tables: dict[str, pl.DataFrame]
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)
    """What it was run on, and what could not be had."""


@dataclass(frozen=True)
class Study:
    """A figure of a paper."""

    paper: str
    figure: str
    title: str
    run: Callable[[Setup], Outcome]
    seconds: float = 1.0
    """What it takes at its quick sizes on one core, roughly: its share of a progress bar."""

    @property
    def name(self) -> str:
        """As the command line has it."""
        return f"{self.paper} {self.figure}"
