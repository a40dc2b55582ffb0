"""Print every benchmark as a table of ratios, and the machine they were taken on.

What there is for an accelerator is `python -m benchmarks.device`.
"""

import platform
from importlib import import_module

import torch

from benchmarks.timing import Row

TITLES = {
    "measuring": "BERT-base, 4 x 128 tokens",
    "deviations": "BERT-base, 4 x 128 tokens, float64",
    "streaming": "Peak memory of measure --text, bert-tiny, 2 variants, 16 tokens",
    "contexts": "Long contexts: 2 layers, width 64, float32",
    "watching": "GPT-2, 4 x 128 tokens",
    "monitoring": "Watching a training: GPT-2, 4 x 128 tokens, AdamW",
    "paths": "Paths: BERT-base, 4 x 128 tokens, float64; 6 layers of 2 heads",
    "certifying": "Certificates: BERT-base, 2 x 64 tokens",
    "sweeping": "Sweeps: bert-tiny of 6 and 12 layers, 2 x 16 tokens",
    "cutting": "Models without layers: a forward pass of BERT, 4 x 64 tokens",
    "forecasting": "Forecasts: networks of the lab, 16 x 64 tokens",
    "exploring": "The explorer: MiniLM, 32 tokens, through HTTP",
    "opening": "The demo's report, opened in Chromium",
}
"""What is printed above the rows of each module."""


def rows(module: str, small: bool = False) -> list[Row]:
    """(what, against what, ratio) of a benchmark by the name of its module."""
    found: list[Row] = import_module(f"benchmarks.{module}").rows(small)
    return found


def main() -> None:
    """Run them all."""
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for module, title in TITLES.items():
        _show(title, rows(module))


def _show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    for what, against, ratio in rows:
        print(f"  {what:32} / {against:32} {ratio:5.2f}")


if __name__ == "__main__":
    main()
