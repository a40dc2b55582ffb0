"""What a cell reads: the first excerpts of its text."""

from itertools import islice
from pathlib import Path

from rankscope.engine.factors import Cell
from rankscope.errors import SweepError, TokensError
from rankscope.runs.store import checksum


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


def content_of(text: str) -> list[str]:
    """What a text is, whatever it is called: the checksums of its files."""
    path = Path(text)
    if not path.exists():
        raise SweepError(f"text must be a file or a folder; there is none at {path}")
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return [checksum(each) for each in files]


def _number(cell: Cell, name: str) -> int:
    value = cell[name]
    if type(value) is not int or value < 1:
        raise SweepError(f"{name} must be a whole number, 1 or more; got {value!r}")
    return value
