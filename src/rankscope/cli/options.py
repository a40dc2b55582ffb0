"""Options that several commands share, declared once, under one name and with one meaning; and the names that they
take: which there are, what a shell completes on Tab, and what a misspelt one gets.

A command takes single options (`metrics: opt.Metrics`) and groups of them, which are dataclasses
(`text: opt.TextOptions = opt.TextOptions(samples=2)`). `flattened` makes of a command with groups one that
typer understands, where every field of a group is an option.

Nothing here imports torch: a name is completed, or refused, at once. The names, copies of those that live
where their things do, and the help of options are read from `data/command_line.toml`.
"""

import inspect
import math
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rankscope.errors import SourceError, TheoremError, require
from rankscope.files import must_be_text
from rankscope.naming import forgiven, is_path, may_be_on_hub, nearest
from rankscope.remedies import REMEDY_FILES
from rankscope.shipped import shipped_folder, shipped_model, shipped_names

NETWORK, TEXT, TRAINING, SIZE = "Network", "Text", "Training", "Size of the study"
MACHINE, RESULT, PAGE = "Where it runs", "Result", "Page"
"""Headings of the help: what runs, on which text, how and where, and what comes of it."""


DATA: dict[str, Any] = tomllib.loads(
    files("rankscope").joinpath("data", "command_line.toml").read_text(encoding="utf-8")
)
KNOWN: dict[str, tuple[str, ...]] = {kind: tuple(names) for kind, names in DATA["names"].items()}
PRESETS, VARIANTS, MASKS, METRICS = (KNOWN[kind] for kind in ("presets", "variants", "masks", "metrics"))
MODELS = ("minilm", *shipped_names(), *PRESETS)
PARTS, ARITHMETICS, SCHEMES = (KNOWN[kind] for kind in ("parts", "arithmetics", "inits"))
SPLITS, DEVICES, THEOREMS = (KNOWN[kind] for kind in ("splits", "devices", "theorems"))
REMEDIES = tuple(REMEDY_FILES)
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, change its colours or turn its text round; not tab and newline."""

HELP: dict[str, str] = DATA["help"]
Completer = Callable[[str], list[str]]  # Gives the names that complete the beginning of one


def complete_one(names: Sequence[str]) -> Completer:
    """A completer for an option that takes one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def complete_several(names: Sequence[str]) -> Completer:
    """A completer for an option that takes several of these names, joined by commas.

    >>> complete_several(("mu", "entropy"))("mu,e")
    ['mu,entropy']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last) and name not in given]

    return complete


def complete_compared(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a model or, after its colon, a variant; bash takes the colon for a word of its own."""
    before = ctx.params.get("things") or ()
    if before and before[-1] == ":":
        return complete_one(VARIANTS)(incomplete)
    model, colon, variant = incomplete.partition(":")
    if colon:
        return [f"{model}:{name}" for name in complete_one(VARIANTS)(variant)]
    return complete_one(MODELS)(incomplete)


def model_named(name: str) -> str:
    """The known name of a model, whatever its case and hyphens; a name that can be no model is refused.

    >>> model_named("MiniLM"), model_named("BERT_Tiny"), model_named("google/bert_uncased_L-2_H-128_A-2")
    ('minilm', 'bert-tiny', 'google/bert_uncased_L-2_H-128_A-2')
    """
    called = forgiven(name, MODELS)
    if (
        called in MODELS
        or shipped_folder(called) is not None
        or called.endswith(".json")
        or Path(called).exists()
        or may_be_on_hub(called)
    ):
        return called
    listed = "rankscope models lists the names"
    if is_path(called):
        raise SourceError(f"a model must be a directory; there is none at {called} ({listed})", subject="model")
    near = nearest(called, MODELS)
    hint = f"did you mean {near}? {listed}" if near else listed
    raise SourceError(
        f"{called!r} is no model known here, no directory and no id on the hub (owner/name): {hint}", subject="model"
    )


def text_named(path: str | None) -> str | None:
    """The path of a text; refused where there is no text at that path."""
    if path is not None:
        must_be_text(path)
    return path


def say_hub(model: str, quiet: bool) -> None:
    """Say on stderr that the hub is asked for a model that is not on this machine."""
    local = model in MODELS or shipped_model(model) or model.endswith(".json") or Path(model).exists()
    if not (local or quiet):
        write_aside(f"looking for {model} on the hub ...")


def write_aside(line: str) -> None:
    """Write a line on stderr, without control characters, which could move a terminal's cursor."""
    sys.stderr.write(CONTROLS.sub("", line) + "\n")
    sys.stderr.flush()


def option(panel: str, metavar: str, help: str, known: Sequence[str] = (), *flags: str, **more: Any) -> Any:
    """An option in a panel; `help` is a sentence or the key of one, `known` names are completed by a shell."""
    if known:
        complete = complete_several if metavar == "NAMES" else complete_one
        more["autocompletion"] = complete(known)
    return typer.Option(*flags, metavar=metavar, help=HELP.get(help, help), rich_help_panel=panel, **more)


def argument(metavar: str, help: str, known: Sequence[str] | Callable[..., list[str]] = (), **more: Any) -> Any:
    """An argument, like `option`; what a shell completes are names, or a function that gives them."""
    if known:
        more["autocompletion"] = known if callable(known) else complete_one(known)
    return typer.Argument(metavar=metavar, help=HELP.get(help, help), **more)


