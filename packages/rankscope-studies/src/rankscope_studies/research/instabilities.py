"""Which signals warn before the loss does? Small trainings driven into instability in six known ways, and quiet ones.

    python -m rankscope_studies.research.instabilities train runs/instabilities --workers 2  # goes on where it was
    python -m rankscope_studies.research.instabilities report runs/instabilities
    python -m rankscope_studies.research.instabilities rules runs/instabilities  # what alarm rules say of the same runs
    # runs that no threshold was chosen by
    python -m rankscope_studies.research.instabilities train runs/unseen --first-seed 100

A GPT (4 layers of width 64, torch's fused attention) learns the next character for `CALM` steps under a `Monitor`. Then
it goes on, and is disturbed in one of the `WAYS`, more and more. The loss shows it at its first spike
(`trainings/spikes.py`), or when its mean over 16 steps is `RISEN` nats above that of the last 200 calm steps,
whichever is first. `report` prints which signals had left their band before that, by how many steps, and how often the
same signals do so in quiet runs at a step that is drawn. `rules` replays the monitor's alarm rules over the same
measurements.
"""

import argparse
import json
import math
import shutil
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

import rankscope
from rankscope.files import atomic
from rankscope.lab import NextCharacter
from rankscope.monitor import Monitor, default_rules
from rankscope.trainings import SURE, Signal, find_spikes, order_of_events, read_signals
from rankscope.workers import run_pieces

