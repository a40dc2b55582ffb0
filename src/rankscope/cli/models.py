"""`rankscope models`: what can be named, and the families that can be loaded, with parity as measured now."""

from typing import TYPE_CHECKING

from rankscope.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.sources.load import FamilyParity


def models(printing: opt.PrintOptions = opt.PrintOptions()) -> None:
    """List the models: those at hand by name, and the families that can be loaded, with their parity.

    A small random model of every family is built, loaded and compared with the original, here and now.
    """
    from rankscope.cli.show import console, machine, progress, say
    from rankscope.extras import install, there
    from rankscope.sources import PRESETS
    from rankscope.sources.load import survey

    with progress(printing.silent) as start:
        families = survey(start("families")) if there("transformers") else []
    if printing.as_json:
        rows = [
            {"family": family.family, "config": family.config, "types": family.types, **family.parity.described()}
            for family in families
        ]
        machine({"presets": list(PRESETS), "families": rows})
        return
    say(f"By name, random weights: {', '.join(PRESETS)}.")
    say("By name, trained: minilm (the demo extra).")
    if not families:
        say(f"Families that can be loaded are listed where transformers is: {install(['transformers'])}")
        return
    say("Loaded: a directory or an id on the hub, of one of these families.\n")
    console().print(_table(families))
    if printing.quiet:
        return
    say(
        "",
        "Parity: the largest difference between the canonical network and the original, in float64, on a "
        "padded probe; of states relative to their largest entry. Float32: how far the original is from "
        "itself when the parts that it computes in float32 are lifted to float64.",
    )


def _table(families: "list[FamilyParity]") -> "Table":
    from rich.table import Table

    table = Table(title="families", title_justify="left", box=None)
    for heading in ("family", "model types", "config"):
        table.add_column(heading, overflow="fold")
    for heading in ("states", "attention", "float32"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for family in families:
        first = family.family != before
        before = family.family
        parity = family.parity
        table.add_row(
            family.family if first else "",
            ", ".join(family.types) if first else "",
            family.config,
            f"{parity.states:.0e}",
            f"{parity.attention or 0.0:.0e}",
            "" if parity.float32_parts is None else f"{parity.float32_parts:.0e}",
        )
    return table
