"""What a cell reads: the first excerpts of its text; and what its files hold, whatever they are called."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from rankscope.engine.factors import Cell
from rankscope.errors import SweepError, TokensError
from rankscope.runs.key import files_of
from rankscope.runs.store import checksum
from rankscope.sources.network_names import is_drawn


def excerpts_for(cell: Cell) -> list[str]:
    """So many excerpts of so many tokens, or of the bundled prose where no text is named."""
    from rankscope.sources import bundled_excerpts, excerpts

    samples, tokens = _number(cell, "samples"), _number(cell, "tokens")
    if "text" in cell:
        found = list(islice(excerpts(str(cell["text"]), "auto", "text"), samples))
    else:
        found = bundled_excerpts(tokens)[:samples]
    if len(found) < samples:
        raise TokensError(
            f"the text must have {samples} excerpts; {cell.get('text', 'the bundled prose')} has "
            f"{len(found)}: ask for fewer samples"
        )
    return found


class Contents:
    """What the files hold that cells name: where these differ, so do the numbers."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._models = {name: _model(name) for name in {str(cell["model"]) for cell in cells}}
        self._texts = {name: _text(name) for name in {str(cell["text"]) for cell in cells if "text" in cell}}

    def of(self, cell: Cell) -> dict[str, list[str]]:
        """Checksums of its text; of its model what is known without reading it all."""
        text = self._texts[str(cell["text"])] if "text" in cell else []
        return {"model": self._models[str(cell["model"])], "text": text}


def _model(name: str) -> list[str]:
    if Path(name).is_file():
        return [checksum(Path(name))]
    return [] if is_drawn(name) else files_of(name)


def _text(name: str) -> list[str]:
    path = Path(name)
    if not path.exists():
        raise SweepError(f"text must be a file or a folder; there is none at {path}")
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return [checksum(each) for each in files]


def _number(cell: Cell, name: str) -> int:
    value = cell[name]
    if type(value) is not int or value < 1:
        raise SweepError(f"{name} must be a whole number, 1 or more; got {value!r}")
    return value
