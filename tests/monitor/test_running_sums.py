"""Sums of parts, merged in any grouping, are those of all values at once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.monitor.measurement import MetricValues, merge_sums, sums_over_samples

VALUES = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([float("nan"), float("inf")]), max_size=12)


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_parts_merge_into_the_whole(parts: list[list[float]]) -> None:
    columns = [torch.tensor(part, dtype=torch.float64).reshape(-1, 1) for part in parts]
    merged = sums_over_samples(columns[0], torch.zeros_like(columns[0]))
    for column in columns[1:]:
        merged = merge_sums(merged, sums_over_samples(column, torch.zeros_like(column)))
    (count, mean, squares, least, most, _, broken) = merged[0].tolist()
    values = torch.cat(columns)
    finite = values[values.isfinite()]
    assert (count, broken) == (len(finite), len(values) - len(finite))
    if len(finite):
        torch.testing.assert_close(mean, float(finite.mean()), rtol=1e-9, atol=1e-6)
        expected = float((finite - finite.mean()).square().sum())
        torch.testing.assert_close(squares, expected, rtol=1e-6, atol=1e-3)
        assert (least, most) == (float(finite.min()), float(finite.max()))


def test_values_of_heads_have_a_row_each() -> None:
    values = MetricValues()
    values.add(None, "loss", torch.tensor([1.0, 3.0]))
    values.add(2, "entropy", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    keys = [(None, None, "loss"), (2, 0, "entropy"), (2, 1, "entropy")]
    assert list(map(tuple, values.keys())) == keys
    assert values.sums()[:, 1].tolist() == [2.0, 2.0, 3.0]


def test_values_of_a_stage_have_the_numbers_of_the_whole_network() -> None:
    values = MetricValues()
    for layer in (None, 0, 1, 2):
        values.add(layer, "mu", torch.tensor([1.0 if layer is None else 10.0 + layer]))
    numbered = {key[0]: row for key, row in zip(values.of_stage(3).keys(), values.of_stage(3).sums(), strict=True)}
    # What the second stage's first block takes is the last layer of the first stage, which measured it.
    assert {layer: float(row[1]) for layer, row in numbered.items()} == {None: 1.0, 4: 11.0, 5: 12.0}
    kept = [[layer for layer, *_ in list(stage.keys())] for stage in (values.of_stage(0), values.of_stage(3, [5]))]
    assert kept == [[None, 0, 1, 2], [None, 5]]


def test_every_number_of_a_column_is_of_its_finite_values() -> None:
    """Those of 1, 2 and 6: a mean of 3, 4 + 1 + 9 about it, floors of 0.25, 0.5 and 0.75 with a mean of 0.5."""
    value = torch.tensor([[1.0], [torch.nan], [2.0], [6.0]], dtype=torch.float64)
    floor = torch.tensor([[0.25], [9.0], [0.5], [0.75]], dtype=torch.float64)
    assert sums_over_samples(value, floor).tolist() == [[3.0, 3.0, 14.0, 1.0, 6.0, 0.5, 1.0]]
