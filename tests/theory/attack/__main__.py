"""`python -m tests.theory.attack --drawn N --climbed M --seed S [-o FILE]`, resumed where it stopped.

Prints by theorem how many networks were drawn against it or climbed, on how many its hypotheses are met and
it guarantees something, and how many guarantees are false. Ends with 1 where any is.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rankscope.errors import RankscopeError
from rankscope.files import atomic
from rankscope.nets import Transformer
from rankscope.theory import THEOREMS, certify
from tests.theory.attack.climb import ATTACKS, TOWARDS_ROUNDING, climbed
from tests.theory.attack.draw import AIMED, drawn
from tests.theory.attack.truth import judged

EVERY = 25
"""Networks between two writings of the file."""
STEPS = 60
COLUMNS = ("drawn", "climbed", "met", "guaranteed", "rows", "unchecked", "misread", "false")


class Tally:
    """What has been tried and what came of it, kept in a file."""

    def __init__(self, seed: int, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, Any] = {"seed": seed, "drawn": 0, "climbed": 0, "errors": {}, "false": [], "misread": []}
        self.found["theorems"] = {name: dict.fromkeys(COLUMNS, 0) for name in THEOREMS}
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["seed"] != seed:
                raise SystemExit(f"{path} is of seed {kept['seed']}; got {seed}: name another file")
            self.found = kept

    def save(self) -> None:
        if self.path is not None:
            with atomic(self.path) as temporary:
                temporary.write_text(json.dumps(self.found, indent=1))

    def judge(self, name: str, net: Transformer, X: Tensor) -> None:
        """Certify one sample by every theorem, and compare what is guaranteed with what is true."""
        try:
            certificates = certify(net, X[None])
        except RankscopeError as error:
            self.found["errors"][str(error)] = name
            return
        verdict = judged(net, X, certificates)
        counts = self.found["theorems"]
        said = certificates.guarantees()
        for theorem in certificates.table.filter("met")["theorem"].unique():
            counts[theorem]["met"] += 1
        for theorem, rows in said["theorem"].value_counts().iter_rows():
            counts[theorem]["guaranteed"] += 1
            counts[theorem]["rows"] += rows
        for kind in ("false", "misread", "unchecked"):
            for row in getattr(verdict, kind):
                counts[row["theorem"]][kind] += 1
                if kind != "unchecked":
                    self.found[kind].append({"case": name, **row})
                    print(kind, name, row, flush=True)

    def table(self) -> str:
        lines = [f"{'':22}" + "".join(f"{column:>12}" for column in COLUMNS)]
        for name, counts in self.found["theorems"].items():
            lines.append(f"{name:22}" + "".join(f"{counts[column]:12}" for column in COLUMNS))
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.theory.attack")
    parser.add_argument("--drawn", type=int, default=1000)
    parser.add_argument("--climbed", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", type=Path, default=None)
    asked = parser.parse_args()
    tally = Tally(asked.seed, asked.o)
    found = tally.found
    while found["drawn"] < asked.drawn:
        number = found["drawn"]
        family, (net, X) = drawn(asked.seed, number)
        for theorem in AIMED[family]:
            found["theorems"][theorem]["drawn"] += 1
        tally.judge(f"drawn {number} ({family})", net, X)
        found["drawn"] += 1
        if found["drawn"] % EVERY == 0:
            tally.save()
    attacks = [*ATTACKS, *TOWARDS_ROUNDING]
    while found["climbed"] < asked.climbed:
        number = found["climbed"]
        attack = attacks[number % len(attacks)]
        best, most, _ = climbed(attack, asked.seed + number, STEPS)
        if math.isfinite(most):
            there = attack.keep(best)
            close = replace(there, X=there.X.mean(0) + 1e-7 * (there.X - there.X.mean(0)))
            for place, plain in (("top", there), ("close", close)):
                tally.judge(f"climbed {number} ({attack.theorem}, {place})", plain.net, plain.X.detach())
        found["theorems"][attack.theorem]["climbed"] += 1
        found["climbed"] += 1
        if found["climbed"] % EVERY == 0:
            tally.save()
    tally.save()
    print(f"{found['drawn']} drawn, {found['climbed']} climbed, seed {asked.seed}")
    print(tally.table())
    return int(bool(found["false"]))


if __name__ == "__main__":
    raise SystemExit(main())
