"""`rankscope reproduce`: both papers, figure by figure, with the published numbers beside ours."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.cli.options import Json, Quiet

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.studies import Outcome, Study


def reproduce(
    paper: Annotated[str, typer.Argument(help="dong2021, wu2024, or all.")] = "all",
    figure: Annotated[str | None, typer.Argument(help="A figure of it; left out: all.")] = None,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="The papers' sizes, or minutes on two cores.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda: where networks run and train.")] = "cpu",
    models: Annotated[
        str, typer.Option(help="Comma-separated hub ids or directories of trained models, for those at hand.")
    ] = "",
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for figures, tables and REPRODUCTION.md.")
    ] = Path("runs/reproduce"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the papers' figures again: figure, data, and a comparison with what was published.

    An interrupted run goes on where it stopped; a second run into the same folder gives the same tables.
    """
    from dataclasses import asdict

    from rich.console import Console

    from rankscope.cli.show import console, machine, say, say_report
    from rankscope.files import writable_folder
    from rankscope.report import write_report
    from rankscope.studies import Setup, chosen, write_page
    from rankscope.studies import reproduce as run

    studies = chosen(paper, figure)
    writable_folder(output)
    named = tuple(name.strip() for name in models.split(",") if name.strip())
    told = Console(stderr=True, highlight=False)

    def tell(what: str) -> None:
        if not (quiet or as_json):
            told.print(f"  {what}", markup=False)

    setup = Setup(folder=output, full=full, device=device, models=named, say=tell)
    answers = []
    for study in studies:
        tell(f"{study.name}: {study.title}")
        found = run(study, setup)
        page = write_page(setup)
        answers.append({"study": study.name, "comparisons": [asdict(each) for each in found.comparisons],
                        "notes": found.notes})  # fmt: skip
        if not as_json:
            console().print(comparison_table(study, found))
            say(*found.notes, "")
    written = write_report([page.parent], page.parent / "report.html")
    if as_json:
        machine(answers)
    elif not quiet:
        say(f"Written: {page}")
        say_report(written)


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
