"""A pass takes attention whole or by rows, as its metrics and its kernel need."""

import gc
import weakref
from typing import Any

import pytest
import torch

from rankscope import Architecture, Transformer, measure
from rankscope.deviation import DeviationStep
from rankscope.errors import TooLargeError
from rankscope.metrics import Metric, Of, chosen_metrics
from rankscope.nets import free_memory
from rankscope.profiles import MetricReader, one_pass
from rankscope.profiles.measuring import PASS_OPTIONS, layer_pass
from rankscope.profiles.pass_cost import MATRICES
from rankscope.profiles.readers import LayerStep
from tests.builders import normal
from tests.nets.test_streaming import both, streamed
from tests.raising import raises


def test_rows_that_need_not_sum_to_one_are_looked_at() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, kernel="sigmoid"))
    X = torch.randn(1, 13, 8, dtype=torch.float64)
    whole = measure(net, X, None, ["mu"], "float64").manifest.networks[0].checks
    by_rows = streamed(net, X, None, ["mu"]).manifest.networks[0].checks
    assert not by_rows["rows_sum_to_one"]
    assert by_rows["largest_row_sum_defect"] == pytest.approx(whole["largest_row_sum_defect"], rel=1e-12)


def test_a_metric_of_the_whole_matrix_keeps_it_whole() -> None:
    net = Transformer.random(Architecture(layers=1, width=8, heads=2))
    trace = Metric("trace", lambda P, padding=None: P.diagonal(dim1=-2, dim2=-1).sum(-1), of="attention")
    whole, same = both(net, torch.randn(1, 9, 8), None, ["entropy", trace])
    assert whole.equals(same)


def test_a_sample_that_overflows_is_broken_and_the_others_are_read() -> None:
    net = Transformer.random(Architecture(layers=1, width=4, heads=1, norm="none"))
    X = torch.randn(2, 6, 4, dtype=torch.float64)
    X[0] *= 1e200
    whole, rows = both(net, X, None, ["entropy"])
    assert whole["value"].is_nan().to_list() == rows["value"].is_nan().to_list() == [True, False]


class LayersAlive:
    """A reader that notes how many of the layers that it was shown are still in memory."""

    needs: frozenset[Of] = frozenset(("tokens", "attention", "heads"))
    cost = "nothing"

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def read(self, step: LayerStep) -> None:
        self.alive.append(sum(reference() is not None for reference in self.seen))
        layer = step.step
        parts = [layer.state, getattr(step.second, "layer", None), getattr(step.second, "step", None)]
        parts += [part.state for part in parts[1:] if isinstance(part, DeviationStep)]
        self.seen += [weakref.ref(part) for part in parts if part is not None and not isinstance(part, tuple)]

    def result(self) -> list[int]:
        return self.alive


@pytest.mark.parametrize("variant", ["as given", "san"])
@pytest.mark.parametrize("arithmetic", ["deviation", "float64"])
def test_a_layer_leaves_memory_as_soon_as_it_was_read(variant: str, arithmetic: str) -> None:
    """Without waiting for Python to look for objects that refer to themselves: layers of a large network do not fit."""
    net = Transformer.random(Architecture(layers=6, width=8, heads=2), seed=0)
    net = net if variant == "as given" else net.variant(variant)
    readers = MetricReader(chosen_metrics("measure", ["mu", "relative_residual", "entropy", "head_mu"])), LayersAlive()
    gc.collect()
    gc.disable()
    try:
        one_pass(net, normal(2, 7, 8), readers=readers, arithmetic=arithmetic, check=True)
    finally:
        gc.enable()
    assert max(readers[1].result()) <= 4  # both passes of the input, and of the layer that the next one starts from


@pytest.mark.parametrize(
    ("metric", "tokens", "blocks"), [("entropy", 1024, False), ("entropy", 1025, True), ("dobrushin", 1025, False)]
)
def test_blocks_begin_where_they_are_faster_and_metrics_with_many_sweeps_keep_the_whole(
    metric: str, tokens: int, blocks: bool
) -> None:
    """Of two heads 1,024 tokens have 2^24 bytes of attention in a layer."""
    net, seen = Transformer.random(Architecture(layers=1, width=4, heads=2, mask="causal")), []

    class Looking(MetricReader):
        def read(self, step: LayerStep) -> None:
            seen.append(step.rows is not None)

    one_pass(net, torch.randn(1, tokens, 4), None, [Looking(chosen_metrics("measure", [metric]))], "float64")
    assert seen == [False, blocks]


def test_a_context_whose_matrix_is_too_large_is_begun_by_rows_alone() -> None:
    """Rows fit where the matrix does not; a metric of the whole matrix cannot be read then, and says so."""
    free = free_memory(torch.device("cpu")) or pytest.skip("this machine does not say how much memory is free")
    tokens = int((2 * max(free, 2**30) / (MATRICES["deviation"] * 8)) ** 0.5)
    net, X = Transformer.random(Architecture(layers=1, width=2, heads=1, mlp_width=2)), torch.zeros(1, tokens, 2)

    def begin(metric: str | Metric) -> None:
        """The tokens themselves, before any layer."""
        next(layer_pass(net, X, None, [MetricReader(chosen_metrics("measure", [metric]))], "deviation", PASS_OPTIONS))

    begin("entropy")
    trace = Metric("trace", lambda P, padding=None: P.diagonal(dim1=-2, dim2=-1).sum(-1), of="attention")
    with raises(TooLargeError, subject="tokens"):
        begin(trace)
