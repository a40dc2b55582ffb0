"""`rankscope explore`: the page on which a network is changed; and the page of `rankscope follow --page`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import console, machine, say
from rankscope.cli import options as opt

if TYPE_CHECKING:
    from socket import socket


def explore(
    models: Annotated[
        list[str] | None,
        opt.argument(
            "MODEL",
            "explored",
            opt.MODELS,
            show_default=False,
            callback=lambda models: models and [*map(opt.model_named, models)],
        ),
    ] = None,
    page: opt.PageOptions = opt.PageOptions(),
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Open a local page: type a text, change the parts of a network, and watch its tokens become the same.

    It answers to this machine alone. Ctrl-C ends it.
    """
    listening, address = open_port("the explorer", page.port)
    from rankscope.extras import installed
    from rankscope.sources import MINILM, named_network
    from rankscope_explorer.network_cache import NetworkCache
    from rankscope_explorer.server import serve

    at_hand = ["minilm"] if installed(MINILM) else []
    named = list(dict.fromkeys(models or at_hand))
    if named and not printing.silent:
        say(f"Loading {', '.join(named)} ...")
    for name in named:
        opt.say_hub(name, printing.silent)
    networks = NetworkCache({name: named_network(name) for name in named}, at_hand)
    say_address("Explorer", address, printing, models=networks.names)
    serve(networks, listening, None if page.no_open else address)


def follow(runs: list[Path], metric: str | None, page: opt.PageOptions, printing: opt.PrintOptions) -> None:
    """Serve the page of training runs until Ctrl-C.

    Args:
        runs: The run folders, side by side and each by itself.
        metric: The metric that is shown first; the first of the first run if left out.
        page: The port, and whether a browser is opened.
        printing: How the address is printed.
    """
    listening, address = open_port("a page", page.port)
    say_address("Following", address, printing, runs=list(map(str, runs)))
    from rankscope_explorer.follow import app
    from rankscope_explorer.server import serve_forever

    serve_forever(app(runs, listening.getsockname()[1], metric), listening, None if page.no_open else address)


def open_port(what: str, port: int) -> "tuple[socket, str]":
    """Bind the port of a page, if the packages that serve it are installed: the socket, and its address."""
    from rankscope.extras import need

    need(what, "fastapi", "uvicorn", "plotly")
    from rankscope_explorer.server import bind_port

    listening = bind_port(port)
    return listening, f"http://127.0.0.1:{listening.getsockname()[1]}/"


def say_address(title: str, address: str, printing: opt.PrintOptions, **fields: Any) -> None:
    """Print the address of a page before it is served; as JSON with further fields."""
    if printing.as_json:
        machine({"address": address, **fields})
    else:
        console().print(address if printing.quiet else f"{title}: {address} (Ctrl-C ends it)", soft_wrap=True)
    sys.stdout.flush()
