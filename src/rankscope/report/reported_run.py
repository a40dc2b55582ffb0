"""A run directory: tables under known names. What is there is read; what is not is left out of the report.

A file that is not as it must be is a sentence that names it, before anything is drawn of it. A number may be missing,
as null or NaN: it becomes a gap in a figure. Names, places (a layer, a head, a token) and switches may not, and places
must be such that a curve can be made of them.

    profile.parquet, summary.parquet   a metric by layer, of samples or of a corpus
    cloud.parquet, spectrum.parquet    tokens on two axes, singular values
    lengths.parquet, heads.parquet     paths
    depth_layers, _heads, _norms       a depth card
    certificates*.parquet              bounds, a file for each variant
    training/, alarms/                 a training run, as far as it is written
    sweep.parquet, cells.parquet       a sweep
    **/outcome.json                    studies, which the package rankscope-studies reads
    manifest.json                      what was run

`measure`, `paths`, `depth`, `bounds`, `sweep`, `reproduce`, `checkpoints`, `demo` and `Monitor` write them, through
`rankscope.runs`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import polars as pl

from rankscope.depths import MARKS, DepthCard
from rankscope.engine import Sweep
from rankscope.errors import FileError, require
from rankscope.extras import counted, install, installed, need
from rankscope.nets import titled
from rankscope.paths import Decomposition
from rankscope.plugins import Group
from rankscope.profiles import CLOUD, SPECTRUM, Profile, Summary
from rankscope.report.causes import network_name, same_network
from rankscope.results import Result, Section, results_of
from rankscope.runs import Manifest, Run, read, read_parquet
from rankscope.theory import Certificates
from rankscope.trainings import TRAINING_TABLE as TRAINING
from rankscope.trainings import TrainingRun, read_training

LENGTHS = {name: of for name, of in Decomposition.schemas["lengths"].items() if name not in ("residual", "cosine")}
TABLES: dict[str, Mapping[str, Any]] = {
    "cloud": CLOUD, "spectrum": SPECTRUM, "lengths": LENGTHS, "heads": Decomposition.schemas["heads"],
    **DepthCard.schemas,
}  # fmt: skip
"""The columns that each table must have, and their types."""
BY_TABLES = ("profile", "summary", "certificates", "depth", "decomposition", "sweep", "training")
"""Kinds of results that are found by their tables, in old folders too; all others are shown by their sections."""
TITLE = 200  # Characters of a name in a heading at most
PATHS = ("lengths", "heads", *DepthCard.schemas)
"""Tables that another command may have put beside measurements; the others are pictures of these."""
PLACES = {"sample", "layer", "head", "token", "index", "length"}  # Columns that say where a number is
FURTHEST = 10**6  # The largest place: no network is as deep, and no excerpt as long
AGAIN, DAMAGED = "run it again", "it is damaged, run it again"
OTHER = "it is damaged or of another version, run it again"
STUDIES = "rankscope_studies"  # The package whose chapter reads outcomes of studies
OUTCOME = "outcome.json"


class FolderChapter(ABC):
    """A chapter of files in a run folder that are no tables of ours, as studies have; a plugin names the class."""

    title: str  # Of a run that holds no measurements
    finding: str  # What the run says, in a sentence or two
    alone: bool  # True if the folder itself is of these files: its tables have names of their own

    @classmethod
    @abstractmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """The chapter on a folder; None if it holds no such files. Raises FileError if one is damaged."""

    @abstractmethod
    def sections(self) -> list[Section]:
        """All that is shown of the files."""


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """What a report shows of one run directory."""

    folder: Path
    manifest: Manifest  # Of what is measured, or else of what there is
    measured: Profile | Summary | None = None
    tables: dict[str, pl.DataFrame] = field(default_factory=dict)  # cloud, spectrum, lengths, heads: those there are
    certificates: dict[str, Certificates] = field(default_factory=dict)  # By variant
    chapters: list[FolderChapter] = field(default_factory=list)  # Of files that plugins read
    notes: list[str] = field(default_factory=list)  # What of the folder is not shown, and why
    manifests: dict[str, Manifest] = field(default_factory=dict)  # Of each command that wrote into the folder
    closure: float | None = None  # How nearly the paths add up to the output
    training: TrainingRun | None = None
    sweep: Sweep | None = None
    further: list[Result] = field(default_factory=list)  # Results of kinds that have no place of their own here

    @property
    def excerpts(self) -> int:
        """The number of excerpts that were measured."""
        return 0 if self.measured is None else self.measured.measured[0]

    @property
    def sample(self) -> str:
        """What the network read several of: images, or excerpts of a text."""
        return "image" if self.manifest.text is not None and self.manifest.text.split == "image" else "excerpt"

    @property
    def title(self) -> str:
        """What was run, for a heading."""
        if self.chapters and self.measured is None:
            return self.chapters[0].title
        if self.training is not None and self.measured is None:
            return f"{self.training.name[:TITLE]}: a training run"
        if self.sweep is not None and self.measured is None:
            name = self.folder.resolve().name[:TITLE]
            return f"{name}: a sweep of {counted(len(self.sweep.cells), 'cell')}"
        if self.further and self.measured is None and not self.tables and not self.certificates:
            return self.further[0].title[:TITLE]
        origin = self.manifest.origin or {}
        name = Path(str(origin.get("name") or self.manifest.model or self.folder.resolve().name)).name
        given = self.manifest.title or (titled(origin) if origin.get("weights") else name)
        return self._kind(str(given)[:TITLE].strip() or self.folder.resolve().name)

    def _kind(self, title: str) -> str:
        """The title with what was done to the network, where that is not to measure it on a few texts."""
        if isinstance(self.measured, Summary):
            path = self.manifest.text.path if self.manifest.text is not None else ""
            of = f" of {'stdin' if path == '-' else Path(path).name[:TITLE]}" if path else ""
            return f"{title}: {counted(self.measured.excerpts, 'excerpt')}{of}"
        if self.measured is not None:
            return title
        if self.certificates and not self.tables:
            return f"{title}: bounds of {', '.join(self.certificates)[:TITLE]}"
        if "depth_layers" in self.tables and "lengths" not in self.tables:
            return f"{title}: depth"
        return f"{title}: paths" if "lengths" in self.tables else title


Chapter = Callable[[ReportedRun], Sequence[Section]] | type[FolderChapter]
CHAPTERS: Group[Chapter] = Group(
    "chapters", "a function that makes sections of a run", callable, named=lambda each: getattr(each, "__name__", "")
)
"""What makes the sections of a run, by the name of each function or class."""


def read_run(folder: str | Path) -> ReportedRun:
    """The tables, chapters and manifests of a run directory, with notes on what is left out. A folder that is no run
    directory, or holds half a depth card, raises `FileError`."""
    folder = Path(folder)
    require(folder.is_dir(), f"a report is made of run directories; there is none at {folder}", FileError, str(folder))
    stored, chapters = read(folder), _chapters(folder)
    if any(chapter.alone for chapter in chapters):
        return ReportedRun(folder, Manifest(), chapters=chapters)
    notes: list[str] = []
    measured = _measured(stored, notes)
    tables: dict[str, pl.DataFrame] = {}
    inside: list[Manifest] = [] if measured is None else [measured.manifest]
    closure = None
    for name in filter(stored.names.__contains__, TABLES):
        table, manifest = _table(stored, name)
        if name not in PATHS and measured is not None and _created(manifest) not in ("", _created(inside[0])):
            notes.append(f"{name}.parquet is of another run than the numbers here, and left out.")
            continue
        if _is_other(f"{name}.parquet", manifest, inside, notes):
            continue
        tables[name] = table
        inside += [] if manifest is None else [manifest]
        closure = manifest.closure if name == "lengths" and manifest is not None else closure
    missing = [name for name in DepthCard.schemas if name not in tables]
    if 0 < len(missing) < len(DepthCard.schemas):
        sentence = f"{folder} must hold all tables of a depth card; {missing[0]}.parquet is missing: run it again"
        raise FileError(sentence, subject=missing[0])
    certificates = {}
    for path in sorted(folder.glob("certificates*.parquet")):
        certificate = checked_certificates(path, Certificates.read(stored.path(path.name)))
        if _is_other(path.name, certificate.manifest, inside, notes):
            continue
        certificates[", ".join(network.variant for network in certificate.manifest.networks)] = certificate
        inside.append(certificate.manifest)
    training = read_training(folder) if TRAINING in stored.names else None
    if training is not None:
        inside.append(training.manifest)
        notes += training.notes
    sweep = Sweep.of_run(stored, Sweep.kind) if "sweep" in stored.names else None
    inside += [] if sweep is None or "sweep" not in stored.manifests else [stored.manifests["sweep"]]
    further = list(results_of(stored, BY_TABLES).values())
    inside += [result.manifest for result in further]
    sentence = (
        f"{folder} must be a run directory, with profile.parquet, lengths.parquet, certificates.parquet "
        "or the like in it; it has none of them: measure, paths, bounds and reproduce write one with -o"
    )
    held = (measured is not None, tables, certificates, chapters, training, sweep, further)
    if not chapters and not installed(STUDIES) and (outcome := next(folder.rglob(OUTCOME), None)):
        if not any(held):
            need("a chapter on a study", STUDIES)
        notes.append(f"{outcome} is of a study, and left out: {install([STUDIES])}")
    require(any(held), sentence, FileError, str(folder))
    main = inside[0] if inside else Manifest()
    manifests = stored.manifests or ({"": main} if inside else {})
    return ReportedRun(
        folder, main, measured, tables, certificates, chapters, notes, manifests, closure, training, sweep, further
    )


def _chapters(folder: Path) -> list[FolderChapter]:
    """The chapters that plugins make of files of their own."""
    if (folder / OUTCOME).is_file():
        need("a chapter on a study", STUDIES)
    chapters: list[FolderChapter] = []
    for name, chapter in CHAPTERS.items():
        try:
            if isinstance(chapter, type) and issubclass(chapter, FolderChapter):
                made = chapter.of_folder(folder)
                chapters += [] if made is None else [made]
        except FileError:
            raise
        except (Exception, SystemExit) as error:  # a stranger's chapter takes no other with it
            CHAPTERS.failed(name, error)
    return chapters


def _measured(stored: Run, notes: list[str]) -> Profile | Summary | None:
    """The measurements; of two runs into one folder, those of the later."""
    profiles: list[Profile | Summary] = []
    for kind, name in ((Profile, "profile"), (Summary, "summary")):
        if name in stored.names:
            path = stored.path(f"{name}.parquet")
            profiles.append(checked_profile(path, kind.read(path)))
    if len(profiles) == 2:
        profiles.sort(key=lambda profile: profile.manifest.created)
        shown = "profile.parquet" if isinstance(profiles[-1], Profile) else "summary.parquet"
        notes.append(f"Two runs were written into this folder; shown is the later, {shown}.")
    return profiles[-1] if profiles else None


def _is_other(file: str, manifest: Manifest | None, inside: list[Manifest], notes: list[str]) -> bool:
    """True, with a note, if a table is of another network than what was read before it: a chapter never mixes two."""
    if manifest is None or not inside or same_network(inside[0], manifest):
        return False
    known, new = (network_name(x) or "another network" for x in (inside[0], manifest))
    which = f"of {new}, and this chapter of {known}" if known != new else f"of other weights or sizes of {known}"
    notes.append(f"{file} is {which}: it is left out. A folder for each network keeps both.")
    return True


def _created(manifest: Manifest | None) -> str:
    """When the run was made; nothing where it does not say."""
    return "" if manifest is None else manifest.created


def _table(stored: Run, name: str) -> tuple[pl.DataFrame, Manifest | None]:
    path = stored.path(f"{name}.parquet")
    table, manifest = read_parquet(path)
    table = checked_table(path, table, TABLES[name])
    sentence = f"{path} must hold paths, layers or heads; it has no rows: run it again"
    require(name not in PATHS or name == "depth_norms" or not table.is_empty(), sentence, FileError, str(path))
    if name == "lengths":  # how many paths there are is written out in digits
        digits = all(text.isascii() and text.isdigit() and len(text) < 4000 for text in table["paths"].unique())
        _check(path, digits, "hold whole numbers in the column paths", "it holds others")
    return table, manifest


def _check(path: Path, holds: bool, must: str, found: str, advice: str = AGAIN) -> None:
    """A sentence on the file where it is not as it must be."""
    require(holds, f"{path} must {must}; {found}: {advice}", FileError, str(path))


def checked_table(path: Path, found: pl.DataFrame, schema: Mapping[str, Any]) -> pl.DataFrame:
    """The table with these columns, each of its type: missing numbers are NaN, places are whole."""
    missing = ", ".join(name for name in schema if name not in found.columns)
    _check(path, not missing, f"have the columns {', '.join(schema)}", f"{missing} is missing", OTHER)
    return found.with_columns(_column(path, found[name], kind) for name, kind in schema.items())


def _column(path: Path, column: pl.Series, kind: Any) -> pl.Series:
    name, held = column.name, column.dtype
    fits = held == pl.String if kind == pl.String else held.is_numeric() or held in (pl.Boolean, pl.Null)
    _check(path, fits, f"hold {'text' if kind == pl.String else 'numbers'} in the column {name}", f"it holds {held}")
    gapless = name in PLACES or (kind in (pl.String, pl.Boolean) and name not in MARKS)
    gaps = f"{column.null_count()} of {len(column)} are missing"
    _check(path, not (gapless and column.null_count()), f"have no gap in the column {name}", gaps, DAMAGED)
    if name in PLACES:
        _places(path, column, name)
    column = column.cast(kind)
    return column.fill_null(float("nan")) if kind == pl.Float64 else column


def _places(path: Path, column: pl.Series, name: str) -> None:
    """Whole numbers from 0 on, within reason."""
    numbers = column.cast(pl.Float64)
    fits = bool(((numbers >= 0) & (numbers <= FURTHEST) & (numbers == numbers.floor())).all())
    must = f"hold whole numbers from 0 to {FURTHEST} in the column {name}"
    _check(path, fits, must, "it holds others", DAMAGED)


def checked_profile(path: Path, found: Profile | Summary) -> Profile | Summary:
    """The measurements, by layer of networks that are described."""
    rows = found.table
    present = len(rows) > 0 and len(found.manifest.networks) > 0
    _check(path, present, "hold measurements of a network", "it has none")
    schema = {name: of for name, of in found.schemas[found.kind].items() if name != "head"}
    kept = checked_table(path, rows, schema)
    _heads(path, kept)
    counted = not isinstance(found, Summary) or found.manifest.excerpts is not None
    _check(path, counted, "say in its manifest of how many excerpts it is", "it does not", OTHER)
    return type(found)(kept, found.manifest)


def _heads(path: Path, rows: pl.DataFrame) -> None:
    """Numbered for a metric of attention, none for one of tokens; as many rows as places, more or less."""
    _places(path, rows["head"].drop_nulls(), "head")
    lines = rows.group_by("variant", "arithmetic", "metric").agg(
        pl.col("head").is_null().any().alias("some"), pl.col("head").is_null().all().alias("all")
    )
    alike = lines.filter(pl.col("some") & ~pl.col("all")).is_empty()
    _check(path, alike, "number all heads of a metric or none", "some have none")
    size = 1
    for name in {"sample", "layer", "head"} & set(rows.columns):
        size *= 1 + int(rows[name].drop_nulls().to_numpy().max(initial=0))
    held = f"it has {len(rows)}, and {size} places for them"
    _check(path, size <= FURTHEST + 20 * len(rows), "have a row for each layer", held, DAMAGED)


def checked_certificates(path: Path, found: Certificates) -> Certificates:
    """Certificates, each an upper or a lower bound, at every layer from the first on."""
    _check(path, len(found.table) > 0, "hold certificates", "it has no rows")
    (schema,) = found.schemas.values()
    rows = checked_table(
        path, found.table, {name: schema[name] for name in schema if name not in ("why", "hypotheses")}
    )
    known = rows["kind"].is_in(["upper", "lower"]).all()
    _check(path, known, "hold upper and lower bounds in the column kind", "it holds others")
    consistent = rows.group_by("theorem").agg(pl.struct("quantity", "kind").n_unique())["quantity"].max() == 1
    _check(path, consistent, "have one quantity and kind for a theorem", "it has several")
    layers = rows.group_by("theorem", "sample").agg(
        pl.col("layer").min().alias("first"), pl.col("layer").max().alias("last"), pl.len()
    )
    complete = layers.filter(pl.col("first") == 1, pl.col("last") == pl.col("len"))
    every = len(complete) == len(layers) and not rows.filter(sample=0).is_empty()
    _check(path, every, "have a row for each layer of each sample", "some are missing")
    entry = rows["hypotheses"].drop_nulls().explode(empty_as_null=False)
    parts = [entry.struct.field(name).null_count() for name in ("says", "number", "limit", "met")]
    full = not rows["hypotheses"].null_count() and not any(parts)
    _check(path, full, "have no gap in the column hypotheses", "some are missing", DAMAGED)
    return Certificates(rows, found.manifest)
