"""The lab: `python -m benchmarks.lab [cuda]`, each section in turn.

The same losses on the accelerator as on the CPU, and recorded as step by step; steps a second, alone and
several seeds at once, recorded or not; on the CPU what can be had there.
"""

import sys
import time
from contextlib import suppress
from itertools import islice, product

import torch

from rankscope.errors import ArchitectureError
from rankscope.lab import Training, release_memory
from rankscope.workers import threads_set
from rankscope_studies.remedies.trainings import EVERY
from rankscope_studies.trial import Trial, TrialSizes

SMALL = TrialSizes(width=32, context=16, batch=4, steps=5)


def main() -> None:
    """On the device that is named."""
    device = (*sys.argv[1:], "cpu")[0]
    if device != "cpu":
        print(torch.cuda.get_device_name(), flush=True)
        agreement(device)
        recorded(device)
    speed(device)


def agreement(device: str) -> None:
    """The largest difference in losses of 5 steps in float64 from those on the CPU: below 1e-9."""
    for remedy in EVERY:
        runs = [
            _training(remedy, where, SMALL, (0, 1), capture=False, dtype=torch.float64).finish()
            for where in ("cpu", device)
        ]
        found = [torch.stack(each.losses).cpu() for each in runs]
        why = getattr(runs[1].learner, "refusal", None)
        said = "" if why is None else f" (one after the other: {why})"
        gap = float((found[0] - found[1]).abs().max())
        print(f"  {remedy:16} {gap:.0e}{'' if gap < 1e-9 else '  TOO FAR'}{said}", flush=True)


def recorded(device: str) -> None:
    """The largest difference in losses of 12 steps, recorded and step by step, in float32: some 1e-6."""
    sizes = TrialSizes(width=32, context=16, batch=4, steps=12)
    for remedy in EVERY:
        runs = [_training(remedy, device, sizes, (0, 1), capture=each) for each in (True, False)]
        losses = [torch.stack(each.finish().losses).cpu() for each in runs]
        gap = float((losses[0] - losses[1]).abs().max())
        why = runs[0].captured.refusal if runs[0].captured is not None else "not on this device"
        print(f"  {remedy:16} {gap:.0e}  {'recorded' if why is None else why}", flush=True)


def speed(device: str) -> None:
    """Steps a second at the sizes of the table."""
    depths, steps = ((6, 48), 30) if device != "cpu" else ((6,), 3)
    kinds = (False, True) if device != "cpu" else (False,)
    for remedy, depth, seeds, capture in product(("none", "contranorm"), depths, ((0,), (0, 1, 2)), kinds):
        made = _training(remedy, device, TrialSizes(steps=steps + 6), seeds, capture, depth)
        going = iter(made)
        list(islice(going, 6 if device != "cpu" else 1))
        _wait(device)
        start = time.perf_counter()
        list(islice(going, steps))
        _wait(device)
        rate = steps / (time.perf_counter() - start)
        memory = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0.0
        how = "recorded" if capture else "step by step"
        about = f"{remedy:9} depth {depth:2}, {len(seeds)} seeds, {how:12}"
        print(f"  {about} {rate:7.1f} steps/s {memory:5.1f} GB", flush=True)
        del made, going
        release_memory(device)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()


def _training(
    remedy: str,
    device: str,
    sizes: TrialSizes,
    seeds: tuple[int, ...],
    capture: bool,
    depth: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Training:
    """In the first setting that takes it."""
    for setting in ("pre", "post"):
        with suppress(ArchitectureError):
            return Trial(remedy, setting, depth, seeds, sizes).training(device, capture, dtype)
    return Trial(remedy, "images", depth, seeds, sizes).training(device, capture, dtype)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    with threads_set(1):
        main()
