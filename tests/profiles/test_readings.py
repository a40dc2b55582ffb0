"""A large P that somebody holds is reduced a block of rows at a time, to what it is reduced to whole."""

import pytest
import torch

from rankscope.metrics import METRICS, Metric
from rankscope.profiles.readings import read_tensor

ATTENTION = [each for each in METRICS.values() if each.of == "attention"]
TRACE = Metric("trace", lambda P, padding=None: P.diagonal(dim1=-2, dim2=-1).sum(-1), of="attention")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_say_what_the_whole_says(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    P = torch.randn(4, 3, 17, 17, dtype=torch.float64).softmax(-1).to(dtype)
    real = torch.rand(4, 17) < 0.8
    P[1, 0, int(real[1].nonzero()[0]), 3] = torch.nan
    real[3] = False
    chosen = [TRACE, *ATTENTION]
    whole, broken = read_tensor("attention", P, real, chosen, 1e-7)
    found, same = read_tensor("attention", P, real, chosen, 1e-7, whole=0, block=8 * P[:, :, :5].numel())
    assert broken.equal(same) and broken.tolist() == [False, True, False, False]
    assert [each.name for each, _ in found] == [each.name for each in chosen]
    for (_, one), (_, other) in zip(whole, found, strict=True):
        assert one.value.isnan().equal(other.value.isnan())
        assert other.value.nan_to_num().flatten().tolist() == pytest.approx(
            one.value.nan_to_num().flatten().tolist(), rel=1e-12, abs=1e-14
        )
        assert one.floor.isnan().equal(other.floor.isnan())
