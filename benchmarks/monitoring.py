"""What watching a training costs: GPT-2, AdamW, 4 x 128 tokens in float32; on a GPU networks of `SIZES` in bfloat16.

    python -m benchmarks.monitoring
    python -m benchmarks.monitoring cuda gpt2 2048    # of `SIZES`, and tokens of a sample

A step that is measured, the second time, is timed beside a step of the bare loop, taking turns. What is
added to the steps between is some Python, the same for any width: on the CPU it is timed where it can be
seen, in a loop of as many layers that are narrow; a GPU does not wait for it, and the loop itself is timed.
Measured every E steps the loop takes 1 + ((E - 1) added + measured - bare) / (E bare).
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.peers import gpt2
from benchmarks.timing import Row, report_rise, rise_of_memory
from rankscope_studies.research.instabilities import GPT

SIZES = {"gpt2": (12, 768, 12, 1 << 15), "1b": (24, 1792, 14, 1 << 15)}
"""Layers, width, heads and tokens of a step of networks on a GPU, which go through torch's flash attention."""
QUIET = 2
"""Steps that are not measured, before one that is."""
PROBED = 1 << 12
"""Tokens of a probe, if a batch has more."""
ATTENTION = ["largest_logit", "entropy", "effective_keys", "first_token_mass"]
EVERYTHING = ["relative_residual", "relative_mu", "mu", "activation_ratio", "token_norm_ratio", *ATTENTION]


