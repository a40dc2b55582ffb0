"""`rankscope masks`, `metrics`, `models` and `plugins`: what can be named, with what is known of each."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import options as opt
from rankscope.cli.app import SOURCES
from rankscope.cli.show import console, machine, progress, say, titled
from rankscope.errors import PluginWarning, RankscopeError, one_of
from rankscope.plugins import SHIPPED, PluginState, entry_points, every_group
from rankscope.shipped import shipped_names

if TYPE_CHECKING:
    from torch import Tensor

    from rankscope.metrics import Metric
    from rankscope.sources import FamilyParity

SHOWN = 4  # Names of what a package adds that a row of the table has
OF: dict[str, str] = opt.DATA["metrics"]["of"]  # What a metric is of, as a heading


def masks(
    specs: Annotated[
        list[str] | None, opt.argument("MASK", "graphs", opt.MASKS, show_default="one of each kind")
    ] = None,
    tokens: Annotated[int, opt.option(opt.TEXT, "N", "The number of tokens of the graphs.", min=1, max=4096)] = 16,
    picture: Annotated[
        bool, opt.option(opt.RESULT, " ", "Draw each mask: rows attend to columns.", (), "--picture")
    ] = False,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Show masks as graphs: edges, centres, connectivity, radius and diameter.

    A token reaches another in as many layers as the graph has steps between them. The [bold]radius[/bold] is
    how soon the best-placed token (a [bold]centre[/bold]) has reached all.
    """
    from rankscope.nets import graph, mask_matrix

    graphs = {spec: graph(spec, tokens) for spec in specs or opt.MASKS[:-1]}
    if printing.as_json:
        return machine([{"mask": spec, **mask.as_dict()} for spec, mask in graphs.items()])
    out = console()
    numbers = ("edges", "centres", "connected", "radius", "diameter")
    table = titled(f"Masks on {tokens} tokens", words=["mask"], numbers=numbers)
    for spec, mask in graphs.items():
        connected = "strongly" if mask.strongly_connected else "quasi" if mask.centres else "no"
        sizes = ["–" if size is None else str(size) for size in (mask.radius, mask.diameter)]
        table.add_row(spec, str(mask.edges), str(len(mask.centres)), connected, *sizes)
    out.print(table)
    if picture:
        for spec in graphs:
            out.print(f"\n{spec}", style="bold")
            out.print(drawing(mask_matrix(spec, tokens)), soft_wrap=True)


def drawing(M: "Tensor") -> str:
    """A mask in half blocks, two rows to a line."""
    rows = M.tolist()
    if len(rows) % 2:
        rows.append([False] * len(rows))
    return "\n".join(
        "".join(" ▄▀█"[2 * top + bottom] for top, bottom in zip(*pair, strict=True))
        for pair in zip(rows[0::2], rows[1::2], strict=True)
    )


