"""The sections of studies: their tables, what was published beside what came out, and their pictures."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankscope.results import Section, Table

WIDTH, COLOURS = 1100, 256
"""Pixels across a picture, and colours kept: with fewer, lines of rare colours take those of others."""
MANY = 40  # Pictures up to which they are shown at full width

Outcomes = Sequence[tuple[Path, dict[str, Any]]]  # What came out of each study, with its folder


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
