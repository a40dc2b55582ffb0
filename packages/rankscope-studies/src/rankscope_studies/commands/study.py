"""`rankscope study`: questions of one's own, answered by experiment."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rankscope.cli import Interruption, console, machine, progress, say, say_where
from rankscope.cli import options as opt
from rankscope_studies.commands.shared import AnyMachine, Full

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope_studies import StudyResult

STUDIES = (
    "long-paths",
    "number-or-length",
    "using-paths",
    "width-depth",
    "efficient",
    "beyond-attention",
    "what-skips-pay",
    "layernorm",
    "does-it-pay",
    "hysteresis",
    "lower-bounds",
)


@dataclass(frozen=True)
class StudyOptions:
    """Options that say at which size and where a study is run, and where its page goes."""

    full: Full = False
    device: opt.Device = "cpu"
    any_machine: AnyMachine = False
    pages: Annotated[Path | None, opt.option(opt.RESULT, "FOLDER", "Write pages there, with their data.")] = None
    redraw: Annotated[bool, opt.option(opt.RESULT, " ", "Only write pages of --pages anew.", (), "--redraw")] = False


def study(
    name: Annotated[str, opt.argument("NAME", "The study, or all.", (*STUDIES, "all"))] = "all",
    options: StudyOptions = StudyOptions(),
    output: opt.Folder = Path("runs/study"),
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Answer a question by experiment: figure, data, and the answer in a sentence.

    [bold]long-paths[/bold]: whether long paths are useless by nature, or by training.
    [bold]number-or-length[/bold]: which of the two decides what paths say.
    [bold]using-paths[/bold]: whether trainings that drop or price lengths pay.
    [bold]width-depth[/bold]: what layers cost at equal parameters and compute.
    [bold]efficient[/bold]: which patterns of efficient transformers retard collapse.
    [bold]beyond-attention[/bold]: whether other networks than transformers collapse.
    [bold]what-skips-pay[/bold]: what skips and large MLPs cost.
    [bold]layernorm[/bold]: why norms do not stop collapse, and when they do.
    [bold]does-it-pay[/bold]: remedies at equal compute and tuned rates.
    [bold]lower-bounds[/bold]: where theorems prove that trained networks do not collapse.
    [bold]hysteresis[/bold]: skips are taken away in training and given back.
    An interrupted study goes on where it stopped.
    """
    from rankscope.extras import need

    need("studies", "matplotlib", "PIL")
    from rankscope.errors import StudyError
    from rankscope.files import writable_folder
    from rankscope.nets import check_device
    from rankscope_studies import Setup
    from rankscope_studies.questions import QUESTIONS, keep, questions, refuse_smaller, write_pages
    from rankscope_studies.reproduce import home, write_study

    chosen = questions(name)
    check_device(options.device)
    pages = options.pages
    if pages is not None:
        writable_folder(pages)
    if options.redraw:
        if pages is None:
            raise StudyError("--redraw must say of which pages, with --pages FOLDER; got none", subject="redraw")
        for path in write_pages(pages, QUESTIONS):
            say_where("Written", path)
        return
    writable_folder(output)
    if pages is not None:
        for question in chosen:
            refuse_smaller(pages, question, options.full)  # before hours of work
    setup = Setup(folder=output, full=options.full, device=options.device, any_machine=options.any_machine)
    answers = []
    try:
        with progress(printing.silent) as start:
            bar = start("")
            for done, question in enumerate(chosen):
                placed = replace(
                    setup, folder=home(setup) / question.name, say=lambda doing, at=done: bar(at, None, doing)
                )
                sizes = question.sizes(options.full)
                result = question.run(placed, sizes)
                command = f"rankscope study {question.name}{' --full' if options.full else ''}"
                folder = write_study(question.study, placed, result, command)
                if pages is not None:
                    keep(pages, question, placed, result, sizes)
                    write_pages(pages, QUESTIONS)
                comparisons = [asdict(comparison) for comparison in result.comparisons]
                answers.append({"study": question.name, "answer": result.summary, "comparisons": comparisons,
                                "notes": result.notes, "folder": str(folder)})  # fmt: skip
                if not printing.as_json:
                    with start.paused():
                        console().print(hypotheses_table(question.title, result))
                        say("", result.summary, *result.notes, "")
                        say_where("Written", folder if pages is None else pages / f"{question.name}.md")
    except KeyboardInterrupt as stop:
        raise Interruption(f"in {chosen[len(answers)].name}; the same command resumes from here") from stop
    if printing.as_json:
        machine(answers)


def hypotheses_table(title: str, result: "StudyResult") -> "Table":
    """What was expected before the run, what came, and the verdict."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None)
    for heading, ratio in (("expected", 4), ("what came", 4), ("", 1)):
        table.add_column(heading, ratio=ratio)
    for comparison in result.comparisons:
        table.add_row(comparison.what, comparison.ours, comparison.verdict)
    return table
