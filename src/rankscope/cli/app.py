"""All commands in one application, and how every command ends.

| exit code | meaning                                                                                    |
|-----------|--------------------------------------------------------------------------------------------|
| 0         | done                                                                                       |
| 2         | bad input, or something that could not be read, written or held: one sentence says what    |
| 130       | stopped by Ctrl-C: one sentence says what was kept                                         |
| 141       | whoever was reading closed the pipe (`| head`): nothing is said                            |

The functions of commands are found without importing their modules (`SOURCES`). A plugin declares one in its
pyproject.toml, under the name that it is called by:

    [project.entry-points."rankscope.commands"]
    study = "rankscope_studies.cli:study"

The function is one for typer, or one with groups of options (`rankscope.cli.options`); the first paragraph of its
docstring is its line in `rankscope --help`.
"""

import io
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import cleandoc
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rankscope.errors import PluginError, PluginWarning, RankscopeError
from rankscope.extras import EXTRAS, install, need
from rankscope.plugins import PREFIX, EntryPoint, Group, loaded, source_of

ending = ExitStack()  # Context managers that are closed when the command ends, however it ends


@dataclass(frozen=True)
class CommandSource:
    """A command that is not imported yet."""

    value: str
    """Where its function is, as "package.module:function"."""
    docstring: str

    def load(self) -> Any:
        """The function of the command; its module is imported."""
        try:
            return loaded(self.value)
        except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
            missing = isinstance(error, ModuleNotFoundError) and error.name in EXTRAS
            if missing or isinstance(error, RankscopeError) or self.value.startswith(PREFIX):
                raise
            why = f"{type(error).__name__}: {error}"
            raise PluginError(f"the command must be importable from {self.value}; it is not, {why}") from error


def _sources_of(entry: EntryPoint) -> dict[str, CommandSource]:
    """The command that an entry point names, or all of a table that says where the function of each name is."""
    source = _source(entry.value)
    if source is not None:
        return {entry.name: source}
    given = loaded(entry.value)
    if callable(given):  # made by a decorator, or imported from elsewhere
        return {entry.name: CommandSource(entry.value, given.__doc__ or "")}
    if not isinstance(given, Mapping):
        raise PluginError(f"it must name a function, or a table of where functions are; got {type(given).__name__}")
    sources = {name: _source(str(value)) for name, value in given.items()}
    if lost := [f"{name} = {given[name]}" for name, source in sources.items() if source is None]:
        raise PluginError(f"a command must be a function of a module; there is none at {', '.join(lost)}")
    return {name: source for name, source in sources.items() if source is not None}


def _source(value: str) -> CommandSource | None:
    """The function at a place such as "package.module:function", by the text of its file; None if there is none."""
    module, _, name = value.partition(":")
    path = source_of(module.strip())
    if path is None or path.suffix != ".py":
        return None
    body = path.read_text(encoding="utf-8").partition(f"\ndef {name.strip()}(")[2].partition("\ndef ")[0]
    return CommandSource(value, [*body.split('"""'), "", ""][1]) if body else None


SOURCES: Group[CommandSource] = Group(
    "commands", "a function", lambda each: isinstance(each, CommandSource), read=_sources_of
)
"""Every command by its name."""


COMMANDS = {
    "demo": "demo", "measure": "measure", "compare": "compare", "paths": "paths", "bounds": "paths", "depth": "depth",
    "cut": "depth", "forecast": "forecast", "sweep": "sweep", "checkpoints": "checkpoints", "follow": "follow",
    "spikes": "follow", "report": "report", "masks": "listings", "metrics": "listings",
    "models": "listings", "plugins": "listings",
}  # fmt: skip
COMMANDS = {name: f"rankscope.cli.{file}:{name}" for name, file in COMMANDS.items()}
"""The commands that rankscope ships, in the order of the help, and where the function of each is."""
ELSEWHERE = {"explore": "rankscope_explorer"} | dict.fromkeys(("reproduce", "study", "remedies"), "rankscope_studies")
"""The package that has a command which rankscope itself does not ship."""
BAD, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
ClickException: Any = typer.BadParameter.__mro__[2]  # click's class, which each version of typer has in another module


