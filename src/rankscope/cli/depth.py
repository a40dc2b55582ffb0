"""`rankscope depth`: which layers, heads and paths does this model need?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rankscope.cli import options as opt
from rankscope.cli.inputs import manifest_fields, network, random_weights_lines, read_inputs, text_fields
from rankscope.cli.measure import ANNOUNCED_SECONDS
from rankscope.cli.output import open_store, require_same_network, with_manifest, write_folder
from rankscope.cli.show import complain, machine, progress, say, say_report, say_where, show_tables

if TYPE_CHECKING:
    from rankscope.nets import Transformer


def depth(
    model: opt.Model = "minilm",
    options: opt.NetworkOptions = opt.NetworkOptions(),
    device: opt.Device = "cpu",
    stream: opt.Stream = False,
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
    from rankscope.depths.tables import norms_sentence
    from rankscope.files import write_text

    excerpts = read_inputs(text, model, quiet=results.silent)
    store = open_store(results.output)
    net = network(model, options, device, stream, results.silent)
    fields = manifest_fields(net, model)
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
    (section,) = card.sections()
    show_tables(*section.tables)
    say("", *random_weights_lines(card.manifest), card.sentence, norms_sentence(card.norms), *card.notes)
    if svg is not None and not results.quiet:
        say_where("Picture", svg)
    say_report(results.report, results, "Tables and figures")


def _announce(net: "Transformer", samples: int, tokens: int, heads: bool) -> None:
    """Say how long the card will take, where that is long."""
    from rankscope.depths.card import layers_applied
    from rankscope.profiles import in_words, seconds

    once = seconds(net.arch, samples, tokens, "float", net.dtype, net.device)
    expected = once * layers_applied(net.arch.layers, net.arch.heads if heads else 0) / net.arch.layers
    if expected > ANNOUNCED_SECONDS:
        complain(f"this will take {in_words(expected)} by estimate{'; --no-heads takes less' * heads}")
