"""`rankscope masks`: masks as graphs on the tokens."""

from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.cli import names
from rankscope.cli import options as opt
from rankscope.cli.show import console, machine, titled

if TYPE_CHECKING:
    from torch import Tensor


def masks(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MASK",
            help="As in window:2 or 'causal&window:4'.",
            show_default="one of each kind",
            autocompletion=names.complete_one(names.MASKS),
        ),
    ] = None,
    tokens: Annotated[int, opt.option(opt.TEXT, "N", "The number of tokens.", min=1, max=4096)] = 16,
    picture: Annotated[bool, typer.Option("--picture", metavar=" ", help="Draw each: rows attend to columns.")] = False,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Show masks as graphs: edges, centres, connectivity, radius and diameter.

    A token reaches another in as many layers as the graph has steps between them. The [bold]radius[/bold] is
    how soon the best-placed token (a [bold]centre[/bold]) has reached all.
    """
    from rankscope.nets import graph, mask_matrix

    graphs = {spec: graph(spec, tokens) for spec in specs or names.MASKS[:-1]}
    if printing.as_json:
        return machine([{"mask": spec, **mask.as_dict()} for spec, mask in graphs.items()])
    out = console()
    numbers = ("edges", "centres", "connected", "radius", "diameter")
    table = titled(f"Masks on {tokens} tokens", words=["mask"], numbers=numbers)
    for spec, mask in graphs.items():
        connected = "strongly" if mask.strongly_connected else "quasi" if mask.centres else "no"
        sizes = ["–" if size is None else str(size) for size in (mask.radius, mask.diameter)]
        table.add_row(spec, str(mask.edges), str(len(mask.centres)), connected, *sizes)
    out.print(table)
    if picture:
        for spec in graphs:
            out.print(f"\n{spec}", markup=False, style="bold")
            out.print(drawing(mask_matrix(spec, tokens)), markup=False, soft_wrap=True)


def drawing(M: "Tensor") -> str:
    """A mask in half blocks, two rows to a line."""
    rows = M.tolist()
    if len(rows) % 2:
        rows.append([False] * len(rows))
    return "\n".join(
        "".join(" ▄▀█"[2 * top + bottom] for top, bottom in zip(*pair, strict=True))
        for pair in zip(rows[0::2], rows[1::2], strict=True)
    )
