"""`rankscope models`: what can be named, and the families that can be loaded, with parity as measured now."""

from typing import TYPE_CHECKING

from rankscope.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.sources.survey import FamilyParity


def models(as_json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """List the models: those at hand by name, and the families that can be loaded, with their parity.

    A small random model of every family is built, loaded and held against itself, here and now.
    """
    from rankscope.cli.show import console, machine, progress, say
    from rankscope.extras import install, there
    from rankscope.sources import PRESETS
    from rankscope.sources.survey import survey

    with progress(quiet or as_json) as start:
        found = survey(start("families")) if there("transformers") else []
    if as_json:
        rows = [
            {"family": each.family, "config": each.config, "types": each.types, **each.parity.described()}
            for each in found
        ]
        machine({"presets": list(PRESETS), "families": rows})
        return
    say(f"By name, random weights: {', '.join(PRESETS)}.")
    say("By name, trained: minilm (the demo extra).")
    if not found:
        say(f"Families that can be loaded are listed where transformers is: {install(['transformers'])}")
        return
    say("Loaded: a directory or an id on the hub, of one of these families.\n")
    console().print(_table(found))
    if quiet:
        return
    say(
        "",
        "Parity: the largest difference between the canonical network and the original, in float64, on a "
        "padded probe; of states relative to their largest entry. Float32: how far the original is from "
        "itself when the parts that it computes in float32 are lifted to float64.",
    )


def _table(found: "list[FamilyParity]") -> "Table":
    from rich.table import Table

    table = Table(title="families", title_justify="left", box=None)
    for heading in ("family", "model types", "config"):
        table.add_column(heading, overflow="fold")
    for heading in ("states", "attention", "float32"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for each in found:
        first = each.family != before
        before = each.family
        parity = each.parity
        table.add_row(
            each.family if first else "",
            ", ".join(each.types) if first else "",
            each.config,
            f"{parity.states:.0e}",
            f"{parity.attention or 0.0:.0e}",
            "" if parity.float32_parts is None else f"{parity.float32_parts:.0e}",
        )
    return table
