"""A table that grows while something runs, a few rows at a time: nothing written is lost when that is killed.

    NAME/journal.jsonl     what came last, a line for each time
    NAME/000000.parquet    what came before, gathered into chunks; the first has no rows, and says the columns

A line is written whole or does not count. Chunks are gathered from lines, and only then the lines taken away:
what is in a chunk counts once. Rows have a column `step` that grows from line to line; `cut` takes away what
came after a step, for a run that went back to an earlier one. `Run.table` reads all of it, also while it is
being written.
"""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rankscope.files import write_text
from rankscope.runs.lines import FILE, frame_of, line_of, lines_of, read_lines, written
from rankscope.runs.manifest import Manifest
from rankscope.runs.store import Store

GATHERED = 64
"""Lines that make a chunk."""


class Journal:
    """The writer of one such table."""

    def __init__(
        self, store: Store, entry: str, name: str, schema: Mapping[str, Any], manifest: Manifest
    ) -> None:
        self.store, self.entry, self.name, self.manifest = store, entry, name, manifest
        self.schema = pl.Schema(schema)
        self.path = store.folder / name / FILE
        if not store.run.chunks(name):
            store.append(entry, name, pl.DataFrame(schema=self.schema), manifest)
        self.lines = read_lines(self.path, store.run.gathered(name))
        self._rewrite()

    @property
    def last(self) -> int | None:
        """The last step that has rows."""
        if self.lines:
            return int(self.lines[-1]["step"])
        gathered = self.store.run.gathered(self.name)
        return None if gathered < 0 else gathered

    def append(self, step: int, rows: pl.DataFrame) -> None:
        """The rows of a step, all at once."""
        line = line_of(step, rows.select(self.schema.names()))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(written([line]))
        self.lines.append(line)
        if len(self.lines) >= GATHERED:
            self.gather()

    def gather(self) -> None:
        """Lines into a chunk."""
        if self.lines:
            self.store.append(self.entry, self.name, frame_of(self.lines, self.schema), self.manifest)
            self.lines = []
            self._rewrite()

    def cut(self, step: int) -> None:
        """Take away what came after this step."""
        for chunk in reversed(self.store.run.chunks(self.name)[1:]):
            table = pl.read_parquet(self.store.run.path(chunk))
            if int(table["step"].max()) <= step:  # type: ignore[arg-type]
                break
            # What stays goes to the journal before its chunk goes: until then it does not count there.
            self.lines = [*lines_of(table.filter(pl.col("step") <= step)), *self.lines]
            self._keep(step)
            self.store.drop(chunk)
        self._keep(step)

    def _keep(self, step: int) -> None:
        self.lines = [line for line in self.lines if line["step"] <= step]
        self._rewrite()

    def _rewrite(self) -> None:
        write_text(self.path, written(self.lines))
