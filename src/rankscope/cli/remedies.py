"""`rankscope remedies`: every remedy against collapse on one scale."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import names
from rankscope.cli import options as opt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from rankscope.studies import StudyResult


def remedies(
    model: opt.Model = "minilm",
    remedy: Annotated[
        list[str] | None,
        opt.option(
            opt.NETWORK,
            "SPEC",
            "Only these, with their numbers: attnscale:w=0.5.",
            names.REMEDIES,
            "--remedy",
            show_default="all",
        ),
    ] = None,
    seeds: Annotated[int, opt.option(opt.NETWORK, "N", "Random networks of each kind.", min=1)] = 3,
    full: opt.Full = False,
    train: Annotated[
        bool, opt.option(opt.NETWORK, " ", "Train them from scratch too, which takes hours.", (), "--train/--no-train")
    ] = False,
    depths: Annotated[
        str | None,
        opt.option(
            opt.NETWORK, "NUMBERS", "Layers of networks that are trained: 6,12,24,48.", (), show_default="by size"
        ),
    ] = None,
    steps: Annotated[int | None, opt.option(opt.NETWORK, "N", "steps", min=1, show_default="by size")] = None,
    device: opt.Device = "cpu",
    workers: Annotated[int, opt.option(opt.NETWORK, "N", "workers", min=1)] = 1,
    output: opt.Folder = Path("runs/remedies"),
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Put every remedy against collapse on one scale, to choose one by.

    On the same random weights: how many layers until tokens are nearly the same, with skips and without, and
    what theory says of it. Put on a trained model: how far its tokens move. With
    [bold]--train[/bold]: loss, residual, entropy and time per step after a short training.

    An interrupted run goes on where it stopped. Without [bold]--train[/bold] the table has what the folder
    holds of earlier trainings.
    """  # fmt: skip
    from dataclasses import asdict

    from rankscope.cli.output import require_report
    from rankscope.sources.checkpoint import MINILM

    require_report("the table of remedies", *((MINILM, "transformers") if model == "minilm" else ()))
    from rankscope.cli.exits import Interruption
    from rankscope.cli.measure import command_line
    from rankscope.cli.show import console, machine, progress, say, say_where
    from rankscope.files import writable_folder
    from rankscope.nets.devices import check_device
    from rankscope.report import write_report
    from rankscope.studies import Setup, write_study
    from rankscope.studies.remedies.study import RemedyOptions, plan, remedies_study

    chosen = {"remedies": tuple(remedy)} if remedy else {}
    options = RemedyOptions(**chosen, model=model, seeds=seeds, train=train, depths=numbers(depths),
                            steps=steps, workers=workers)  # fmt: skip
    check_device(device)
    writable_folder(output)
    silent = quiet or as_json
    study, counts = remedies_study(options), [0, 1]
    try:
        with progress(silent) as start:
            bar = start("")

            def count(done: int, total: int) -> None:
                counts[:] = done, total

            setup = Setup(output, full, device, (model,), lambda what: bar(counts[0], counts[1], what), count)
            jobs = plan(setup, options)
            counts[1] = len(jobs)
            if not silent:
                with start.paused():
                    say(expected(sum(job.seconds for job in jobs), len(jobs), workers, train), "")
            result = study.run(setup)
    except KeyboardInterrupt as stop:
        done, total = counts
        where = "in training" if done == total else f"after {done} of {total} parts"
        raise Interruption(f"{where}; the same command resumes from here") from stop
    report = write_report([write_study(study, setup, result, command_line())], output / "report.html")
    if as_json:
        machine({
            "remedies": result.tables["remedies"].to_dicts(), "laws": result.tables["laws"].to_dicts(),
            "claims": [asdict(claim) for claim in result.comparisons], "notes": result.notes,
            "report": str(report),
        })  # fmt: skip
        return
    for table in choice_tables(result):
        console().print(table, "")
    say(result.summary, *([] if quiet else ["", *result.notes]), "", claims_said(result.comparisons))
    if not quiet:
        say_where("Report", report)


def numbers(text: str | None) -> tuple[int, ...] | None:
    """The depths of a comma-separated option."""
    from rankscope.cli.inputs import split_names
    from rankscope.errors import StudyError

    if text is None:
        return None
    depths = split_names("depths", text)
    if not all(depth.isdecimal() and int(depth) for depth in depths):
        raise StudyError(f"--depths must be whole numbers from 1 on, as 6,12,24; got {text!r}", subject="depths")
    return tuple(map(int, depths))


def expected(seconds: float, parts: int, workers: int, train: bool) -> str:
    """How long it takes, said before: roughly, on a core of today."""
    minutes = seconds / workers / 60
    time = f"about {minutes:.0f} minutes" if minutes >= 1.5 else "about a minute"
    said = f"{parts} parts, {time} where none of them is kept yet."
    return f"{said} Trainings come after them and take longer: hours on two cores." if train else said


def claims_said(claims: "list[Any]") -> str:
    """How many claims came out."""
    words: dict[str, int] = {}
    for each in claims:
        words[each.verdict] = words.get(each.verdict, 0) + 1
    many = {"agrees": "agree", "does not": "do not", "does nothing here": "do nothing here"}
    counts = ", ".join(
        f"{number} {word if number == 1 else many.get(word, word)}"
        for word, number in sorted(words.items(), key=lambda one: -one[1])
    )
    return f"Of {len(claims)} published claims: {counts}. Each with its numbers is in the report."


def choice_tables(result: "StudyResult") -> "Iterator[Table]":
    """Tables to choose by, before training and after it where there is some: a row a remedy, in eighty
    columns. Medians: their ranges are in the report."""
    from rankscope.cli.show import titled
    from rankscope.studies.remedies.at_initialisation import THRESHOLD
    from rankscope.studies.remedies.tables import AFTER, BEFORE

    short = {"moved, cold": "moved", "log times": "log ×"}
    deepest = max(result.tables["initial"]["depth"].to_list())
    words = {
        BEFORE: (
            f"At initialisation: layers until the relative residual falls below {THRESHOLD:g}",
            f"post, pre, no skips: of {deepest} layers; ≥: it never does. log ×: by which the log of a "
            "small residual is multiplied in a layer without skips. moved: tokens of the trained model, "
            "cold.",
        ),
        AFTER: (
            "Trained from scratch: the deepest networks that learn",
            "≥: no deeper ones were trained. none: not even the shallowest. time: of a step, none = 1. "
            "added: parameters, at the deepest.",
        ),
    }
    pages = {page.title: page for page in result.page_tables}
    for page in (pages[title] for title in words if title in pages):
        table = titled(*words[page.title])
        for heading in page.headings:
            side = "left" if heading == "remedy" else "right"
            table.add_column(short.get(heading, heading), justify=side, no_wrap=True)  # type: ignore[arg-type]
        for row in page.rows:
            table.add_row(*map(terse, row))
        yield table


def terse(cell: str) -> str:
    """A cell in little room.

    >>> terse("99 (98–128)"), terse("all 128 (117–128)"), terse("1,592,832"), terse("-6,132")
    ('99', '≥128', '1.6M', '-6.1k')
    """
    said = cell.partition(" (")[0].replace("all ", "≥")
    digits = said.replace(",", "").removeprefix("-")
    if "," in said and digits.isdecimal():
        number = float(said.replace(",", ""))
        return f"{number / 1e6:.1f}M" if abs(number) >= 1e6 else f"{number / 1e3:.1f}k"
    return said
