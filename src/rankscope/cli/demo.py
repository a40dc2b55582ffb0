"""`rankscope demo`: the main job on the embedded default model; or a training under a monitor (`--train`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rankscope.cli import options as opt
from rankscope.cli.inputs import MeasureTask, bundled_text, manifest_fields, text_fields, title_of
from rankscope.cli.measure import measure_all, raise_if_stopped
from rankscope.cli.output import ReportTables, open_store, require_report, with_manifest
from rankscope.cli.show import Interruption, console, machine, progress, say, say_report, show_run, show_tables
from rankscope.errors import SourceError, require
from rankscope.extras import counted

if TYPE_CHECKING:
    import polars as pl

    from rankscope.nets import Transformer
    from rankscope.runs import Manifest, SavedTable

PARTS = ("attention_skip", "mlp", "norm", "skip")
VARIANTS = ("transformer", *(f"transformer-{part}" for part in PARTS), "san")
"""What a verdict needs to name a cause: the whole, each part taken out by itself, and attention alone."""
DRAWN = ("transformer", "transformer-attention_skip", "transformer-mlp", "san")
"""Of which the cloud and the spectra are drawn."""
DECODER = "moby-gpt"  # The model of `--decoder`
READERS = {
    "minilm": "MiniLM (all-MiniLM-L6-v2), a trained English BERT of 6 layers, reads 4 excerpts of Moby Dick,",
    DECODER: f"{DECODER}, a trained Llama of 8 layers, reads 4 excerpts of Moby Dick, held out of its training,",
}
"""The model of each demo, and what it reads."""
TRAININGS = {"whole": 1.0, "no-skips": 0.0}  # The folder of each training run, and the weight of its skips


def demo(
    train: Annotated[bool, opt.option(opt.TRAINING, " ", "train_gpt", (), "--train")] = False,
    decoder: Annotated[bool, opt.option(opt.NETWORK, " ", "decoder", (), "--decoder")] = False,
    steps: Annotated[int, opt.option(opt.TRAINING, "N", "steps", min=1)] = 700,
    output: Annotated[Path | None, opt.output_option("runs/demo or runs/demo-train")] = None,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Measure MiniLM, a trained BERT, with and without its parts, take it apart, certify it: a report.

    With --train: train a small GPT, whole and without skips, under the monitor (about two minutes).
    """
    sentence = "--train trains a network, --decoder measures another; got both: leave one out"
    require(not train or not decoder, sentence, SourceError, "train")
    if train:
        train_demo(output or Path("runs/demo-train"), steps, printing)
    elif decoder:
        measure_demo(DECODER, output or Path("runs/demo-decoder"), printing)
    else:
        measure_demo("minilm", output or Path("runs/demo"), printing)


def measure_demo(model: str, output: Path, printing: opt.PrintOptions) -> None:
    """Measure variants of a model, its paths and what is proved of it; write the report."""
    from rankscope.profiles import DEFAULT_METRICS
    from rankscope.report import verdict, write_run_directory
    from rankscope.sources import MINILM, load

    require_report("the demo", *([MINILM] if model == "minilm" else []), "transformers")
    store = open_store(output)
    assert store is not None
    if not printing.silent:
        say(
            f"{READERS[model]} 128 tokens each: whole, without its attention skips, its MLPs, its norms, without any "
            "skip, and attention alone (san). In deviation arithmetic, which has no floor.\n"
        )
    net = load(model)
    texts = bundled_text(samples=4, tokens=128)
    X, padding = net.encode(texts, 128)
    report_tables = ReportTables(net, DRAWN, X, padding, net.words(texts[:1], 128))
    jobs = {name: (net.variant(name), X, padding) for name in VARIANTS}
    profile = measure_all(jobs, MeasureTask(list(DEFAULT_METRICS)), printing.silent, tables=report_tables)
    read = text_fields(opt.TextOptions(max_length=128), texts)
    profile = with_manifest(profile, **manifest_fields(net, model), **read)
    tables: dict[str, pl.DataFrame | SavedTable] = {}
    if profile.manifest.stopped is None:
        more, closure = paths_and_certificates(net, texts, profile.manifest, printing.silent)
        tables, profile = {**report_tables.tables(), **more}, with_manifest(profile, closure=closure)
    report = write_run_directory(profile, store, title_of(net), tables, "demo")
    show_run(profile, "relative_residual", [verdict(profile)], report, printing, more={"report": str(report)})
    raise_if_stopped(profile, output)


