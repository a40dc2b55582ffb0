"""`rankscope demo`: the main job on the embedded default model, and its report."""

from pathlib import Path

from rankscope.cli.options import Folder, Json, Quiet


def demo(output: Folder = Path("runs/demo"), as_json: Json = False, quiet: Quiet = False) -> None:
    """Measure MiniLM, a trained BERT, with and without its skips and MLPs, and write a report."""
    from rankscope.cli.measure import about, end_if_stopped, measured, prose, title_of, write_run
    from rankscope.cli.show import console, machine, profile_table, say, say_report
    from rankscope.files import writable_folder
    from rankscope.nets import PUBLISHED
    from rankscope.profiles import DEFAULT_METRICS
    from rankscope.report import verdict
    from rankscope.sources import load

    writable_folder(output)
    if not (quiet or as_json):
        say(
            "MiniLM (all-MiniLM-L6-v2), a trained English BERT of 6 layers, reads 4 excerpts of Moby Dick, "
            "128 tokens each: the four networks of Dong et al. 2021, figure 2, as their code builds them, "
            "and pure attention (san). In deviation arithmetic, which has no floor.\n"
        )
    net = load("minilm")
    X, padding = prose(net, samples=4, tokens=128)
    variants = ["san", *PUBLISHED.values()]
    profile = measured(net, X, padding, variants, list(DEFAULT_METRICS), ["deviation"], quiet or as_json)
    profile.manifest.update(about(net, "minilm"))
    report = write_run(profile, output, title_of(net))
    if as_json:
        machine({"manifest": profile.manifest, "table": profile.table.to_dicts(), "report": str(report)})
    else:
        console().print(profile_table(profile, "relative_residual"))
        say("", verdict(profile))
        if not quiet:
            say("")
            say_report(report)
    end_if_stopped(profile, output)
