"""What a page is answered: the curve, the cloud, paths, bounds, each as soon as it is there.

Figures are those of `charts`, over the setting at hand and those that are pinned beside it. What was computed
of a setting is kept for a while, so that a pinned one costs nothing; with it goes its network, so nothing is
kept of one that has left the shelf.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import polars as pl
import torch

from rankscope import charts
from rankscope.errors import RankscopeError
from rankscope.explorer import panels
from rankscope.explorer.jobs import Interruptible
from rankscope.explorer.measured import Measured, measured
from rankscope.explorer.settings import Request, Setting
from rankscope.explorer.shelf import Shelf, sizes
from rankscope.explorer.words import in_words
from rankscope.paths import decompose
from rankscope.paths.lengths import ByLength
from rankscope.paths.views import carried
from rankscope.profiles import Profile
from rankscope.profiles.cloud import cloud_rows
from rankscope.profiles.verdict import sentence
from rankscope.theory import THEOREMS, Certificates, certify
from rankscope.theory.views import EXACT, RANK, BoundView, bounds_sentence

KEPT = 8
"""Settings whose results are kept."""
NOW = "now"
ALONE = "One token alone: there is no other for it to become equal to."
MOST_PATHS = 2.5e10
"""Multiplications of a sum over paths: some seconds."""

Check = Callable[[], None]
Kept = TypeVar("Kept")


class Answers:
    """Answers requests, and remembers what it has computed of the latest settings."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._kept: OrderedDict[tuple[str, Setting], Any] = OrderedDict()

    def parts(self, request: Request, check: Check) -> Iterator[dict[str, Any]]:
        """The parts that were asked for, one after the other. `check` is called on the way, and may raise."""
        settings = {NOW: request.setting, **request.pinned}
        found: dict[str, Measured] = {}
        if "curve" in request.parts or "cloud" in request.parts:
            found = {name: self.measured(setting, check) for name, setting in settings.items()}
        if "curve" in request.parts:
            yield {"part": "curve", **curve_part(found)}
        if "cloud" in request.parts:
            yield {"part": "cloud", **cloud_part(found)}
        focus = settings.get(request.focus, request.setting)
        if "paths" in request.parts:
            yield {"part": "paths", **self.paths_part(focus, check)}
        if "bounds" in request.parts:
            yield {"part": "bounds", **self.bounds_part(focus, check)}

    def measured(self, setting: Setting, check: Check) -> Measured:
        """One pass over a setting."""
        net = self.shelf.network(setting)  # also where nothing is computed: what is in use stays on the shelf
        return self._once("measured", setting, lambda: measured(net, setting, check))

    def lengths(self, setting: Setting, check: Check) -> ByLength:
        """All paths of a setting by length."""
        own = self.measured(setting, check)
        return self._once("paths", setting, lambda: decompose(own.net, own.X).by_length(), check)

    def certificates(self, setting: Setting, check: Check) -> Certificates:
        """Every theorem on a setting."""
        own = self.measured(setting, check)
        norms = self.shelf.norms(self.shelf.network(setting))
        return self._once("bounds", setting, lambda: certify(own.net, own.X, norms=norms), check)

    def paths_part(self, setting: Setting, check: Check) -> dict[str, Any]:
        """Shares by length; or a sentence that says why there are none."""
        own = self.measured(setting, check)
        arch, number = own.net.arch, len(own.words)
        layer = number * arch.width * (4 * arch.width + 2 * arch.mlp_width + 2 * number)
        if arch.layers**2 * layer > MOST_PATHS:
            return {"why": f"Paths are summed by length in time that grows with the square of the depth: "
                           f"{arch.layers} layers of width {arch.width} are too many to wait for here. "
                           "rankscope paths does it."}  # fmt: skip
        try:
            found = self.lengths(setting, check)
        except RankscopeError as error:
            return {"why": why(error)}
        views, whole = found.views(), charts.lengths(found.table)
        numbers = {
            "share": [each.share_of_all for each in views], "paths": [str(each.paths) for each in views]
        }  # fmt: skip
        return {
            "share": panels.alone(whole, 0),
            "residual": panels.alone(whole, 1),
            "said": carried(views),
            "numbers": charts.plain(numbers),
        }

    def bounds_part(self, setting: Setting, check: Check) -> dict[str, Any]:
        """Bounds next to what is measured, a line a theorem; or why there are none."""
        try:
            found = self.certificates(setting, check)
        except RankscopeError as error:
            return {"why": why(error)}
        views = sorted(found.views(), key=lambda each: ("says", "vacuous", "refused").index(each.state))
        lines = [bound_line(each) for each in views]
        return {"figures": bound_figures(found, views), "lines": lines, "said": bounds_sentence(views)}

    def _once(
        self, kind: str, setting: Setting, compute: Callable[[], Kept], check: Check | None = None
    ) -> Kept:
        """What is kept, or computed: with a `check` at every torch operation, where none is made within."""
        key = (kind, setting)
        for old in [old for old in self._kept if not self.shelf.holds(old[1])]:
            del self._kept[old]
        if key not in self._kept:
            with nullcontext() if check is None else Interruptible(check):
                self._kept[key] = compute()
            while len(self._kept) > 3 * KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


