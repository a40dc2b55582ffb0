"""Which signals warn before the loss does? Small trainings driven into instability in six known ways, and quiet ones.

    python -m benchmarks.instabilities train runs/instabilities --workers 2    # goes on where it was
    python -m benchmarks.instabilities report runs/instabilities

A GPT (4 layers of width 64, torch's fused attention) learns the next character under a `Monitor`. After `CALM` steps it
is disturbed, or not. `report` prints, for each way, how many runs had a spike (`runs/spikes.py`), which signals left
their band before it and by how many steps, and how often the same signals do so in quiet runs at a step that is drawn.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.files import atomic
from rankscope.lab.tasks import NextCharacter
from rankscope.live import Monitor
from rankscope.runs.signals import read_signals, split_loss
from rankscope.runs.spikes import SURE, Signal, Spike, find_spikes, order_of_events
from rankscope.workers import run_pieces

STEPS, CALM, EVERY = 1600, 1000, 4
METRICS = ("relative_mu", "mu", "entropy", "largest_logit", "activation_ratio", "token_norm_ratio")
WAYS = {
    "quiet": "nothing is done",
    "rate": "the learning rate rises by a hundredth at every step, up to 300 times",
    "query_key": "weights of queries and keys grow by 1% at every step",
    "embedding": "the embedding shrinks by 5% at every step",
    "bad_data": "five batches of random characters out of every forty",
    "low_eps": "Adam's second moments are forgotten every 50 steps, with an eps of 1e-15",
    "skips": "the weights of skips fall by 1% at every step",
}
RUNS = [(way, seed) for way in WAYS for seed in range(12 if way == "quiet" else 6)]


class Attention(nn.Module):
    """Causal attention by torch's fused kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """What attention adds."""
        batch, token, width = x.shape
        q, k, v = (
            linear(x).view(batch, token, self.heads, -1).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, token, width))


class Block(nn.Module):
    """A block with norms before its branches, whose skips have a weight."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.skip = 1.0
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens after the block."""
        x = self.skip * x + self.attention(self.norm_1(x))
        return self.skip * x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A small GPT."""

    def __init__(self, symbols: int, context: int, layers: int = 4, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next character."""
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Disturbance:
    """What is done to a training in one of the `WAYS`, from step `CALM` on."""

    way: str
    model: GPT
    optimizer: torch.optim.Optimizer
    generator: torch.Generator

    @torch.no_grad()
    def before(self, step: int) -> None:
        """Change the network or the optimiser before a step, counted from the end of the calm."""
        if self.way == "rate":
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 * min(300.0, 1.01**step)
        elif self.way == "query_key":
            for block in self.model.blocks:
                for linear in (block.attention.q_proj, block.attention.k_proj):  # type: ignore[union-attr]
                    linear.weight.mul_(1.01)  # type: ignore[operator,union-attr]
        elif self.way == "embedding":
            self.model.embedding.weight.mul_(0.95)
            self.model.positions.weight.mul_(0.95)
        elif self.way == "low_eps" and step % 50 == 0:
            for group in self.optimizer.param_groups:
                group["eps"] = 1e-15
            for state in self.optimizer.state.values():
                state["exp_avg_sq"].mul_(1e-6)
        elif self.way == "skips":
            for block in self.model.blocks:
                block.skip *= 0.99  # type: ignore[operator,assignment]

    def labels(self, step: int, labels: Tensor) -> Tensor:
        """The labels of a step."""
        if self.way != "bad_data" or step % 40 >= 5:
            return labels
        order = torch.randperm(labels.numel(), generator=self.generator)
        return labels.flatten()[order].reshape(labels.shape)


