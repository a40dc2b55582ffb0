"""Looks as lines of JSON: one for each, that any program reads."""

import json
from pathlib import Path
from typing import Any

from rankscope.files import write_text
from rankscope.live.monitor.looks import Look
from rankscope.live.sinks.scalars import scalars


class JSONLines:
    """`{"step": 100, "relative_mu/layer_03": 0.7, ..., "alarms": ["..."]}`, a line for each look.

    >>> import tempfile, polars as pl
    >>> from rankscope.live.monitor.looks import TRAINING
    >>> sink = JSONLines(Path(tempfile.mkdtemp()) / "looks.jsonl")
    >>> rows = pl.DataFrame([{"step": 100, "metric": "loss", "value": 0.5}], schema=TRAINING)
    >>> sink(Look(100, rows))
    >>> sink.path.read_text()
    '{"step": 100, "monitor/loss": 0.5, "alarms": []}\\n'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open = False

    def __call__(self, look: Look) -> None:
        """One line. Before the first: what a run that went back to an earlier step had written is let go."""
        if not self._open:
            write_text(self.path, "".join(f"{json.dumps(line)}\n" for line in self._before(look.step)))
            self._open = True
        line = {"step": look.step, **scalars(look), "alarms": [alarm.sentence for alarm in look.alarms]}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Nothing is kept open between looks."""
        self._open = False

    def _before(self, step: int) -> list[dict[str, Any]]:
        kept = []
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        for each in text.split("\n")[:-1]:  # the last is empty, or half a line of a run that was killed
            line = json.loads(each)
            if line["step"] < step:
                kept.append(line)
        return kept
