"""How often a monitor's rules are wrong: small GPTs that train well, and such as have a fault.

The table of `docs/monitor.md`. `python -m benchmarks.alarms` (some minutes on two cores)."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rankscope.lab import GPT, Recipe, Shape, characters, training
from rankscope.live.monitor import default_rules
from rankscope.runs import read


@dataclass(frozen=True)
class Case:
    """Runs of one kind."""

    label: str
    expected: str = ""
    """The rule that should speak; of a healthy run none should."""
    shape: Any = None
    """What is otherwise about the network,"""
    recipe: Any = None
    """and about its training."""
    spoil: Callable[[GPT], None] | None = None
    """What is done to it before."""


def sharpen(model: GPT, by: float) -> None:
    """Queries and keys so many times as large: attention logits by the square of that."""
    blocks: Any = model.blocks
    for block in blocks:
        weight = block.attn.in_proj_weight
        weight.data[: 2 * len(weight) // 3] *= by


def kill_a_head(model: GPT) -> None:
    """The first head of the second layer adds nothing, and gets no gradient: zero values, zero outputs."""
    attn: Any = model.blocks[1].attn
    each = attn.embed_dim // attn.num_heads
    attn.in_proj_weight.data[2 * attn.embed_dim :][:each] = 0
    attn.out_proj.weight.data[:, :each] = 0


CASES = [
    *(Case(f"healthy, rate {rate:g}", recipe={"rate": rate}) for rate in (3e-4, 1e-3, 3e-3)),
    Case("healthy, dropout 0.1", shape={"dropout": 0.1}),
    Case("healthy, 10 layers", shape={"layers": 10}),
    Case("no skips", "tokens collapse", {"skips": False}),
    Case("no skips, 10 layers", "tokens collapse", {"skips": False, "layers": 10}),
    Case("rate 0.1", "tokens blow up or vanish", recipe={"rate": 0.1}),
    Case("rate 0.1, no clipping", "tokens blow up or vanish", recipe={"rate": 0.1, "clip": 1e9}),
    Case("logits 64 times as large", "attention entropy collapses", spoil=partial(sharpen, by=8.0)),
    Case("a head of zeros", "a head has died", spoil=kill_a_head),
]


def said(case: Case, seed: int, small: bool = False) -> list[str]:
    """The rules that spoke in one run, by name."""
    torch.set_num_threads(1)
    text = characters()
    shape = Shape(len(text.alphabet), context=32, layers=4, width=32)
    shape = replace(shape, **(case.shape or {}))
    shape = replace(shape, layers=2, width=8) if small else shape
    recipe = replace(Recipe(steps=600, batch=8, every=20, seed=seed), **(case.recipe or {}))
    recipe = replace(recipe, steps=4, every=1) if small else recipe
    torch.manual_seed(seed)
    model = GPT(shape)
    if case.spoil is not None:
        case.spoil(model)
    with TemporaryDirectory() as folder:
        for _ in training(
            shape, recipe, text, folder, model=model, alarms=default_rules(action=lambda _: None)
        ):
            pass
        return read(Path(folder)).table("alarms")["rule"].to_list()


def rows(seeds: int = 5) -> Iterator[tuple[str, int, int, int, dict[str, int]]]:
    """(runs, how many, in how many the expected rule spoke, alarms in all, how many of each rule)."""
    with ProcessPoolExecutor(2) as pool:
        found = [[pool.submit(said, case, seed) for seed in range(seeds)] for case in CASES]
        for case, runs in zip(CASES, found, strict=True):
            each = [run.result() for run in runs]
            together = [name for names in each for name in names]
            counts = {name: together.count(name) for name in dict.fromkeys(together)}
            yield case.label, seeds, sum(case.expected in names for names in each), len(together), counts


def main() -> None:
    """The table in Markdown."""
    print("| run | runs | caught | alarms | which |")
    print("|---|---|---|---|---|")
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for case, (label, runs, caught, alarms, counts) in zip(CASES, rows(seeds), strict=True):
        which = ", ".join(f"{name} ({number})" for name, number in counts.items())
        print(f"| {label} | {runs} | {caught if case.expected else '–'} | {alarms} | {which} |", flush=True)


if __name__ == "__main__":
    main()
