"""Figure 9 of the 2024 paper: pairwise cosines."""

import math

import pytest
import torch

from rankscope_studies.wu2024 import fig9


def test_cosines_are_counted_once() -> None:
    angles = fig9.angles(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.1]]], dtype=torch.float64))
    assert int(angles["pairs"].sum()) == 3
    assert angles["least"][0] == pytest.approx(-1 / math.sqrt(1.01))
    assert angles["negative"][0] == pytest.approx(1 / 3)
