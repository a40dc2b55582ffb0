"""`Result`: what every kind of result is and does; `TableResult`, one that is a single table.

A kind of result is a frozen dataclass that says which `tables` it has and of which `schemas`, and makes its `sections`.
Everything else is written here, once: `save` and `read` (through `rankscope.runs`), `to_dict` and `from_dict`, `plot`,
the text of a terminal and the card of a notebook. `rankscope.report` makes a chapter of the same sections, and
`kinds.py` finds the class of a folder.

    manifest.json    names the kind beside the manifest
    NAME.parquet     a table, for each of `tables`
    KIND_details.json  what is no table: the notes, and what `details` gives
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import polars as pl

from rankscope.errors import FileError, RankscopeError
from rankscope.results.cards import card, lines, whole
from rankscope.results.section import Section
from rankscope.runs import Manifest, Run, Store, document, read_parquet, write_parquet
from rankscope.runs import read as read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.figures import Chart

Schema = Mapping[str, Any]  # The type of each column
COLUMNS = 80  # Characters of a line of text
R = TypeVar("R", bound="Result")
T = TypeVar("T", bound="TableResult")
MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)  # raised on odd content


class Result(ABC):
    """Tables, a manifest, notes and sections; see the module on what that gives."""

    kind: ClassVar[str]  # A word by which the manifest of a folder names the class
    schemas: ClassVar[Mapping[str, Schema]]  # The columns of each table and their types
    optional: ClassVar[Sequence[str]] = ()  # Tables that there need not be
    later: ClassVar[Sequence[str]] = ()  # Columns that are null in files of earlier versions
    grows: ClassVar[bool] = False  # True if there may be further columns, which the manifest names as factors
    if TYPE_CHECKING:  # fields or properties of each class

        @property
        def manifest(self) -> Manifest:
            """What was run on what."""

        @property
        def notes(self) -> tuple[str, ...]:
            """What a reader should know: sentences."""

    @property
    @abstractmethod
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The tables by their names, which are those of their files."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What the result is and of how much, in one line."""

    @classmethod
    @abstractmethod
    def made_of(cls: type[R], tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> R:
        """The result of these tables, made again; `details` has the `notes` and what `details` gave."""

    @abstractmethod
    def sections(self) -> list[Section]:
        """All that the result shows, in the order of reading."""

    def details(self) -> dict[str, Any]:
        """What is neither a table nor the manifest nor a note, as plain Python."""
        return {}

    def overview(self) -> Section:
        """What a card and a few lines of text show: the first section, if a class does not say otherwise."""
        return next(iter(self.sections()), Section(self.title))

    def charts(self, *which: Any, **options: Any) -> "list[Chart]":
        """The charts that `plot` draws below each other: the pictures of the overview."""
        return [plot.chart for plot in self.overview().plots]

    # --- written once ---

    def plot(
        self,
        *which: Any,
        ax: "Axes | Iterable[Axes] | None" = None,
        figsize: tuple[float, float] | None = None,
        **options: Any,
    ) -> "Figure":
        """The charts of the result as a figure of matplotlib.

        Args:
            which: What `charts` takes: a metric, a sample, ... of those results that have several.
            ax: Axes to draw into instead, one for each panel; not with `figsize`.
            figsize: Inches of a new figure.
            options: What `charts` takes by name.
        """
        from rankscope.figures import plot

        charts = self.charts(*which, **options)
        if not charts:
            raise FileError(f"{self.title}: there is nothing to draw", subject=self.kind)
        return plot(*charts, ax=ax, figsize=figsize)

    def save(self, path: str | Path) -> Path:
        """Write the result into a run folder, which `rankscope.read` and `rankscope report` read; a result of one table
        also into a single file, `NAME.parquet`. Each file is whole or not there."""
        path = Path(path)
        if path.suffix == ".parquet" and len(self.tables) == 1:
            return write_parquet(path, next(iter(self.tables.values())), self.manifest)
        with Store(path) as store:
            self.write(store)
        return path

    def write(self, store: Store, entry: str = "", also: "Mapping[str, Any] | None" = None) -> None:
        """Write the result into an open run folder.

        Args:
            store: The folder.
            entry: The command that writes; the kind, if left out.
            also: More tables of the same run.
        """
        grown = [name for name in self.tables if store.run.chunks(name)]
        if grown:
            sentence = f"{store.folder} must be a folder where no other run goes on; its {grown[0]} grew chunk by chunk"
            raise FileError(f"{sentence}: save {self.words()} into another folder", subject=self.kind)
        details = {"notes": list(self.notes), **self.details()}
        documents = {f"{self.kind}_details": plain_value(details)} if any(details.values()) else {}
        store.write(entry or self.kind, self.manifest, {**self.tables, **(also or {})}, documents, self.kind)

    @classmethod
    def read(cls: type[R], path: str | Path) -> R:
        """The result in a run folder, or in a single Parquet file; raises FileError if there is none, or another."""
        path = Path(path)
        if path.suffix == ".parquet" or path.is_file():
            return cls._of_file(path)
        run = read_run(path)
        for name, entry in run.entries.items():
            if entry.kind == cls.kind or (not entry.kind and cls._listed(run, name)):
                return cls.of_run(run, name)
        raise FileError(
            f"{path} must hold {cls.words()}; there is nothing of the kind: save it there", subject=str(path)
        )

    @classmethod
    def of_run(cls: type[R], run: Run, entry: str) -> R:
        """The result that an entry of a run folder holds."""
        held = [name for name in cls.schemas if name not in cls.optional or name in run.names]
        missing = [name for name in held if name not in run.names]
        if missing:
            sentence = f"{run.folder} must hold all tables of {cls.words()}; {missing[0]}.parquet is missing"
            raise FileError(f"{sentence}: run it again", subject=missing[0])
        manifest = run.entries[entry].manifest
        tables = {name: cls._fitted(name, run.table(name), manifest, run.folder / name) for name in held}
        file = f"{cls.kind}_details.json"
        listed = file in run.entries[entry].files
        return cls._made(tables, manifest, document(run.path(file)) if listed else {}, f"{run.folder} must hold")

    @classmethod
    def words(cls) -> str:
        """One object of the class in words, with its article, if it is not several.

        >>> from rankscope.depths import DepthCard
        >>> from rankscope.trainings import Spikes
        >>> DepthCard.words(), Spikes.words()
        ('a depth card', 'spikes')
        """
        name = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in cls.__name__).strip()
        return name if name.endswith("s") else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"

    def to_dict(self) -> dict[str, Any]:
        """All of the result as JSON knows it: numbers that are none, which JSON does not have, are words."""
        schemas = type(self).schemas
        tables = {name: plain_table(table, schemas.get(name, {})) for name, table in self.tables.items()}
        details = {"notes": list(self.notes), **self.details()}
        named = {"kind": self.kind, "manifest": self.manifest.to_dict(), "tables": tables, "details": details}
        made: dict[str, Any] = plain_value(named)
        return made

    @classmethod
    def from_dict(cls: type[R], content: Mapping[str, Any]) -> R:
        """What `to_dict` gave, made again."""
        begin = f"{cls.__name__}.from_dict must be given"
        try:
            if content["kind"] != cls.kind:
                raise ValueError(f"its kind is {content['kind']!r}")
            manifest = Manifest.from_dict(content["manifest"])
            tables = {name: table_of(rows, cls.schemas.get(name, {})) for name, rows in content["tables"].items()}
            details = content["details"]
        except (*MALFORMED, pl.exceptions.PolarsError) as error:
            sentence = f"{begin} {cls.words()} as to_dict wrote it; it is not ({error!r})"
            raise FileError(sentence, subject=cls.kind) from error
        tables |= {
            name: cls._fitted(name, tables[name], manifest, begin) for name in tables.keys() & cls.schemas.keys()
        }
        return cls._made(tables, manifest, details, begin)

    @classmethod
    def _made(
        cls: type[R], tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any], begin: str
    ) -> R:
        """What `made_of` makes; an error that begins so where something of it is missing or of another type."""
        try:
            return cls.made_of(tables, manifest, details)
        except RankscopeError:
            raise
        except (*MALFORMED, pl.exceptions.PolarsError) as error:
            sentence = f"{begin} {cls.words()} as this version saves it; something is missing or damaged ({error!r})"
            raise FileError(f"{sentence}: run it again", subject=cls.kind) from error

    def equals(self, other: object) -> bool:
        """True if the other is of the same class, with the same tables, notes and manifest."""
        if not isinstance(other, type(self)) or self.tables.keys() != other.tables.keys():
            return False
        alike = all(table.equals(other.tables[name]) for name, table in self.tables.items())
        told = plain_value((self.notes, self.details())) == plain_value((other.notes, other.details()))
        return alike and told and self.manifest == other.manifest

    def __repr__(self) -> str:
        shown = self.overview()
        headings, rows = ((), ()) if not shown.tables else (shown.tables[0].headings, shown.tables[0].rows)
        return lines(self.title, headings, rows, [shown.sentence, *shown.notes])

    def __str__(self) -> str:
        """The whole result as text of 80 columns: its notes, and every section with its tables, none of them cut."""
        sections, brief = self.sections(), self.overview()
        if not any(section.tables for section in sections):
            sections = [brief, *sections]
        shown = [text for section in sections for text in (section.sentence, *section.notes)]
        parts = [self.title, *_wrapped(_unsaid([brief.sentence, *self.notes], shown))]
        for section in sections:
            heading = [section.heading] if section.heading != self.title else []
            parts += ["", *heading, *_wrapped([section.sentence, *section.notes])]
            for table in section.tables:
                parts += whole(table.title, table.headings, table.rows, COLUMNS)
                parts += _wrapped([table.note])
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        """For notebooks: the overview as a card."""
        shown = self.overview()
        charts = [plot.chart for plot in shown.plots if plot.chart.panels]
        table = shown.tables[0] if shown.tables else None

        def draw() -> "Figure":
            from rankscope.figures import plot

            return plot(*charts)

        notes = [shown.sentence, *([table.note] if table is not None else []), *shown.notes]
        rows = ((), ()) if table is None else (table.headings, table.rows)
        notes = [note for note in [*notes, *_unsaid(self.notes, notes)] if note]
        return card(self.title, draw if charts else None, *rows, notes)

    # --- tables as they were saved ---

    @classmethod
    def _of_file(cls: type[R], path: Path) -> R:
        if not path.is_file():
            raise FileError(f"a Parquet file must hold {cls.words()}; there is none at {path}", subject=str(path))
        name, *more_tables = [name for name in cls.schemas if name not in cls.optional]
        if more_tables:
            sentence = f"{path} must be a run folder, with all tables of {cls.words()}; it is one file"
            raise FileError(sentence, subject=str(path))
        table, manifest = read_parquet(path, f" written by {cls.__name__}.save")
        return cls.made_of({name: cls._fitted(name, table, manifest, path)}, manifest or Manifest(), {})

    @classmethod
    def _listed(cls, run: Run, entry: str) -> bool:
        """True if an entry of an earlier version, which names no kind, has all tables of this class."""
        files = run.entries[entry].files
        return all(f"{name}.parquet" in files or run.chunks(name) for name in cls.schemas if name not in cls.optional)

    @classmethod
    def _fitted(cls, name: str, table: pl.DataFrame, manifest: Manifest | None, place: Path | str) -> pl.DataFrame:
        """The table with columns of later versions; raises FileError, which begins with the place it is from, if it is
        another table."""
        schema = cls.schemas[name]
        missing = [column for column in cls.later if column in schema and column not in table.columns]
        if missing and set(table.columns) >= set(schema) - set(missing):
            table = table.with_columns(pl.lit(None, schema[column]).alias(column) for column in missing)
        extra = manifest.more.get("factors", ()) if cls.grows and manifest is not None else ()
        if manifest is None or table.drop(extra, strict=False).schema != pl.Schema(schema):
            must = f"{place} must be" if isinstance(place, Path) else place
            sentence = f"{must} {cls.words()} written by {cls.__name__}.save; it is another kind of table"
            raise FileError(sentence, subject=str(place) if isinstance(place, Path) else name)
        return table


