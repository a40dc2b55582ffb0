"""A study: one figure of a paper, run again, with the published numbers beside ours.

Each study is a file that reads as the method section of a paper: a function from `Setup` to `StudyResult`. What the
paper claims, and the sentences that go with our numbers, are in `data/studies.toml` (`StudyTexts`).
"""

import json
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from glob import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from rankscope.runs import begun, digest, files_of, key_of, lock_if_free, tables, unlock

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DIGITS = 12  # Of the key's digest, in the name of a part's file
WAIT_SECONDS = 0.5  # Between two looks at parts that another process computes


@dataclass(frozen=True)
class Setup:
    """How a study is to be run."""

    folder: Path  # Where it caches what it has done: an interrupted study resumes from there
    full: bool = False  # At the papers' sizes; else at sizes that take minutes on two cores
    device: str = "cpu"
    models: tuple[str, ...] = ()  # Hub ids or directories in place of the trained models at hand
    say: Callable[[str], None] = lambda _: None  # Called with what is being done
    progress: Callable[[int, int], None] = lambda done, total: None  # Called with how many pieces are done, of how many
    any_machine: bool = False  # Also take parts of the same work that another machine, device or torch computed
    elsewhere: dict[str, str] = field(default_factory=dict)  # What computed each part that was taken so, by its name

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    def cached(self, name: str, compute: Callable[[], pl.DataFrame], **settings: object) -> pl.DataFrame:
        """A table that is computed once, and read back where an earlier run of the same work has left it: by
        the same versions, on the same device and models, with the same settings."""
        return self.cached_parts({name: compute}, **settings)

    def cached_parts(self, parts: Mapping[str, Callable[[], pl.DataFrame]], **settings: object) -> pl.DataFrame:
        """One table of several by name, each of which is cached by itself.

        Processes that run the same study into the same folder share its parts: each process computes parts that no
        other one has begun, and waits for the others' at the end.

        Args:
            parts: What computes each part, by the part's name.
            settings: What else the parts depend on: a part that was computed with other settings is not read.
        """
        models = [files_of(model) for model in self.models]
        key = key_of(full=self.full, device=self.device, models=models, settings=settings)
        paths = {name: self.folder / "parts" / f"{name}-{digest(key, DIGITS)}.parquet" for name in parts}
        left = [*parts]
        if self.any_machine:
            paths |= self._from_elsewhere({name: path for name, path in paths.items() if not path.is_file()}, key)
        while left:
            waiting = [name for name in left if not self._computed(paths[name], name, parts[name], key)]
            if len(waiting) == len(left):
                time.sleep(WAIT_SECONDS)
            left = waiting
        return pl.concat([tables.read_parquet(path)[0] for path in paths.values()])

    def _from_elsewhere(self, paths: Mapping[str, Path], key: dict[str, Any]) -> dict[str, Path]:
        """Files of parts whose key is this one but for the device and the versions of packages other than rankscope;
        what computed them is written into `elsewhere`."""
        elsewhere = {}
        for name, path in paths.items():
            for kept in sorted(path.parent.glob(f"{escape(name)}-{'?' * DIGITS}.parquet")):
                manifest = tables.manifest_in(kept)
                if manifest.key is not None and _work(manifest.key) == _work(key):
                    versions = manifest.key["versions"]
                    self.elsewhere[name] = f"{manifest.device}, torch {versions.get('torch', 'unknown')}"
                    elsewhere[name] = kept
                    break
        return elsewhere

    @property
    def devices(self) -> str:
        """What computed the study: its own device, and those of parts that were taken from elsewhere."""
        return " and ".join(sorted({self.device, *(what.split(",")[0] for what in self.elsewhere.values())}))

    def notes(self) -> list[str]:
        """A sentence on the parts that other machines computed, for the notes of a study; none if there are none."""
        counts = Counter(self.elsewhere.values())
        listed = "; ".join(f"{count} on {what}" for what, count in sorted(counts.items()))
        return [f"Computed elsewhere and taken as they were: {listed} (parts of the study)."] if counts else []

    def _computed(self, path: Path, name: str, compute: Callable[[], pl.DataFrame], key: dict[str, Any]) -> bool:
        """False where another process is computing the part; else the part's table is in its file afterwards."""
        if path.is_file():
            return True
        file = f".{path.stem}.lock"
        handle = lock_if_free(path.parent, file)
        if handle is None:
            return False
        try:
            if not path.is_file():  # nobody has written the file since it was looked for
                self.say(name)
                tables.write_parquet(path, compute(), begun(self.device).adding(key=key))
        finally:
            unlock(path.parent, handle, file)
        return True


