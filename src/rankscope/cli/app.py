"""All commands in one application, and how every command ends.

| exit code | meaning                                                                                    |
|-----------|--------------------------------------------------------------------------------------------|
| 0         | done                                                                                       |
| 2         | bad input, or something that could not be read, written or held: one sentence says what    |
| 130       | stopped by Ctrl-C: one sentence says what was kept                                         |
| 141       | whoever was reading closed the pipe (`| head`): nothing is said                            |
"""

import io
import os
import re
import sys
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rankscope.cli.ending import ending
from rankscope.errors import RankscopeError

COMMANDS = (
    "demo", "measure", "compare", "paths", "bounds", "depth", "cut", "forecast", "sweep", "checkpoints", "follow",
    "spikes", "explore", "reproduce", "study", "remedies", "report", "masks", "metrics", "models",
)  # fmt: skip
FILES = {"explore": "pages", "report": "pages", "masks": "listings", "metrics": "listings", "models": "listings"}
"""The file of this folder that has a command, where it is not one of the command's own name."""
BAD, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
ClickException: Any = typer.BadParameter.__mro__[2]  # click's class, which each version of typer has in another module


class Command(TyperCommand):
    """A command whose file is imported when its parameters or its function are asked for.

    Until then its help is the first paragraph of the docstring, which is read from the file's text: importing all files
    takes longer than printing the list of all commands."""

    def __init__(self, name: str) -> None:
        self.file = FILES.get(name, name)
        text = Path(__file__).with_name(f"{self.file}.py").read_text(encoding="utf-8")
        docstring = text.partition(f"\ndef {name}(")[2].split('"""')[1]
        super().__init__(name, help=_unwrapped(docstring).partition("\n\n")[0], rich_markup_mode="rich")
        del self.params, self.callback

    def __getattr__(self, attribute: str) -> Any:
        if attribute not in ("params", "callback"):
            raise AttributeError(attribute)
        from rankscope.cli.options import flattened

        function = getattr(import_module(f"rankscope.cli.{self.file}"), str(self.name))
        alone = typer.Typer(add_completion=False)
        alone.command(self.name, help=_unwrapped(function.__doc__))(flattened(function))
        loaded = typer.main.get_command(alone)
        self.params, self.callback, self.help = loaded.params, loaded.callback, loaded.help
        return getattr(self, attribute)


class Commands(TyperGroup):
    """The group of all commands; every error in one becomes a sentence and an exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: Command(name) for name in COMMANDS}

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command and leave with its exit code."""
        _streams()
        try:
            with ending:
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
            from rankscope.extras import EXTRAS, install

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
