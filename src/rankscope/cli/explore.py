"""`rankscope explore`: the page on which the parts of a network are changed."""

import sys
from typing import Annotated

import typer

from rankscope.cli import names
from rankscope.cli import options as opt


def explore(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Models to choose from: a directory, a hub id, a size with random weights (bert-tiny), or a "
            "JSON file of an architecture. MiniLM and random networks of any shape are there anyway.",
            show_default=False,
            autocompletion=names.complete_one(names.MODELS),
            callback=names.models_named,
        ),
    ] = None,
    port: opt.Port = 0,
    no_open: opt.NoOpen = False,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Open a local page: type a text, change the parts of a network, and watch its tokens become the same.

    It answers to this machine alone. Ctrl-C ends it.
    """
    from importlib.util import find_spec

    require_server("the explorer")
    from rankscope.cli.show import console, machine, say
    from rankscope.explorer.network_cache import NetworkCache
    from rankscope.explorer.server import bind_port, serve
    from rankscope.sources import named_network
    from rankscope.sources.checkpoint import MINILM

    installed = ["minilm"] if find_spec(MINILM) is not None else []
    named = list(dict.fromkeys(models or installed))
    socket = bind_port(port)
    address = f"http://127.0.0.1:{socket.getsockname()[1]}/"
    if named and not printing.silent:
        say(f"Loading {', '.join(named)} ...")
    for name in named:
        names.say_hub(name, printing.silent)
    networks = NetworkCache({name: named_network(name) for name in named}, installed)
    if printing.as_json:
        machine({"address": address, "models": networks.names})
    else:
        line = address if printing.quiet else f"Explorer: {address} (Ctrl-C ends it)"
        console().print(line, soft_wrap=True)
    sys.stdout.flush()
    serve(networks, socket, None if no_open else address)


def require_server(what: str) -> None:
    """Refuse to begin unless the packages that serve a page are installed."""
    from rankscope.extras import need

    need(what, "fastapi", "uvicorn", "plotly")