@dataclass(frozen=True, eq=False, repr=False)
class TableResult(Result):
    """A result that is one table, named by its kind."""

    table: pl.DataFrame
    manifest: Manifest

    @property
    def notes(self) -> tuple[str, ...]:
        """None of its own: what there is to say is in the manifest."""
        return ()

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The one table, by the kind."""
        return {self.kind: self.table}

    @classmethod
    def made_of(cls: type[T], tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> T:
        """The result of this table."""
        return cls(tables[cls.kind], manifest)


def _unsaid(notes: Iterable[str], said: Sequence[str]) -> list[str]:
    """The notes that no sentence has yet, but for its capital and full stop."""
    told = " ".join(said).casefold()
    return [note for note in notes if note.casefold() not in told]


def _wrapped(sentences: Iterable[str]) -> list[str]:
    return [line for sentence in sentences for line in wrap(sentence, COLUMNS, break_on_hyphens=False)]


def plain_value(value: Any) -> Any:
    """The value as JSON knows it; NaN and infinity become the words `nan`, `inf` and `-inf`, which `float` reads."""
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def plain_table(table: pl.DataFrame, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a table, with the types of those that its schema does not name."""
    types = {name: str(kind) for name, kind in table.schema.items() if name not in schema}
    columns = {name: plain_value(values) for name, values in table.to_dict(as_series=False).items()}
    return {"types": types, "columns": columns}


