"""`rankscope depth`: which layers, heads and paths does this model need? `rankscope cut`: a smaller model, without the
layers that are needed least."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import inputs
from rankscope.cli import options as opt
from rankscope.cli.measure import ANNOUNCED_SECONDS
from rankscope.cli.output import open_store, require_same_network, with_manifest, write_figures
from rankscope.cli.show import complain, machine, progress, say, say_report, say_where, show_tables
from rankscope.errors import FileError, SourceError, require

if TYPE_CHECKING:
    from rankscope.nets import Transformer

CRITERIA = tuple(opt.DATA["names"]["criteria"])
SEARCHES = ("one_shot", "greedy", "exact")


def depth(
    model: opt.Model = "minilm",
    options: opt.NetworkOptions = opt.NetworkOptions(),
    device: opt.Device = "cpu",
    stream: opt.Stream = False,
    text: opt.TextOptions = opt.TextOptions(max_length=64),
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
    from rankscope.depths import norms_sentence
    from rankscope.files import write_text

    excerpts = inputs.read_inputs(text, model, quiet=results.silent)
    store = open_store(results.output)
    net = inputs.network(model, options, device, stream, results.silent)
    fields = inputs.manifest_fields(net, model)
    require_same_network(store, "depth", {"as given": net}, fields)
    encoded = net.encode(excerpts, text.max_length)
    if not results.silent:
        _announce(net, len(encoded.X), encoded.X.shape[1], heads)
    with progress(results.silent) as start:
        card = card_of(net, encoded, heads=heads, progress=start("layers and heads"))
    card = with_manifest(card, **fields, **inputs.text_fields(text, excerpts))
    if svg is not None:
        write_text(svg, card.svg())
    if store is not None:
        from rankscope.depths import printed

        card.write(store, "depth")
        write_figures(store, {"depth": printed(card.chart, card.sentence)})
    if results.as_json:
        tables = {name: getattr(card, name).to_dicts() for name in ("layers", "heads", "norms")}
        told = {"sentence": card.sentence, "notes": list(card.notes)}
        depths = [effective._asdict() for effective in card.effective_depths]
        return machine({"manifest": card.manifest.to_dict(), **told, "effective_depths": depths, **tables})
    (section,) = card.sections()
    show_tables(*section.tables)
    say("", *inputs.random_weights_lines(card.manifest), card.sentence, norms_sentence(card.norms), *card.notes)
    if svg is not None and not results.quiet:
        say_where("Picture", svg)
    say_report(results.report, results, "Tables and figures")


def _announce(net: "Transformer", samples: int, tokens: int, heads: bool) -> None:
    """Say how long the card will take, where that is long."""
    from rankscope.depths import layers_applied
    from rankscope.profiles import in_words, seconds

    once = seconds(net.arch, samples, tokens, "float", net.dtype, net.device)
    expected = once * layers_applied(net.arch.layers, net.arch.heads if heads else 0) / net.arch.layers
    if expected > ANNOUNCED_SECONDS:
        complain(f"this will take {in_words(expected)} by estimate{'; --no-heads takes less' * heads}")


@dataclass(frozen=True)
class CutOptions:
    """Options that choose the layers to take out, and the device that layers are scored on."""

    keep: Annotated[float, opt.option(opt.NETWORK, "SHARE", "The share of layers that stays.")] = 0.75
    by: Annotated[str, opt.option(opt.NETWORK, "NAME", "by", CRITERIA)] = "influence"
    search: Annotated[str, opt.option(opt.NETWORK, "NAME", "search", SEARCHES)] = "one_shot"
    seed: Annotated[int, opt.option(opt.NETWORK, "N", "The seed of random choices and directions.", min=0)] = 0
    device: opt.Device = "cpu"


def cut(
    model: opt.Model,
    choice: CutOptions = CutOptions(),
    text: opt.TextOptions = opt.TextOptions(),
    output: Annotated[
        Path | None, opt.option(opt.RESULT, "FOLDER", "Write the model to this new folder.", (), "-o", "--output")
    ] = None,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Take out of a model the layers that are needed least, and write what is left as a model that transformers loads.

    What is needed is measured on a text. Without [bold]-o[/bold] nothing is written: it says what would be taken out,
    and what the output would lose by it. With [bold]-o[/bold] MODEL must be trained: what is written has its task head
    and tokenizer, is loaded again and compared with the network that was measured.
    """
    from rankscope.depths import cut as cut_network
    from rankscope.depths import next_token_loss
    from rankscope.sources import MODULES, is_drawn, original

    excerpts = inputs.read_inputs(text, model, quiet=printing.silent)
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileError(f"{output} must be a new or empty folder; it holds something already", subject=str(output))
    sentence = f"cut writes models that were trained; {model} has random weights: leave out -o, or name another"
    require(output is None or not is_drawn(model), sentence, SourceError, "model")
    by, search, seed = choice.by, choice.search, choice.seed
    net = inputs.network(model, opt.NetworkOptions(), choice.device, quiet=printing.silent)
    full_model: Any = None if is_drawn(model) else original(model)
    encoded, loss = net.encode(excerpts, text.max_length), None
    origin: dict[str, Any] = {} if net.origin is None else net.origin.described()
    if isinstance(excerpts, list) and by == "gradient" and full_model is not None and net.arch.mask == "causal":
        loss = next_token_loss(full_model, _ids(net.origin, excerpts, text.max_length), encoded.padding.cpu())
    with progress(printing.silent) as start:
        tell = start(f"layers by {by}")
        cut_made = cut_network(net, encoded, choice.keep, by, search, loss=loss, seed=seed, progress=tell)
    sizes = None
    if output is not None:
        small = cut_made.save_model(output, full_model)
        sizes = full_model.num_parameters(), small.num_parameters()
    if printing.as_json:
        return machine(
            {
                "model": model, "origin": origin, "by": by, "search": search, "keep": choice.keep, "seed": seed,
                "layers": list(cut_made.layers), "left": cut_made.net.arch.layers, **cut_made.fidelity._asdict(),
                "weights": sizes,
                "loss": None if by != "gradient" else "random direction" if loss is None else "next token",
                "scores": cut_made.scores.to_dicts(), "output": None if output is None else str(output),
            }
        )  # fmt: skip
    if not printing.silent and cut_made.layers:
        show_tables(*cut_made.sections()[0].tables)
    size = "" if sizes is None else f"; {sizes[0]:,} weights became {sizes[1]:,} ({100 * sizes[1] / sizes[0]:.0f} %)"
    say(f"{Path(model).name} {cut_made.sentence}{size}.", *inputs.random_weights_of(model, origin))
    folders = [] if full_model is None else [Path(full_model.name_or_path), *([output] if output else [])]
    if cut_made.layers and any((folder / MODULES).is_file() for folder in folders):
        say(
            f"By outputs of all tokens: what is pooled from them, as {MODULES} says, may keep more or less. Compare it."
        )
    if output is not None:
        say_where("Model", output)


def _ids(origin: Any, excerpts: list[str], tokens: int) -> Any:
    """Token ids of the excerpts, padded at the end as their tokens are."""
    import torch

    rows = [torch.tensor(ids) for ids in origin.ids(excerpts, tokens)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
