"""How often a monitor's rules are wrong: small GPTs that train well, and such as have a fault.

The table of `docs/monitor.md`. `python -m rankscope_studies.research.alarms` (some minutes on two cores)."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rankscope.lab import Initialisation, Model, NextCharacter, Recipe, Training
from rankscope.monitor import default_rules
from rankscope.runs import read
from rankscope.workers import cores, run_pieces


@dataclass(frozen=True)
class Case:
    """Runs of one kind."""

    label: str
    expected: str = ""
    """The rule that should speak; of a healthy run none should."""
    layers: int = 4
    skip: float = 1.0
    dropout: float = 0.0
    recipe: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe in place of the usual ones."""
    spoil: Callable[[Model], None] | None = None
    """What is done to the network before it is trained."""


@torch.no_grad()
def sharpen(model: Model, by: float) -> None:
    """Queries and keys so many times as large: attention logits by the square of that."""
    for layer in model.net.layers:
        attention: Any = layer.attention
        attention.query.weight *= by
        attention.key.weight *= by


@torch.no_grad()
def kill_a_head(model: Model) -> None:
    """The first head of the second layer adds nothing, and gets no gradient: zero values, zero outputs."""
    attention: Any = model.net.layers[1].attention
    attention.value.weight[:, 0] = 0
    attention.output.weight[0] = 0


CASES = [
    *(Case(f"healthy, rate {lr:g}", recipe={"lr": lr}) for lr in (3e-4, 1e-3, 3e-3)),
    Case("healthy, dropout 0.1", dropout=0.1),
    Case("healthy, 10 layers", layers=10),
    Case("no skips", "tokens collapse", skip=0.0),
    Case("no skips, 10 layers", "tokens collapse", skip=0.0, layers=10),
    Case("rate 0.1", "tokens blow up or vanish", recipe={"lr": 0.1}),
    Case("rate 0.1, no clipping", "tokens blow up or vanish", recipe={"lr": 0.1, "max_norm": 1e9}),
    Case("logits 64 times as large", "attention entropy collapses", spoil=partial(sharpen, by=8.0)),
    Case("a head of zeros", "a head has died", spoil=kill_a_head),
]


def said(case: Case, seed: int, small: bool = False) -> list[str]:
    """The rules that spoke in one run, by name."""
    recipe = replace(Recipe(steps=600, batch_size=8, seed=seed), **case.recipe)
    recipe = replace(recipe, steps=4, measure_every=1) if small else recipe
    task, (layers, width) = NextCharacter(context=32), (2, 8) if small else (case.layers, 32)
    arch = task.architecture(layers, width, attention_skip=case.skip, mlp_skip=case.skip)
    with TemporaryDirectory() as folder:
        training = Training(
            task, arch, recipe, initialisation=Initialisation(dropout=case.dropout), run=folder,
            alarms=lambda: default_rules(action=lambda _: None),
        )  # fmt: skip
        if case.spoil is not None:
            case.spoil(training.models[0])
        training.finish()
        return read(Path(folder)).table("alarms")["rule"].to_list()


def one_run(run: tuple[int, int]) -> list[str]:
    """The rules that spoke in the run of a case and a seed."""
    case, seed = run
    return said(CASES[case], seed)


def rows(seeds: int = 5) -> Iterator[tuple[str, int, int, int, dict[str, int]]]:
    """(runs, how many, in how many the expected rule spoke, alarms in all, how many of each rule)."""
    from rankscope_studies.research.alarms import one_run  # by its module's name, where workers find it

    runs = list(product(range(len(CASES)), range(seeds)))
    results = {result.piece: result for result in run_pieces(one_run, runs, cores())}
    for result in results.values():
        if result.error:
            raise RuntimeError(f"{CASES[result.piece[0]].label}, seed {result.piece[1]}: {result.error}")
    for number, case in enumerate(CASES):
        spoken = [results[number, seed].value or [] for seed in range(seeds)]
        together = [name for names in spoken for name in names]
        counts = {name: together.count(name) for name in dict.fromkeys(together)}
        yield case.label, seeds, sum(case.expected in names for names in spoken), len(together), counts


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
