"""The network and the text that a command line asks for, the same way in every command."""

import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.cli.options import NetworkOptions, TextOptions, say_hub, write_aside
from rankscope.errors import (
    ArchitectureError,
    FileError,
    MetricError,
    RankscopeError,
    SourceError,
    TokensError,
    require,
    require_one_of,
)
from rankscope.extras import counted
from rankscope.shipped import held_out_images, shipped_model

if TYPE_CHECKING:
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.profiles import Profile, Summary
    from rankscope.runs import Manifest
    from rankscope.sources import Excerpts

CHARACTERS_PER_TOKEN = 64
"""Characters of an excerpt that are read for each token: no vocabulary has words that long on average."""
TRAINED = {"gpt2": "openai-community/gpt2", "t5-base": "google-t5/t5-base"}
"""Names of sizes with random weights that are also names of trained models on the hub, with their other names there."""
COUNTED = 1000  # Excerpts that are counted beyond those that are read
BEGINNING = 90  # Characters of an excerpt by which the manifest names it


def network(
    model: str, options: NetworkOptions, device: str = "cpu", stream: bool = False, quiet: bool = False
) -> "Transformer":
    """The network of this name, with its mask, depth and remedies as the options say.

    Its layers stay in their files if `stream` is set or they do not fit into memory. Unless `quiet`, a line
    says when the hub is asked.
    """
    from rankscope.remedies import remedy
    from rankscope.sources import named_network

    remedies = [remedy(spec) for spec in options.remedy or ()]
    is_random(model, options)
    seed = options.seed or 0
    require(0 <= seed < 2**31, f"--seed must lie in 0..{2**31 - 1}; got {seed}", ArchitectureError, "seed")
    say_hub(model, quiet)
    require_tokenizer(model, "put the files of its tokenizer, as tokenizer.json, into that folder")
    net = named_network(model, seed, options.init or "bert", device, stream or None)
    if options.mask is not None or options.layers is not None:
        net = net.variant(mask=options.mask, layers=options.layers)
    for chosen in remedies:
        net = net.with_remedy(chosen)
    return net


def has_tokenizer(folder: Path) -> bool:
    """True if a model's folder holds files of a tokenizer."""
    return any(next(folder.glob(pattern), None) for pattern in ("tokenizer*", "vocab*", "*.model"))


def require_tokenizer(model: str, advice: str) -> None:
    """Refuse a model's folder without a tokenizer before its weights are read: no text can be read with it."""
    from rankscope.runs import document
    from rankscope.sources import CheckpointLocation, tokenizer

    folder = Path(model)
    sees = (folder / "preprocessor_config.json").is_file()  # a model of images or sound, refused in its own words
    if not (folder / "config.json").is_file() or has_tokenizer(folder) or sees:
        return
    try:
        document(folder / "config.json")
    except FileError:
        return  # which `load` refuses with its reason
    try:
        tokenizer(CheckpointLocation(model, model, {}))  # some have no files of their own
    except SourceError as error:
        sentence = f"{model} must have a tokenizer to read text with; it has none"
        raise SourceError(f"{sentence}: {advice}", subject="tokenizer") from error


def is_random(model: str, options: NetworkOptions | None = None) -> bool:
    """True if a model's weights are random; options that draw weights are refused for a trained one."""
    from rankscope.sources import is_drawn

    random = is_drawn(model)
    init, seed = (None, None) if options is None else (options.init, options.seed)
    given = [name for name, value in (("--init", init), ("--seed", seed)) if value is not None]
    if given and not random:
        sentence = f"{' and '.join(given)} must go with random weights, which {model} does not have: leave out"
        raise SourceError(sentence, subject=given[0].removeprefix("--"))
    return random