def table_of(content: Mapping[str, Any], schema: Mapping[str, Any]) -> pl.DataFrame:
    """The table that `plain_table` gave, numbers that JSON does not know from words.

    >>> made = plain_table(pl.DataFrame({"layer": [0, 1], "value": [1.0, float("nan")]}), {"value": pl.Float64})
    >>> made
    {'types': {'layer': 'Int64'}, 'columns': {'layer': [0, 1], 'value': [1.0, 'nan']}}
    >>> table_of(made, {"value": pl.Float64})["value"].is_nan().to_list()
    [False, True]
    """
    known = {**schema, **{name: getattr(pl, kind) for name, kind in content["types"].items()}}
    columns = content["columns"].items()
    return pl.DataFrame([pl.Series(name, [_typed(value, known[name]) for value in values], known[name], strict=True)
                         for name, values in columns])  # fmt: skip


def _typed(value: Any, kind: Any) -> Any:
    """A value of a column of this type, its words numbers again."""
    if isinstance(kind, pl.List) and value is not None:
        return [_typed(item, kind.inner) for item in value]
    if isinstance(kind, pl.Struct) and value is not None:
        return {field.name: _typed(value[field.name], field.dtype) for field in kind.fields}
    return float(value) if isinstance(value, str) and kind.is_float() else value
