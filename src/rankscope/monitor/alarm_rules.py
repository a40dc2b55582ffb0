"""The built-in alarm rules: what goes wrong in training, from which size on, and what helps.

`Monitor` uses `default_rules()` unless it is given `alarms=`. Each rule compares a measurement with numbers
that no healthy network has, with the other layers, or with the run's own past; `rankscope_studies.research.alarms`
measures how often they are wrong. A rule is a dataclass: its fields are its thresholds, and the `patience` and `action`
of `AlarmRule`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rankscope.monitor.alarms import Action, AlarmRule, Fault, MeasurementRows
from rankscope.plugins import Group

WAYS = {True: ("up", "blow up"), False: ("down", "vanish")}  # whether a size is too large: the way, and in words

WEIGHTS = {"query_key": "queries and keys", "value_output": "values and outputs", "mlp": "the MLP"}
"""Kinds of weights, by the ends of names of metrics."""


@dataclass(eq=False, repr=False)
class Collapse(AlarmRule):
    """Tokens become the same: from some layer to the last, `relative_mu` (||res X||_F / ||X||_F) is small."""

    name = "tokens collapse"
    metrics = ("relative_mu", "relative_residual")
    advice = (
        "Skips of full weight, and branches of weight 1/sqrt(depth) beside them, hold tokens apart. (Post-norm "
        "networks may pass through this while the learning rate warms up.)"
    )
    threshold: float = 0.03  # at each of these layers it is below this,
    decades: float = 2.0  # or has fallen by so many powers of ten since the first measurement
    patience: int = 2
    action: Action = "warn"

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        """One fault, at the first of the layers up to the last that have all collapsed. Layers with a sample that is
        not finite are skipped (`rows.layers` leaves them out), so no value here is NaN. A value below its floor counts
        as the floor, and is said to be there."""
        metric = next((name for name in self.metrics if name in rows.by_metric), None)
        floors = rows.layers(metric, "floor") if metric else {}
        now = {layer: max(value, floors[layer]) for layer, value in rows.layers(metric).items()} if metric else {}
        start = self.first_values("start", now)
        collapsed: list[int] = []
        for layer in sorted(now, reverse=True):
            fallen = _decades_fallen(start[str(layer)], now[layer])
            if now[layer] >= self.threshold and fallen < self.decades:
                break
            collapsed.append(layer)
        if not collapsed:
            return {}
        layer, last = collapsed[-1], max(now)
        sizes, before = (
            [f"less than rounding shows ({floors[at]:.2g})" if x <= floors[at] else f"{x:.2g}" for at, x in ends]
            for ends in ([(at, now[at]) for at in (layer, last)], [(at, start[str(at)]) for at in (layer, last)])
        )
        differ = f"{sizes[0]} of their size there and {sizes[1]} at layer {last}"
        differ += f" ({before[0]} and {before[1]} at the first measurement)"
        description = f"tokens collapse from layer {layer} on: they differ by {differ}"
        return {"tokens": Fault(layer, None, description)}


@dataclass(eq=False, repr=False)
class EntropyCollapse(AlarmRule):
    """Attention of a layer falls on single tokens: its entropy, mean over heads, is small. Training that
    comes here tends to diverge (Zhai et al. 2023).

    Even attention of n tokens under a causal mask has `log(n!) / n` nats. Where samples are so short that a quarter of
    that is less than `threshold`, it is the threshold; half of it, where that is less than `never`, stands for `never`.
    """

    name = "attention entropy collapses"
    metrics = ("entropy",)
    advice = "A norm of queries and keys (QK-norm), a lower learning rate or a longer warm-up helps."
    threshold: float = 0.1  # the entropy is below so many nats,
    share: float = 0.05  # or below this share of the highest it ever was,
    patience: int = 2
    action: Action = "warn"
    never: float = 0.35  # or has never been above so many nats (a layer that learns to be sharp was not so at first)

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        """A fault for each layer whose attention has collapsed."""
        peak = self.baselines.setdefault("peak", {})
        even = math.inf if self.tokens is None else math.lgamma(self.tokens + 1) / max(1, self.tokens)
        threshold, never = min(self.threshold, even / 4), min(self.never, even / 2)
        faults = {}
        for layer, entropy in rows.layers("entropy").items():
            highest = peak[str(layer)] = max(entropy, peak.get(str(layer), entropy))
            if entropy < max(threshold, self.share * highest) or highest < never:
                nats = f"its entropy is {entropy:.2g} nats, and was {highest:.2g} at the highest"
                faults[str(layer)] = Fault(layer, None, f"attention of layer {layer} falls on single tokens: {nats}")
        return faults


@dataclass(eq=False, repr=False)
class AttentionSink(AlarmRule):
    """The first token takes most of a layer's attention, mean over heads, and much more than at first."""

    name = "a sink takes a layer over"
    metrics = ("first_token_mass",)
    advice = "A gate on what heads add, or a learnt sink of their own, leaves them something else to do."
    threshold: float = 0.8  # the share of the attention from which on it is most
    risen: float = 0.3  # by how much the share has risen since the first measurement
    patience: int = 3
    action: Action = "warn"

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        """A fault for each layer whose attention goes to the first token."""
        now = rows.layers("first_token_mass")
        start = self.first_values("start", now)
        faults = {}
        for layer, share in now.items():
            if share > self.threshold and share - start[str(layer)] > self.risen:
                takes = f"the first token takes {share:.0%} of the attention of layer {layer}"
                faults[str(layer)] = Fault(layer, None, f"{takes} ({start[str(layer)]:.0%} at the first measurement)")
        return faults