def bundled_text(samples: int, tokens: int) -> list[str]:
    """The first excerpts of the bundled prose, each long enough for this many tokens."""
    from rankscope.sources import bundled_excerpts

    excerpts = bundled_excerpts(tokens)
    has = f"the bundled prose has {len(excerpts)} excerpts of {tokens} tokens; got samples={samples}"
    require(len(excerpts) >= samples, f"{has}: ask for fewer samples or tokens", TokensError, "samples")
    return excerpts[:samples]


def read_excerpts(options: TextOptions, quiet: bool) -> list[str]:
    """The first excerpts of the text that the options name, or of the bundled prose. Where the text has more, a line on
    stderr says so, unless `quiet`."""
    samples = options.samples or 4
    if options.text is not None:
        stream = stream_excerpts(options)
        first = list(islice(stream, samples))
        if not quiet:
            _say_rest(stream, len(first))
        return first
    sentence = "--split and --field must go with --text, which says what is to be read"
    require(options.split == "auto" and options.field == "text", sentence, FileError, "text")
    return bundled_text(samples, options.max_length)


def _say_rest(stream: "Excerpts", read: int) -> None:
    """Say how many excerpts of a text were read of how many, if there are more."""
    if stream.bytes_total is None:  # stdin may never end
        write_aside(f"rankscope: read the first {counted(read, 'excerpt')}; --samples N reads N")
        return
    rest = 0
    with suppress(RankscopeError):  # excerpts that are only counted may be damaged
        rest = sum(1 for _ in islice(stream, COUNTED))
    if rest:
        all_of_them = f"{read + rest}" if rest < COUNTED else f"more than {read + rest}"
        write_aside(f"rankscope: read the first {read} of {all_of_them} excerpts of {stream.path}; --samples N reads N")


def read_inputs(options: TextOptions, *models: str, quiet: bool) -> "list[str] | Tensor":
    """What models of these names read: the first excerpts of the text, or the first of the images that come with a
    shipped model of images."""
    held_out = {model: held_out_images(name) for model in models if (name := shipped_model(model))}
    seeing = {model: images for model, images in held_out.items() if images is not None}
    if not seeing:
        return read_excerpts(options, quiet)
    sees = f"{' and '.join(seeing)} must read images, which come with it"
    if options.text is not None:
        raise SourceError(f"{sees}; got --text {options.text}: leave it out", subject="text")
    if of_text := [model for model in models if model not in seeing]:
        raise SourceError(f"{sees}, and {' and '.join(of_text)} text: compare what reads the same", subject="models")
    pixels, samples = next(iter(seeing.values())).pixel_values, options.samples or 4
    if len(pixels) < samples:
        has = f"{', '.join(seeing)} comes with {len(pixels)} images; got samples={samples}"
        raise TokensError(f"{has}: ask for fewer", subject="samples")
    return pixels[:samples]


def stream_excerpts(options: TextOptions) -> "Excerpts":
    """All excerpts of a text, read one after another, each long enough for the tokens that are asked for."""
    from rankscope.sources import LONGEST, excerpts

    longest = max(LONGEST, CHARACTERS_PER_TOKEN * options.max_length)
    return excerpts(str(options.text), options.split, options.field, longest=longest)


def text_fields(options: TextOptions, excerpts: "list[str] | Tensor") -> dict[str, Any]:
    """Fields of the manifest that say what was read."""
    from rankscope.runs import Text

    if not isinstance(excerpts, list):
        return {"text": Text(path="held-out images, bundled", split="image"), "samples": len(excerpts)}
    how: dict[str, Any] = {} if options.text is None else {"split": options.split, "field": options.field}
    first: dict[str, Any] = {"first": beginning(excerpts[0])} if excerpts else {}
    text = Text(path=options.text or "Moby Dick, bundled", **how, **first)
    return {"text": text, "samples": len(excerpts), "tokens": options.max_length}


