"""`rankscope demo`: the main job on the embedded default model, and its report."""

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.options import Quiet, Seed


def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the table, figures, manifest and report.")
    ] = Path("runs/demo"),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Measure a BERT-base at initialisation, with and without its skips and MLPs, and write a report."""
    from rankscope.cli.measure import measured, network, prose, title_of, write_run
    from rankscope.cli.show import console, profile_table, say
    from rankscope.nets import PUBLISHED
    from rankscope.profiles import DEFAULT_METRICS
    from rankscope.report import verdict

    if not quiet:
        say(
            "A BERT-base network with [bold]random weights[/bold] (no training), on 4 excerpts of Moby Dick, "
            "128 words each, under a random embedding: the four networks of Dong et al. 2021, figure 2, as "
            "their code builds them.\n"
        )
    net = network("bert-base", seed, "bert")
    X, padding = prose(net, samples=4, tokens=128, seed=seed)
    variants = ["san", *PUBLISHED.values()]
    profile = measured(net, X, padding, variants, list(DEFAULT_METRICS), ["float64"], quiet)
    profile.manifest.update(model="bert-base", seed=seed, init="bert")
    report = write_run(profile, output, title_of("bert-base"))
    console().print(profile_table(profile, "relative_residual"))
    say("", verdict(profile), "", f"Report: {report}")
