"""What a page is answered: the curve, the cloud, paths, bounds, each as soon as it is there.

Figures are those of `charts`, over the setting at hand and those that are pinned beside it. What was computed
of a setting is kept for a while, so that a pinned one costs nothing; with it goes its network, so nothing is
kept of one that has left the shelf.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import polars as pl
import torch

from rankscope import charts
from rankscope.charts.bounds import QUANTITIES
from rankscope.charts.lengths import counted
from rankscope.errors import RankscopeError
from rankscope.explorer import panels
from rankscope.explorer.jobs import Interruptible
from rankscope.explorer.measured import Measured, measured
from rankscope.explorer.settings import Request, Setting
from rankscope.explorer.shelf import Shelf
from rankscope.explorer.verdict import verdict
from rankscope.figures import power
from rankscope.paths import decompose
from rankscope.paths.lengths import ByLength
from rankscope.profiles import Profile
from rankscope.profiles.cloud import placed
from rankscope.theory import THEOREMS, Certificates, certify

KEPT = 8
"""Settings whose results are kept."""
NOW = "now"
MOST_PATHS = 2.5e10
"""Multiplications of a sum over paths: some seconds."""

Ask = Callable[[], None]
Kept = TypeVar("Kept")


class Answers:
    """Answers requests, and remembers what it has computed of the latest settings."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._kept: OrderedDict[tuple[str, Setting], Any] = OrderedDict()

    def parts(self, request: Request, ask: Ask) -> Iterator[dict[str, Any]]:
        """The parts that were asked for, one after the other. `ask` is called on the way, and may raise."""
        settings = {NOW: request.setting, **request.pinned}
        found: dict[str, Measured] = {}
        if "curve" in request.parts or "cloud" in request.parts:
            found = {name: self.measured(setting, ask) for name, setting in settings.items()}
        if "curve" in request.parts:
            yield {"part": "curve", **curve_part(found)}
        if "cloud" in request.parts:
            yield {"part": "cloud", **cloud_part(found)}
        focus = settings.get(request.focus, request.setting)
        if "paths" in request.parts:
            yield {"part": "paths", **self.paths_part(focus, ask)}
        if "bounds" in request.parts:
            yield {"part": "bounds", **self.bounds_part(focus, ask)}

    def measured(self, setting: Setting, ask: Ask) -> Measured:
        """One pass over a setting."""
        net = self.shelf.network(setting)  # also where nothing is computed: what is in use stays on the shelf
        return self._once("measured", setting, lambda: measured(net, setting, ask))

    def lengths(self, setting: Setting, ask: Ask) -> ByLength:
        """All paths of a setting by length."""
        own = self.measured(setting, ask)

        def compute() -> ByLength:
            with Interruptible(ask):
                return decompose(own.net, own.X).by_length()

        return self._once("paths", setting, compute)

    def certificates(self, setting: Setting, ask: Ask) -> Certificates:
        """Every theorem on a setting."""
        own = self.measured(setting, ask)

        def compute() -> Certificates:
            with Interruptible(ask):
                return certify(own.net, own.X, norms=self.shelf.norms(self.shelf.network(setting)))

        return self._once("bounds", setting, compute)

    def paths_part(self, setting: Setting, ask: Ask) -> dict[str, Any]:
        """Shares by length; or a sentence that says why there are none."""
        own = self.measured(setting, ask)
        arch, number = own.net.arch, len(own.words)
        layer = number * arch.width * (4 * arch.width + 2 * arch.mlp_width + 2 * number)
        if arch.layers**2 * layer > MOST_PATHS:
            return {"why": f"Paths are summed by length in time that grows with the square of the depth: "
                           f"{arch.layers} layers of width {arch.width} are too many to wait for here. "
                           "rankscope paths does it."}  # fmt: skip
        try:
            found = self.lengths(setting, ask)
        except RankscopeError as error:
            return {"why": sentence(error)}
        table = found.table
        shares = table.filter(start="all")["share"].to_list()
        numbers = {"share": shares, "paths": [str(count) for count in found.counts]}
        whole = charts.lengths(table)
        return {
            "share": panels.alone(whole, 0),
            "residual": panels.alone(whole, 1),
            "said": lengths_said(found, shares),
            "numbers": charts.plain(numbers),
        }

    def bounds_part(self, setting: Setting, ask: Ask) -> dict[str, Any]:
        """Bounds next to what is measured, a line a theorem; or why there are none."""
        try:
            found = self.certificates(setting, ask)
        except RankscopeError as error:
            return {"why": sentence(error)}
        lines = bound_lines(found)
        return {"figures": bound_figures(found, lines), "lines": lines, "said": bounds_said(lines)}

    def _once(self, kind: str, setting: Setting, compute: Callable[[], Kept]) -> Kept:
        key = (kind, setting)
        for old in [old for old in self._kept if not self.shelf.holds(old[1])]:
            del self._kept[old]
        if key not in self._kept:
            self._kept[key] = compute()
            while len(self._kept) > 3 * KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


