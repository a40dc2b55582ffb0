"""What came of networks: certified, judged against the truth, and counted."""

import math
from collections import Counter
from dataclasses import replace
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
BATCH = {"drawn": 25, "climbed": 2}
"""Networks of a line."""
OF_THEOREMS = ("drawn", "climbed", "met", "guaranteed", "rows", "unchecked", "misread", "false")
OF_FEATURES = ("networks", "refused", "guaranteed", "rows")


class Tally:
    """What came of some networks: counts by theorem and by feature, and what is wrong."""

    def __init__(self) -> None:
        self.theorems: dict[str, Counter[str]] = {name: Counter() for name in THEOREMS}
        self.features: dict[str, Counter[str]] = {}
        self.wrong: list[str] = []

    def judge(self, name: str, net: Transformer, X: Tensor, padding: Tensor | None = None) -> Counter[str]:
        """Certify one sample by every theorem, and compare what is guaranteed with what is true."""
        try:
            certificates = certify(net, X[None], None if padding is None else padding[None])
        except RankscopeError:
            return Counter(networks=1, refused=1)
        verdict, rows = judged(net, X, certificates, padding), certificates.guarantees()
        for theorem in certificates.table.filter("met")["theorem"].unique():
            self.theorems[theorem]["met"] += 1
        for theorem, count in rows["theorem"].value_counts().iter_rows():
            self.theorems[theorem].update(guaranteed=1, rows=count)
        for kind in ("false", "misread", "unchecked"):
            for row in getattr(verdict, kind):
                self.theorems[row["theorem"]][kind] += 1
                if kind != "unchecked":
                    self.wrong.append(f"{kind} {name}: {row}")
        return Counter(networks=1, guaranteed=int(len(rows) > 0), rows=len(rows))

    def drawn(self, seed: int, number: int) -> None:
        """Judge a network with features."""
        family, features, net, X, padding = featured(seed, number)
        names = [*features, *(["padding"] if padding is not None else []), "all"]
        for theorem in AIMED[family]:
            self.theorems[theorem]["drawn"] += 1
        counts = self.judge(f"drawn {number} ({family}; {', '.join(names[:-1])})", net, X, padding)
        for name in names:
            self.features.setdefault(name, Counter()).update(counts)

    def climbed(self, seed: int, number: int) -> None:
        """Judge what gradient ascent against one theorem came to, and the same with tokens close together."""
        attacks = [*ATTACKS, *TOWARDS_ROUNDING]
        attack = attacks[number % len(attacks)]
        best, most, _ = climbed(attack, seed + number, STEPS)
        self.theorems[attack.theorem]["climbed"] += 1
        if math.isfinite(most):
            there = attack.keep(best)
            close = replace(there, X=there.X.mean(0) + 1e-7 * (there.X - there.X.mean(0)))
            for place, plain in (("top", there), ("close", close)):
                self.judge(f"climbed {number} ({attack.theorem}, {place})", plain.net, plain.X.detach())

    def add(self, line: dict[str, Any]) -> None:
        """Add what a line of the file has."""
        for kind, counted in (("theorems", self.theorems), ("features", self.features)):
            for name, counts in line[kind].items():
                counted.setdefault(name, Counter()).update(counts)
        self.wrong += line["wrong"]

    def __str__(self) -> str:
        tables = ((OF_THEOREMS, self.theorems), (OF_FEATURES, dict(sorted(self.features.items()))))
        lines = []
        for columns, counted in tables:
            lines += ["", f"{'':22}" + "".join(f"{column:>12}" for column in columns)]
            lines += [
                f"{name:22}" + "".join(f"{counts[column]:12}" for column in columns) for name, counts in counted.items()
            ]
        return "\n".join([*lines, "", *self.wrong])


def line_of(work: tuple[str, int, int]) -> dict[str, Any]:
    """The line of one batch: (drawn or climbed, the seed, the number of the batch)."""
    torch.set_num_threads(1)
    (way, seed, batch), tally = work, Tally()
    for number in range(batch * BATCH[way], (batch + 1) * BATCH[way]):
        try:
            getattr(tally, way)(seed, number)
        except Exception as error:  # whatever it is, it is a defect, and the others are still to be judged
            tally.wrong.append(f"failed {way} {number}: {type(error).__name__}: {error}")
    theorems = {name: counts for name, counts in tally.theorems.items() if counts}
    return {
        "way": way,
        "seed": seed,
        "batch": batch,
        "theorems": theorems,
        "features": tally.features,
        "wrong": tally.wrong,
    }
