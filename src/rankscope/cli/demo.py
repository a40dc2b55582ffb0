"""`rankscope demo`: the main job on the embedded default model, and its report."""

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.options import Json, Quiet, Seed


def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the table, figures, manifest and report.")
    ] = Path("runs/demo"),
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a BERT-base at initialisation, with and without its skips and MLPs, and write a report."""
    from rankscope.cli.measure import command, measured, network, prose, title_of, write_run
    from rankscope.cli.show import console, machine, profile_table, say, say_report
    from rankscope.nets import PUBLISHED
    from rankscope.profiles import DEFAULT_METRICS
    from rankscope.report import verdict

    if not (quiet or as_json):
        say(
            "A BERT-base network with random weights (no training), on 4 excerpts of Moby Dick, 128 words "
            "each, under a random embedding: the four networks of Dong et al. 2021, figure 2, as their code "
            "builds them, and pure attention (san). In deviation arithmetic, which has no floor.\n"
        )
    net = network("bert-base", seed, "bert")
    X, padding = prose(net, samples=4, tokens=128)
    variants = ["san", *PUBLISHED.values()]
    profile = measured(net, X, padding, variants, list(DEFAULT_METRICS), ["deviation"], quiet or as_json)
    profile.manifest.update(model="bert-base", seed=seed, init="bert", command=command())
    report = write_run(profile, output, title_of("bert-base"))
    if as_json:
        machine({"manifest": profile.manifest, "table": profile.table.to_dicts(), "report": str(report)})
        return
    console().print(profile_table(profile, "relative_residual"))
    say("", verdict(profile), "")
    say_report(report)
