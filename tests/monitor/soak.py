"""A long training whose disk fills and whose process is killed, while its run folder is read all along.

    python -m tests.monitor.soak FOLDER [STEPS KILLS]

The run folder lies on a small file system (tmpfs, in a namespace of its own). `soak` trains in processes that it kills,
fills the disk and empties it again, and reads the run as `rankscope follow` does. No code is patched. What must hold at
the end is in `Soaked`.
"""

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import polars as pl
import torch
from torch import nn

import rankscope
from rankscope import Monitor
from rankscope.cli.follow import described
from rankscope.errors import FileError, TrainingWarning
from rankscope.files import atomic
from rankscope.trainings import read_training
from tests.monitor.small import loss_of, tokens

EVERY, SAVED, BYTES = 20, 500, 3 * 2**20
METRICS = ["relative_mu", "mu", "entropy"]
FULL = 3  # the exit status of a training that cannot begin because the disk is full


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def train(folder: Path, run: Path | None, steps: int) -> list[torch.Tensor]:
    """Train to the end from the last checkpoint in `folder`; without `run` nothing is measured. After each measurement
    a line says whether it was written: what a monitor could not write it has said in its notes."""
    network, kept, first = model(), folder / "checkpoint.pt", 0
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    state: dict[str, Any] = torch.load(kept) if kept.exists() else {}
    torch.manual_seed(7)
    monitor = None
    if run is not None:
        probe = tokens(99).float()
        monitor = Monitor(network, METRICS, EVERY, probe, run=run, optimizer=optimizer, alarms=())
    if state:
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        torch.set_rng_state(state["generator"])
    if monitor is not None:
        monitor.load_state_dict(state["monitor"]) if state else monitor.resume(0)
    for step in range(first + 1, steps + 1):
        loss = loss_of(network, tokens(step).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if monitor is None:
            continue
        monitor.step(loss=loss)
        if step % EVERY == 0:
            written = not any("run folder" in note for note in monitor.notes)
            sys.stdout.write(json.dumps({"step": step, "written": written}) + "\n")
            sys.stdout.flush()
        if step % SAVED == 0:
            saved = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            with atomic(kept) as path:
                torch.save({**saved, "monitor": monitor.state_dict(), "generator": torch.get_rng_state()}, path)
    if monitor is not None:
        monitor.close()
    torch.save([weight.detach() for weight in network.parameters()], folder / "weights.pt")
    return [weight.detach() for weight in network.parameters()]


class Reader(Thread):
    """Reads the run again and again, as `follow` does, and notes what should not be."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run_folder, self.ended = run, Event()
        self.readings, self.wrong, self.rows = 0, list[str](), set[int]()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            try:
                training = read_training(self.run_folder)
            except FileError as error:
                if self.readings:
                    self.wrong.append(str(error))
                continue
            described(training, training.metrics[:1])
            self.readings += 1
            self.rows |= set(training.table.group_by("step").len()["len"]) - {0}
            steps = training.table["step"].unique(maintain_order=True).to_list()
            if steps != sorted(set(steps)):
                self.wrong.append(f"steps out of order: {steps[-5:]}")


class Filler(Thread):
    """Fills a disk to the last byte, and empties it again, at times of its own."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.ended, self.filled, self.random = file, Event(), 0, random.Random(1)

    def run(self) -> None:
        while not self.ended.wait(self.random.uniform(0.5, 2.0)):
            self.filled += 1
            try:
                with self.file.open("wb", buffering=0) as file:
                    for size in (2**16, 2**12, 1):  # to the last page, then its last bytes
                        while file.write(b"x" * size) == size and size > 1:
                            pass
            except OSError:
                pass
            self.ended.wait(self.random.uniform(0.3, 1.0))
            self.file.unlink(missing_ok=True)


@dataclass
class Soaked:
    """What came of it."""

    steps: int
    kills: int = 0
    refused: int = 0
    """Starts that were refused because the disk was full just then."""
    filled: int = 0
    readings: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What a reader met that should not be."""
    measured: int = 0
    lost: int = 0
    """Measurements that could not be written, and were said to be lost."""
    missing: list[int] = field(default_factory=list)
    """Steps that were said to be written, and are not there."""
    unsaid: list[int] = field(default_factory=list)
    """Steps that are there, and were said to be lost."""
    same_rows: bool = False
    """Each row is that of an undisturbed run."""
    same_weights: bool = False
    """Weights are those of a run without a monitor, to the last bit."""


def soak(folder: Path, steps: int, kills: int, disk: Path) -> Soaked:
    """Train `steps` steps with the run folder on `disk`, killed so many times."""
    soaked, run, began = Soaked(steps), disk / "run", time.monotonic()
    reader, filler = Reader(run), Filler(disk / "filler")
    reader.start()
    filler.start()
    rng, said, errors = random.Random(steps), dict[int, bool](), folder / "errors.txt"
    command = [sys.executable, "-m", "tests.monitor.soak", "train", str(folder), str(run), str(steps)]
    try:
        while True:
            left, ahead = (steps - max(said, default=0)) // EVERY, kills - soaked.kills  # measurements, kills
            until = rng.randrange(1, max(2, 2 * left // (ahead + 1) - 2)) if ahead else 10**9
            with (
                errors.open("a") as stream,
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream) as process,
            ):
                assert process.stdout is not None
                for number, line in enumerate(process.stdout):
                    report = json.loads(line)
                    said[report["step"]] = report["written"]
                    if number >= until:
                        time.sleep(rng.uniform(0, 0.05))
                        process.kill()
                        break
                code = process.wait()
            soaked.kills += code == -9
            soaked.refused += code == FULL
            if code == 0:
                break
            assert code in (-9, FULL), errors.read_text()[-3000:]
    finally:
        for thread in (filler, reader):
            thread.ended.set()
            thread.join()
    soaked.filled, soaked.readings, soaked.seconds = filler.filled, reader.readings, time.monotonic() - began
    soaked.wrong = reader.wrong + ([f"steps of {sorted(reader.rows)} rows"] if len(reader.rows) > 2 else [])
    table = rankscope.read(run).tables["training"]
    there = set(table["step"].to_list()) - {0}
    soaked.measured, soaked.lost = len(said), sum(not written for written in said.values())
    soaked.missing = sorted(step for step, written in said.items() if written and step not in there)
    soaked.unsaid = sorted(step for step, written in said.items() if not written and step in there)
    (folder / "whole").mkdir()
    train(folder / "whole", folder / "whole" / "run", steps)
    whole = rankscope.read(folder / "whole" / "run").tables["training"]
    whole = whole.filter(pl.col("step").is_in(sorted(there | {0})))
    keys = ["step", "metric", "layer", "head"]
    scalars = pl.col("metric") != "loss"  # a mean since the last measurement: of one that is lost, its steps are, too
    soaked.same_rows = table.filter(scalars).sort(keys).equals(whole.filter(scalars).sort(keys))
    (folder / "without").mkdir()
    plain, weights = train(folder / "without", None, steps), torch.load(folder / "weights.pt")
    soaked.same_weights = all(map(torch.equal, plain, weights))
    return soaked


def on_small_disk(folder: Path, steps: int, kills: int) -> Soaked:
    """The same on a disk of `BYTES`, which only this process and its children see."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    inner = f"{sys.executable} -m tests.monitor.soak soak {folder} {steps} {kills} {disk}"
    script = f"mount -t tmpfs -o size={BYTES} none {disk} && exec {inner}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Soaked(**json.loads(done.stdout.splitlines()[-1]))


def can_mount() -> bool:
    """Whether a file system can be mounted in a namespace of one's own."""
    try:
        return subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["train", folder, run, steps]:
            import warnings

            warnings.simplefilter("ignore", TrainingWarning)
            try:
                train(Path(folder), Path(run), int(steps))
            except FileError as error:  # only before the first measurement
                sys.stderr.write(f"{error}\n")
                sys.exit(FULL)
        case ["soak", folder, steps, kills, disk]:
            sys.stdout.write(json.dumps(vars(soak(Path(folder), int(steps), int(kills), Path(disk)))) + "\n")
        case [folder, *numbers]:
            length, times = map(int, numbers or ("20000", "10"))
            sys.stdout.write(f"{on_small_disk(Path(folder), length, times)}\n")
