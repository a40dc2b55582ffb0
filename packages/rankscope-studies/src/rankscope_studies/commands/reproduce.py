"""`rankscope reproduce`: both papers, figure by figure, with the published numbers beside ours."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import Interruption, console, ending, machine, progress, require_report, say, say_where
from rankscope.cli import options as opt
from rankscope_studies.commands.shared import FIGURES, AnyMachine, Full, complete_figure

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope_studies import Setup, Study, StudyResult


@dataclass(frozen=True)
class ReproduceOptions:
    """Options that say on which models, at which size and where the figures are made."""

    full: Full = False
    models: Annotated[
        str,
        opt.option(
            opt.NETWORK,
            "NAMES",
            "Comma-separated hub ids or directories of trained models to use instead of MiniLM.",
            opt.MODELS[:1],
        ),
    ] = ""
    device: opt.Device = "cpu"
    any_machine: AnyMachine = False
    on: opt.On = None
    stuck_after: opt.StuckAfter = opt.STUCK_AFTER


def reproduce(
    paper: Annotated[str, opt.argument("PAPER", "The paper: dong2021, wu2024, or all.", (*FIGURES, "all"))] = "all",
    figure: Annotated[
        str | None, opt.argument("FIGURE", "One figure of that paper; all of them if left out.", complete_figure)
    ] = None,
    options: ReproduceOptions = ReproduceOptions(),
    output: opt.Folder = Path("runs/reproduce"),
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Run the papers' figures again: figure, data, and a comparison with what was published.

    An interrupted run goes on where it stopped; a second run into the same folder gives the same tables. With
    [bold]--on ray[/bold] a cluster runs several figures at a time.
    """
    from rankscope.sources import MINILM

    require_report("the papers' figures", *(() if figure or options.models else (MINILM,)), "transformers")
    from rankscope.files import writable_folder
    from rankscope.nets import check_device
    from rankscope.report import write_report
    from rankscope_studies import Setup, chosen, write_page

    studies = chosen(paper, figure)
    check_device(options.device)
    writable_folder(output)
    models = tuple(name.strip() for name in options.models.split(",") if name.strip())
    setup = Setup(
        folder=output, full=options.full, device=options.device, models=models, any_machine=options.any_machine
    )
    answers: list[dict[str, Any]] = []
    page, done, total = None, 0, sum(round(study.seconds) for study in studies)
    try:
        with progress(printing.silent) as start:
            bar = start("")

            def tell(doing: str) -> None:
                bar(done, total, doing)

            for study, result in _run(studies, replace(setup, say=tell), options):
                done += round(study.seconds)
                tell(study.name)
                page = write_page(setup)
                comparisons = [asdict(comparison) for comparison in result.comparisons]
                answers.append({"study": study.name, "comparisons": comparisons, "notes": result.notes})
                if not printing.as_json:
                    with start.paused():
                        console().print(comparison_table(study, result))
                        say(*result.notes, "")
    except KeyboardInterrupt as stop:
        if printing.as_json:
            machine(answers)
        where = f"in {studies[len(answers)].name}, " if options.on is None else ""
        raise Interruption(
            f"{where}after {len(answers)} of {len(studies)}; the same command resumes from here"
        ) from stop
    written = None if page is None else write_report([page.parent], page.parent / "report.html")
    if printing.as_json:
        machine(answers)
    elif not printing.quiet:
        say_where("Written", page)
        if written is not None:
            say_where("Report", written)


def _run(studies: "list[Study]", setup: "Setup", options: ReproduceOptions) -> "Iterator[tuple[Study, StudyResult]]":
    """One after the other here; on a cluster several at a time, in the order in which they end."""
    if options.on is not None:
        from rankscope.engine import Cluster
        from rankscope_studies.on_cluster import reproduce_on_cluster

        setup.say(f"{len(studies)} studies")
        connected = ending.enter_context(Cluster(options.on, stuck_after=options.stuck_after))
        yield from reproduce_on_cluster(connected, studies, setup)
        return
    from rankscope_studies import reproduce as run

    for study in studies:
        setup.say(study.name)
        yield study, run(study, replace(setup, say=lambda doing, name=study.name: setup.say(f"{name}: {doing}")))


def comparison_table(study: "Study", result: "StudyResult") -> "Table":
    """What the paper says, and what came out here."""
    from rich.table import Table

    table = Table(title=f"{study.name}: {study.title}", title_justify="left", box=None)
    for heading, ratio in (("", 3), ("published", 2), ("ours", 2), ("", 3)):
        table.add_column(heading, ratio=ratio)
    marks = {True: "agrees", False: "differs", None: ""}
    for comparison in result.comparisons:
        verdict = ": ".join(filter(None, (marks[comparison.agrees], comparison.because)))
        table.add_row(comparison.what, comparison.published, comparison.ours, verdict)
    return table