def manifest_fields(net: "Transformer", model: str) -> dict[str, Any]:
    """Fields of the manifest that say which model was asked for, and where its weights came from."""
    origin = {} if net.origin is None else net.origin.described()
    drawn: dict[str, Any] = {key: origin[key] for key in ("seed", "init") if key in origin}
    return {"model": model, **drawn, "origin": origin, "command": command_line()}


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["rankscope", *sys.argv[1:]])


def beginning(text: str) -> str:
    """The beginning of an excerpt on one line.

    >>> beginning("Call me  Ishmael.\\nSome years ago")
    'Call me Ishmael. Some years ago'
    """
    line = " ".join(text[: 8 * BEGINNING].split())
    return line if len(line) <= BEGINNING else f"{line[:BEGINNING].rpartition(' ')[0] or line[:BEGINNING]} …"


def split_names(option: str, text: str) -> list[str]:
    """The names of a comma-separated option, each once."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    require(parts, f"--{option} must name at least one; got {text!r}", RankscopeError, option)
    return parts


@dataclass(frozen=True)
class MeasureTask:
    """What is measured of every network, and how it is checked."""

    metrics: list[str]
    arithmetics: list[str] = field(default_factory=lambda: ["deviation"])
    checks: dict[str, Any] = field(default_factory=dict)
    """The arguments `check` and `confirm` of `rankscope.measure`, where they are given."""

    @classmethod
    def parse(cls, metrics: str, arithmetic: str = "deviation", checks: dict[str, bool] | None = None) -> "MeasureTask":
        """Read comma-separated names, and refuse unknown ones before a model is loaded for them."""
        from rankscope.metrics import metric
        from rankscope.profiles import ARITHMETICS

        metric_names = split_names("metrics", metrics)
        for name in metric_names:
            metric(name)
        arithmetics = split_names("arithmetic", arithmetic)
        for name in arithmetics:
            require_one_of("arithmetic", name, (*ARITHMETICS, "all"), MetricError)
        return cls(metric_names, list(ARITHMETICS) if "all" in arithmetics else arithmetics, checks or {})


def title_of(net: "Transformer") -> str:
    """The heading of the report on a network."""
    from rankscope.nets import titled

    return titled({} if net.origin is None else net.origin.described())


def random_weights_lines(manifest: "Manifest") -> list[str]:
    """A line for each network whose weights are random: its numbers say nothing of a trained one."""
    origins = manifest.more.get("origins") or {(manifest.origin or {}).get("name"): manifest.origin or {}}
    return [line for name, origin in origins.items() for line in random_weights_of(str(name), origin)]


def random_weights_of(name: str, origin: Mapping[str, Any]) -> list[str]:
    """A line that says that the weights of one network are random, with the trained model of its name on the hub, if
    there is one; no line if the weights are not random."""
    from rankscope.nets import weights_of

    trained = f"; the trained model is {TRAINED[name]}" if name in TRAINED else ""
    return [f"{Path(name).name}: {weights_of(origin)}{trained}."] if origin.get("weights") == "random" else []


def fallback_lines(profile: "Profile | Summary") -> list[str]:
    """A line for each network that ran in another arithmetic than was asked for."""
    return [
        f"{network.variant} ran in {network.arithmetic}: {network.checks['arithmetic_asked']} "
        f"arithmetic has no rule for {_without_rule(network.architecture or {})}."
        for network in profile.manifest.networks
        if network.checks["arithmetic_asked"] != network.arithmetic
    ]


def _without_rule(arch: dict[str, Any]) -> str:
    """What made it run in float64, as its manifest has it: its kernel, or its parts where that has a rule."""
    from rankscope.nets import KERNELS

    disentangled = arch.get("positions") == "disentangled"
    parts = ["disentangled positions"] * disentangled + [
        str(part).partition(":")[2].partition(":")[0] for part in arch.get("parts") or ()
    ]
    kernel = KERNELS.get(str(arch.get("kernel")).partition(":")[0])
    alone = kernel is not None and kernel.deviation is not None and parts
    return " and ".join(parts) if alone else f"kernel {arch.get('kernel')}"