def paths_and_certificates(
    net: "Transformer", texts: list[str], manifest: "Manifest", quiet: bool
) -> "tuple[dict[str, pl.DataFrame | SavedTable], float]":
    """What the report shows beside the curves, and how nearly the paths add up to the output.

    The sum over all paths, by length and by head; what is proved of the network, and of attention alone.
    """
    from rankscope.paths import decompose
    from rankscope.theory import certify

    fields = {name: getattr(manifest, name) for name in ("model", "origin", "command")}
    with progress(quiet) as start:
        start("paths, certificates")
        paths = decompose(net, *net.encode(texts, 64))
        lengths = paths.by_length()
        tables: dict[str, pl.DataFrame | SavedTable] = {"lengths": lengths.table, "heads": paths.by_head()}
        encoded = net.encode(texts[:2], 32)
        for variant in ("san", "transformer"):
            certificates = certify(net.variant(variant), *encoded, variant=variant)
            tables[f"certificates_{variant}"] = with_manifest(certificates, **fields)
    return tables, lengths.closure


def train_demo(output: Path, steps: int, printing: opt.PrintOptions) -> None:
    """Train a small GPT with and without its skips, a step of each in turn; show and write both."""
    import torch
    from rich.padding import Padding
    from rich.text import Text

    from rankscope.files import writable_folder
    from rankscope.lab import NextCharacter, Recipe, Training
    from rankscope.monitor import default_rules
    from rankscope.report import write_report
    from rankscope.trainings import compare_runs, read_training

    require_report()
    writable_folder(output)
    if not printing.silent:
        say(
            "A GPT of 6 layers, 64 wide, learns to write Moby Dick letter by letter: whole, and without its "
            f"skips, {steps} steps each, side by side. A monitor measures both every 20 steps.\n"
        )
    task, recipe, folders = NextCharacter(), Recipe(steps=steps), {name: output / name for name in TRAININGS}
    with_skips, without = (
        iter(
            Training(
                task,
                task.architecture(6, 64, attention_skip=skip, mlp_skip=skip),
                recipe,
                run=folders[name],
                alarms=lambda: default_rules(action=lambda _: None),
            )
        )
        for name, skip in TRAININGS.items()
    )
    done, threads = 0, torch.get_num_threads()
    torch.set_num_threads(1)  # threads of so small a network mostly wait for each other
    try:
        with progress(printing.silent) as start:
            bar = start("training")
            for step in with_skips:
                done = next(without, step)
                bar(done, steps)
            for done in without:  # of a run that is resumed, it may be behind
                bar(done, steps)
    except KeyboardInterrupt as stop:
        raise Interruption(f"after {done} of {steps} steps; the same command resumes from there") from stop
    finally:
        torch.set_num_threads(threads)
        with_skips.close()
        without.close()
    report = write_report([*folders.values()], output / "report.html")
    runs = {name: read_training(folder) for name, folder in folders.items()}
    if printing.as_json:
        rows = {name: {"training": run.table.to_dicts(), "alarms": run.alarms.to_dicts()} for name, run in runs.items()}
        return machine({"report": str(report), "runs": rows})
    show_tables(*compare_runs([*runs.values()], [*runs], "relative_mu").sections()[0].tables)
    for name, run in runs.items():
        sentences = run.alarms["sentence"].to_list()
        say("", f"{name}: {counted(len(sentences), 'alarm')}")
        for sentence in sentences:
            console().print(Padding(Text(sentence), (0, 0, 0, 2)))
    say_report(report, printing)
