"""`rankscope models`: what can be named, and the families that can be loaded, with parity as measured now."""

from typing import TYPE_CHECKING

from rankscope.cli import options as opt
from rankscope.cli.show import console, machine, progress, say, titled

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.sources.load import FamilyParity


def models(printing: opt.PrintOptions = opt.PrintOptions()) -> None:
    """List the models: those at hand by name, and the families that can be loaded, with their parity.

    A small random model of every family is built, loaded and compared with the original, here and now.
    """
    from rankscope.extras import install, installed
    from rankscope.sources import PRESETS
    from rankscope.sources.load import survey

    with progress(printing.silent) as start:
        families = survey(start("families")) if installed("transformers") else []
    if printing.as_json:
        rows = [
            {"family": family.family, "config": family.config, "types": family.types, **family.parity.described()}
            for family in families
        ]
        return machine({"presets": list(PRESETS), "families": rows})
    say(f"By name, random weights: {', '.join(PRESETS)}.", "By name, trained: minilm (the demo extra).")
    if not families:
        return say(f"Families that can be loaded are listed where transformers is: {install(['transformers'])}")
    say("Loaded: a directory or an id on the hub, of one of these families.\n")
    console().print(_table(families))
    if not printing.quiet:
        say(
            "",
            "Parity: the largest difference between the canonical network and the original, in float64, on a "
            "padded probe; of states relative to their largest entry. Float32: how far the original is from "
            "itself when the parts that it computes in float32 are lifted to float64.",
        )


def _table(families: "list[FamilyParity]") -> "Table":
    numbers = ("states", "attention", "float32")
    table = titled("families", words=("family", "model types", "config"), numbers=numbers)
    before = None
    for name, config, types, parity in families:
        named = (name, ", ".join(types)) if name != before else ("", "")
        float32 = "" if parity.float32_parts is None else f"{parity.float32_parts:.0e}"
        table.add_row(*named, config, f"{parity.states:.0e}", f"{parity.attention or 0.0:.0e}", float32)
        before = name
    return table