def metrics(
    name: Annotated[str | None, opt.argument("NAME", "metric", opt.METRICS)] = None,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """List the metrics: what each is, between which values it lies, and what small and large ones mean."""
    from rankscope.metrics import METRICS, metric

    chosen = list(METRICS.values()) if name is None else [metric(name)]
    if printing.as_json:
        return machine([described(known) for known in chosen])
    if name is not None:
        return say(*explanation(chosen[0]))
    for of in dict.fromkeys(known.of for known in chosen):
        say(f"Metrics of {OF[of]}", "")
        say(*(line for known in chosen if known.of == of for line in list_entry(known)), "")
    if not printing.quiet:
        say(*(line for part in opt.DATA["metrics"]["legend"] for line in (part, "")))
        say("rankscope metrics NAME explains one. rankscope measure --metrics NAME,NAME measures them.")


def described(metric: "Metric") -> dict[str, Any]:
    """A metric as JSON has it."""
    words = {} if metric.meaning is None else metric.meaning._asdict()
    plain = {name: getattr(metric, name) for name in ("name", "symbol", "tex", "of")}
    return {**plain, "definition": definition(metric), **words}


def explanation(metric: "Metric") -> list[str]:
    """All that is known of a metric, in lines."""
    lines = [f"{metric.name}: {metric.symbol}", "", f"A metric of {OF[metric.of]}.", definition(metric)]
    lines += ["Here X is what one head adds to the tokens."] if metric.of == "heads" else []
    if metric.meaning is not None:
        words = metric.meaning
        lines += [f"Range: {words.range}.", f"Small values: {words.small}.", f"Large values: {words.large}."]
        lines += [f"When all tokens are equal: {words.equal}."] if words.equal else []
        lines += [words.note] if words.note else []
    power = "c" if metric.degree == 1 else f"c^{metric.degree:g}"
    scaled = "does not change it" if metric.degree == 0 else f"multiplies it by {power}"
    lines += [f"Scaling all tokens by c {scaled}."] if metric.of in ("tokens", "heads") else []
    command = f"rankscope measure --metrics {metric.name}"
    return [*lines, "", command if metric.of != "scores" else f'watch(model, ["{metric.name}"])']


def definition(metric: "Metric") -> str:
    """The definition of a metric: the first paragraph of the docstring of its function."""
    compute: Any = metric.compute
    words = (getattr(compute, "func", compute).__doc__ or "").partition("\n\n")[0].partition("\n    >>>")[0]
    return " ".join(words.split()).replace("`", "")


def list_entry(metric: "Metric") -> list[str]:
    """A metric in two lines: name, symbol and range, and what small and large values mean."""
    words = metric.meaning
    if words is None:  # a plugin's own affair
        return [f"{metric.name:<27} {metric.symbol}"]
    ends = f"    small: {words.small}; large: {words.large}"
    return [f"{metric.name:<27} {metric.symbol:<24} {words.range}", *wrap(ends, 78, subsequent_indent="    ")]


def models(printing: opt.PrintOptions = opt.PrintOptions()) -> None:
    """List the models: those at hand by name, and the families that can be loaded, with their parity.

    A small random model of every family is built, loaded and compared with the original, here and now. Where one
    fails, the others are listed all the same, and the exit code is 2.
    """
    from rankscope.extras import install, installed
    from rankscope.sources import PRESETS, survey

    if not printing.as_json:
        trained = ", ".join(["minilm (the demo extra)", *shipped_names()])
        say(f"By name, random weights: {', '.join(PRESETS)}.", f"By name, trained: {trained}.")
        sys.stdout.flush()
    families: list[FamilyParity] = []
    with progress(printing.silent) as start:
        for family in survey(start("families")) if installed("transformers") else ():
            if not printing.as_json:
                with start.paused():
                    show_family(family, families[-1] if families else None)
            families.append(family)
    if printing.as_json:
        rows = [
            {"family": family.family, "config": family.config, "types": family.types,
             **({"failure": family.failure} if family.parity is None else family.parity.described())}
            for family in families
        ]  # fmt: skip
        machine({"presets": list(PRESETS), "families": rows})
        return require_parity(families)
    if not families:
        return say(f"Families that can be loaded are listed where transformers is: {install(['transformers'])}")
    if not printing.quiet:
        say(
            "",
            "Parity: the largest difference between the canonical network and the original, in float64, on a "
            "padded probe; of states relative to their largest entry. Float32: how far the original is from "
            "itself when the parts that it computes in float32 are lifted to float64.",
        )
    failures = [f"{family.family} {family.config}".strip() + f": {family.failure}" for family in failed(families)]
    say(*(line for failure in failures for line in ("", failure)))
    require_parity(families)


def failed(families: "list[FamilyParity]") -> "list[FamilyParity]":
    """The configs of families whose small model could not be loaded as what it is."""
    return [family for family in families if family.parity is None]


def require_parity(families: "list[FamilyParity]") -> None:
    """Raise a `SourceError` that names the families of which a small model failed, if any did."""
    names_of_failed = list(dict.fromkeys(family.family for family in failed(families)))
    if not names_of_failed:
        return
    from importlib.metadata import version

    from rankscope.errors import SourceError

    message = f"every family must agree with its original; {len(failed(families))} of {len(families)} small models "
    message += f"failed with transformers {version('transformers')}, of {', '.join(names_of_failed)}"
    raise SourceError(f"{message}: load refuses models like them, watch measures them as they are", subject="family")


def show_family(family: "FamilyParity", before: "FamilyParity | None") -> None:
    """Print the line of one config of a family, with its parity, as soon as it is measured: all of them take a while.
    The headings come before the first line; a family is named on its first line only."""
    from rich.table import Table

    if before is None:
        say("Loaded: a directory or an id on the hub, of one of these families.\n", "families")
    table = Table(box=None, show_header=before is None)
    for heading in ("family", "model types", "config"):
        table.add_column(heading, overflow="fold", width=15)
    for heading in ("states", "attention", "float32"):
        table.add_column(heading, justify="right", no_wrap=True, width=len(heading))
    new = before is None or family.family != before.family
    numbers = ["failed"]
    if (parity := family.parity) is not None:
        float32 = "" if parity.float32_parts is None else f"{parity.float32_parts:.0e}"
        numbers = [f"{parity.states:.0e}", f"{parity.attention or 0.0:.0e}", float32]
    table.add_row(family.family if new else "", ", ".join(family.types) if new else "", family.config, *numbers)
    console().print(table)
    sys.stdout.flush()


def plugins(printing: opt.PrintOptions = opt.PrintOptions()) -> None:
    """List the plugins: what each installed package adds to rankscope, and what is wrong with one that is left out.

    Everything that is listed is imported, here and now. What rankscope itself ships is found in the same way, and has
    the first row of each group.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # listed here
        states = [_tried(state) for group in every_group() for state in group.states]
    for entry in (entry for entry in entry_points() if entry.group not in SHIPPED):
        states.append(PluginState(entry, (), entry.left_out(one_of("a group of rankscope", entry.group, SHIPPED))))
    if printing.as_json:
        given = ("group", "name", "value", "package", "version")
        return machine([
            {**{name: getattr(state.entry, name) for name in given}, "adds": list(state.objects),
             "trouble": state.trouble or None}
            for state in states
        ])  # fmt: skip
    table = titled("What is found, by group", words=["group", "package", "adds"])
    for state in states:
        names = ", ".join(state.objects[:SHOWN]) + (", ..." if len(state.objects) > SHOWN else "")
        counted = f"{len(state.objects)}: {names}" if state.objects else "nothing"
        table.add_row(state.entry.group, f"{state.entry.package} {state.entry.version}", counted)
    console().print(table)
    say(*(line for state in states if state.trouble for line in ("", state.trouble)))
    if not printing.quiet:
        say("", "A package adds something with an entry point: the page on parts of your own has one of each.")


def _tried(state: PluginState) -> PluginState:
    """The state of an entry point; commands and kinds of results, which are not imported to be listed, are here."""
    from rankscope.results import KINDS, class_of

    imported: dict[str, Callable[[str], Any]] = {SOURCES.name: lambda name: SOURCES[name].load(), KINDS.name: class_of}
    if state.entry.group not in imported or state.entry.shipped:
        return state
    for name in state.objects:
        try:
            imported[state.entry.group](name)
        except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
            why = str(error) if isinstance(error, RankscopeError) else f"{type(error).__name__}: {error}"
            return replace(state, trouble=state.entry.left_out(why))
    return state
