"""`rankscope remedies`: every remedy against collapse on one scale."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import names
from rankscope.cli import options as opt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from rankscope.studies.remedies.table import Tables


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
        bool,
        opt.option(
            opt.NETWORK, " ", "Train them from scratch too, which takes hours.", (), "--train/--no-train"
        ),
    ] = False,
    depths: Annotated[
        str | None,
        opt.option(
            opt.NETWORK,
            "NUMBERS",
            "Layers of networks that are trained: 6,12,24,48.",
            (),
            show_default="by size",
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
    from rankscope.studies import Setup
    from rankscope.studies.remedies.run import Asked, gather, outcome, plan, write

    given = {"remedies": tuple(remedy)} if remedy else {}
    asked = Asked(**given, model=model, seeds=seeds, train=train, depths=numbers(depths), steps=steps,
                  workers=workers)  # fmt: skip
    check_device(device)
    writable_folder(output)
    silent = quiet or as_json
    done, planned = 0, list[Any]()
    try:
        with progress(silent) as start:
            bar = start("")
            setup = Setup(
                output, full, device, (model,), say=lambda what: bar(done, max(len(planned), 1), what)
            )
            planned = plan(setup, asked)
            if not silent:
                with start.paused():
                    say(
                        expected(sum(part.seconds for part in planned), len(planned), asked.workers, train),
                        "",
                    )

            def tell(part: Any) -> None:
                nonlocal done
                done += 1
                bar(done, len(planned), str(part))

            tables = gather(setup, asked, planned, tell)
    except KeyboardInterrupt as stop:
        trains = bool(planned) and done == len(planned)
        where = "in training" if trains else f"after {done} of {len(planned)} parts"
        raise Interruption(f"{where}; the same command resumes from here") from stop
    found = outcome(setup, asked, tables)
    report = write_report([write(setup, found, command_line())], output / "report.html")
    if as_json:
        machine({
            "remedies": found.tables["remedies"].to_dicts(), "laws": found.tables["laws"].to_dicts(),
            "claims": [asdict(each) for each in found.comparisons], "notes": found.notes,
            "report": str(report),
        })  # fmt: skip
        return
    for table in shown(tables):
        console().print(table, "")
    say(found.said, *([] if quiet else ["", *found.notes]), "", claims_said(found.comparisons))
    if not quiet:
        say_where("Report", report)


def numbers(text: str | None) -> tuple[int, ...] | None:
    """The depths of a comma-separated option."""
    from rankscope.cli.inputs import split_names
    from rankscope.errors import StudyError

    if text is None:
        return None
    found = split_names("depths", text)
    if not all(each.isdecimal() and int(each) for each in found):
        raise StudyError(f"--depths must be whole numbers from 1 on, as 6,12,24; got {text!r}")
    return tuple(map(int, found))


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


def shown(tables: "Tables") -> "Iterator[Table]":
    """Before training, and after it where there is some: a row a remedy, in eighty columns. Medians: their
    ranges are in the report."""
    from rankscope.cli.show import titled
    from rankscope.studies.remedies.reached import THRESHOLD
    from rankscope.studies.remedies.shown import chosen_after, chosen_before

    short = {"moved, cold": "moved", "log times": "log ×"}
    said = (
        f"At initialisation: layers until the relative residual falls below {THRESHOLD:g}",
        f"post, pre, no skips: of {tables.deepest} layers; ≥: it never does. log ×: by which the log of a "
        "small residual is multiplied in a layer without skips. moved: tokens of the trained model, cold.",
    )
    learned = (
        "Trained from scratch: the deepest networks that learn",
        "≥: no deeper ones were trained. none: not even the shallowest. time: of a step, none = 1. added: "
        "parameters, at the deepest.",
    )
    for words, found in ((said, chosen_before(tables)), (learned, chosen_after(tables))):
        if found is None:
            continue
        table = titled(*words)
        for heading in found.headings:
            table.add_column(
                short.get(heading, heading), justify="left" if heading == "remedy" else "right", no_wrap=True
            )
        for row in found.rows:
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
