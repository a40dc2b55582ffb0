"""Print every benchmark as a table of ratios, and the machine they were taken on."""

import platform

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import measuring


def main() -> None:
    """Run them all."""
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    table = Table(title=f"BERT-base, 4 x 128 tokens · {machine}", title_justify="left", box=None)
    for heading in ("what", "against", "ratio"):
        table.add_column(heading)
    for what, against, ratio in measuring.rows():
        table.add_row(what, against, f"{ratio:.2f}")
    Console().print(table)


main()
