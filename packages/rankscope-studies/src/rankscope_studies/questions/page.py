"""Pages of questions: written from the data that is kept beside them, and nothing else.

    FOLDER/index.md            every answered question with its answer
    FOLDER/summary.md          all of them as a paper would report them (`summary.py`)
    FOLDER/NAME.md             question, answer, figure, evidence, method, what would change the answer, command
    FOLDER/images/NAME*.png    the figures
    FOLDER/data/NAME/          tables in Parquet, and `kept.json`: sizes, command, device, versions

`keep` writes the data of a run; `write_pages` makes all pages of a folder from the data in it. `rankscope study
--pages FOLDER` calls both, `rankscope study --redraw --pages FOLDER` the second alone.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from rankscope.errors import StudyError
from rankscope.figures import png, rendered
from rankscope.files import atomic, write_text
from rankscope.runs import begun, document
from rankscope.runs import tables as parquet
from rankscope_studies.questions.question import LATER, VERDICTS, Question, RuleChange
from rankscope_studies.questions.summary import NAME as SUMMARY
from rankscope_studies.questions.summary import AnsweredQuestion, changed_text, summary_page
from rankscope_studies.study import PageTable, Setup, StudyResult

KEPT = "kept.json"
MOST_BYTES = 400_000  # Of the tables beside a page, together: more belongs into a run folder
MOST_SHOWN = 8  # Entries of one size that a page lists; `kept.json` has all
INTRODUCTION = (
    "Questions that the papers left open, each answered by an experiment that one command runs again. Every page has "
    "the answer in one sentence, the figure, the evidence with its spread over seeds, what was expected beforehand, "
    "and what would change the answer. Brackets give the least and the largest of the seeds that were run, mostly 3 to "
    "5: they are no confidence intervals. Rules that were changed once a page's full run had been seen are named on "
    "the page, and in the [summary](summary.md), with the verdicts of the rules before. Pages are written by "
    "`rankscope study all --pages packages/rankscope-studies/docs/studies`, from the data beside them."
)


def keep(folder: Path, question: Question, setup: Setup, result: StudyResult, sizes: Any) -> Path:
    """Write the tables of a run, and what the page says of the run, beside the page.

    Args:
        folder: The folder of the pages.
        question: The question that was answered.
        setup: How the question was run.
        result: What `question.run` gave.
        sizes: The sizes of the run.

    Returns:
        The folder of the data.

    Raises:
        StudyError: The tables are too large to be kept beside a page, or a quick run would replace a full one.
    """
    data_folder = folder / "data" / question.name
    refuse_smaller(folder, question, setup.full)
    manifest = begun(setup.device).adding(command=command_of(question, setup))
    names = list(question.keep) or list(result.tables)
    data_folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(
        dir=data_folder.parent, prefix="."
    ) as temporary:  # old tables stay until all new ones are in
        new = [
            parquet.write_parquet(Path(temporary, f"{name}.parquet"), result.tables[name], manifest) for name in names
        ]
        size = sum(path.stat().st_size for path in new)
        if size > MOST_BYTES:
            wanted = f"tables beside a page must take at most {MOST_BYTES // 1000} kB"
            raise StudyError(f"{wanted}; those of {question.name} take {size // 1000} kB", subject=question.name)
        data_folder.mkdir(exist_ok=True)
        for old in data_folder.glob("*.parquet"):
            old.unlink()
        for path in new:
            path.replace(data_folder / path.name)
    kept = {
        "study": question.name, "full": setup.full, "device": setup.devices, "command": manifest.command,
        "sizes": asdict(sizes), "tables": names, "versions": manifest.versions,
        "machine": manifest.machine, "notes": setup.notes(),
    }  # fmt: skip
    write_text(data_folder / KEPT, json.dumps(kept, indent=1) + "\n")
    return data_folder


def refuse_smaller(folder: Path, question: Question, full: bool) -> None:
    """Refuse to put a quick run in place of a full one: the smaller evidence would replace the larger."""
    path = folder / "data" / question.name / KEPT
    if not full and path.is_file() and document(path)["full"]:
        wanted = f"{folder} holds {question.name} at full size, which a quick run must not replace"
        raise StudyError(f"{wanted}: choose another folder with --pages, or run with --full", subject="page")


def command_of(question: Question, setup: Setup) -> str:
    """The command line that makes the run again."""
    size, device = " --full" if setup.full else "", "" if setup.device == "cpu" else f" --device {setup.device}"
    return f"rankscope study {question.name}{size}{device}"


def read_kept(folder: Path, question: Question) -> tuple[dict[str, pl.DataFrame], Any, dict[str, Any]]:
    """(tables, sizes, what else was kept) of a question in a folder of pages.

    Raises:
        StudyError: The sizes that were kept are not those of this question's file any more.
    """
    data_folder = folder / "data" / question.name
    kept = document(data_folder / KEPT)
    kind = type(question.quick)
    if {*kept["sizes"]} != {entry.name for entry in fields(kind)}:
        wanted = f"the data of {question.name} must have the sizes {', '.join(entry.name for entry in fields(kind))}"
        raise StudyError(f"{wanted}; got {', '.join(kept['sizes'])}: run it again", subject=question.name)
    sizes = kind(**{name: _tuples(value) for name, value in kept["sizes"].items()})
    return {name: parquet.read_parquet(data_folder / f"{name}.parquet")[0] for name in kept["tables"]}, sizes, kept


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def write_pages(folder: Path, questions: Sequence[Question]) -> list[Path]:
    """Write the page of every question whose data lies in the folder, and the overview of them.

    Args:
        folder: The folder of the pages.
        questions: All questions there are, in the order of the overview.
    """
    have_run = [question for question in questions if (folder / "data" / question.name / KEPT).is_file()]
    lines = ["# Studies", "", INTRODUCTION, ""]
    answered = []
    for question in have_run:
        tables, sizes, kept = read_kept(folder, question)
        result = question.result(tables, sizes)
        files = [f"images/{_stem(question, name)}.png" for name in result.figures]
        for file, figure in zip(files, result.figures.values(), strict=True):
            with atomic(folder / file) as temporary:
                temporary.write_bytes(png(rendered(figure)))
        write_text(folder / f"{question.name}.md", page(question, result, sizes, kept))
        answered.append(AnsweredQuestion(question, result, kept, files))
        size = _size(question, sizes, kept)
        shown = "" if size == "full size" else f" *({size})*"
        lines += [f"**[{question.title}]({question.name}.md)** {result.summary}{shown}", ""]
    left = [question.title for question in questions if question not in have_run]
    if left:
        lines += ["Not run yet: " + " ".join(left), ""]
    names = [question.name for question in have_run]
    if answered:
        write_text(folder / f"{SUMMARY}.md", summary_page(answered))
        lines += [f"All of them on one page, as a paper would report them: [summary]({SUMMARY}.md).", ""]
        names.append(SUMMARY)
        lines += ["```{toctree}", ":hidden:", "", *names, "```", ""]
    write_text(folder / "index.md", "\n".join(lines))
    return [folder / f"{name}.md" for name in (*names, "index")]


def _stem(question: Question, figure: str) -> str:
    """The name of a figure's file: that of the question, and of the figure where it is another."""
    return question.name if figure == question.name else f"{question.name}_{figure}"


