"""The chapter of a report on studies: their tables, what was published beside what came out, and their pictures.

`pyproject.toml` declares `Studies` as a chapter: `rankscope report` asks it what there is in a folder.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rankscope.errors import FileError, require
from rankscope.report import FolderChapter
from rankscope.results import Section, Table
from rankscope.runs import document, read

WIDTH, COLOURS = 1100, 256
"""Pixels across a picture, and colours kept: with fewer, lines of rare colours take those of others."""
TITLE = 200  # Characters of a name in a heading at most
MANY = 40  # Pictures up to which they are shown at full width
LISTS = ("comparisons", "figures", "notes", "shown")
Outcomes = Sequence[tuple[Path, dict[str, Any]]]  # What came out of each study, with its folder


@dataclass(frozen=True)
class Studies(FolderChapter):
    """The studies in a folder and below it."""

    title: str
    finding: str
    alone: bool
    outcomes: Outcomes

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """The study of a folder, or those below it; None if there are none."""
        alone = (folder / "outcome.json").is_file()
        paths = [folder / "outcome.json"] if alone else sorted(folder.rglob("outcome.json"))
        outcomes = [(path.parent, outcome_in(path.parent)) for path in paths]
        said = outcomes[0][1].get("said") if len(outcomes) == 1 else None
        return cls(title_of(outcomes), str(said or agreement(outcomes)), alone, outcomes) if outcomes else None

    def sections(self) -> list[Section]:
        """Sections for each study."""
        return study_sections(self.outcomes)


def title_of(outcomes: Outcomes) -> str:
    """What was run again."""
    if len(outcomes) > 1:
        return "The papers, run again"
    folder, outcome = outcomes[0]
    if "paper" not in outcome and outcome.get("title"):
        return str(outcome["title"])[:TITLE]
    name = f"{outcome.get('paper', '')} {outcome.get('figure', folder.name)}"
    return f"{name.strip()[:TITLE]}, run again"


def outcome_in(folder: Path) -> dict[str, Any]:
    """What came out of the study in a folder; raises FileError if it is damaged."""
    path = read(folder).path("outcome.json")
    return checked(path, document(path))


def checked(path: Path, outcome: dict[str, Any]) -> dict[str, Any]:
    """The outcome, if it has lists where there must be lists, and objects in that of comparisons; else a FileError."""
    fits = all(isinstance(outcome.get(name, []), list) for name in LISTS) and all(
        isinstance(entry, dict) and entry.get("agrees") in (True, False, None)
        for entry in outcome.get("comparisons", [])
    )
    fits = fits and all(_is_table(entry) for entry in outcome.get("shown", []))
    must = f"{path} must list comparisons, figures, tables and notes of a study; it does not"
    require(fits, f"{must}: it is damaged or of another version, run it again", FileError, str(path))
    return outcome


def _is_table(entry: Any) -> bool:
    """A title, headings, and rows as long as these."""
    if not isinstance(entry, dict) or not {"title", "headings", "rows"} <= entry.keys():
        return False
    headings, rows = entry["headings"], entry["rows"]
    return (
        isinstance(headings, list)
        and isinstance(rows, list)
        and all(isinstance(row, list) and len(row) == len(headings) for row in rows)
    )


def study_sections(outcomes: Outcomes) -> list[Section]:
    """Sections for the studies of a run: one each, or of a study with tables for its page, one for each
    table."""
    sections = []
    many = sum(len(outcome.get("figures", [])) for _, outcome in outcomes)
    width = 900 if many <= MANY else 600
    for index, (folder, outcome) in enumerate(outcomes):
        fallback = "" if "shown" in outcome and "paper" not in outcome else folder.name
        name = f"{outcome.get('paper', '')} {outcome.get('figure', fallback)}".strip()
        title = str(outcome.get("title", ""))
        uris = {
            str(figure): data_uri(folder / f"{Path(str(figure)).name}.png", width)
            for figure in outcome.get("figures", [])
        }
        pictures = [
            {"title": f"{name}: {title}, {figure}".removeprefix(": "), "uri": uri}
            for figure, uri in uris.items()
            if uri
        ]
        lost = ", ".join(f"{figure}.png" for figure, uri in uris.items() if uri is None)
        notes = [*map(str, outcome.get("notes", [])), *([f"Missing, or no picture: {lost}."] if lost else [])]
        heading, key = f"{name}: {title}".removeprefix(": "), f"study-{index}"
        compared = [table for table in [comparison_table(outcome)] if table.rows]
        tables = shown_tables(outcome)
        if not tables:
            sections.append(Section(heading, tables=compared, notes=notes, pictures=pictures, key=key))
            continue
        sections.append(Section(heading, tables=tables[:1], notes=notes, key=key))
        sections += [Section("Figures", pictures=pictures, key=f"{key}-figures")] if pictures else []
        sections += [
            Section(table.title, tables=[replace(table, title="")], key=f"{key}-{k}")
            for k, table in enumerate(tables[1:])
        ]
        sections += [Section("What was published", tables=compared, key=f"{key}-compared")] if compared else []
    return sections


def agreement(outcomes: Outcomes) -> str:
    """How much of what was published came out in the studies."""
    compared = [row.get("agrees") for _, outcome in outcomes for row in outcome.get("comparisons", [])]
    yes, no = compared.count(True), compared.count(False)
    if not yes + no:
        return "No published number to compare with."
    if not no:
        return f"All of {yes} published numbers came out." if yes > 1 else "The published number came out."
    differ = "1 differs, with the reason beside it" if no == 1 else f"{no} differ, with the reasons beside them"
    return f"Of {yes + no} published numbers, {yes} came out; {differ}."


def comparison_table(outcome: dict[str, Any]) -> Table:
    """What the paper says, and what came out here."""
    marks = {True: "agrees", False: "differs", None: "no number to compare"}
    rows = [
        [str(row.get("what", "")), str(row.get("published", "")), str(row.get("ours", "")),
         ": ".join(filter(None, (str(row.get("verdict") or marks.get(row.get("agrees"), "")),
                                 str(row.get("because", "")))))]
        for row in outcome.get("comparisons", [])
    ]  # fmt: skip
    return Table("", ["", "published", "ours", ""], rows, wordy=True)


def shown_tables(outcome: dict[str, Any]) -> list[Table]:
    """The tables that a study has for its page."""
    return [
        Table(
            str(table["title"]), [*map(str, table["headings"])],
            [[*map(str, row)] for row in table["rows"]],
            note=str(table.get("note", "")), wordy=bool(table.get("wordy")),
        )
        for table in outcome.get("shown", [])
        if table["rows"]
    ]  # fmt: skip


def data_uri(path: Path, width: int = WIDTH) -> str | None:
    """A PNG as text, no wider than `width`; None where there is none that can be read."""
    from rankscope.figures import png
    from rankscope.figures.matplotlib import Image

    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # as a damaged file makes it
        return None
    if picture.width > width:
        height = round(picture.height * width / picture.width)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return f"data:image/png;base64,{base64.b64encode(png(picture, COLOURS)).decode()}"
