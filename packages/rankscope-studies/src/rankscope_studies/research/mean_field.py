"""How far mean-field theory is from random networks: percent of q and p by layer, over designs drawn at random.

`python -m rankscope_studies.research.mean_field --workers 16 --designs 100` measures each design at every width and
writes a line when it is done, so that an interrupted run goes on where it was; `--report` prints the table of what is
written. Networks are drawn anew by each seed on tokens that stay, and theory is the mean of recursions of some of
these networks, so that what is left is theory's error and not what one network is by chance; how large that is stands
beside it, and so does what is left of chance (the standard error of the mean). Kedia et al. (2024) state, for their
closed forms of one attention layer, 1.4 / 4.1 / 7.8 percent of the variance and 1.3 / 3.9 / 7.4 percent of the
covariance.
"""

import argparse
import json
import random
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankscope.forecasts import Moments, mean_field
from rankscope.nets import Transformer
from rankscope.workers import run_pieces
from rankscope_studies.forecasts import Design, draw_design
from rankscope_studies.giorlandino2026 import equiangular_tokens

WIDTHS = (64, 128, 256, 512)
HEAD_WIDTH, TOKENS = 16, 32
SMALL_SHARE = 0.05  # p below this share of q is near a zero of its own: percent of it say nothing
PUBLISHED = {"q": "1.4 / 4.1 / 7.8", "p": "1.3 / 3.9 / 7.4"}


def design_of(number: int, width: int) -> tuple[Design, float]:
    """The design of a number at a width, with 1 to 12 layers, and the cosine of the tokens that it reads."""
    draw = random.Random(f"mean field {number}")
    layers, cosine = draw.randint(1, 12), draw.uniform(0.1, 0.9)
    return replace(draw_design(number), layers=layers, width=width, heads=width // HEAD_WIDTH), cosine


def network(design: Design, seed: int) -> Transformer:
    """A network of a design, with the gains of its weights and its remedy."""
    arch = design.architecture
    arch = Transformer.random(replace(arch, layers=1)).with_remedy(design.remedy).arch if design.remedy else arch
    tensors = Transformer.random(replace(arch, layers=design.layers), seed=seed, init=design.scheme).state_dict()
    for name, gain in design.initialisation.gains:
        tensors |= {key: gain * tensor for key, tensor in tensors.items() if key.endswith(name)}
    return Transformer.from_weights(replace(arch, layers=design.layers), tensors)


def measured(piece: tuple[int, int], networks: float = 16384, compared: int = 8, draws: int = 8) -> dict[str, Any]:
    """q and p of a design by layer, as measured and in theory.

    Args:
        piece: (the number of the design, the width).
        networks: Networks that are measured, times the width.
        compared: Networks whose recursion is computed.
        draws: Draws of queries and keys in each recursion.
    """
    (number, width), start = piece, time.perf_counter()
    design, cosine = design_of(number, width)
    X = design.embedding_std * equiangular_tokens(TOKENS, width, cosine, seed=number)
    found: list[list[tuple[float, float]]] = []
    theory: list[list[tuple[float, float]]] = []
    for seed in range(max(compared, round(networks / width))):
        net = network(design, seed)
        states = [Moments(step.layer, step.state @ step.state.mT / width) for step in net.steps(X)]
        found.append([(moments.q, moments.p) for moments in states[1:]])
        if seed < compared:
            states = list(mean_field(net, X, draws=draws, seed=seed))
            theory.append([(moments.q, moments.p) for moments in states[1:]])
    whole, ours = np.array(found), np.array(theory)  # [network, layer, q or p]
    return {
        "number": number, "width": width, "layers": design.layers, "networks": len(whole), "remedy": design.remedy,
        "measured": whole.mean(0).tolist(), "sd": whole.std(0, ddof=1).tolist(), "theory": ours.mean(0).tolist(),
        "single": (ours - whole[: len(ours)]).tolist(), "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def report(lines: list[dict[str, Any]]) -> str:
    """The table: percentiles 50 / 90 / 99 over designs and layers, in percent."""
    rows = ["| width | designs | | theory's error | chance left in it | one network's error | published |"]
    rows.append("|---|---|---|---|---|---|---|")
    for width in sorted({line["width"] for line in lines}):
        chosen = [line for line in lines if line["width"] == width]
        for place, name in enumerate("qp"):
            error, chance, single = [], [], []
            for line in chosen:
                mean, sd = np.array(line["measured"]), np.array(line["sd"])
                kept = np.abs(mean[:, place]) >= SMALL_SHARE * mean[:, 0]
                scale = 100 / np.abs(mean[kept, place])
                error.append(scale * np.abs(np.array(line["theory"]) - mean)[kept, place])
                chance.append(scale * sd[kept, place] / line["networks"] ** 0.5)
                single.append((scale * np.abs(np.array(line["single"]))[:, kept, place]).ravel())
            cells = " | ".join(map(_percentiles, (error, chance, single)))
            rows.append(f"| {width} | {len(chosen)} | {name} | {cells} | {PUBLISHED[name]} |")
    return "\n".join(rows)


def _percentiles(parts: list[Any]) -> str:
    values = np.concatenate(parts)
    return " / ".join(f"{value:.1f}" for value in np.percentile(values, [50, 90, 99])) if len(values) else "none"


def main() -> None:
    """Measure what is not written yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=10_000_000)
    parser.add_argument("--designs", type=int, default=100)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--networks", type=float, default=16384, help="networks of a design, times the width")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--report", action="store_true", help="print the table of what is written, and measure nothing")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/mean_field.jsonl"))
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.output.read_text().splitlines()] if options.output.exists() else []
    done = {(line["number"], line["width"]) for line in lines}
    numbers = range(options.first, options.first + options.designs)
    pieces = [(number, width) for number in numbers for width in options.widths if (number, width) not in done]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    work, until = partial(measured, networks=options.networks), time.time() + 60 * options.minutes
    with torch.no_grad(), options.output.open("a") as file:
        for result in run_pieces(work, [] if options.report else pieces, options.workers, deadline=until):
            print(result.piece, f"{result.seconds:.1f} s", result.error or "", flush=True)
            if result.value is not None:
                lines.append(result.value)
                file.write(json.dumps(result.value) + "\n")
                file.flush()
    print(report(lines))


if __name__ == "__main__":  # workers find functions by the name of their module, and none in __main__
    import_module("rankscope_studies.research.mean_field").main()
