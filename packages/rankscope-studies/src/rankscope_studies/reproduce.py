"""Run studies and write what they give: figures, tables, comparisons, and one page about all of them.

OUT/quick/dong2021/fig2/   figure.png .svg, tables in Parquet, outcome.json, parts/ (to resume from)
OUT/quick/REPRODUCTION.md  every study done so far: published against ours
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rankscope.errors import StudyError, one_of
from rankscope.figures import save
from rankscope.files import write_text
from rankscope.nets import Architecture, Transformer
from rankscope.runs import Store, begun, document
from rankscope_studies.dong2021 import STUDIES as DONG
from rankscope_studies.study import Comparison, Setup, Study, StudyResult
from rankscope_studies.wu2024 import STUDIES as WU

STUDIES: tuple[Study, ...] = (*DONG, *WU)  # Every study, in the order of the papers


def chosen(paper: str, figure: str | None = None) -> list[Study]:
    """The studies of a paper, of one figure of it, or with 'all' of both papers."""
    papers = list(dict.fromkeys(study.paper for study in STUDIES))
    if paper == "all":
        if figure is not None:
            sentence = f"'all' takes no figure; got {figure!r}: name the paper, one of {', '.join(papers)}"
            raise StudyError(sentence, subject="figure")
        return list(STUDIES)
    if paper not in papers:
        raise StudyError(one_of("paper", paper, [*papers, "all"]), subject="paper")
    studies = {study.figure: study for study in STUDIES if study.paper == paper}
    if figure is not None and figure not in studies:
        raise StudyError(one_of(f"figure of {paper}", figure, list(studies)), subject="figure")
    return list(studies.values()) if figure is None else [studies[figure]]


def reproduce(study: Study, setup: Setup, run: Callable[[Setup], StudyResult] | None = None) -> StudyResult:
    """Run one study below the setup's folder and write all it gives; `run` runs it elsewhere."""
    Transformer.random(Architecture(layers=1, width=1, heads=1)).to(device=setup.device)  # refused if absent
    placed = replace(setup, folder=home(setup) / study.paper / study.figure, elsewhere={})
    with Store(placed.folder) as store:
        result = (run or study.run)(placed)
        result = replace(result, notes=[*result.notes, *placed.notes()])
        _write(store, study, placed, result)
    return result


def write_study(study: Study, setup: Setup, result: StudyResult, command: str = "") -> Path:
    """Write figures, tables and `outcome.json` of a study into the setup's folder; the folder."""
    with Store(setup.folder) as store:
        _write(store, study, setup, result, command)
    return setup.folder


def _write(store: Store, study: Study, setup: Setup, result: StudyResult, command: str = "") -> None:
    for name, figure in result.figures.items():
        save(figure, setup.folder / name)
    of_paper = {"paper": study.paper, "figure": study.figure} if study.paper else {}
    run_with = {"full": setup.full, "models": [*setup.models]} if study.paper else {}
    outcome: dict[str, Any] = {
        **of_paper, "title": study.title, **run_with,
        "comparisons": [asdict(comparison) for comparison in result.comparisons], "notes": result.notes,
        "figures": list(result.figures), "shown": [asdict(table) for table in result.page_tables],
        "said": result.summary,
    }  # fmt: skip
    title = f"{study.name}: {study.title}" if study.paper else study.title
    manifest = begun(setup.device).adding(title=title, **({"command": command} if command else {}))
    entry = "reproduce" if study.paper else study.figure
    store.write(entry, manifest, result.tables, {"outcome": outcome})


def write_page(setup: Setup) -> Path:
    """`REPRODUCTION.md` of every study that has been done below the folder: in the order of the papers, then
    those of one's own."""
    below = home(setup)
    command = "rankscope reproduce --full" if setup.full else "rankscope reproduce"
    lines = ["# Reproduction", "", f"Figures of both papers, published against ours. Written by `{command}`."]
    known = {below / study.paper / study.figure / "outcome.json": study.name for study in STUDIES}
    unlisted = [path for path in sorted(below.glob("*/*/outcome.json")) if path not in known]
    for path in (*known, *unlisted):
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
        lines += [_row(Comparison(**comparison)) for comparison in outcome["comparisons"]]
    return lines + [f"\n{note}" for note in outcome["notes"]]


def _row(comparison: Comparison) -> str:
    verdict = comparison.verdict or {True: "agrees", False: "differs", None: "no number to compare"}[comparison.agrees]
    text = f"{verdict}: {comparison.because}" if comparison.because else verdict
    cells = (comparison.what, comparison.published, comparison.ours, text)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