class Loop:
    """A training loop as people write it; `after` is what a tool asks for at the end of a step."""

    def __init__(self, small: bool = False, device: str = "cpu", narrow: bool = False, sizes: str = "") -> None:
        torch.manual_seed(0)
        words = 99 if narrow else 50257
        shape = (1, 8) if small or narrow else (4, 128)
        if device == "cuda" and not small:
            name, tokens = sizes.split()
            layers, width, heads, together = SIZES[name]
            shape = (max(1, together // int(tokens)), int(tokens))
            self.model: torch.nn.Module = GPT(words, shape[1], layers, width, heads).to(device)
        else:
            size = {"n_embd": 32, "n_head": 2, "vocab_size": words, "n_layer": 2 if small else 12} if narrow else {}
            self.model = gpt2(small, "GPT2LMHeadModel", **size).train().to(device)
        self.argument = "ids" if isinstance(self.model, GPT) else "input_ids"
        self.ids = torch.randint(0, words, shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.cast: AbstractContextManager[Any] = (
            torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
        )
        self.after: Callable[[torch.Tensor], object] = lambda loss: None
        self.wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step(self) -> None:
        """Forward, backward, and a step of the optimiser."""
        with self.cast:
            logits = self.model(self.ids)
            logits = logits if isinstance(logits, torch.Tensor) else logits.logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        with self.cast:  # a probe runs in the arithmetic of the training
            self.after(loss.detach())
        self.optimizer.zero_grad()

    def timed(self) -> float:
        """Seconds of a step."""
        self.wait()
        start = time.perf_counter()
        self.step()
        self.wait()
        return time.perf_counter() - start


@contextmanager
def monitored(loop: Loop, **options: Any) -> Iterator[None]:
    """Our monitor; the step after `QUIET` others is measured."""
    from rankscope import Monitor

    with (
        TemporaryDirectory() as folder,
        Monitor(loop.model, every=QUIET + 1, run=f"{folder}/run", alarms=(), **options) as monitor,
    ):
        loop.after = lambda loss: monitor.step(loss=loss)
        yield


@contextmanager
def histograms(loop: Loop) -> Iterator[None]:
    """TensorBoard's, of weights and gradients."""
    from torch.utils.tensorboard import SummaryWriter

    steps = 0

    def after(loss: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        if steps % (QUIET + 1) == 0:
            writer.add_scalar("loss", loss, steps)
            for name, each in loop.model.named_parameters():
                writer.add_histogram(f"weights/{name}", each, steps)
                writer.add_histogram(f"gradients/{name}", each.grad, steps)

    with TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        loop.after = after
        yield


@contextmanager
def wandb_watched(loop: Loop) -> Iterator[None]:
    """Weights & Biases' `watch` of weights and gradients, offline."""
    import wandb

    with TemporaryDirectory() as folder:
        settings = wandb.Settings(silent=True, console="off")
        run = wandb.init(mode="offline", dir=folder, settings=settings)
        run.watch(loop.model, log="all", log_freq=QUIET + 1)
        loop.after = lambda loss: run.log({"loss": float(loss)})
        try:
            yield
        finally:
            run.unwatch(loop.model)
            run.finish()


def cases(loop: Loop) -> dict[str, tuple[int, Callable[[], AbstractContextManager[None]]]]:
    """(every how many steps it measures, what is put around the loop), by what it is."""
    probe = {loop.argument: loop.ids[: max(1, PROBED // loop.ids.shape[1])]}
    found: dict[str, tuple[int, Callable[[], AbstractContextManager[None]]]] = {
        "probe every 100": (100, lambda: monitored(loop, probe=probe)),
        "and entropy, gradients, updates": (
            100,
            lambda: monitored(
                loop,
                probe=probe,
                metrics=["relative_residual", "relative_mu", "mu", "entropy"],
                optimizer=loop.optimizer,
            ),
        ),
        "everything every 100": (
            100,
            lambda: monitored(loop, probe=probe, metrics=EVERYTHING, optimizer=loop.optimizer, spectra=True),
        ),
        "and Jacobians of blocks": (100, lambda: monitored(loop, probe=probe, jacobians=True)),
        "training batches every 10": (10, lambda: monitored(loop)),
        "attention statistics every 10": (10, lambda: monitored(loop, metrics=ATTENTION)),
    }
    if find_spec("tensorboard"):
        found["TensorBoard histograms every 100"] = 100, lambda: histograms(loop)
    if find_spec("wandb"):
        found["wandb.watch every 100"] = 100, lambda: wandb_watched(loop)
    return found


def rows(small: bool = False, device: str = "cpu", rounds: int = 3, sizes: str = "gpt2 2048") -> list[Row]:
    """(what, against what, ratio of the loop's time)."""
    loop = Loop(small, device, sizes=sizes)
    bare, measured, quiet = _least(loop, 1 if small else rounds)
    empty = bare
    if device == "cpu":
        empty, _, quiet = _least(Loop(small, narrow=True), 1 if small else 10 * rounds)
    against, found = f"bare loop, {bare:.3f} s a step", []
    for name, (every, _) in cases(loop).items():
        added = (every - 1) * max(quiet[name] - empty, 0.0) + measured[name] - bare
        found.append((name, against, 1 + added / (every * bare)))
        found.append((f"  a step that is measured ({name})", against, measured[name] / bare))
    return found


def _least(loop: Loop, rounds: int) -> tuple[float, dict[str, float], dict[str, float]]:
    """Seconds of a bare step, and by case of one that is measured and of one that is not."""
    ways = cases(loop)
    bare = float("inf")
    measured, quiet = dict.fromkeys(ways, bare), dict.fromkeys(ways, bare)
    loop.step()
    for _ in range(rounds):
        for name, (_, around) in ways.items():
            bare = min([bare, *(loop.timed() for _ in range(QUIET))])
            with around():
                for _ in range(QUIET + 1):
                    loop.step()
                *between, last = (loop.timed() for _ in range(QUIET + 1))
            quiet[name], measured[name] = min(quiet[name], *between), min(measured[name], last)
            loop.after = lambda loss: None
    return bare, measured, quiet


def memory(device: str = "cpu", sizes: str = "gpt2 2048") -> list[tuple[str, float]]:
    """(what, MB above the peak of a bare step)."""
    if device == "cpu":
        names = [*cases(Loop(small=True))]
        return [(name, rise_of_memory("-m", "benchmarks.monitoring", "rise", name)) for name in names]
    loop, found = Loop(device=device, sizes=sizes), []

    def peak() -> float:
        torch.cuda.reset_peak_memory_stats()
        loop.step()
        return torch.cuda.max_memory_allocated() / 2**20

    loop.step()
    before = peak()
    for name, (_, around) in cases(loop).items():
        with around():
            found.append((name, max(peak() for _ in range(QUIET + 1)) - before))
        loop.after = lambda loss: None
    return found


def main() -> None:
    """Print both tables, or, asked for a rise, that of one case alone."""
    if sys.argv[1:2] == ["rise"]:
        loop = Loop()
        around = cases(loop)[sys.argv[2]][1]

        def measured_step() -> None:
            with around():
                for _ in range(QUIET + 1):
                    loop.step()
            loop.after = lambda loss: None

        loop.step()
        report_rise(loop.step, measured_step)
        return
    device, *words = sys.argv[1:] or ["cpu"]
    sizes = " ".join(words) or "gpt2 2048"
    for what, against, ratio in rows(device=device, sizes=sizes):
        print(f"  {what:60} / {against:32} {ratio:6.3f}")
    for what, rise in memory(device, sizes):
        print(f"  {what:60} +{rise:.1f} MB")


if __name__ == "__main__":
    main()
