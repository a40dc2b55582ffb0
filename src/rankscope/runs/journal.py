"""`Journal`: writes a table that grows while something runs. What was written survives if that is killed.

    NAME/journal.jsonl     the last rows, a line of JSON for each step
    NAME/000000.parquet    earlier rows, gathered into chunks; the first chunk has no rows, only columns

An incomplete line does not count. Lines are gathered into a chunk first and removed afterwards; lines of
steps that a chunk has do not count, so no row counts twice. Rows have a column `step`, which grows from line
to line; `cut` removes what came after a step, for a run that went back. The monitor's `RunWriter` and `sweep`
write journals; `Run.table` reads them, also while they are being written.

Where the disk is full, `append` raises FileError and leaves no part of its line; nothing else is lost. Lines that
cannot be gathered stay lines until they can, and a `cut` that failed is made before the next line is written.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import polars as pl

from rankscope.files import append_whole, write_text
from rankscope.runs.manifest import Manifest
from rankscope.runs.store import Store
from rankscope.runs.tables import JOURNAL, frame_of, line_of, lines_of, read_lines, text_of

GATHERED = 64  # lines that make a chunk


class Journal:
    """The writer of one table that grows; `entry` of the manifest, a result of this
    kind, lists it, and one column is `step`."""

    def __init__(
        self, store: Store, entry: str, name: str, schema: Mapping[str, Any], manifest: Manifest, kind: str = ""
    ) -> None:
        self.store, self.entry, self.name, self.manifest = store, entry, name, manifest
        self.schema = pl.Schema(schema)
        self.path = store.folder / name / JOURNAL
        if not store.run.chunks(name):
            store.append(entry, name, pl.DataFrame(schema=self.schema), manifest, kind)
        self.lines = read_lines(self.path, store.run.gathered(name), self.schema)[0]
        content = self.path.read_bytes() if self.path.is_file() else b""
        self.size = content.rfind(b"\n") + 1  # bytes of complete lines; what follows is cut by the next `append`
        self._cut_to: int | None = None  # the step of a `cut` that failed

    @property
    def last(self) -> int | None:
        """The last step that has rows; None if there are none."""
        if self.lines:
            return int(self.lines[-1]["step"])
        gathered = self.store.run.gathered(self.name)
        return None if gathered < 0 else gathered

    def append(self, step: int, rows: pl.DataFrame) -> None:
        """Write the rows of a step: all of them or, if the process is killed or the disk is full, none."""
        if self._cut_to is not None:
            self.cut(self._cut_to)
        self.store.require_place()
        line = line_of(step, rows.select(self.schema.names()))
        self.size = append_whole(self.path, self.size, text_of([line]))
        self.lines.append(line)
        if len(self.lines) >= GATHERED:
            with suppress(OSError):  # the lines are there, and gathered later
                self.gather()

    def gather(self) -> None:
        """Move the lines into a new chunk."""
        if self._cut_to is not None:
            self.cut(self._cut_to)
        if self.lines:
            self.store.append(self.entry, self.name, frame_of(self.lines, self.schema), self.manifest)
            self.lines = []
            with suppress(OSError):  # lines that a chunk has do not count
                self._rewrite()

    def cut(self, step: int) -> None:
        """Remove the rows of all steps after this one."""
        self._cut_to = step
        self.store.require_place()
        for chunk in reversed(self.store.run.chunks(self.name)[1:]):
            table = pl.read_parquet(self.store.run.path(chunk))
            if int(table["step"].max()) <= step:  # type: ignore[arg-type]
                break
            # Rows that stay are written as lines first; these count once their chunk is removed.
            rows, steps = lines_of(table.filter(pl.col("step") <= step)), {line["step"] for line in self.lines}
            self.lines = [*(line for line in rows if line["step"] not in steps), *self.lines]
            self._keep(step)
            self.store.drop(chunk)
        self._keep(step)
        self._cut_to = None

    def _keep(self, step: int) -> None:
        self.lines = [line for line in self.lines if line["step"] <= step]
        self._rewrite()

    def _rewrite(self) -> None:
        self.store.require_place()
        write_text(self.path, text_of(self.lines))
        self.size = self.path.stat().st_size
