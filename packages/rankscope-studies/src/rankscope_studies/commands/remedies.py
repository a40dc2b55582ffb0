"""`rankscope remedies`: every remedy against collapse on one scale."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import (
    Interruption,
    command_line,
    console,
    machine,
    progress,
    require_report,
    say,
    say_where,
    split_names,
    titled,
)
from rankscope.cli import options as opt
from rankscope_studies.commands.shared import Full

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from rankscope_studies import StudyResult

SHORT = {"moved, cold": "moved", "log times": "log ×"}
"""Headings of the tables of the report, as they fit into eighty columns."""


@dataclass(frozen=True)
class RemedyStudyOptions:
    """Options that say which remedies are put on which networks, and what is trained."""

    model: opt.Model = "minilm"
    remedy: Annotated[
        list[str] | None, opt.option(opt.NETWORK, "SPEC", "remedies", opt.REMEDIES, "--remedy", show_default="all")
    ] = None
    seeds: Annotated[
        int, opt.option(opt.SIZE, "N", "The number of random networks of each kind, one for each seed.", min=1)
    ] = 3
    full: Full = False
    train: Annotated[bool, opt.option(opt.TRAINING, " ", "train", (), "--train/--no-train")] = False
    depths: Annotated[
        str | None,
        opt.option(
            opt.TRAINING,
            "NUMBERS",
            "With --train: the depths of the networks, such as 6,12,24,48.",
            (),
            show_default="by size",
        ),
    ] = None
    steps: Annotated[int | None, opt.option(opt.TRAINING, "N", "steps", min=1, show_default="by size")] = None
    device: opt.Device = "cpu"
    workers: Annotated[int, opt.option(opt.MACHINE, "N", "workers", min=1)] = 1


def remedies(
    options: RemedyStudyOptions = RemedyStudyOptions(),
    output: opt.Folder = Path("runs/remedies"),
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Put every remedy against collapse on one scale, to choose one by.

    On the same random weights: how many layers until tokens are nearly the same, with skips and without, and
    what theory says of it. Put on a model whose weights were trained without it: how far its tokens move. With
    [bold]--train[/bold]: loss, residual, entropy and time per step after a short training.

    An interrupted run resumes where it stopped. Without [bold]--train[/bold] the table shows the trainings that
    the folder holds already.
    """  # fmt: skip
    from rankscope.sources import MINILM

    require_report("the table of remedies", *((MINILM, "transformers") if options.model == "minilm" else ()))
    from rankscope.files import writable_folder
    from rankscope.nets import check_device
    from rankscope.report import write_report
    from rankscope_studies import Setup, write_study
    from rankscope_studies.remedies.study import RemedyOptions, named_with_weights, plan, remedies_study

    chosen: dict[str, Any] = {"remedies": tuple(options.remedy)} if options.remedy else {}
    same = {name: getattr(options, name) for name in ("model", "seeds", "train", "steps", "workers")}
    study_options = RemedyOptions(**chosen, **same, depths=depths_of(options.depths))
    check_device(options.device)
    writable_folder(output)
    study, done, total = remedies_study(study_options), 0, 1
    try:
        with progress(printing.silent) as start:
            bar = start("")

            def count(parts_done: int, parts: int) -> None:
                nonlocal done, total
                done, total = parts_done, parts

            on_model = (options.model,)
            setup = Setup(output, options.full, options.device, on_model, lambda part: bar(done, total, part), count)
            jobs = plan(setup, study_options)
            total = len(jobs)
            if not printing.silent:
                with start.paused():
                    say(expected(sum(job.seconds for job in jobs) / options.workers, total, options.train), "")
            result = study.run(setup)
    except KeyboardInterrupt as stop:
        where = "in training" if done == total else f"after {done} of {total} parts"
        raise Interruption(f"{where}; the same command resumes from here") from stop
    report = write_report([write_study(study, setup, result, command_line())], output / "report.html")
    if printing.as_json:
        tables = {name: result.tables[name].to_dicts() for name in ("remedies", "laws")}
        claims = [asdict(claim) for claim in result.comparisons]
        return machine({**tables, "claims": claims, "notes": result.notes, "report": str(report)})
    for table in choice_tables(result, named_with_weights(options.model)):
        console().print(table, "")
    say(result.summary, *([] if printing.quiet else ["", *result.notes]), "", claims_counted(result.comparisons))
    if not printing.quiet:
        say_where("Report", report)


def depths_of(text: str | None) -> tuple[int, ...] | None:
    """The depths of a comma-separated option; None where it is left out."""
    from rankscope.errors import StudyError

    if text is None:
        return None
    depths = split_names("depths", text)
    if not all(depth.isdecimal() and int(depth) for depth in depths):
        raise StudyError(f"--depths must be whole numbers from 1 on, as 6,12,24; got {text!r}", subject="depths")
    return tuple(map(int, depths))


def expected(seconds: float, parts: int, train: bool) -> str:
    """A sentence on how long it takes, roughly, on a core of today."""
    time = f"about {seconds / 60:.0f} minutes" if seconds >= 90 else "about a minute"
    training = " Trainings come after them and take longer: hours on two cores." if train else ""
    return f"{parts} parts, {time} where none of them is kept yet.{training}"


def claims_counted(claims: "list[Any]") -> str:
    """A sentence on how many published claims came out, by verdict."""
    many = {"agrees": "agree", "does not": "do not", "does nothing here": "do nothing here"}
    verdicts = Counter(claim.verdict for claim in claims).most_common()
    counts = ", ".join(f"{count} {word if count == 1 else many.get(word, word)}" for word, count in verdicts)
    return f"Of {len(claims)} published claims: {counts}. Each with its numbers is in the report."


def choice_tables(result: "StudyResult", model: str) -> "Iterator[Table]":
    """Tables to choose by, before training and after it where there is some: a row a remedy, in eighty columns.

    The numbers are medians: their ranges are in the report. `model` names the network that remedies were put on.
    """
    from rankscope_studies.remedies.at_initialisation import THRESHOLD
    from rankscope_studies.remedies.tables import AFTER, BEFORE

    deepest = max(result.tables["initial"]["depth"].to_list())
    words = {
        BEFORE: (
            f"At initialisation: layers until the relative residual falls below {THRESHOLD:g}",
            f"post, pre, no skips: of {deepest} layers; ≥: it never does. log ×: by which the log of a small residual "
            "is multiplied in a layer without skips. moved: how far the last layer's tokens of "
            f"{model} move, over their length.",
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
            table.add_column(SHORT.get(heading, heading), justify=side, no_wrap=True)  # type: ignore[arg-type]
        for row in page.rows:
            table.add_row(*map(terse, row))
        yield table


def terse(cell: str) -> str:
    """A cell in little room.

    >>> terse("99 (98–128)"), terse("all 128 (117–128)"), terse("1,592,832"), terse("-6,132")
    ('99', '≥128', '1.6M', '-6.1k')
    """
    text = cell.partition(" (")[0].replace("all ", "≥")
    digits = text.replace(",", "")
    if "," in text and digits.removeprefix("-").isdecimal():
        amount = float(digits)
        return f"{amount / 1e6:.1f}M" if abs(amount) >= 1e6 else f"{amount / 1e3:.1f}k"
    return text