def curve_part(found: Mapping[str, Measured]) -> dict[str, Any]:
    """The residual by layer of every setting, logarithmic and linear, and what it says."""
    profile = Profile.join([each.profile(name) for name, each in found.items()])
    now = found[NOW]
    arch = now.net.arch
    figures = {log: charts.curves(profile, "relative_residual", log=log) for log in (True, False)}
    if len(found) == 1:
        for figure in figures.values():
            panels.unnamed(figure)
    return {
        "log": figures[True],
        "linear": figures[False],
        "verdicts": {name: verdict(each.curve(), len(each.words)) for name, each in found.items()},
        "about": {
            "tokens": len(now.words), "layers": arch.layers, "width": arch.width, "heads": arch.heads,
            "mask": arch.mask, "divisor": arch.divisor, "arithmetic": now.arithmetic,
            "skip": arch.attention_skip, "own": own_parts(now.net),
        },
        "numbers": {name: charts.plain(each.curve()) for name, each in found.items()},
    }  # fmt: skip


def own_parts(net: Any) -> dict[str, Any]:
    """Which parts there are to take out."""
    return {"mlp": net.arch.mlp != "none", "norm": net.arch.norm != "none"}


def cloud_part(found: Mapping[str, Measured]) -> dict[str, Any]:
    """The tokens of every setting: those that begin alike in one plane, others each in its own."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, each in found.items():
        groups.setdefault(each.starts_like, []).append(name)
    tables = []
    for names in groups.values():
        first = found[names[0]]
        here = torch.arange(len(first.words))
        shapes = [
            (name, shape._replace(R=shape.R.nan_to_num(0.0)))
            for name in names
            for shape in found[name].shapes
        ]
        tables.append(placed(shapes, 0, here, first.words))
    table = pl.concat(tables)
    return {
        "plain": panels.beside(charts.cloud(table)),
        "magnified": panels.beside(charts.cloud(table, magnified=True)),
        "words": found[NOW].words,
    }


def lengths_said(found: ByLength, shares: list[float]) -> str:
    """Which length carries most."""
    total = sum(found.counts)
    if not total:
        return "No path leads from the text to the output: what comes out starts at biases."
    most = max(range(len(shares)), key=lambda length: abs(shares[length]))
    share = f"{shares[most]:.0%}" if abs(shares[most]) < 10 else f"{shares[most]:.3g} times"
    carried = f"those of length {most} carry {share} of the output"
    paths = counted(str(total))
    return f"{paths[:1].upper()}{paths[1:]}; {carried}."


def bound_lines(found: Certificates) -> list[dict[str, Any]]:
    """A line per theorem: what it says here, or why it says nothing."""
    lines = []
    for row in found.summary().iter_rows(named=True):
        theorem = THEOREMS[row["theorem"]]
        rank = row["quantity"] == "affine_rank"
        number = (lambda k: f"{10**k:.0f}") if rank else power
        known = row["log10_bound"] is not None and row["log10_measured"] is not None
        state = "refused" if not row["met_to"] else "says" if row["says_at"] is not None else "vacuous"
        lines.append(
            {
                "theorem": theorem.name,
                "source": theorem.source,
                "says": theorem.says,
                "quantity": row["quantity"],
                "side": "≤" if row["kind"] == "upper" else "≥",
                "state": state,
                "layer": row["says_at"] or row["met_to"] or None,
                "bound": number(row["log10_bound"]) if known else None,
                "measured": number(row["log10_measured"]) if known else None,
                "why": row["why"],
            }
        )
    return sorted(lines, key=lambda line: ("says", "vacuous", "refused").index(line["state"]))


def bound_figures(found: Certificates, lines: list[dict[str, Any]]) -> dict[str, charts.Figure]:
    """A figure for each quantity of which something is proved, that with most bounds first. Bounds that say
    nothing are left to the list, unless there are no others."""
    drawn = [line for line in lines if line["quantity"] in QUANTITIES and line["theorem"] != "exact-factors"]
    kept = [line for line in drawn if line["state"] == "says"] or drawn
    counts = Counter(line["quantity"] for line in kept)
    names = [line["theorem"] for line in kept]
    return {
        quantity: charts.bounds(
            Certificates(
                found.table.filter(pl.col("theorem").is_in(names), quantity=quantity), found.manifest
            )
        )
        for quantity, _ in counts.most_common()
    }


def bounds_said(lines: list[dict[str, Any]]) -> str:
    """How many theorems say something."""
    states = [line["state"] for line in lines]
    count = {state: states.count(state) for state in ("says", "vacuous", "refused")}
    one = {state: number == 1 for state, number in count.items()}
    return (
        f"{count['says']} {'theorem says' if one['says'] else 'theorems say'} something here, "
        f"{count['vacuous']} {'holds and says' if one['vacuous'] else 'hold and say'} nothing, "
        f"{count['refused']} {'does' if one['refused'] else 'do'} not apply."
    )


def sentence(error: RankscopeError) -> str:
    """An error as the page shows it."""
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