def page(question: Question, result: StudyResult, sizes: Any, kept: dict[str, Any]) -> str:
    """The page of one question, in Markdown.

    Args:
        question: The question.
        result: Its answer.
        sizes: The sizes of the run that gave the answer.
        kept: What `kept.json` holds of that run.
    """
    lines = [f"# {question.title}", "", f"**{result.summary}**", ""]
    for name in result.figures:
        lines += [f"![{question.title}](images/{_stem(question, name)}.png)", ""]
    ran = f"`{kept['command']}`, {_size(question, sizes, kept)}, on {kept['device']}."
    lines += [f"*{question.caption} {ran}*".replace("* ", "*", 1), "", question.why.strip(), ""]
    later = any(hypothesis.startswith(LATER) for hypothesis in question.hypotheses)
    header = f"expected, before the run unless it begins with '{LATER}'" if later else "expected before the run"
    header += " (what was changed since is under Method)" if any("Changed" in note for note in result.notes) else ""
    changed = question.changed if kept["full"] else None
    expected = PageTable("", [header, "what came", ""], [
        [entry.what, entry.ours, (entry.verdict or VERDICTS[entry.agrees]) + _by_earlier_rules(changed, position)]
        for position, entry in enumerate(result.comparisons, 1)
    ])  # fmt: skip
    lines += ["## What we expected, and what came", "", *expected.markdown, ""]
    if changed:
        lines += [f"**Rules were changed once this page's full run had been seen.** {changed_text(changed)}", ""]
    lines += [_brackets(sizes), "", "## Evidence", ""]
    for shown in result.page_tables:
        lines += [f"**{shown.title}**", "", *shown.markdown, ""] + ([shown.note, ""] if shown.note else [])
    lines += ["## Method", "", question.method.strip(), "", *_sizes_table(question, sizes).markdown, ""]
    lines += [line for note in (*result.notes, *kept.get("notes", ())) for line in (note, "")]
    lines += ["## What would change our mind", "", question.refuted_by.strip(), "", "## Run it again", ""]
    lines += ["```sh", kept["command"], "```", ""]
    data = ", ".join(f"`{name}.parquet`" for name in kept["tables"])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(kept["versions"].items()))
    lines += [
        f"Every number and the figure of this page come from {data} in `data/{question.name}`; "
        f"`rankscope study --redraw --pages packages/rankscope-studies/docs/studies` writes the page from them. "
        f"Made with {versions}."
    ]
    return "\n".join(lines) + "\n"


