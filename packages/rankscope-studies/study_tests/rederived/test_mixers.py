"""Which mixers of positions make them the same: kept curves, and stacks of plain torch with draws of their own."""

import math
import statistics

import pytest
import torch
from torch import Tensor, nn

from study_tests.rederived.kept_data import near, rank_correlation, rows, spread

CURVES = rows("beyond-attention", "curves")
MIXERS = ("attention", "lstm", "gru", "ssm", "mixer", "gcn ring", "gcn path", "gcn complete", "conv")


def left(mixer: str, form: str = "bare", trained: bool = False, metric: str = "relative_mu") -> list[float]:
    """What is left of differences after the last block, by seed."""
    table = CURVES.filter(mixer=mixer, form=form, trained=trained, metric=metric)
    return [10 ** float(value) for value in table.filter(layer=table["layer"].max()).sort("seed")["log10"]]


def test_lstm_and_gru_end_on_either_side_of_a_threshold_that_nothing_marks() -> None:
    assert near(spread(left("lstm")), (0.0921, 0.0912, 0.0932), 1e-4)
    assert near(spread(left("gru")), (0.122, 0.103, 0.130), 1e-3)
    ends = {mixer: statistics.median(left(mixer)) for mixer in MIXERS}
    by_threshold = {t: {mixer for mixer in MIXERS if ends[mixer] < t} for t in (0.08, 0.1, 0.15)}
    assert by_threshold[0.08] == {"attention", "gcn complete"}  # these two are told apart from all others
    assert by_threshold[0.1] - by_threshold[0.08] == {"lstm"} and by_threshold[0.15] - by_threshold[0.1] == {"gru"}
    assert (
        max(ends[mixer] for mixer in ("attention", "gcn complete"))
        < 1e-10
        < 0.09
        < min(ends[mixer] for mixer in MIXERS if mixer not in ("attention", "gcn complete"))
    )


def test_whole_networks_keep_positions_apart_and_bare_attention_learns_digits() -> None:
    assert near([min(statistics.median(left(mixer, "whole")) for mixer in MIXERS)], [0.124], 1e-3)
    assert min(min(left(mixer, "whole")) for mixer in MIXERS) > 0.1
    bare = rows("beyond-attention", "scores").filter(mixer="attention", form="bare")
    assert near(spread(bare["accuracy"]), (0.883, 0.875, 0.894), 1e-3) and bare.height == 3
    assert max(left("attention", trained=True)) < 1e-15


def test_only_attention_is_known_to_fall_faster_than_geometrically_and_most_fall_too_little_to_tell() -> None:
    """Decades that fall in all before rounding decides: of two and more a law can be read."""
    fallen = {}
    for mixer in MIXERS:
        table = CURVES.filter(mixer=mixer, form="bare", trained=False, metric="relative_mu", marked=False)
        finite = [float(v) for v in table.filter(seed=0).sort("layer")["log10"] if math.isfinite(v)]
        fallen[mixer] = max(finite) - min(finite)
    assert [mixer for mixer in MIXERS if fallen[mixer] > 2] == ["attention"]


def relative_mu(X: Tensor) -> float:
    return float((X - X.mean(0)).norm() / X.norm())


def test_even_attention_makes_positions_equal_in_one_block_and_softmax_cubes_what_is_left() -> None:
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        X = torch.randn(16, 32, generator=draw, dtype=torch.float64)
        even = torch.full((16, 16), 1 / 16, dtype=torch.float64) @ X
        assert relative_mu(even) < 1e-15
        X = X.mean(0) + 0.02 * (X - X.mean(0))
        logs = [math.log(relative_mu(X))]
        for _ in range(2):
            W = [torch.randn(32, 32, generator=draw, dtype=torch.float64) / math.sqrt(32) for _ in range(3)]
            X = ((X @ W[0]) @ (X @ W[1]).T / math.sqrt(32)).softmax(-1) @ (X @ W[2])
            logs.append(math.log(relative_mu(X)))
        assert 2.5 < logs[2] / logs[1] < 4.5 or logs[2] < math.log(1e-14)


def stacked(kind: type[nn.Module], blocks: int, seed: int, scale: float, positions: float) -> float:
    """What a bare stack of recurrent layers, as torch draws them, leaves of differences."""
    torch.manual_seed(seed)
    X = torch.randn(1, 64, 64, dtype=torch.float64) * positions + torch.randn(64, dtype=torch.float64)
    for _ in range(blocks):
        layer = kind(64, 64, batch_first=True).double()
        with torch.no_grad():
            for weight in layer.parameters():
                weight.mul_(scale)
            X = layer(X)[0]
    return relative_mu(X[0])


@pytest.mark.slow
def test_lstm_and_gru_stacks_drawn_anew_lie_side_by_side_and_move_with_their_weights() -> None:
    """Other seeds, other tokens: the two ranges touch a factor of two, and larger weights keep positions apart."""
    ends = {kind: [stacked(kind, 48, seed, 1.0, 1.0) for seed in range(5)] for kind in (nn.LSTM, nn.GRU)}
    for values in ends.values():
        assert 0.05 < min(values) < max(values) < 0.25
    assert min(stacked(nn.GRU, 48, seed, 3.0, 1.0) for seed in range(3)) > 2 * max(ends[nn.GRU])


def test_the_first_block_does_not_foretell_the_stack() -> None:
    ratios = rows("beyond-attention", "averages").group_by("mixer").median()
    first = dict(zip(ratios["mixer"], ratios["ratio"], strict=True))
    falls = []
    for mixer in MIXERS:
        log = math.log10(max(statistics.median(left(mixer)), 1e-300))
        falls.append(log)
    assert 0.4 < rank_correlation([first[mixer] for mixer in MIXERS], falls) < 0.75