class SizeRule(AlarmRule):
    """The base of rules about sizes by layer that blow up or vanish. A size that is NaN or infinite raises
    its alarm at once."""

    jump: float
    """Powers of ten by which a size may differ from its last values: from a running mean of logarithms, in which each
    measurement counts a tenth."""
    drift: float  # powers of ten by which it may differ from its first value

    def changes(
        self, metric: str, words: str, now: Mapping[int, float], broken: Mapping[int, str],
        harmless: Mapping[int, float] | None = None,
    ) -> dict[str, Fault]:  # fmt: skip
        """A fault for each layer whose size (`now`) has jumped or drifted, or is not finite (`broken`: in how
        many samples). `metric` tells several sizes of one rule apart; `words` say what has the size. A size that has
        grown, and is below its `harmless` one, is compared with what it has grown to from then on."""
        faults = {}
        for layer, samples in broken.items():
            description = f"{words} of layer {layer} are no numbers, in {samples} readings"
            faults[f"{metric} {layer} broken"] = Fault(layer, None, description, f"{metric} broken", True)
        logs = {f"{metric} {layer}": math.log10(size) for layer, size in now.items() if size > 0}
        start = self.first_values("start", logs)
        recent = self.baselines.setdefault("recent", {})
        for layer, size in now.items():
            name = f"{metric} {layer}"
            if name not in start:
                continue  # zero from the first
            log = logs.get(name, -math.inf)
            usual = recent.setdefault(name, start[name])
            drift, jump = log - start[name], log - usual
            if (jump > self.jump or drift > self.drift) and size < (harmless or {}).get(layer, 0.0):
                start[name] = recent[name] = log
            elif abs(jump) > self.jump or abs(drift) > self.drift:
                way, verb = WAYS[jump > 0 if abs(jump) > self.jump else drift > 0]
                before = f"{10**usual:.2g} over the last measurements, {10 ** start[name]:.2g} at the first"
                description = f"{words} of layer {layer} {verb}: {size:.2g} now, {before}"
                faults[f"{name} {way}"] = Fault(layer, None, description, f"{metric} {way}")
            else:  # only healthy sizes count as usual ones
                recent[name] = usual + 0.1 * jump
        return faults


