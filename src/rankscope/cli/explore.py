"""`rankscope explore`: the page in which parts of a network are turned."""

import sys
from typing import Annotated

import typer

from rankscope.cli import names
from rankscope.cli import options as opt
from rankscope.cli.complete import one
from rankscope.cli.named import models_named, tell_hub


def explore(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Models to choose from: a directory, a hub id, a size with random weights (bert-tiny), or a "
            "JSON file of an architecture. MiniLM and random networks of any shape are there anyway.",
            show_default=False,
            autocompletion=one(names.MODELS),
            callback=models_named,
        ),
    ] = None,
    port: opt.Port = 0,
    no_open: opt.NoOpen = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Open a local page: type a text, turn the parts of a network, and watch its tokens become the same.

    It answers to this machine alone. Ctrl-C ends it.
    """
    from importlib.util import find_spec

    require_server("the explorer")
    from rankscope.cli.show import console, machine, say
    from rankscope.explorer.network_cache import NetworkCache
    from rankscope.explorer.server import bind_port, serve
    from rankscope.sources import named_network
    from rankscope.sources.checkpoint import MINILM

    there = ["minilm"] if find_spec(MINILM) is not None else []
    named = list(dict.fromkeys(models or there))
    socket = bind_port(port)
    address = f"http://127.0.0.1:{socket.getsockname()[1]}/"
    if named and not (as_json or quiet):
        say(f"Loading {', '.join(named)} ...")
    for name in named:
        tell_hub(name, as_json or quiet)
    networks = NetworkCache({name: named_network(name) for name in named}, there)
    if as_json:
        machine({"address": address, "models": networks.names})
    else:
        console().print(address if quiet else f"Explorer: {address} (Ctrl-C ends it)", soft_wrap=True)
    sys.stdout.flush()
    serve(networks, socket, None if no_open else address)


def require_server(what: str) -> None:
    """A sentence with the line that installs what serves a page, where it is not there."""
    from rankscope.extras import need

    need(what, "fastapi", "uvicorn", "plotly")
