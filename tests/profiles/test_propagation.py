"""A pass takes attention whole or by rows, as its metrics and its kernel need."""

import pytest
import torch

from rankscope import Architecture, Transformer, measure
from rankscope.metrics import Metric
from tests.nets.test_streaming import both, streamed


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