@dataclass(eq=False, repr=False)
class TokenSize(SizeRule):
    """Tokens blow up, vanish or are not finite: ||X||_F, which is `mu / relative_mu`, or `mu` if that is all
    there is."""

    name = "tokens blow up or vanish"
    metrics = ("mu",)
    advice = "A lower learning rate, clipped gradients and a norm before each branch keep their size."
    jump: float = 2.0
    drift: float = 5.0
    patience: int = 2
    action: Action = "warn"

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        """A fault for each layer and direction."""
        mu, relative_mu = rows.layers("mu"), rows.layers("relative_mu")
        if not relative_mu:
            return self.changes("mu", "differences between tokens", mu, rows.broken("mu"))
        sizes = {k: mu[k] / relative for k, relative in relative_mu.items() if k in mu and relative > 0}
        return self.changes("size", "tokens", sizes, rows.broken("mu"))


@dataclass(eq=False, repr=False)
class GradientSize(SizeRule):
    """Gradients of a layer blow up, vanish or are not finite. Where tokens collapse, those of queries and
    keys vanish beside those of values and outputs (Noci et al. 2022). In healthy GPTs they begin small, and rise by
    powers of ten once attention learns: they blow up only where they are larger than those of values and outputs."""

    name = "gradients blow up or vanish"
    metrics = ("grad_query_key", "grad_value_output", "grad_mlp", "grad_tokens")
    WORDS = ("gradients of queries and keys", "gradients of values and outputs", "gradients of the MLP",
             "gradients at the tokens")  # fmt: skip
    advice = (
        "Against vanishing gradients skips and norms help; against exploding ones a lower learning rate, a "
        "longer warm-up or clipping."
    )
    apart: float = 3.0  # powers of ten by which a layer may differ from the median of the layers
    starved: float = 6.0
    """Powers of ten by which gradients of queries and keys may be below those of values and outputs of the same layer.
    (In the first steps of healthy GPTs, whose attention is all but uniform, they are below by up to 5.4; without skips
    by 8 and more at the last layer.)"""
    jump: float = 3.0
    drift: float = 5.0
    patience: int = 3
    action: Action = "warn"

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        """A fault for each metric, layer and direction; of several reasons for one, the first is given."""
        faults: dict[str, Fault] = {}
        changes: dict[str, Fault] = {}
        values = rows.layers("grad_value_output")
        for metric, words in zip(self.metrics, self.WORDS, strict=True):
            now = rows.layers(metric)
            harmless = values if metric == "grad_query_key" else {}
            middle, which = median(now.values()) if now else 0.0, "the median of the layers"
            high = [layer for layer in now if -_decades_fallen(middle, now[layer]) > self.apart]
            if high and high == list(now)[-len(high) :]:  # a gradient comes from the last layer: those before vanish
                middle, which = now[high[-1]], "the last layer's"
            for layer, size in now.items():
                above = -_decades_fallen(middle, size)
                if abs(above) > self.apart and not (above > 0 and size < harmless.get(layer, 0.0)):
                    way, verb = WAYS[above > 0]
                    beside = f"{size:.2g}, where {which} is {middle:.2g}"
                    fault = Fault(layer, None, f"{words} of layer {layer} {verb}: {beside}", f"{metric} {way}")
                    faults[f"{metric} {layer} {way}"] = fault
            changes |= self.changes(metric, words, now, rows.broken(metric), harmless)
        for layer, size in rows.layers("grad_query_key").items():
            if _decades_fallen(values.get(layer, 0.0), size) > self.starved:
                beside = f"{size:.2g}, where those of its values and outputs are {values[layer]:.2g}"
                description = f"gradients of queries and keys of layer {layer} vanish: {beside}"
                fault = Fault(layer, None, description, "grad_query_key down")
                faults.setdefault(f"grad_query_key {layer} down", fault)
        return faults | {name: fault for name, fault in changes.items() if name not in faults}


