"""Print every benchmark as a table of ratios, and the machine they were taken on.

`python -m benchmarks` runs on the CPU; `python -m benchmarks cuda` what there is for an accelerator.
"""

import platform
import sys

import torch

from benchmarks import deviations


def main() -> None:
    """Run them all."""
    if sys.argv[1:] == ["cuda"]:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        for batch in (4, 32):
            _show(f"BERT-base, {batch} x 128 tokens, float64", deviations.rows(batch, "cuda"))
        return
    from benchmarks import certifying, exploring, measuring, opening, paths, streaming, watching

    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    _show("BERT-base, 4 x 128 tokens", measuring.rows())
    _show("BERT-base, 4 x 128 tokens, float64", deviations.rows())
    _show("Peak memory of measure --text, bert-tiny, 2 variants, 16 tokens", streaming.rows())
    _show("GPT-2, 4 x 128 tokens", watching.rows())
    _show("Paths: BERT-base, 4 x 128 tokens, float64; 6 layers of 2 heads", paths.rows())
    _show("Certificates: BERT-base, 2 x 64 tokens", certifying.rows())
    _show("The explorer: MiniLM, 32 tokens, through HTTP", exploring.rows())
    _show("The demo's report, opened in Chromium", opening.rows())


def _show(title: str, rows: list[tuple[str, str, float]]) -> None:
    print(f"\n{title}")
    for what, against, ratio in rows:
        print(f"  {what:32} / {against:32} {ratio:5.2f}")


main()
