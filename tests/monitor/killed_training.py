"""A training that saves what it needs to resume, run by `test_measurement.py`: FOLDER STEPS."""

import sys
from pathlib import Path

import torch

from rankscope import Monitor
from rankscope.files import atomic
from tests.monitor.small import encoder, loss_of, tokens

SAVED = 7
"""Steps from checkpoint to checkpoint."""


def main(folder: Path, steps: int) -> None:
    model, kept = encoder(), folder / "checkpoint.pt"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = Monitor(model, ["relative_mu", "entropy"], every=2, probe=tokens(99), run=folder / "run")
    first = 0
    if kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        monitor.load_state_dict(state["monitor"])
        first = state["step"]
    elif monitor.steps == 0 and (folder / "begun").exists():
        monitor.resume(0)
    (folder / "begun").touch()
    for step in range(first, steps):
        loss = loss_of(model, tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
        if (step + 1) % SAVED == 0:
            with atomic(kept) as path:
                torch.save(
                    {
                        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1,
                        "monitor": monitor.state_dict(),
                    },
                    path,
                )  # fmt: skip
        sys.stdout.write(f"{step + 1}\n")
        sys.stdout.flush()
    monitor.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
