"""`python -m tests.attack --networks 20000`: the whole attack, resumed from where it was.

`--feature remedies` (experts, latents, cross, caps, gates) attacks networks that have it, `--confirm` doubled
precision. Exits with 1 where a bar is missed: none wrong, none failed, needless marks of ordinary networks and
refusals each under 0.1%.
"""

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.attack.networks import FEATURES, KINDS
from tests.attack.verdicts import SECONDS, line_of

BAR = 0.001
"""The most of needless marks on ordinary networks, and of networks that are refused."""
Line = dict[str, Any]


def main() -> None:
    """Draw, judge, write each verdict as it comes, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=list(KINDS), help="one kind alone")
    parser.add_argument("--feature", "--features", choices=list(FEATURES), default="none")
    parser.add_argument("--confirm", action="store_true", help="attack doubled precision")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the most that one network may take")
    parser.add_argument("--device", default="cpu", help="where ours runs; on a GPU a replayed pass is attacked")
    parser.add_argument("-o", "--output", type=Path, help="runs/attack.jsonl, or of the feature's name")
    asked = parser.parse_args()
    names = [
        "attack",
        *[asked.feature] * (asked.feature != "none"),
        *["confirm"] * asked.confirm,
        *[asked.device] * (asked.device != "cpu"),
    ]
    output: Path = asked.output or Path("runs") / f"{'_'.join(names)}.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = output.read_text().splitlines() if output.exists() else []
    done = {line["seed"]: line for line in map(json.loads, lines)}
    left = [seed for seed in range(asked.first, asked.first + asked.networks) if seed not in done]
    pool = ProcessPoolExecutor(asked.workers, get_context("spawn"))
    with pool, output.open("a") as file:
        options = (asked.kind, asked.feature, asked.confirm, asked.seconds, asked.device)
        for future in as_completed([pool.submit(line_of, seed, *options) for seed in left]):
            line = future.result()
            done[line["seed"]] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
    found = list(done.values())
    print(told(found))
    bars = missed(found)
    print("\n".join(f"MISSED: {bar}" for bar in bars) or "every bar is met")
    sys.exit(bool(bars))


def told(lines: list[Line]) -> str:
    """The table of what was found, by kind, and every wrong reading."""
    said = [
        f"{'kind':<20}{'networks':>9}{'readings':>10}{'right':>9}{'marked':>9}{'needless':>9}{'beyond':>8}{'WRONG':>7}"
        f"{'refused':>9}{'left':>6}{'failed':>7}{'seconds':>9}"
    ]
    for kind in [*KINDS, "all"]:
        mine = [line for line in lines if kind in (line["kind"], "all")]
        counts = _counts(mine)
        total = sum(counts.values()) or 1
        refused, left, failed = (sum(bool(line[name]) for line in mine) for name in ("refused", "left", "failed"))
        said.append(
            f"{kind:<20}{len(mine):>9}{sum(counts.values()):>10}{counts['right'] / total:>9.2%}"
            f"{counts['marked'] / total:>9.2%}{_needless(mine):>9.2%}{counts['beyond']:>8}{counts['wrong']:>7}"
            f"{refused:>9}{left:>6}{failed:>7}{sum(line['seconds'] for line in mine):>9.0f}"
        )
    for line in sorted(lines, key=lambda line: line["kind"]):
        where = f"{line['kind']}, seed {line['seed']}"
        said += [f"{where}: wrong {wrong}" for wrong in line["wrong"][:3]]
        said += [f"{where}: {name} {line[name]}" for name in ("refused", "left", "failed") if line[name]]
    return "\n".join(said)


def missed(lines: list[Line]) -> list[str]:
    """The bars that are not met, in words."""
    wrong = sum(bool(line["wrong"]) for line in lines)
    failed = sum(bool(line["failed"]) for line in lines)
    refused = sum(bool(line["refused"]) for line in lines) / (len(lines) or 1)
    needless = _needless([line for line in lines if line["kind"] == "ordinary"])
    bars = {
        f"{wrong} networks with a wrong reading that is not marked": wrong > 0,
        f"{failed} networks on which the reference failed": failed > 0,
        f"{refused:.2%} of networks refused": refused >= BAR,
        f"{needless:.2%} needless marks on ordinary networks": needless >= BAR,
    }
    return [bar for bar, is_missed in bars.items() if is_missed]


def _counts(lines: list[Line]) -> Counter[str]:
    return sum((Counter(line["counts"]) for line in lines), Counter())


def _needless(lines: list[Line]) -> float:
    """The share of readings that are marked, and right."""
    return sum(sum(line["needless"].values()) for line in lines) / (sum(_counts(lines).values()) or 1)


if __name__ == "__main__":
    main()