CALM, DISTURBED, EVERY = 1000, 400, 4
MEAN, RISEN = 16, 0.15  # Steps that the loss is averaged over, and nats by which it has risen
METRICS = ("relative_mu", "mu", "entropy", "largest_logit", "activation_ratio", "token_norm_ratio")
WAYS = {
    "quiet": "nothing is done",
    "rate": "the learning rate rises by 2% at every step, up to 300 times",
    "query_key": "weights of queries and keys grow by 2% at every step",
    "embedding": "the embedding shrinks by 10% at every step",
    "bad_data": "four steps of twenty have wrong labels, in one more sequence each time",
    "low_eps": "every 50 steps Adam forgets more of its second moments, with an eps of 1e-15",
    "skips": "the weights of skips fall by 1% at every step",
}
SEEDS = {way: 12 if way == "quiet" else 6 for way in WAYS}
"""The thresholds of alarm rules were chosen with runs of these seeds, from 0 on, in sight: what `rules` says of them is
no test. Seeds from 100 on were trained afterwards."""


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
                group["lr"] = 1e-3 * min(300.0, 1.02**step)
        elif self.way == "query_key":
            for block in self.model.blocks:
                for linear in (block.attention.q_proj, block.attention.k_proj):  # type: ignore[union-attr]
                    linear.weight.mul_(1.02)  # type: ignore[operator,union-attr]
        elif self.way == "embedding":
            self.model.embedding.weight.mul_(0.9)
            self.model.positions.weight.mul_(0.9)
        elif self.way == "low_eps" and step % 50 == 0:
            for group in self.optimizer.param_groups:
                group["eps"] = 1e-15
            for state in self.optimizer.state.values():
                state["exp_avg_sq"].mul_(10 ** (-0.5 * (step // 50 + 1)))
        elif self.way == "skips":
            for block in self.model.blocks:
                block.skip *= 0.99  # type: ignore[operator,assignment]

    def labels(self, step: int, labels: Tensor) -> Tensor:
        """The labels of a step."""
        if self.way != "bad_data" or step % 20 >= 4:
            return labels
        wrong, labels = step // 20 + 1, labels.clone()
        chosen = labels[:wrong].flatten()
        labels[:wrong] = chosen[torch.randperm(len(chosen), generator=self.generator)].view_as(labels[:wrong])
        return labels


def train(piece: tuple[str, int], folder: Path, steps: int = DISTURBED, calm: int = CALM) -> dict[str, Any]:
    """Train one network, and write what its monitor read and the loss of every step.

    Args:
        piece: (the way, the seed); of the way "calm" only what comes before the disturbance, from which others go on.
        folder: Where runs are, one folder each.
        steps: Steps after the calm.
        calm: Steps before the disturbance.
    """
    way, seed = piece
    task = NextCharacter()
    torch.manual_seed(seed)
    model = GPT(task.interface.classes, task.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    disturbance = Disturbance(way, model, optimizer, torch.Generator().manual_seed(seed))
    home, before = folder / f"{way}-{seed}", folder / f"calm-{seed}"
    shutil.rmtree(home, ignore_errors=True)
    losses: list[float] = []
    if way != "calm":
        shutil.copytree(before / "run", home / "run")
        state = torch.load(before / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    probe = {"ids": task.held_out(8).inputs}
    options: dict[str, Any] = {"optimizer": optimizer, "spectra": True, "alarms": (), "padding": "none"}
    with Monitor(model, METRICS, EVERY, probe, run=home / "run", **options) as monitor:
        if way != "calm":
            monitor.resume(calm)
        for step in range(calm) if way == "calm" else range(calm, calm + steps):
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
    if way == "calm":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
        torch.save(state, home / "state.pt")
    else:
        table = rankscope.read(home / "run").tables["training"]
        numbers = pl.col("value", "floor", "most").cast(pl.Float32)
        table = table.select("step", "layer", "head", "metric", numbers, "samples", "broken")
        table.write_parquet(home / "measurements.parquet", compression="zstd")
        shutil.rmtree(home / "run")
    with atomic(home / "outcome.json") as path:
        path.write_text(json.dumps({"way": way, "seed": seed, "calm": calm, "losses": losses}) + "\n")
    return {"way": way, "seed": seed, "last": losses[-1], "steps": len(losses)}


def looked_at(run: Path) -> tuple[Signal, list[Signal], int]:
    """(The loss of every step, the other signals, the steps before the disturbance) of a run."""
    outcome = json.loads((run / "outcome.json").read_text())
    losses = np.array(outcome["losses"])
    signals = [signal for signal in read_signals([run / "measurements.parquet"]) if signal.name not in ("loss", "lr")]
    return Signal("loss", np.arange(1, len(losses) + 1), losses), signals, int(outcome["calm"])


def first_shown(loss: Signal, calm: int) -> int | None:
    """The step at which the loss shows that something is wrong: its first spike, or that its mean has risen."""
    spike = next((spike.first for spike in find_spikes(loss) if spike.first > calm), None)
    usual = float(np.mean(loss.values[max(0, calm - 200) : calm]))
    means = np.convolve(np.nan_to_num(loss.values, nan=np.inf), np.full(MEAN, 1 / MEAN), mode="valid")
    risen = np.flatnonzero(~(means[calm:] < usual + RISEN))
    shown = [] if spike is None else [spike]
    return min([*shown, *(calm + MEAN + k for k in risen[:1].tolist())], default=None)


def warnings_of(run: Path, shown: int) -> pl.DataFrame:
    """The signals that had left their band before a step at which the loss shows that something is wrong.

    Args:
        run: The folder of the run.
        shown: The step; of a quiet run any, whose signals cry wolf.
    """
    loss, signals, _ = looked_at(run)
    values = loss.values.copy()
    values[shown - 1 :] = np.nan  # a spike for `order_of_events`, wherever the loss shows it
    report = order_of_events(Signal("loss", loss.steps, values), signals)
    number = next(k for k, spike in enumerate(report.spikes) if spike.first == shown)
    return report.events.filter(pl.col("spike") == number, pl.col("adjusted") <= SURE)


def runs_of(folder: Path, way: str) -> list[tuple[Path, int | None]]:
    """(A run, the step at which its loss shows it) of every run of a way; of quiet runs the step is drawn."""
    found: list[tuple[Path, int | None]] = []
    homes = sorted((path.parent for path in folder.glob(f"{way}-*/outcome.json")), key=lambda path: _seed(path))
    for k, run in enumerate(homes):
        loss, _, calm = looked_at(run)
        drawn = calm + (len(loss.values) - calm) * (k + 1) // (len(homes) + 1)
        found.append((run, drawn if way == "quiet" else first_shown(loss, calm)))
    return found


def _seed(run: Path) -> int:
    return int(run.name.rpartition("-")[2])


def rows(folder: Path) -> Iterator[tuple[str, int, int, int, dict[str, tuple[int, float]]]]:
    """(Way, runs, how many losses show it, after how many steps, signals by name with runs and median lead)."""
    for way in WAYS:
        if not (runs := runs_of(folder, way)):
            continue
        leads: dict[str, list[int]] = defaultdict(list)
        delays = []
        for run, shown in runs:
            if shown is None:
                continue
            delays.append(shown - looked_at(run)[2])
            for (name,), mine in warnings_of(run, shown).group_by("signal"):
                leads[str(name)].append(int(mine["lead"].max()))  # type: ignore[arg-type]
        found = {name: (len(each), float(median(each))) for name, each in leads.items()}
        found = dict(sorted(found.items(), key=lambda item: (-item[1][0], -item[1][1])))
        yield way, len(runs), len(delays), round(median(delays)) if delays else 0, found


def report(folder: Path, most: int = 6) -> str:
    """The table in Markdown."""
    lines = ["| way | runs | the loss shows it | after steps | signals before it: runs, median lead in steps |"]
    lines.append("|---|---|---|---|---|")
    for way, runs, spiked, delay, found in rows(folder):
        said = ", ".join(f"{name} {count} ({lead:.0f})" for name, (count, lead) in list(found.items())[:most]) or "none"
        spikes, steps = ("–", "–") if way == "quiet" else (str(spiked), str(delay))
        lines.append(f"| {way}: {WAYS[way]} | {runs} | {spikes} | {steps} | {said} |")
    return "\n".join(lines)


def alarms_of(run: Path) -> dict[str, int]:
    """The first step after the calm at which each alarm rule, replayed over a run's measurements, finds a fault."""
    calm = looked_at(run)[2]
    table = pl.read_parquet(run / "measurements.parquet")
    found: dict[str, int] = {}
    rules = default_rules()
    for (step,), part in table.sort("step").group_by("step", maintain_order=True):
        at = int(step)
        for rule in rules:
            for alarm in rule.on_measurement(part, at):
                found.setdefault(rule.name if at > calm else f"{rule.name}, in the calm", alarm.step)
    return found


def rules_report(folder: Path) -> str:
    """A table in Markdown of alarm rules: in how many runs of a way one came before the loss showed it, how early."""
    names = [rule.name for rule in default_rules()]
    lines = ["| way | runs | the loss shows it | " + " | ".join(names) + " |", "|---" * (len(names) + 3) + "|"]
    for way in WAYS:
        runs, leads = runs_of(folder, way), defaultdict[str, list[int]](list)
        shown_in = [(run, shown) for run, shown in runs if shown is not None]
        for run, shown in shown_in:
            for name, step in alarms_of(run).items():
                if way == "quiet" or step < shown:
                    leads[name.removesuffix(", in the calm")].append(shown - step)
        cells = [f"{len(leads[name])} ({median(leads[name]):.0f})" if leads[name] else "–" for name in names]
        lines.append(f"| {way} | {len(runs)} | {len(shown_in)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "report", "rules"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.command == "train":
        first = options.first_seed
        runs = [(way, first + k) for way, seeds in SEEDS.items() for k in range(seeds)]
        for pieces in ([("calm", first + k) for k in range(max(SEEDS.values()))], runs):
            left = [(way, seed) for way, seed in pieces if not (options.folder / f"{way}-{seed}/outcome.json").exists()]
            for result in run_pieces(partial(train, folder=options.folder), left, options.workers):
                print(result.value or f"{result.piece}: {result.error}", f"{result.seconds:.0f} s", flush=True)
    print(rules_report(options.folder) if options.command == "rules" else report(options.folder))


if __name__ == "__main__":  # workers find functions by the name of their module, and none in __main__
    import_module("rankscope_studies.research.instabilities").main()
