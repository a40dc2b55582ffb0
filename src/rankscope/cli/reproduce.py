"""`rankscope reproduce`: both papers, figure by figure, with the published numbers beside ours."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli import names
from rankscope.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.studies import Setup, Study, StudyResult

MODELS = "Comma-separated hub ids or directories of trained models, for those at hand."


def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            metavar="PAPER",
            help="dong2021, wu2024, or all.",
            autocompletion=names.complete_one([*names.FIGURES, "all"]),
        ),
    ] = "all",
    figure: Annotated[
        str | None,
        typer.Argument(metavar="FIGURE", help="One of it; left out: all.", autocompletion=names.complete_figure),
    ] = None,
    full: opt.Full = False,
    models: Annotated[str, opt.option(opt.NETWORK, "NAMES", MODELS, names.MODELS[:1])] = "",
    device: opt.Device = "cpu",
    on: opt.On = None,
    output: opt.Folder = Path("runs/reproduce"),
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Run the papers' figures again: figure, data, and a comparison with what was published.

    An interrupted run goes on where it stopped; a second run into the same folder gives the same tables. With
    [bold]--on ray[/bold] a cluster runs several figures at a time.
    """
    from dataclasses import asdict, replace

    from rankscope.cli.output import require_report
    from rankscope.sources.checkpoint import MINILM

    require_report("the papers' figures", *(() if figure or models else (MINILM,)), "transformers")
    from rankscope.cli.exits import Interruption
    from rankscope.cli.show import console, machine, progress, say, say_where
    from rankscope.files import writable_folder
    from rankscope.nets.devices import check_device
    from rankscope.report import write_report
    from rankscope.studies import Setup, chosen, write_page

    studies = chosen(paper, figure)
    check_device(device)
    writable_folder(output)
    named = tuple(name.strip() for name in models.split(",") if name.strip())
    setup = Setup(folder=output, full=full, device=device, models=named)
    answers: list[dict[str, Any]] = []
    page, done, whole = None, 0, sum(round(study.seconds) for study in studies)
    try:
        with progress(quiet or as_json) as start:
            bar = start("")

            def tell(what: str) -> None:
                bar(done, whole, what)

            for study, found in _run(studies, replace(setup, say=tell), on):
                done += round(study.seconds)
                tell(study.name)
                page = write_page(setup)
                answers.append({"study": study.name, "comparisons": [asdict(each) for each in
                                found.comparisons], "notes": found.notes})  # fmt: skip
                if not as_json:
                    with start.paused():
                        console().print(comparison_table(study, found))
                        say(*found.notes, "")
    except KeyboardInterrupt as stop:
        if as_json:
            machine(answers)
        where = f"in {studies[len(answers)].name}, " if on is None else ""
        raise Interruption(
            f"{where}after {len(answers)} of {len(studies)}; the same command resumes from here"
        ) from stop
    written = None if page is None else write_report([page.parent], page.parent / "report.html")
    if as_json:
        machine(answers)
    elif not quiet:
        say_where("Written", page)
        if written is not None:
            say_where("Report", written)


def _run(studies: "list[Study]", setup: "Setup", on: str | None) -> "Iterator[tuple[Study, StudyResult]]":
    """One after the other here; on a cluster several at a time, in the order in which they end."""
    from dataclasses import replace

    from rankscope.studies import reproduce as run

    if on is not None:
        from rankscope.cli.output import ending
        from rankscope.engine.cluster import cluster
        from rankscope.engine.ray_jobs import reproduce_on_cluster

        setup.say(f"{len(studies)} studies")
        yield from reproduce_on_cluster(ending.enter_context(cluster(on)), studies, setup)
        return
    for study in studies:
        setup.say(study.name)
        named = replace(setup, say=lambda what, name=study.name: setup.say(f"{name}: {what}"))
        yield study, run(study, named)


def comparison_table(study: "Study", found: "StudyResult") -> "Table":
    """What the paper says, and what came out here."""
    from rich.table import Table

    table = Table(title=f"{study.name}: {study.title}", title_justify="left", box=None)
    table.add_column("", ratio=3)
    table.add_column("published", ratio=2)
    table.add_column("ours", ratio=2)
    table.add_column("", ratio=3)
    marks = {True: "agrees", False: "differs", None: ""}
    for each in found.comparisons:
        said = ": ".join(part for part in (marks[each.agrees], each.because) if part)
        table.add_row(each.what, each.published, each.ours, said)
    return table