class RecentChangeRule(AlarmRule):
    """The base of rules about positive numbers that leave what they were lately: the median of their logarithms over
    `REFERENCE` measurements that ended `LAG` measurements ago. Slow changes, as those of a healthy training, pass."""

    REFERENCE, LAG = 40, 5

    def recent_changes(self, metric: str, now: Mapping[int, float]) -> dict[int, tuple[float, float]]:
        """By layer, (the powers of ten by which a number has changed, what it was lately); none of layers whose past is
        too short, or whose number is not positive.

        Args:
            metric: What tells several numbers of one rule apart in its baselines.
            now: The number of each layer.
        """
        past = self.baselines.setdefault("past", {})
        changes = {}
        for layer, value in now.items():
            if not 0 < value < math.inf:
                continue
            logs = past.setdefault(f"{metric} {layer}", [])
            logs.append(math.log10(value))
            if len(logs) > self.REFERENCE + self.LAG:
                del logs[0]
                usual = median(logs[: self.REFERENCE])
                changes[layer] = (logs[-1] - usual, 10**usual)
        return changes

    def changes_of_weights(self, rows: MeasurementRows) -> Iterator[tuple[str, str, int, float, float, float]]:
        """(Metric, its kind of weights in words, layer, the number there, how far it has changed, what it was lately)
        of all metrics of the rule."""
        for metric in self.metrics:
            now, weights = rows.layers(metric), next(words for end, words in WEIGHTS.items() if metric.endswith(end))
            for layer, (change, usual) in self.recent_changes(metric, now).items():
                yield metric, weights, layer, now[layer], change, usual


@dataclass(eq=False, repr=False)
class LogitGrowth(RecentChangeRule):
    """Attention logits grow: the largest of a layer, over its heads and all samples, has grown fast, or is larger than
    any healthy one."""

    name = "attention logits grow"
    metrics = ("largest_logit",)
    advice = "A norm of queries and keys (QK-norm), a cap on logits or a lower learning rate holds them."
    growth: float = 0.5  # powers of ten by which the largest logit has grown over what it was lately
    threshold: float = 1e3  # the size from which on a logit is too large, however slowly it came there
    patience: int = 3
    action: Action = "warn"

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        """A fault for each layer whose largest logit grows."""
        faults = {}
        now = {layer: max(heads.values()) for layer, heads in rows.heads("largest_logit", "most").items() if heads}
        changes = self.recent_changes("logit", now)
        for layer, size in now.items():
            change, usual = changes.get(layer, (0.0, size))
            if change > self.growth or size > self.threshold:
                sizes = f"the largest is {size:.2g}, and was {usual:.2g} lately"
                faults[str(layer)] = Fault(layer, None, f"attention logits of layer {layer} grow: {sizes}")
        return faults


@dataclass(eq=False, repr=False)
class UpdateSize(RecentChangeRule):
    """Updates of weights grow: one step changes weights by a larger share of their size than lately. A learning rate
    that rises explains that, as long as the share is small."""

    name = "updates grow"
    metrics = ("update_query_key", "update_value_output", "update_mlp")
    advice = "A lower learning rate, a longer warm-up, a larger eps or a smaller beta_2 of Adam keeps steps small."
    growth: float = 0.2  # powers of ten by which the relative size of updates has grown
    threshold: float = 0.03  # the share of the weights' size above which it is too large, whatever the learning rate
    patience: int = 3
    action: Action = "warn"

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        """A fault for each kind of weights and layer whose updates grow."""
        rate = rows.run_value("lr")
        by_rate, _ = self.recent_changes("lr", {} if rate is None else {0: rate}).get(0, (0.0, 0.0))
        faults = {}
        for metric, weights, layer, size, change, usual in self.changes_of_weights(rows):
            explained = 0.0 if size > self.threshold else max(0.0, by_rate)
            if change - explained > self.growth:
                share = f"a step changes them by {size:.2g} of their size, lately by {usual:.2g}"
                description = f"updates of {weights} of layer {layer} grow: {share}"
                faults[f"{metric} {layer}"] = Fault(layer, None, description, metric)
        return faults


