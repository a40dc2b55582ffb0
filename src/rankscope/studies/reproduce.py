"""Run studies and write what they give: figures, tables, comparisons, and one page about all of them.

OUT/quick/dong2021/fig2/   figure.png .svg, tables in Parquet, outcome.json, parts/ (to resume from)
OUT/quick/REPRODUCTION.md  every study done so far: published against ours
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rankscope.errors import StudyError, one_of
from rankscope.figures.matplotlib import save
from rankscope.files import write_text
from rankscope.nets import Architecture, Transformer
from rankscope.runs import Store
from rankscope.runs.manifest import begun
from rankscope.runs.store import document
from rankscope.studies.catalogue import STUDIES
from rankscope.studies.study import Comparison, Outcome, Setup, Study


def chosen(paper: str, figure: str | None = None) -> list[Study]:
    """The studies of a paper, of one figure of it, or with 'all' of both papers."""
    papers = list(dict.fromkeys(study.paper for study in STUDIES))
    if paper == "all":
        if figure is not None:
            raise StudyError(
                f"'all' takes no figure; got {figure!r}: name the paper, one of {', '.join(papers)}"
            )
        return list(STUDIES)
    if paper not in papers:
        raise StudyError(one_of("paper", paper, [*papers, "all"]))
    found = [study for study in STUDIES if study.paper == paper]
    if figure is None:
        return found
    figures = [study.figure for study in found]
    if figure not in figures:
        raise StudyError(one_of(f"figure of {paper}", figure, figures))
    return [study for study in found if study.figure == figure]


def reproduce(study: Study, setup: Setup, run: Callable[[Setup], Outcome] | None = None) -> Outcome:
    """Run one study below the setup's folder and write all it gives; `run` runs it elsewhere."""
    Transformer.random(Architecture(layers=1, width=1, heads=1)).to(device=setup.device)  # refused if absent
    folder = home(setup) / study.paper / study.figure
    with Store(folder) as store:
        found = (run or study.run)(replace(setup, folder=folder))
        for name, figure in found.figures.items():
            save(figure, folder / name)
        outcome = {
            "paper": study.paper, "figure": study.figure, "title": study.title, "full": setup.full,
            "models": list(setup.models), **described(found),
        }  # fmt: skip
        manifest = begun(setup.device).adding(title=f"{study.name}: {study.title}")
        store.write("reproduce", manifest, found.tables, {"outcome": outcome})
    return found


def described(found: Outcome) -> dict[str, Any]:
    """Of an outcome what a page is made from, for `outcome.json`."""
    return {
        "comparisons": [asdict(each) for each in found.comparisons], "notes": found.notes,
        "figures": list(found.figures), "shown": [asdict(each) for each in found.shown], "said": found.said,
    }  # fmt: skip


def write_page(setup: Setup) -> Path:
    """`REPRODUCTION.md` of every study that has been done below the folder: in the order of the papers, then
    those of one's own."""
    below = home(setup)
    lines = [
        "# Reproduction", "",
        "Figures of both papers, published against ours. Written by `rankscope reproduce"
        f"{' --full' if setup.full else ''}`.",
    ]  # fmt: skip
    known = {below / study.paper / study.figure / "outcome.json": study.name for study in STUDIES}
    own = [path for path in sorted(below.glob("*/*/outcome.json")) if path not in known]
    for path in (*known, *own):
        lines += ["", *_section(document(path))] if path.is_file() else []
    missing = [name for path, name in known.items() if not path.is_file()]
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    write_text(below / "REPRODUCTION.md", "\n".join(lines) + "\n")
    return below / "REPRODUCTION.md"


def home(setup: Setup) -> Path:
    """Below the setup's folder, where studies of its size lie."""
    return setup.folder / ("full" if setup.full else "quick")


def _section(outcome: dict[str, Any]) -> list[str]:
    folder = f"{outcome['paper']}/{outcome['figure']}"
    lines = [f"## {outcome['paper']}, {outcome['figure']}: {outcome['title']}", ""]
    lines += [f"![{outcome['title']}]({folder}/{name}.png)" for name in outcome["figures"]]
    if outcome["comparisons"]:
        lines += ["", "| | published | ours | |", "|---|---|---|---|"]
        for each in outcome["comparisons"]:
            lines.append(_row(Comparison(**each)))
    return lines + [f"\n{note}" for note in outcome["notes"]]


def _row(each: Comparison) -> str:
    verdict = each.verdict or {True: "agrees", False: "differs", None: "no number to compare"}[each.agrees]
    said = f"{verdict}: {each.because}" if each.because else verdict
    cells = (each.what, each.published, each.ours, said)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