def _work(key: Mapping[str, Any]) -> dict[str, Any]:
    """What a key says of the work itself: all but the device, and of versions rankscope's alone."""
    return {**key, "device": None, "versions": key["versions"].get("rankscope")}


@dataclass(frozen=True)
class Comparison:
    """One thing the paper says, and what came out here."""

    what: str
    published: str
    ours: str
    agrees: bool | None  # None where there is no published number to hold it against
    because: str = ""  # The reason for a disagreement, or what to know of the agreement
    verdict: str = ""  # In place of the usual word: agrees, differs, no number to compare


@cache
def published(paper: str) -> dict[str, Any]:
    """The numbers of a paper by figure, read off its vector figures: `data/dong2021.json`."""
    numbers: dict[str, Any] = json.loads(_data(f"{paper}.json"))
    return numbers


def mean_by_layer(table: pl.DataFrame, column: str = "value") -> list[float]:
    """The mean over samples and seeds, by layer; of log10, that is a geometric mean."""
    return table.group_by("layer").agg(pl.col(column).mean()).sort("layer")[column].to_list()


@cache
def _sentences() -> dict[str, Any]:
    return tomllib.loads(_data("studies.toml"))


def _data(name: str) -> str:
    return files("rankscope_studies").joinpath("data", name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class StudyTexts:
    """The sentences of one study in `data/studies.toml`, to be filled with what came out.

    >>> StudyTexts("wu2024", "fig1").compare("slope", True, name="A", sign="+", stable="unstable",
    ...                                      predicted=1.5, measured=1.5).ours
    'slope 1.5000'
    """

    paper: str
    figure: str

    def notes(self, **values: object) -> list[str]:
        """The notes on what the study was run on."""
        return [note.format(**values) for note in _sentences()[self.paper][self.figure]["notes"]]

    def sentence(self, *keys: str, **values: object) -> str:
        """One sentence by the keys that lead to it: of the study, or of a claim and then in it."""
        entry = _sentences()[self.paper][self.figure]
        for key in keys:
            entry = entry[key]
        return str(entry).format(**values)

    def compare(self, claim: str, agrees: bool | None, /, **values: object) -> Comparison:
        """A claim of the paper with ours beside it."""
        entry = _sentences()[self.paper][self.figure][claim]
        cells = ("what", "published", "ours", "because")
        what, published, ours, because = (entry.get(cell, "").format(**values) for cell in cells)
        return Comparison(what, published, ours, agrees, because)


@dataclass(frozen=True)
class PageTable:
    """A table of texts, as a page shows it."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""
    wordy: bool = False  # Holds sentences, not numbers

    @property
    def markdown(self) -> list[str]:
        """The headings and rows as lines of Markdown."""
        rows = [self.headings, ["---"] * len(self.headings), *self.rows]
        return ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in rows]


@dataclass(frozen=True)
class StudyResult:
    """Figures, tables and comparisons that came of a study."""

    figures: "dict[str, Figure]"
    tables: dict[str, pl.DataFrame]
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)  # What it was run on, and what could not be had
    page_tables: list[PageTable] = field(default_factory=list)  # For its page, where comparisons are not all
    summary: str = ""  # What came of it, in a sentence or two, where that is more than how many comparisons agree


@dataclass(frozen=True)
class Study:
    """A figure of a paper, or a question of one's own, and the function that answers it."""

    paper: str  # Empty for a study of no paper
    figure: str
    title: str
    run: Callable[[Setup], StudyResult]
    seconds: float = 1.0  # What it takes at its quick sizes on one core, roughly: its share of a progress bar

    @property
    def name(self) -> str:
        """Paper and figure, as the command line has them."""
        return f"{self.paper} {self.figure}".strip()
