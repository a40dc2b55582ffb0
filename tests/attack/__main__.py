"""`python -m tests.attack --networks 20000`: the whole attack, resumed from where it was."""

import argparse
import json
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.attack.networks import KINDS
from tests.attack.verdicts import line_of


def main() -> None:
    """Draw, judge, write each verdict as it comes, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=list(KINDS), help="one kind alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/attack.jsonl"))
    asked = parser.parse_args()
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    lines = asked.output.read_text().splitlines() if asked.output.exists() else []
    done = {line["seed"]: line for line in map(json.loads, lines)}
    left = [seed for seed in range(asked.first, asked.first + asked.networks) if seed not in done]
    pool = ProcessPoolExecutor(asked.workers, get_context("spawn"))
    with pool, asked.output.open("a") as file:
        for line in pool.map(line_of, left, [asked.kind] * len(left)):
            done[line["seed"]] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
    print(told(list(done.values())))


def told(lines: list[dict[str, Any]]) -> str:
    """The table of what was found, by kind, and every wrong reading."""
    said = [f"{'kind':<18}{'networks':>9}{'readings':>10}{'marked':>8}{'needless':>9}{'beyond':>8}{'WRONG':>7}"]
    for kind in [*KINDS, "all"]:
        mine = [line for line in lines if kind in (line["kind"], "all")]
        counts: Counter[str] = sum((Counter(line["counts"]) for line in mine), Counter())
        needless = sum(sum(line["needless"].values()) for line in mine)
        total = sum(counts.values()) or 1
        said.append(
            f"{kind:<18}{len(mine):>9}{total:>10}{counts['marked'] / total:>8.2%}{needless / total:>9.2%}"
            f"{counts['beyond']:>8}{counts['wrong']:>7}"
        )
    for line in lines:
        said += [f"{line['kind']}, seed {line['seed']}: {wrong}" for wrong in line["wrong"][:3]]
    return "\n".join(said)


if __name__ == "__main__":
    main()
