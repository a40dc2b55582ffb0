"""`python -m tests.theory.attack --drawn N --climbed M [--seed S] [--workers W] [-o FILE]`, resumed where it stopped.

Each network becomes a line of FILE as soon as it is judged. Prints by theorem how many networks were drawn against it
or climbed, on how many its hypotheses are met and it guarantees something, and how many guarantees are false; and by
feature how many networks have it. Ends with 1 where any guarantee is false, or certify failed other than by a refusal.
"""

import argparse
import json
import math
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import RankscopeError
from rankscope.nets import Transformer
from rankscope.theory import THEOREMS, certify
from tests.theory.attack.climb import ATTACKS, TOWARDS_ROUNDING, climbed
from tests.theory.attack.draw import AIMED, featured
from tests.theory.attack.truth import judged

STEPS = 60
COLUMNS = ("drawn", "climbed", "met", "guaranteed", "rows", "unchecked", "misread", "false")
Line = dict[str, Any]


def judge(name: str, net: Transformer, X: Tensor, padding: Tensor | None = None) -> Line:
    """Certify one sample by every theorem, and compare what is guaranteed with what is true."""
    line: Line = {"case": name, "counts": {}, "false": [], "misread": []}
    try:
        certificates = certify(net, X[None], None if padding is None else padding[None])
    except RankscopeError as error:
        return line | {"refused": str(error)}
    counts = {theorem: Counter(met=1) for theorem in certificates.table.filter("met")["theorem"].unique()}
    for theorem, rows in certificates.guarantees()["theorem"].value_counts().iter_rows():
        counts[theorem] += Counter(guaranteed=1, rows=rows)
    verdict = judged(net, X, certificates, padding)
    for kind in ("false", "misread", "unchecked"):
        for row in getattr(verdict, kind):
            counts[row["theorem"]][kind] += 1
            if kind != "unchecked":
                line[kind].append(row)
    return line | {"counts": {theorem: dict(each) for theorem, each in counts.items()}}


def line_of(work: tuple[str, int, int]) -> Line:
    """The line of one network: (drawn or climbed, the seed, its number)."""
    torch.set_num_threads(1)
    way, seed, number = work
    try:
        lines = list(_drawn(seed, number) if way == "drawn" else _climbed(seed, number))
    except Exception as error:  # whatever it is, it is a defect, and the others are still to be judged
        lines = [{"case": f"{way} {number}", "failed": f"{type(error).__name__}: {error}"}]
    return {"way": way, "number": number, "lines": lines}


def _drawn(seed: int, number: int) -> list[Line]:
    family, features, net, X, padding = featured(seed, number)
    told = (*features, *(["padding"] if padding is not None else []))
    line = judge(f"drawn {number} ({family}; {', '.join(told)})", net, X, padding)
    return [line | {"features": told, "aimed": AIMED[family], "column": "drawn"}]


def _climbed(seed: int, number: int) -> list[Line]:
    attacks = [*ATTACKS, *TOWARDS_ROUNDING]
    attack = attacks[number % len(attacks)]
    best, most, _ = climbed(attack, seed + number, STEPS)
    lines: list[Line] = [{"case": f"climbed {number}", "aimed": [attack.theorem], "column": "climbed"}]
    if math.isfinite(most):
        there = attack.keep(best)
        close = replace(there, X=there.X.mean(0) + 1e-7 * (there.X - there.X.mean(0)))
        for place, plain in (("top", there), ("close", close)):
            lines.append(judge(f"climbed {number} ({attack.theorem}, {place})", plain.net, plain.X.detach()))
    return lines


def table(lines: list[Line]) -> str:
    """By theorem and by feature, what came of all lines; then whatever is wrong."""
    totals = {name: Counter[str]() for name in THEOREMS}
    having: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for line in lines:
        for theorem in line.get("aimed", ()):
            totals[theorem][line["column"]] += 1
        for theorem, counts in line.get("counts", {}).items():
            totals[theorem].update(counts)
        rows = sum(counts.get("rows", 0) for counts in line.get("counts", {}).values())
        for feature in line.get("features", ()):
            counted = Counter(networks=1, refused="refused" in line, guaranteed=rows > 0, rows=rows)
            having.setdefault(feature, Counter()).update(counted)
        wrong += [
            f"{kind.upper()} {line['case']}: {row}" for kind in ("false", "misread") for row in line.get(kind, ())
        ]
        wrong += [f"FAILED {line['case']}: {line['failed']}"] if "failed" in line else []
    said = [f"{'':22}" + "".join(f"{column:>12}" for column in COLUMNS)]
    said += [f"{name:22}" + "".join(f"{counts[column]:12}" for column in COLUMNS) for name, counts in totals.items()]
    columns = ("networks", "refused", "guaranteed", "rows")
    said += ["", f"{'':22}" + "".join(f"{column:>12}" for column in columns)]
    said += [f"{name:22}" + "".join(f"{having[name][column]:12}" for column in columns) for name in sorted(having)]
    return "\n".join([*said, *wrong])


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
    done = _read(asked.o, asked.seed)
    works = [("drawn", asked.seed, number) for number in range(asked.drawn)]
    works += [("climbed", asked.seed, number) for number in range(asked.climbed)]
    left = [work for work in works if (work[0], work[2]) not in done]
    begun = time.monotonic()
    with get_context("spawn").Pool(asked.workers) as pool, asked.o.open("a") as file:
        for result in pool.imap_unordered(line_of, left, chunksize=4):
            done[result["way"], result["number"]] = result
            file.write(json.dumps(result | {"seed": asked.seed}) + "\n")
            file.flush()
            if time.monotonic() - begun > asked.seconds:
                break
    lines = [line for result in done.values() for line in result["lines"]]
    counts = Counter(way for way, _ in done)
    print(f"{counts['drawn']} drawn, {counts['climbed']} climbed, seed {asked.seed}")
    print(table(lines))
    return int(any(line.get("false") or "failed" in line for line in lines))


def _read(path: Path, seed: int) -> dict[tuple[str, int], Line]:
    """What was judged before; a line that was being written when the last call ended is left out."""
    kept: dict[tuple[str, int], Line] = {}
    if not path.exists():
        return kept
    whole = path.read_text()
    if whole and not whole.endswith("\n"):
        path.write_text(whole[: whole.rfind("\n") + 1])
    for line in map(json.loads, whole[: whole.rfind("\n") + 1].splitlines()):
        if line["seed"] != seed:
            raise SystemExit(f"{path} is of seed {line['seed']}; got {seed}: name another file")
        kept[line["way"], line["number"]] = line
    return kept


if __name__ == "__main__":
    raise SystemExit(main())