def train(piece: tuple[str, int], folder: Path, steps: int = STEPS, calm: int = CALM) -> dict[str, Any]:
    """Train one network, and write what its monitor read and the loss of every step.

    Args:
        piece: (the way, the seed).
        folder: Where runs are, one folder each.
        steps: Steps of the training.
        calm: Steps before it is disturbed.
    """
    way, seed = piece
    task = NextCharacter()
    torch.manual_seed(seed)
    model = GPT(task.interface.classes, task.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    disturbance = Disturbance(way, model, optimizer, torch.Generator().manual_seed(seed))
    run, losses = folder / f"{way}-{seed}", []
    probe = {"ids": task.held_out(8).inputs}
    with Monitor(
        model, METRICS, EVERY, probe, run=run, optimizer=optimizer, spectra=True, alarms=(), padding="none"
    ) as monitor:
        for step in range(steps):
            batch = task.batch(16, seed, step)
            labels = batch.labels
            if step >= calm:
                disturbance.before(step - calm)
                labels = disturbance.labels(step - calm, labels)
            for group in optimizer.param_groups if step < calm else []:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 100)
            loss = F.cross_entropy(model(batch.inputs).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            monitor.step(loss=losses[-1])
            if not math.isfinite(losses[-1]) or (step > calm and np.mean(losses[-50:]) > 2 * losses[0]):
                break  # it has exploded, and would not come back
    outcome = {"way": way, "seed": seed, "calm": calm, "losses": losses}
    with atomic(run / "outcome.json") as path:
        path.write_text(json.dumps(outcome) + "\n")
    return {"way": way, "seed": seed, "last": losses[-1], "steps": len(losses)}


def looked_at(run: Path) -> tuple[Signal, list[Signal], int]:
    """(The loss of every step, the other signals, the steps before the disturbance) of a run."""
    outcome = json.loads((run / "outcome.json").read_text())
    losses = np.array(outcome["losses"])
    _, signals = split_loss(read_signals([run]))
    return Signal("loss", np.arange(1, len(losses) + 1), losses), signals, int(outcome["calm"])


def first_spike(loss: Signal, calm: int) -> Spike | None:
    """The first spike after the calm, if there is one."""
    return next((spike for spike in find_spikes(loss) if spike.first > calm), None)


def warnings_of(run: Path, drawn: int | None = None) -> tuple[Spike | None, pl.DataFrame]:
    """(The first spike of a run, the signals that left their band before it).

    Args:
        run: The folder of the run.
        drawn: A step that is taken for a spike in a quiet run; the signals before it cry wolf.
    """
    loss, signals, calm = looked_at(run)
    spike = first_spike(loss, calm)
    if drawn is not None:
        values = loss.values.copy()
        values[drawn:] = np.nan
        loss = Signal("loss", loss.steps, values)
        spike = first_spike(loss, calm)
    if spike is None:
        return None, pl.DataFrame()
    report = order_of_events(loss, signals)
    number = report.spikes.index(spike)
    return spike, report.events.filter(pl.col("spike") == number, pl.col("adjusted") <= SURE)


def rows(folder: Path) -> Iterator[tuple[str, int, int, int, dict[str, tuple[int, float]]]]:
    """(Way, runs, with a spike, steps from the disturbance to the spike, signals by name with runs and median lead)."""
    for way in WAYS:
        runs = sorted(path.parent for path in folder.glob(f"{way}-*/outcome.json"))
        if not runs:
            continue
        leads: dict[str, list[int]] = defaultdict(list)
        delays = []
        for k, run in enumerate(runs):
            loss, _, calm = looked_at(run)
            drawn = calm + (len(loss.values) - calm) * (k + 1) // (len(runs) + 1) if way == "quiet" else None
            spike, events = warnings_of(run, drawn)
            if spike is None:
                continue
            delays.append(spike.first - calm)
            for (name,), mine in events.group_by("signal"):
                leads[str(name)].append(int(mine["lead"].max()))  # type: ignore[arg-type]
        found = {name: (len(each), float(median(each))) for name, each in leads.items()}
        found = dict(sorted(found.items(), key=lambda item: (-item[1][0], -item[1][1])))
        yield way, len(runs), len(delays), round(median(delays)) if delays else 0, found


def report(folder: Path, most: int = 6) -> str:
    """The table in Markdown."""
    lines = ["| way | runs | with a spike | steps until it | signals before it: runs, median lead in steps |"]
    lines.append("|---|---|---|---|---|")
    for way, runs, spiked, delay, found in rows(folder):
        said = ", ".join(f"{name} {count} ({lead:.0f})" for name, (count, lead) in list(found.items())[:most]) or "none"
        spikes, steps = ("–", "–") if way == "quiet" else (str(spiked), str(delay))
        lines.append(f"| {way}: {WAYS[way]} | {runs} | {spikes} | {steps} | {said} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.command == "train":
        left = [(way, seed) for way, seed in RUNS if not (options.folder / f"{way}-{seed}" / "outcome.json").exists()]
        for result in run_pieces(partial(train, folder=options.folder), left, options.workers):
            print(result.value or f"{result.piece}: {result.error}", f"{result.seconds:.0f} s", flush=True)
    print(report(options.folder))


if __name__ == "__main__":  # workers find functions by the name of their module, and none in __main__
    import_module("benchmarks.instabilities").main()
