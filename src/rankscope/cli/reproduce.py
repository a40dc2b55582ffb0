"""`rankscope reproduce`: both papers, figure by figure, with the published numbers beside ours."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli import names
from rankscope.cli import options as opt
from rankscope.cli.complete import figure as complete_figure
from rankscope.cli.complete import one

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.studies import Outcome, Study

MODELS = "Comma-separated hub ids or directories of trained models, for those at hand."


def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            metavar="PAPER", help="dong2021, wu2024, or all.", autocompletion=one([*names.FIGURES, "all"])
        ),
    ] = "all",
    figure: Annotated[
        str | None,
        typer.Argument(metavar="FIGURE", help="One of it; left out: all.", autocompletion=complete_figure),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="The papers' sizes, or minutes on two cores.")
    ] = False,
    models: Annotated[str, opt.option(opt.NETWORK, "NAMES", MODELS, names.MODELS[:1])] = "",
    device: opt.Device = "cpu",
    output: opt.Folder = Path("runs/reproduce"),
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Run the papers' figures again: figure, data, and a comparison with what was published.

    An interrupted run goes on where it stopped; a second run into the same folder gives the same tables.
    """
    from dataclasses import asdict
    from itertools import accumulate

    from rankscope.cli.exits import Stopped
    from rankscope.cli.show import console, machine, progress, say, say_where
    from rankscope.files import writable_folder
    from rankscope.nets.transformer import refuse_absent
    from rankscope.report import write_report
    from rankscope.studies import Setup, chosen, write_page
    from rankscope.studies import reproduce as run

    studies = chosen(paper, figure)
    refuse_absent(device)
    writable_folder(output)
    named = tuple(name.strip() for name in models.split(",") if name.strip())
    answers: list[dict[str, Any]] = []
    page = None
    try:
        with progress(quiet or as_json) as start:
            bar = start("")
            ends = list(accumulate((round(study.seconds) for study in studies), initial=0))
            for begun, study in zip(ends[:-1], studies, strict=True):
                bar(begun, ends[-1], study.name)

                def tell(what: str, begun: int = begun, name: str = study.name) -> None:
                    bar(begun, ends[-1], f"{name}: {what}")

                setup = Setup(folder=output, full=full, device=device, models=named, say=tell)
                found = run(study, setup)
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
        raise Stopped(
            f"in {studies[len(answers)].name}, after {len(answers)} of {len(studies)}; the same command goes "
            "on from here"
        ) from stop
    written = None if page is None else write_report([page.parent], page.parent / "report.html")
    if as_json:
        machine(answers)
    elif not quiet:
        say_where("Written", page)
        if written is not None:
            say_where("Report", written)


def comparison_table(study: "Study", found: "Outcome") -> "Table":
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
