"""`rankscope depth`: which layers, heads and paths does this model need?"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import options as opt
from rankscope.cli.inputs import manifest_fields, network, random_weights_lines, read_inputs, text_fields
from rankscope.cli.measure import ANNOUNCED_SECONDS
from rankscope.cli.output import open_store, require_same_network, with_manifest, write_folder
from rankscope.cli.show import complain, console, machine, progress, say, say_report, say_where, titled

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.depths import DepthCard
    from rankscope.nets import Transformer

MOST_LAYERS = 48  # Rows of the table of layers at most
SHOWN_HEADS = 5  # Heads that are shown at either end


@dataclass(frozen=True)
class DepthNetwork(opt.NetworkOptions):
    """Options of the network of the card."""

    model: opt.Model = "minilm"
    device: opt.Device = "cpu"
    stream: opt.Stream = False


def depth(
    options: DepthNetwork = DepthNetwork(),
    text: opt.TextOptions = opt.TextOptions(tokens=64),
    heads: Annotated[bool, opt.option(opt.RESULT, " ", "heads_out", (), "--heads/--no-heads")] = True,
    svg: Annotated[
        Path | None, opt.option(opt.RESULT, "FILE", "Write the card as a picture for a README.", (), "--svg")
    ] = None,
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Say which layers and heads a model needs: what passes through each, exactly, and what is lost without it.

    Shares are of all paths, with attention, norms and activations as measured on the text. Losses are measured: the
    network runs without each layer and each head. With [bold]--stream[/bold] layers of a model larger than memory are
    read one at a time.
    """
    from rankscope.depths import depth as card_of
    from rankscope.files import write_text

    excerpts = read_inputs(text, options.model, quiet=results.silent)
    store = open_store(results.output)
    net = network(options.model, options, options.device, options.stream, results.silent)
    fields = manifest_fields(net, options.model)
    require_same_network(store, "depth", {"as given": net}, fields)
    inputs = net.encode(excerpts, text.tokens)
    if not results.silent:
        _announce(net, len(inputs.X), inputs.X.shape[1], heads)
    with progress(results.silent) as start:
        card = card_of(net, inputs, heads=heads, progress=start("layers and heads"))
    card = with_manifest(card, **fields, **text_fields(text, excerpts))
    if svg is not None:
        write_text(svg, card.svg())
    if store is not None:
        from rankscope.depths.figures import printed

        write_folder(store, "depth", card, {"depth": printed(card.chart, card.sentence)})
    if results.as_json:
        tables = {name: getattr(card, name).to_dicts() for name in ("layers", "heads", "norms")}
        told = {"sentence": card.sentence, "notes": list(card.notes)}
        depths = [effective._asdict() for effective in card.effective_depths]
        return machine({"manifest": card.manifest.to_dict(), **told, "effective_depths": depths, **tables})
    show_card(card)
    if svg is not None and not results.quiet:
        say_where("Picture", svg)
    if results.output is not None:
        say_report(results.output / "report.html", results, "Tables and figures")


def _announce(net: "Transformer", samples: int, tokens: int, heads: bool) -> None:
    """Say how long the card will take, where that is long."""
    from rankscope.depths.card import layers_applied
    from rankscope.profiles import in_words
    from rankscope.profiles.pass_cost import seconds

    once = seconds(net.arch, samples, tokens, "float", net.dtype, net.device)
    expected = once * layers_applied(net.arch.layers, net.arch.heads if heads else 0) / net.arch.layers
    if expected > ANNOUNCED_SECONDS:
        complain(f"this will take {in_words(expected)} by estimate{'; --no-heads takes less' * heads}")


def show_card(card: "DepthCard") -> None:
    """Print the tables, the sentence, effective depths and what norms do."""
    from rankscope.depths.summary import ALL_LAYER_COLUMNS, HEAD_COLUMNS, norms_sentence

    below = "lost: how much the output changes without the layer.\n"
    below += "share: what of the output passes through the layer.\n"
    below += "of res, at res: the same of what tells tokens apart."
    rows = card.layers.to_dicts()
    shown = rows if len(rows) <= MOST_LAYERS else rows[: MOST_LAYERS // 2] + rows[-(MOST_LAYERS // 2) :]
    below += f"\nThe first and the last {MOST_LAYERS // 2} of {len(rows)} layers." * (len(shown) < len(rows))
    console().print(_table("layers, mean over samples", below, shown, ALL_LAYER_COLUMNS))
    say("", *random_weights_lines(card.manifest), card.sentence, norms_sentence(card.norms), "")
    console().print(effective_table(card))
    known = card.heads.filter(card.heads["lost"].is_not_null()).sort("lost", descending=True).to_dicts()
    if known:
        most = len(known) > 2 * SHOWN_HEADS
        below = f"The {SHOWN_HEADS} without which the output changes most, and the {SHOWN_HEADS} least.\n" * most
        below += "Layers count from 1 (layer 0 is the input), heads from 0."
        shown = known[:SHOWN_HEADS] + known[-SHOWN_HEADS:] if most else known
        say("")
        console().print(_table("heads, mean over samples", below, shown, HEAD_COLUMNS))
    if card.notes:
        say("", *card.notes)


def _table(title: str, caption: str, rows: list[dict[str, Any]], columns: Mapping[str, Any]) -> "Table":
    """Rows of a card as a table that fits into the terminal."""
    from rankscope.depths.summary import columns_in

    cells = columns_in(console().width, rows, columns)
    table = titled(title, caption, numbers=[*cells])
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table


def effective_table(card: "DepthCard") -> "Table":
    """A line for each definition of effective depth."""
    table = titled("effective depth")
    table.add_column("", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for effective in card.effective_depths:
        in_layers = "–" if effective.value is None else f"{effective.value:.3g} of {effective.layers}"
        table.add_row(effective.name.replace("_", " "), in_layers, effective.definition)
    return table
