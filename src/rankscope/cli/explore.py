"""`rankscope explore`: the page in which parts of a network are turned."""

from typing import Annotated

import typer

INSTALL = "pip install 'rankscope[explore]'"


def explore(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Models to choose from: a directory, a hub id, a usual size (bert-tiny), a JSON file of an "
            "architecture. MiniLM and random networks of any shape are there without being named.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Open a local page: type a text, turn the parts of a network, and watch its tokens become the same.

    It answers to this machine alone. Ctrl-C ends it.
    """
    from importlib.util import find_spec

    from rankscope.errors import MissingExtraError

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the explorer needs {' and '.join(missing)}, which is not installed: {INSTALL}"
        )

    from rankscope.cli.show import say
    from rankscope.explorer.serve import bound, serve
    from rankscope.explorer.shelf import Shelf
    from rankscope.sources import named_network
    from rankscope.sources.checkpoint import MINILM

    there = ["minilm"] if find_spec(MINILM) is not None else []
    named, later = list(dict.fromkeys(models or there)), there
    socket = bound(port)
    address = f"http://127.0.0.1:{socket.getsockname()[1]}/"
    if named:
        say(f"Loading {', '.join(named)} ...")
    shelf = Shelf({name: named_network(name) for name in named}, later)
    typer.echo(f"Explorer: {address} (Ctrl-C ends it)")
    serve(shelf, socket, address if not no_open else None)
