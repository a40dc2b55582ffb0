"""The rules that a monitor hears by: what goes wrong in training, from which size on, and what helps.

Each compares a look with numbers that no healthy network has, with the other layers, or with the run's own
past; how often they are wrong is measured in `benchmarks/alarms.py`.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rankscope.live.monitor.alarms import Action, Fault, Rows, Rule


class Collapse(Rule):
    """Tokens become the same: from some layer on, what they differ by is below a share of them at each layer,
    or has fallen by decades since the first look (`relative_mu`: ||res X||_F / ||X||_F)."""

    name = "tokens collapse"
    metrics = ("relative_mu", "relative_residual")
    helps = "Skips of full weight, LayerNorm, and branches of weight 1/sqrt(depth) hold tokens apart."

    def __init__(
        self, threshold: float = 0.03, decades: float = 2.0, looks: int = 2, action: Action = "warn"
    ) -> None:
        super().__init__(looks, action)
        self.threshold, self.decades = threshold, decades

    def faults(self, rows: Rows) -> dict[str, Fault]:
        """One, of the first layer from which on all are so."""
        metric = rows.one_of(self.metrics)
        now = rows.layers(metric) if metric else {}
        start = self.first("start", _named(now))
        low: list[int] = []
        for layer in sorted(now, reverse=True):
            fallen = _decades(start[str(layer)], now[layer])
            if now[layer] >= self.threshold and fallen < self.decades:
                break
            low.append(layer)
        if not low:
            return {}
        layer, last = low[-1], max(now)
        said = (
            f"tokens collapse from layer {layer} on: they differ by {_short(now[layer])} of their size there "
            f"and {_short(now[last])} at layer {last} ({_short(start[str(layer)])} and "
            f"{_short(start[str(last)])} at the first look)"
        )
        return {"tokens": Fault(layer, None, said)}


class EntropyCollapse(Rule):
    """Attention of a layer falls on single tokens: its entropy, mean over heads, is below a number of nats or
    a share of the highest it ever had (Zhai et al. 2023: training that comes here diverges)."""

    name = "attention entropy collapses"
    metrics = ("entropy",)
    helps = "A norm of queries and keys (QK-norm), a lower learning rate or a longer warm-up helps."

    def __init__(
        self, threshold: float = 0.1, share: float = 0.05, looks: int = 2, action: Action = "warn"
    ) -> None:
        super().__init__(looks, action)
        self.threshold, self.share = threshold, share

    def faults(self, rows: Rows) -> dict[str, Fault]:
        """By layer."""
        now = rows.layers("entropy")
        peak: dict[str, float] = self.memory.setdefault("peak", {})
        found = {}
        for layer, value in now.items():
            highest = peak[str(layer)] = max(value, peak.get(str(layer), value))
            if value < self.threshold or value < self.share * highest:
                said = (
                    f"attention of layer {layer} falls on single tokens: its entropy is {_short(value)} "
                    f"nats, and was {_short(highest)} at the highest"
                )
                found[str(layer)] = Fault(layer, None, said)
        return found


class Sink(Rule):
    """The first token takes most of a layer's attention, mean over heads, and much more than at first."""

    name = "a sink takes a layer over"
    metrics = ("first_token_mass",)
    helps = "A gate on what heads add, or a learnt sink of their own, leaves them something else to do."

    def __init__(
        self, threshold: float = 0.8, risen: float = 0.3, looks: int = 3, action: Action = "warn"
    ) -> None:
        super().__init__(looks, action)
        self.threshold, self.risen = threshold, risen

    def faults(self, rows: Rows) -> dict[str, Fault]:
        """By layer."""
        now = rows.layers("first_token_mass")
        start = self.first("start", _named(now))
        return {
            str(layer): Fault(
                layer, None, f"the first token takes {value:.0%} of the attention of layer {layer} "
                f"({start[str(layer)]:.0%} at the first look)",
            )
            for layer, value in now.items()
            if value > self.threshold and value - start[str(layer)] > self.risen
        }  # fmt: skip


class Size(Rule):
    """Numbers by layer that blow up or vanish: samples that are no numbers at once; else by decades against
    their own last looks (a mean of logarithms in which each look counts a tenth), or by more against the
    first."""

    def __init__(
        self, jump: float = 2.0, drift: float = 5.0, looks: int = 2, action: Action = "warn"
    ) -> None:
        super().__init__(looks, action)
        self.jump, self.drift = jump, drift

    def changes(
        self, what: str, words: str, now: Mapping[int, float], broken: Mapping[int, str]
    ) -> dict[str, Fault]:
        """By layer and direction."""
        found = {}
        for layer, many in broken.items():
            said = f"{words} of layer {layer} are no numbers, in {many} readings"
            found[f"{what} {layer} broken"] = Fault(layer, None, said, f"{what} broken", at_once=True)
        logs = {f"{what} {layer}": math.log10(value) for layer, value in now.items() if value > 0}
        start = self.first("start", logs)
        recent: dict[str, float] = self.memory.setdefault("recent", {})
        for layer, value in now.items():
            name = f"{what} {layer}"
            if name not in start:
                continue  # zero from the first
            log = logs.get(name, -math.inf)
            usual = recent.setdefault(name, start[name])
            since, lately = log - start[name], log - usual
            if abs(lately) > self.jump or abs(since) > self.drift:
                up = lately > 0 if abs(lately) > self.jump else since > 0
                said = (
                    f"{words} of layer {layer} {'blow up' if up else 'vanish'}: {_short(value)} now, "
                    f"{_short(10**usual)} over the last looks, {_short(10 ** start[name])} at the first"
                )
                way = "up" if up else "down"
                found[f"{name} {way}"] = Fault(layer, None, said, f"{what} {way}")
            else:  # what is wrong is not what is usual
                recent[name] = usual + 0.1 * lately
        return found


