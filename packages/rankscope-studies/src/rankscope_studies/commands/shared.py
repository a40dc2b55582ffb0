"""What several of these commands share: options of a study, and the papers' figures by name."""

from typing import Annotated

import typer

from rankscope.cli import options as opt

FIGURES = {
    "dong2021": ["fig2", "fig3", "fig4", "lengths", "rate"],
    "wu2024": ["fig1", "fig2", "fig3", "fig4", "fig6", "fig8", "fig9", "thm3"],
}
"""The figures of each paper, readable without torch; a test compares them with `STUDIES`."""

Full = Annotated[
    bool,
    opt.option(opt.SIZE, " ", "Run the sizes of the papers, or smaller ones that take minutes on two cores.", (),
               "--full/--quick"),
]  # fmt: skip
AnyMachine = Annotated[
    bool,
    opt.option(opt.MACHINE, " ", "Also take parts of the study that other machines computed; notes say which.", (),
               "--any-machine"),
]  # fmt: skip


def complete_figure(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a figure of the paper that was named before it."""
    return opt.complete_one(FIGURES.get(str(ctx.params.get("paper")), ()))(incomplete)