def output_option(default: str) -> Any:
    """The option `-o` of a command that writes to a folder by default."""
    return option(RESULT, "FOLDER", "output", (), "-o", "--output", show_default=default)


INITS = (*SCHEMES, *(f"{name}/sqrt(L)" for name in SCHEMES))
Model = Annotated[str, argument("MODEL", "model", MODELS, callback=model_named)]
Compared = Annotated[list[str], argument("MODEL_OR_RUN", "compared", complete_compared)]
Variant = Annotated[str, option(NETWORK, "NAME", "variant", VARIANTS)]
Device = Annotated[str, option(MACHINE, "NAME", "device", DEVICES)]
Layers = Annotated[int | None, option(NETWORK, "N", "layers", min=1)]
Stream = Annotated[bool, option(MACHINE, " ", "stream", (), "--stream")]
On = Annotated[str | None, option(MACHINE, "WHERE", "on", ("ray",), show_default="this machine")]
StuckAfter = Annotated[float, option(MACHINE, "SECONDS", "stuck_after", min=1.0)]
Remedies = Annotated[list[str] | None, option(NETWORK, "SPEC", "remedy", REMEDIES, "--remedy", show_default="none")]
Metrics = Annotated[str, option(RESULT, "NAMES", "metrics", METRICS)]
Threshold = Annotated[float, option(RESULT, "SHARE", "threshold")]
Folder = Annotated[Path, option(RESULT, "FOLDER", "output", (), "-o", "--output")]
STUCK_AFTER = 6 * 3600.0
DEFAULT_METRICS = "relative_residual,residual,relative_mu,mu"


@dataclass(frozen=True)
class NetworkOptions:
    """Options that change a model: its mask, depth and remedies, and how random weights are drawn."""

    mask: Annotated[str | None, option(NETWORK, "MASK", "mask", MASKS)] = None
    layers: Layers = None
    remedy: Remedies = None
    init: Annotated[str | None, option(NETWORK, "NAME", "init", INITS, show_default="bert")] = None
    seed: Annotated[int | None, option(NETWORK, "N", "seed", show_default="0")] = None


@dataclass(frozen=True)
class MeasuredNetwork(NetworkOptions):
    """Options of the network of `measure`, and of where it runs."""

    model: Model = "minilm"
    variants: Annotated[str, option(NETWORK, "NAMES", "variants", VARIANTS)] = "san,san+mlp,san+skip,transformer"
    device: Device = "cpu"
    stream: Stream = False
    on: On = None
    stuck_after: StuckAfter = STUCK_AFTER


@dataclass(frozen=True)
class TextOptions:
    """Options that say what a network reads; without `text` it is the bundled prose."""

    text: Annotated[
        str | None, option(TEXT, "PATH", "text", (), "--text", show_default="Moby Dick", callback=text_named)
    ] = None
    split: Annotated[str, option(TEXT, "NAME", "split", SPLITS)] = "auto"
    field: Annotated[str, option(TEXT, "NAME", "field")] = "text"
    samples: Annotated[int | None, option(TEXT, "N", "samples", min=1)] = 4
    max_length: Annotated[int, option(TEXT, "N", "max_length", min=1)] = 128


@dataclass(frozen=True)
class CorpusOptions(TextOptions):
    """The text of `measure`: a few excerpts, or with `text` a corpus of any size."""

    samples: Annotated[int | None, option(TEXT, "N", "samples", min=1, show_default="4, or all of --text")] = None
    batch_size: Annotated[int, option(MACHINE, "N", "The number of excerpts that run together.", min=1)] = 16


@dataclass(frozen=True)
class MetricOptions:
    """Options that say what is measured of a network."""

    metrics: Metrics = DEFAULT_METRICS
    arithmetic: Annotated[str, option(RESULT, "NAMES", "arithmetic", (*ARITHMETICS, "all"))] = "deviation"


@dataclass(frozen=True)
class PrintOptions:
    """Options that say how results are printed."""

    as_json: Annotated[bool, option(RESULT, " ", "json", (), "--json")] = False
    quiet: Annotated[bool, option(RESULT, " ", "quiet", (), "--quiet", "-q")] = False

    @property
    def silent(self) -> bool:
        """True if nothing but results is printed."""
        return self.quiet or self.as_json


@dataclass(frozen=True)
class ResultOptions(PrintOptions):
    """Options of commands that print results and, with `-o`, write them to a folder."""

    output: Annotated[Path | None, option(RESULT, "FOLDER", "output", (), "-o", "--output")] = None

    @property
    def report(self) -> Path | None:
        """The path of the report in the folder, if one is written."""
        return None if self.output is None else self.output / "report.html"


@dataclass(frozen=True)
class PageOptions:
    """Options of a page that is served to this machine."""

    port: Annotated[int, option(PAGE, "N", "The port; 0: any that is free.", min=0, max=65535)] = 0
    no_open: Annotated[bool, option(PAGE, " ", "Do not open a browser.", (), "--no-open")] = False


def require_positive(**options: float) -> None:
    """Refuse an option that is not a positive number, before anything is computed."""
    for name, value in options.items():
        require(math.isfinite(value) and value > 0, f"--{name} must be a number > 0; got {value:g}", TheoremError, name)


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, in which each field of a group of options is a parameter of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))
            continue
        field_hints = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default, hint = getattr(parameter.default, field.name), field_hints[field.name]
            parameters.append(
                parameter.replace(name=field.name, kind=parameter.KEYWORD_ONLY, default=default, annotation=hint)
            )

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