class TokenSize(Size):
    """Tokens blow up, vanish, or are no numbers: ||X||_F, which is `mu / relative_mu`; without the latter,
    what they differ by."""

    name = "tokens blow up or vanish"
    metrics = ("mu",)
    helps = "A lower learning rate, clipped gradients and a norm before each branch keep their size."

    def faults(self, rows: Rows) -> dict[str, Fault]:
        """By layer and direction."""
        differ, share = rows.layers("mu"), rows.layers("relative_mu")
        if not share:
            return self.changes("mu", "differences between tokens", differ, rows.broken("mu"))
        sizes = {layer: differ[layer] / each for layer, each in share.items() if layer in differ and each > 0}
        return self.changes("size", "tokens", sizes, rows.broken("mu"))


class GradientSize(Size):
    """Gradients of a layer blow up or vanish: against their own past as tokens do; against the median of the
    layers at the same look, by decades; and those of queries and keys against those of values and outputs of
    the same layer, since they are what vanishes where tokens collapse (Noci et al. 2022)."""

    name = "gradients blow up or vanish"
    metrics = ("grad_query_key", "grad_value_output", "grad_mlp", "grad_tokens")
    WORDS = ("gradients of queries and keys", "gradients of values and outputs", "gradients of the MLP",
             "gradients at the tokens")  # fmt: skip
    helps = (
        "Against vanishing gradients skips and norms help; against exploding ones a lower learning rate, a "
        "longer warm-up or clipping."
    )

    def __init__(
        self,
        apart: float = 3.0,
        starved: float = 4.0,
        jump: float = 3.0,
        drift: float = 5.0,
        looks: int = 3,
        action: Action = "warn",
    ) -> None:
        super().__init__(jump, drift, looks, action)
        self.apart, self.starved = apart, starved

    def faults(self, rows: Rows) -> dict[str, Fault]:
        """By metric, layer and direction; of one that is found in several ways, the first is said."""
        found: dict[str, Fault] = {}
        later: dict[str, Fault] = {}
        for metric, words in zip(self.metrics, self.WORDS, strict=True):
            now = rows.layers(metric)
            middle = median(now.values()) if now else 0.0
            for layer, value in now.items():
                off = -_decades(middle, value)
                if abs(off) > self.apart:
                    way, doing = ("up", "blow up") if off > 0 else ("down", "vanish")
                    said = (
                        f"{words} of layer {layer} {doing}: {_short(value)}, where the median of the layers "
                        f"is {_short(middle)}"
                    )
                    found[f"{metric} {layer} {way}"] = Fault(layer, None, said, f"{metric} {way}")
            later |= self.changes(metric, words, now, rows.broken(metric))
        values = rows.layers("grad_value_output")
        for layer, value in rows.layers("grad_query_key").items():
            if _decades(values.get(layer, 0.0), value) > self.starved:
                said = (
                    f"gradients of queries and keys of layer {layer} vanish: {_short(value)}, where those of "
                    f"its values and outputs are {_short(values[layer])}"
                )
                fault = Fault(layer, None, said, "grad_query_key down")
                found.setdefault(f"grad_query_key {layer} down", fault)
        return found | {name: fault for name, fault in later.items() if name not in found}


class DeadHead(Rule):
    """What a head adds to its layer is the same for all tokens, next to what the layer's other heads add, for
    many looks (`head_mu`: ||res X||_F of the head's contribution)."""

    name = "a head has died"
    metrics = ("head_mu",)
    helps = "It may be pruned; more warm-up, or less weight decay on values and outputs, keeps heads alive."

    def __init__(self, threshold: float = 1e-3, looks: int = 5, action: Action = "warn") -> None:
        super().__init__(looks, action)
        self.threshold = threshold

    def faults(self, rows: Rows) -> dict[str, Fault]:
        """By layer and head."""
        found = {}
        for layer, heads in rows.heads("head_mu").items():
            for head, value in heads.items():
                others = [each for other, each in heads.items() if other != head]
                middle = median(others) if others else 0.0
                if value < self.threshold * middle:
                    said = (
                        f"head {head} of layer {layer} tells tokens apart no more: what it adds differs by "
                        f"{_short(value)} between them, the other heads' by {_short(middle)}"
                    )
                    found[f"{layer} {head}"] = Fault(layer, head, said)
        return found


def default_rules(action: Action = "warn") -> list[Rule]:
    """All of them, each with its own thresholds; those whose metrics are not measured say nothing.

    >>> [rule.name for rule in default_rules()][:2]
    ['tokens collapse', 'attention entropy collapses']
    """
    kinds: Sequence[Any] = (Collapse, EntropyCollapse, Sink, TokenSize, GradientSize, DeadHead)
    return [kind(action=action) for kind in kinds]


def _named(numbers: Mapping[int, float]) -> dict[str, float]:
    """Names are what a checkpoint of any format keeps."""
    return {str(name): number for name, number in numbers.items()}


def _decades(before: float, now: float) -> float:
    """By how many powers of ten it has fallen."""
    if before <= 0:
        return 0.0
    return math.inf if now <= 0 else math.log10(before / now)


def _short(number: float) -> str:
    return f"{number:.2g}"
