"""Figure 1 of Giorlandino & Goldt (2026), and points of the plane that they did not publish.

python -m rankscope_studies.research.giorlandino2026 run TABLE.csv  # a minute for each point; goes on where it was
python -m rankscope_studies.research.giorlandino2026 draw TABLE.csv -o FIGURE.png  # and prints the largest differences
"""

import argparse
from itertools import product
from pathlib import Path

import polars as pl
import torch

from rankscope import figures as fig
from rankscope.figures import plot
from rankscope.files import atomic
from rankscope_studies.giorlandino2026 import figure_1

BETAS, SKIPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0), (1.0, 0.5)
PUBLISHED = ((0.5, 1.0), (3.0, 1.0))


@torch.no_grad()
def run(table: Path) -> None:
    """Compute the points that the table does not have yet."""
    parts = [pl.read_csv(table)] if table.exists() else []
    done = {row for part in parts for row in part.select("beta", "skip").unique().iter_rows()}
    for beta, skip in (*PUBLISHED, *(point for point in product(BETAS, SKIPS) if point not in PUBLISHED)):
        if (beta, skip) not in done:
            parts.append(figure_1([beta], [skip], networks=3))
            with atomic(table) as path:
                pl.concat(parts).write_csv(path)
            print(beta, skip, flush=True)


def differences(table: pl.DataFrame) -> str:
    """A table in Markdown: the largest difference of both theories to the mean of three networks, at each point."""
    rows = ["| beta | weight of skip | layers to a cosine of 0.9 | closed form | our recursion | spread of pairs |"]
    rows.append("|---|---|---|---|---|---|")
    for (beta, skip), mine in table.sort("skip", "beta", descending=[True, False]).group_by(
        "beta", "skip", maintain_order=True
    ):
        above = mine.filter(pl.col("measured") > 0.9)["layer"]
        worst = [max((mine[name] - mine["measured"]).abs()) for name in ("closed_form", "mean_field")]
        first = str(min(above)) if above.len() else f"more than {max(mine['layer'])}"
        spread = max(mine["measured_sd"])
        known = " (published)" if (beta, skip) in PUBLISHED else ""
        rows.append(f"| {beta:g}{known} | {skip:g} | {first} | {worst[0]:.3f} | {worst[1]:.3f} | {spread:.3f} |")
    return "\n".join(rows)


def cosines_chart(table: pl.DataFrame) -> fig.Chart:
    """The cosine of two tokens by layer: networks (dots, a band of one standard deviation), theory (lines).

    Args:
        table: What `giorlandino2026.figure_1` returns; each weight of skips has a panel.
    """
    panels = []
    for (skip,), part in table.sort("skip", descending=True).group_by("skip", maintain_order=True):
        marks: list[fig.Line] = []
        betas = part["beta"].unique().sort().to_list()
        for index, beta in enumerate(betas):
            mine = part.filter(pl.col("beta") == beta).sort("layer")
            layer, colour = mine["layer"].to_list(), fig.ordered_colour(index / max(1, len(betas) - 1) * 0.85)
            measured, spread = mine["measured"].to_numpy(), mine["measured_sd"].to_numpy()
            marks += [
                fig.Line(layer, measured, colour, f"β {beta:g}", marker="dot", width=0.0, index=index,
                         bands=[(measured - spread, measured + spread)], strength=0.5),
                fig.Line(layer, mine["mean_field"].to_numpy(), colour, width=1.5),
                fig.Line(layer, mine["closed_form"].to_numpy(), colour, dash="dot", width=1.5),
            ]  # fmt: skip
        heading = f"skip around attention of weight {skip:g}"
        y = fig.Axis("cosine of two tokens", range=(-0.05, 1.05))
        panels.append(fig.Panel(fig.Axis("layer", last=int(part["layer"].max())), y, marks, heading))  # type: ignore[arg-type]
    alt = "Cosines of tokens by layer: dots are networks, lines our recursion, dotted lines the published closed form."
    return fig.Chart(panels, table.to_dict(as_series=False), alt)


def main() -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "draw"))
    parser.add_argument("table", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("figure_1.png"))
    options = parser.parse_args()
    if options.command == "run":
        run(options.table)
        return
    table = pl.read_csv(options.table)
    plot(cosines_chart(table)).savefig(options.output, dpi=150)
    print(differences(table))


if __name__ == "__main__":
    main()
