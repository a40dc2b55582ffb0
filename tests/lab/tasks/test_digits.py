"""The task of digits: patches of real images."""

import sys

import pytest
import torch

from rankscope.errors import MissingExtraError
from rankscope.lab import Digits


def test_patches_are_squares_of_the_image() -> None:
    from sklearn.datasets import load_digits

    images, held = load_digits().images, Digits(patch=4).held_out(10)
    assert held.inputs.shape == (10, 4, 16)
    corner = torch.from_numpy(images[-360][:4, 4:]).float().flatten() / 8 - 1
    assert torch.equal(held.inputs[0, 1], corner)
    assert held.labels.tolist() == load_digits().target[-360:-350].tolist()


def test_without_scikit_learn_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[lab\]'"):
        Digits().batch(2, 0, 0)
