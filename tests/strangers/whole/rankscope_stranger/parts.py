"""A metric, a remedy, an alarm rule, an instrument, a family, sections of a report and a job of sweeps."""

from dataclasses import dataclass

import polars as pl

from rankscope.engine import CellJob
from rankscope.metrics import Meaning, Metric
from rankscope.metrics.base import tokens
from rankscope.monitor import AlarmRule, Fault, Instrument, MetricValues
from rankscope.remedies import NamedRemedy
from rankscope.results import Section, Table
from rankscope.sources import FAMILIES


def largest(X, padding=None):
    """The largest absolute entry of the tokens, [batch, token, width]."""
    return tokens(X, padding).X.abs().amax((-2, -1))


words = Meaning("0 and above", "small tokens", "large ones")
spread = Metric("spread", largest, degree=1, scale=largest, direction=1, meaning=words)


@dataclass(frozen=True)
class WeakSkip(NamedRemedy):
    """A skip of attention that counts less."""

    share: float = 0.5
    name = "weak_skip"
    formula = "share x + attention(x)"

    def applied(self, arch):
        """The architecture with that skip."""
        return arch.replace(attention_skip=self.share)


class TooAlike(AlarmRule):
    """Tokens point into one direction: their mean cosine is above .999."""

    name = "tokens point one way"
    metrics = ("mean_cosine",)
    advice = "Look at the skips."

    def faults(self, rows):
        """A fault for each layer."""
        cosines = rows.layers("mean_cosine").items()
        return {str(k): Fault(k, None, f"at layer {k} the mean cosine is {x:.4f}") for k, x in cosines if x > 0.999}


class LargestWeight(Instrument):
    """The largest absolute weight of each block, in a training."""

    name, metrics, of_samples = "largest weight", ("largest_weight",), False

    def read_stack(self, plan):
        """One number of each layer."""
        values = MetricValues()
        for layer, block in enumerate(plan.blocks, 1):
            values.add(layer, "largest_weight", max(weight.detach().abs().max() for weight in block.parameters()))
        return values


class StrangerBert(type(FAMILIES["bert"])):
    """BERT under another name."""

    name, types = "stranger_bert", ("stranger-bert",)


family = StrangerBert()


def spread_sections(run):
    """A section on the depth of what was measured; none of other runs."""
    if run.measured is None:
        return []
    deepest = run.measured.table.group_by("variant", maintain_order=True).agg(pl.col("layer").max())
    rows = [[variant, str(layer)] for variant, layer in deepest.rows()]
    return [Section("spread", "How deep each variant is", tables=[Table("", ["variant", "layers"], rows)])]


def sizes_of(net, X, padding):
    """One row: the width of the network."""
    return pl.DataFrame({"width": [net.arch.width]})


sizes = CellJob("sizes", {"width": pl.Int64}, sizes_of)