def _by_earlier_rules(changed: RuleChange | None, number: int) -> str:
    """What a verdict was by the rules before they were changed, where it was another one."""
    return f" (by the rule before: {VERDICTS[changed.before[number]]})" if changed and number in changed.before else ""


def _brackets(sizes: Any) -> str:
    """What the ranges of a page are, and what they are not."""
    seeds = {entry.name: getattr(sizes, entry.name) for entry in fields(sizes) if entry.name.endswith("seeds")}
    ran = ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in seeds.items())
    of = f"seeds that were run ({ran})" if ran else "what was run"
    return (
        f"A number with two others in round brackets is a median with the least and the largest of all {of}. That is "
        "no confidence interval: another seed falls outside the range of 3 in one of two cases, of 5 in one of three."
    )


def _size(question: Question, sizes: Any, kept: dict[str, Any]) -> str:
    """Of which size the run was, and whether the command would run at other sizes today."""
    earlier = "" if sizes == question.sizes(kept["full"]) else ", sizes of an earlier version"
    return ("full size" if kept["full"] else "quick size") + earlier


def _sizes_table(question: Question, sizes: Any) -> PageTable:
    """The quick and the full sizes, and those of this page's run where it has others."""
    columns = {"quick": question.quick, "full": question.full}
    if sizes not in columns.values():
        columns = {"this page": sizes} | columns
    headings = [f"{name} (this page)" if column == sizes and name != "this page" else name
                for name, column in columns.items()]  # fmt: skip
    rows = [
        [entry.name.replace("_", " "), *(_shown(getattr(column, entry.name)) for column in columns.values())]
        for entry in fields(sizes)
    ]
    return PageTable("", ["size", *headings], rows)


def _shown(value: Any) -> str:
    """A size as text: short numbers, entries that are tuples themselves without brackets, of many the first and last.

    >>> _shown((0.5, 2**0.5)), _shown((("sort", 2), ("sort", 4))), _shown(tuple(range(20))), _shown(10_000)
    ('0.5, 1.41421', 'sort 2, sort 4', '0, 1, 2, … 19 (20)', '10000')
    """
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, tuple):
        return str(value)
    texts = [" ".join(map(_shown, entry)) if isinstance(entry, tuple) else _shown(entry) for entry in value]
    if len(texts) > MOST_SHOWN:
        texts = [*texts[:3], f"… {texts[-1]} ({len(texts)})"]
    return ", ".join(texts)
