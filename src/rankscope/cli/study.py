"""`rankscope study`: questions of one's own, answered by experiment."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from rankscope.cli import options as opt
from rankscope.cli.output import require_report
from rankscope.cli.reproduce import comparison_table
from rankscope.cli.show import Interruption, console, machine, progress, say, say_where

STUDIES = ("hysteresis",)


@dataclass(frozen=True)
class StudyOptions:
    """Options that say at which size and where a study is run."""

    full: opt.Full = False
    device: opt.Device = "cpu"


def study(
    name: Annotated[str, opt.argument("NAME", "The study, or all.", (*STUDIES, "all"))] = "all",
    options: StudyOptions = StudyOptions(),
    output: opt.Folder = Path("runs/study"),
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Answer a question by experiment: figure, data, and the answer in a sentence.

    [bold]hysteresis[/bold]: skips are taken away from a network in training and given back. An interrupted study goes
    on where it stopped.
    """
    require_report("studies")
    from rankscope.files import writable_folder
    from rankscope.nets.devices import check_device
    from rankscope.studies import Setup
    from rankscope.studies.questions import questions
    from rankscope.studies.reproduce import home, write_study

    chosen = questions(name)
    check_device(options.device)
    writable_folder(output)
    setup = Setup(folder=output, full=options.full, device=options.device)
    answers = []
    try:
        with progress(printing.silent) as start:
            bar = start("")
            for done, each in enumerate(chosen):
                placed = replace(
                    setup, folder=home(setup) / each.figure, say=lambda doing, at=done: bar(at, None, doing)
                )
                result = each.run(placed)
                command = f"rankscope study {each.figure}{' --full' if options.full else ''}"
                folder = write_study(each, placed, result, command)
                comparisons = [asdict(comparison) for comparison in result.comparisons]
                answers.append({"study": each.figure, "answer": result.summary, "comparisons": comparisons,
                                "notes": result.notes, "folder": str(folder)})  # fmt: skip
                if not printing.as_json:
                    with start.paused():
                        console().print(comparison_table(each, result))
                        say("", result.summary, *result.notes, "")
                        say_where("Written", folder)
    except KeyboardInterrupt as stop:
        raise Interruption(f"in {chosen[len(answers)].figure}; the same command resumes from here") from stop
    if printing.as_json:
        machine(answers)
