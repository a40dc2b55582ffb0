"""The text that is held out is not learnt from."""

import torch

from rankscope.lab import NextCharacter


def test_the_text_that_is_held_out_is_not_learnt_from() -> None:
    given = NextCharacter(context=4, text="a" * 900 + "b" * 100)
    assert given.batch(300, 0, 0).inputs.unique().tolist() == [0]
    held = given.held_out(50)
    assert held.inputs.unique().tolist() == [1] and torch.equal(held.inputs[:, 1:], held.labels[:, :-1])
    assert len(NextCharacter().ids) > 100_000
