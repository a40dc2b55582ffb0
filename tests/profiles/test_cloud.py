"""The tokens of every layer on one plane."""

import pytest
import torch
from polars.testing import assert_frame_equal

from rankscope.metrics import singular_values
from rankscope.profiles import ShapeReader, SpectrumReader, cloud_table, measure
from tests.profiles.residual_shapes import NET, PADDING, X, cloud, shapes, spectra


def test_the_cloud_is_a_projection_and_no_other_plane_shows_more() -> None:
    table = cloud({"transformer": NET}, X, PADDING, [["a"] * 9, ["b"] * 6], samples=2)
    assert table.filter(sample=1, layer=0)["text"].to_list() == ["b"] * 6
    found = [(each.R[0], float(each.log10[0])) for each in shapes(NET, X, PADDING)]
    whole = sum(10 ** (2 * k) * R.T @ R for R, k in found)
    assert isinstance(whole, torch.Tensor)
    best = float(torch.linalg.eigvalsh(whole)[-2:].sum())
    rows = table.filter(sample=0)
    shown = rows.group_by("layer").first()
    seen = sum(s * 10 ** (2 * k) for s, k in shown.select("shown", "log10_scale").iter_rows())
    assert abs(seen - best) < 1e-9 * best
    one = rows.filter(layer=2)
    square = sum(x * x + y * y for x, y in one.select("x", "y").iter_rows()) / 9
    assert abs(square - one["shown"][0]) < 1e-9


def test_only_so_many_tokens_are_kept() -> None:
    assert cloud({"t": NET}, X, most=4).height == 4 * 5


@pytest.mark.slow
def test_of_a_deep_network_some_layers_are_looked_at() -> None:
    deep = NET.variant(layers=40)
    layers = [each.layer for each in shapes(deep, X[:1])]
    assert layers == sorted(layers) and len(layers) == 33
    assert layers[0] == 0 and layers[-1] == 40
    assert cloud({"deep": deep}, X).height == 33 * 9


def test_a_measurement_takes_the_cloud_and_the_spectra_along() -> None:
    """One pass gives what three give, whatever the batches."""
    shape, values = ShapeReader(samples=2), SpectrumReader("transformer", samples=2)
    profile = measure(NET, X, PADDING, batch_size=1, readers=[shape, values])
    torch.testing.assert_close(profile.curve("mu"), measure(NET, X, PADDING).curve("mu"))
    clouds = (
        cloud_table({"transformer": shape.result()}, ~PADDING),
        cloud({"transformer": NET}, X, PADDING, samples=2),
    )
    assert_frame_equal(*clouds, rel_tol=1e-9, abs_tol=1e-12)
    alone = spectra({"transformer": NET}, X, PADDING)
    assert_frame_equal(values.result(), alone, check_row_order=False, rel_tol=1e-9, abs_tol=1e-9)


def test_spectra_are_singular_values_of_the_residual() -> None:
    table = spectra({"transformer": NET}, X)
    for step in NET.steps(X):
        values = singular_values(step.state - step.state.mean(1, keepdim=True))
        sizes = torch.linalg.vector_norm(step.state, dim=(1, 2))
        for sample in range(2):
            rows = table.filter(sample=sample, layer=step.layer).sort("index")
            found = 10 ** torch.tensor(rows["log10"].to_list(), dtype=torch.float64)
            assert len(found) == 8  # nine tokens about their mean
            assert torch.allclose(found, values[sample, :8] / sizes[sample], rtol=1e-8)
