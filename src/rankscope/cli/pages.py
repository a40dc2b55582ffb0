"""`rankscope report` and `rankscope explore`: runs on one page, and the page on which a network is changed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import options as opt
from rankscope.cli.show import console, machine, say, say_where

if TYPE_CHECKING:
    from socket import socket


def report(
    runs: Annotated[list[Path], opt.argument("RUN", "runs")],
    output: Annotated[Path, opt.option(opt.RESULT, "PAGE", "page", (), "-o", "--output")] = Path("report.html"),
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Make one page of run folders, a chapter for each: interactive figures, tables, manifest.

    The file stands alone: it can be opened, sent and kept without anything beside it.
    """
    from rankscope.files import writable_folder
    from rankscope.report import write_report

    writable_folder(output.parent)
    written = write_report(runs, output)
    if printing.as_json:
        machine({"report": str(written)})
    elif not printing.quiet:
        say_where("Report", written)


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
    from rankscope.explorer.network_cache import NetworkCache
    from rankscope.explorer.server import serve
    from rankscope.extras import installed
    from rankscope.sources import MINILM, named_network

    at_hand = ["minilm"] if installed(MINILM) else []
    named = list(dict.fromkeys(models or at_hand))
    if named and not printing.silent:
        say(f"Loading {', '.join(named)} ...")
    for name in named:
        opt.say_hub(name, printing.silent)
    networks = NetworkCache({name: named_network(name) for name in named}, at_hand)
    say_address("Explorer", address, printing, models=networks.names)
    serve(networks, listening, None if page.no_open else address)


def open_port(what: str, port: int) -> "tuple[socket, str]":
    """Bind the port of a page, if the packages that serve it are installed: the socket, and its address."""
    from rankscope.extras import need

    need(what, "fastapi", "uvicorn", "plotly")
    from rankscope.explorer.server import bind_port

    listening = bind_port(port)
    return listening, f"http://127.0.0.1:{listening.getsockname()[1]}/"


def say_address(title: str, address: str, printing: opt.PrintOptions, **fields: Any) -> None:
    """Print the address of a page before it is served; as JSON with further fields."""
    if printing.as_json:
        machine({"address": address, **fields})
    else:
        console().print(address if printing.quiet else f"{title}: {address} (Ctrl-C ends it)", soft_wrap=True)
    sys.stdout.flush()