@dataclass(eq=False, repr=False)
class StableRank(RecentChangeRule):
    """Weights grow along one direction: their spectral norm ||W||_2 rises fast, or their stable rank,
    ||W||_F^2 / ||W||_2^2, falls fast."""

    name = "weights grow along one direction"
    metrics = (
        "spectral_norm_query_key", "spectral_norm_value_output", "spectral_norm_mlp",
        "stable_rank_query_key", "stable_rank_value_output", "stable_rank_mlp",
    )  # fmt: skip
    advice = "A lower learning rate, weight decay or weights divided by their spectral norm (sigma-reparam) hold it."
    growth: float = 0.15  # powers of ten by which the spectral norm has risen above what it was lately
    fallen: float = 0.25  # powers of ten by which the stable rank has fallen below what it was lately
    patience: int = 3
    action: Action = "warn"

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        """A fault for each kind of weights and layer; of both reasons, that of the spectral norm is given."""
        faults: dict[str, Fault] = {}
        for metric, weights, layer, now, change, usual in self.changes_of_weights(rows):
            norm = metric.startswith("spectral_norm")
            if change > self.growth if norm else change < -self.fallen:
                what = "spectral norm" if norm else "stable rank"
                numbers = f"their {what} is {now:.2g}, and was {usual:.2g} lately"
                description = f"weights of {weights} of layer {layer} grow along one direction: {numbers}"
                faults.setdefault(f"{weights} {layer}", Fault(layer, None, description, weights))
        return faults


@dataclass(eq=False, repr=False)
class DeadHead(AlarmRule):
    """A head adds the same to all tokens: `head_mu`, ||res X||_F of its contribution, is small beside that of the
    largest head of its layer; or all heads of a layer do, beside those of the other layers or what they once added."""

    name = "a head has died"
    metrics = ("head_mu",)
    advice = "It may be pruned; more warm-up, or less weight decay on values and outputs, keeps heads alive."
    threshold: float = 1e-3  # the share of the largest below which a head is small; of all of a layer its square
    patience: int = 5
    action: Action = "warn"

    def faults(self, rows: MeasurementRows) -> dict[str, Fault]:
        """A fault for each head that has died."""
        faults = {}
        layers = rows.heads("head_mu")
        largest = {layer: max(heads.values()) for layer, heads in layers.items()}
        peak = self.baselines.setdefault("peak", {})
        for layer, heads in layers.items():
            most = largest[layer]
            elsewhere = max((size for at, size in largest.items() if at != layer), default=0.0)
            earlier = peak[str(layer)] = max(most, peak.get(str(layer), most))
            if most < self.threshold**2 * max(elsewhere, earlier):
                adds = f"what its heads add differs by at most {most:.2g} between them"
                beside = f"that of other layers by {elsewhere:.2g}, its own once by {earlier:.2g}"
                description = f"attention of layer {layer} tells tokens apart no more: {adds}, {beside}"
                faults[str(layer)] = Fault(layer, None, description)
                continue
            for head, size in heads.items():
                if size < self.threshold * most:
                    adds = f"what it adds differs by {size:.2g} between them, the largest head's by {most:.2g}"
                    description = f"head {head} of layer {layer} tells tokens apart no more: {adds}"
                    faults[f"{layer} {head}"] = Fault(layer, head, description)
        return faults


def default_rules(action: Action = "warn") -> list[AlarmRule]:
    """One of each built-in rule with its default thresholds, and of each that a plugin adds, for `Monitor(alarms=...)`;
    `action` is that of `AlarmRule`. Rules whose metrics are not measured raise nothing.

    >>> [rule.name for rule in default_rules()][:2]
    ['tokens collapse', 'attention entropy collapses']
    """
    return [kind(action=action) for kind in ALARMS.values()]


def _is_rule(given: Any) -> bool:
    if not isinstance(given, type) or not issubclass(given, AlarmRule) or "name" not in dir(given):
        return False
    made: Any = given
    made(action="warn")  # raises what it lacks
    return True


SHIPPED: Sequence[Any] = (
    Collapse, EntropyCollapse, AttentionSink, TokenSize, GradientSize, DeadHead,
    LogitGrowth, UpdateSize, StableRank,
)  # fmt: skip
ALARMS: Group[Any] = Group("alarms", "a class derived from AlarmRule, with a name", _is_rule)
"""The kinds of rules that a monitor has unless it is told otherwise."""


def _decades_fallen(before: float, now: float) -> float:
    """By how many powers of ten a number has fallen; 0 if it was not positive before."""
    if before <= 0:
        return 0.0
    return math.inf if now <= 0 else math.log10(before / now)