class Command(TyperCommand):
    """A command whose module is imported when its parameters or its function are asked for.

    Until then its help is the first paragraph of the docstring, which is read from the file's text: importing all
    modules takes longer than printing the list of all commands."""

    def __init__(self, name: str, source: CommandSource) -> None:
        self.source = source
        super().__init__(name, help=_unwrapped(source.docstring).partition("\n\n")[0], rich_markup_mode="rich")
        del self.params, self.callback

    def __getattr__(self, attribute: str) -> Any:
        if attribute not in ("params", "callback"):
            raise AttributeError(attribute)
        from rankscope.cli.options import flattened

        function = self.source.load()
        alone = typer.Typer(add_completion=False)
        alone.command(self.name, help=_unwrapped(function.__doc__))(flattened(function))
        command = typer.main.get_command(alone)
        self.params, self.callback, self.help = command.params, command.callback, command.help
        return getattr(self, attribute)


class Commands(TyperGroup):
    """The group of all commands; every error in one becomes a sentence and an exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.commands

    @cached_property
    def commands(self) -> dict[str, Command]:  # type: ignore[override]
        """Every command by name: those of rankscope, then those of plugins."""
        return {name: Command(name, source) for name, source in SOURCES.items()}

    def get_command(self, ctx: Any, cmd_name: str) -> Command | None:
        """The command of a name; for one that rankscope ships, no plugin is looked at."""
        return Command(cmd_name, SOURCES[cmd_name]) if cmd_name in SOURCES else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that was asked for; of one in a package that is not installed, say what installs it."""
        if args and args[0] in ELSEWHERE and args[0] not in SOURCES and not ctx.resilient_parsing:
            need(f"rankscope {args[0]}", ELSEWHERE[args[0]])
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command and leave with its exit code."""
        _streams()
        try:
            with ending, _plugins_named():
                code = super().main(*args, standalone_mode=False, **extra)
            sys.stdout.flush()
        except ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                sys.exit(0)  # the help is printed: asking for nothing is no mistake
            _leave(BAD, _misuse(error))
        except BrokenPipeError:
            _leave(PIPE_CLOSED)
        except OSError as error:  # a full disk behind stdout
            _leave(BAD, _os_sentence(error))
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except RankscopeError as error:
            _leave(BAD, str(error))
        except KeyboardInterrupt as stop:  # an `Interruption` says what was kept
            kept = str(stop)
            _leave(INTERRUPTED, f"stopped {kept}" if kept else "stopped; what is not printed or written yet is lost")
        except BrokenPipeError:
            _leave(PIPE_CLOSED)
        except OSError as error:
            _leave(BAD, _os_sentence(error))
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            _leave(BAD, f"this needs {package}, which is not installed: {install([package])}")
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not re.search("allocate|out of memory", str(error)):
                raise
            _leave(BAD, "this needs more memory than there is: ask for fewer tokens or samples, or a smaller model")


def _unwrapped(docstring: str | None) -> str:
    """A docstring whose paragraphs are one line each, for the terminal to break.

    >>> _unwrapped('One.\\n\\n    Two\\n    lines.')
    'One.\\n\\nTwo lines.'
    """
    paragraphs = cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


@contextmanager
def _plugins_named() -> Iterator[None]:
    """Say of a plugin that is left out why, in a line on stderr; a shell that completes a word hears nothing."""
    with warnings.catch_warnings():
        completing = "_RANKSCOPE_COMPLETE" in os.environ
        warnings.simplefilter("ignore" if completing else "always", PluginWarning)
        show = warnings.showwarning

        def say(message: Warning | str, category: type[Warning], *more: Any, **named: Any) -> None:
            from rankscope.cli.show import complain

            complain(str(message)) if category is PluginWarning else show(message, category, *more, **named)

        warnings.showwarning = say
        yield


def _streams() -> None:
    """Make stdout and stderr take any text: a closed stream takes it nowhere, an unknown letter is a `?`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _leave(code: int, sentence: str | None = None) -> NoReturn:
    if code == PIPE_CLOSED:
        # What is still in the buffer has nowhere to go, and Python would say so at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        try:
            sys.stdout.flush()  # what was done comes before what ended it
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sentence = sentence or _os_sentence(error)
    if sentence is not None:
        from rankscope.cli.show import complain

        complain(sentence)
    sys.exit(code)


def _misuse(error: Any) -> str:
    """What was wrong with the command line, and where to look it up."""
    message = error.format_message().rstrip(". ")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "rankscope"
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


def _os_sentence(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


app = typer.Typer(
    name="rankscope", cls=Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rankscope {version('rankscope')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", metavar=" ", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How fast the tokens of a transformer become the same, and what holds them apart."""


def main() -> None:
    """Run the command; a mistake is one sentence on stderr and exit code 2."""
    app(prog_name="rankscope")