def curve_part(found: Mapping[str, Measured]) -> dict[str, Any]:
    """The residual by layer of every setting, logarithmic and linear, and what it says."""
    profile = Profile.join([each.profile(name) for name, each in found.items()])
    curves = profile.views("relative_residual")
    now = found[NOW]
    arch = now.net.arch
    own = {"mlp": arch.mlp != "none", "norm": arch.norm != "none"}  # which there are to take out
    about = {"tokens": len(now.words), **sizes(arch), "arithmetic": now.arithmetic, "own": own}
    about["remedies"] = now.setting.remedies
    figures = {log: charts.curves(curves, log) for log in (True, False)}
    if len(found) == 1:
        for figure in figures.values():
            panels.unnamed(figure)
    return {
        "log": figures[True],
        "linear": figures[False],
        "verdicts": {
            each.variant: ALONE if len(found[each.variant].words) == 1 else sentence(each) for each in curves
        },
        "about": about,
        "numbers": {name: charts.plain(each.curve()) for name, each in found.items()},
    }


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
        tables.append(cloud_rows(shapes, 0, here, first.words))
    table = pl.concat(tables)
    return {
        "plain": panels.beside(charts.cloud(table)),
        "magnified": panels.beside(charts.cloud(table, magnified=True)),
        "words": found[NOW].words,
    }


def bound_line(bound: BoundView) -> dict[str, Any]:
    """What a theorem says here, or why it says nothing."""
    theorem = THEOREMS.get(bound.theorem)
    known = bound.log10_bound is not None and bound.log10_measured is not None
    return {
        "theorem": bound.theorem,
        "source": "" if theorem is None else theorem.source,
        "says": "" if theorem is None else theorem.says,
        "quantity": bound.quantity,
        "side": bound.sign,
        "state": bound.state,
        "layer": bound.layer,
        "bound": bound.bound if known else None,
        "measured": bound.measured if known else None,
        "why": bound.why,
    }


def bound_figures(found: Certificates, bounds: list[BoundView]) -> dict[str, charts.Figure]:
    """A figure for each quantity of which something is proved, that with most bounds first. Bounds that say
    nothing are left to the list, unless there are no others."""
    drawn = [each for each in bounds if each.quantity != RANK and each.theorem != EXACT]
    kept = [each for each in drawn if each.state == "says"] or drawn
    counts = Counter(each.quantity for each in kept)
    names = [each.theorem for each in kept]
    rows = found.table.filter(pl.col("theorem").is_in(names))
    return {
        quantity: charts.bounds(Certificates(rows.filter(quantity=quantity), found.manifest))
        for quantity, _ in counts.most_common()
    }


def why(error: RankscopeError) -> str:
    """An error as the page shows it."""
    text = in_words(str(error))
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
