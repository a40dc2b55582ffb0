"""`python -m tests.theory.attack --drawn N --climbed M [--seed S] [--workers W] [-o FILE]`, resumed where it stopped.

Networks are judged some at a time; what came of each batch becomes a line of FILE. Prints by theorem how many networks
were drawn against it or climbed, on how many its hypotheses are met and it guarantees something, and how many
guarantees are false; and by feature how many networks have it. Ends with 1 where any is false, or certify failed.
"""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.theory.attack.tally import BATCH, Tally, line_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.theory.attack")
    parser.add_argument("--drawn", type=int, default=1000)
    parser.add_argument("--climbed", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long; the next call goes on")
    parser.add_argument("-o", type=Path, default=Path("runs/attack_theorems.jsonl"))
    asked = parser.parse_args()
    asked.o.parent.mkdir(parents=True, exist_ok=True)
    done = {(line["way"], line["batch"]): line for line in _lines(asked.o, asked.seed)}
    numbers = {way: range(math.ceil(getattr(asked, way) / BATCH[way])) for way in BATCH}
    left = [(way, asked.seed, batch) for way in BATCH for batch in numbers[way] if (way, batch) not in done]
    begun = time.monotonic()
    with get_context("spawn").Pool(asked.workers) as pool, asked.o.open("a") as file:
        for line in pool.imap_unordered(line_of, left):
            done[line["way"], line["batch"]] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
            for wrong in line["wrong"]:
                print(wrong, flush=True)
            if time.monotonic() - begun > asked.seconds:
                break
    tally, counts = Tally(), Counter(way for way, _ in done)
    for line in done.values():
        tally.add(line)
    print(f"{', '.join(f'{counts[way] * BATCH[way]} {way}' for way in BATCH)}, seed {asked.seed}")
    print(tally)
    return int(any(not wrong.startswith("misread") for wrong in tally.wrong))


def _lines(path: Path, seed: int) -> Iterator[dict[str, Any]]:
    """What was judged before; a line that was being written when the last call ended is dropped from the file."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    for line in map(json.loads, whole.splitlines()):
        if line["seed"] != seed:
            raise SystemExit(f"{path} is of seed {line['seed']}; got {seed}: name another file")
        yield line


if __name__ == "__main__":
    raise SystemExit(main())
