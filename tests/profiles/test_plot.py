import numpy as np
import torch

from rankscope.nets import Architecture, Transformer, named_variant
from rankscope.profiles import Profile, measure

NET = Transformer.random(Architecture(layers=5, width=16, heads=2), init="xavier")
X = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BOTH = Profile.join([measure(named_variant(NET, v), X, variant=v) for v in ("san", "transformer")])


def test_a_collapsing_profile_is_drawn_on_a_log_axis_with_its_floor() -> None:
    (axes,) = BOTH.plot("relative_residual").axes
    assert axes.get_yscale() == "log"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["san", "transformer", "floor of float64"]
    floor = next(line for line in axes.lines if line.get_label() == "floor of float64")
    assert np.allclose(floor.get_ydata(), BOTH.curve("relative_residual", "floor", variant="san")[0])


def test_values_at_the_floor_are_never_drawn_as_if_real() -> None:
    (axes,) = BOTH.plot("relative_residual").axes
    noise = BOTH.curve("relative_residual", "below_floor", variant="san").amax(0).numpy() == 1
    assert noise.any() and not noise.all()
    solid = next(line for line in axes.lines if line.get_label() == "san")
    assert np.array_equal(np.isnan(np.asarray(solid.get_ydata(), dtype=float)), noise)
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert sum(len(np.atleast_1d(line.get_xdata())) for line in hollow) == noise.sum()


def test_a_quiet_profile_is_drawn_on_a_linear_axis_from_zero() -> None:
    (axes,) = measure(NET, X).plot("relative_mu").axes
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0


def test_the_line_is_the_mean_over_samples() -> None:
    (axes,) = measure(NET, X).plot("mu", log=False).axes
    curve = measure(NET, X).curve("mu").mean(0).numpy()
    assert np.allclose(np.asarray(axes.lines[0].get_ydata(), dtype=float), curve)


def test_attention_arithmetics_and_overflow_can_be_drawn() -> None:
    measure(NET, X, metrics=["dobrushin"]).plot("dobrushin").savefig("/dev/null", format="png")
    several = Profile.join([measure(NET, X, arithmetic=a) for a in ("float64", "bfloat16")])
    (axes,) = several.plot("mu", log=True).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert "as given, bfloat16" in labels and "floor of bfloat16" in labels
