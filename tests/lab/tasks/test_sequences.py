"""Copying and induction ask for what their names say; the text that is held out is not learnt from."""

from collections import Counter

import torch

from rankscope.lab import UNLABELLED, Copying, Induction, NextCharacter


def test_what_is_copied_and_what_follows() -> None:
    batch = Copying(symbols=5, length=4).batch(20, 0, 0)
    for row, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        assert row[4] == 5 and row[5:] == row[:3]
        assert labels == [UNLABELLED] * 4 + row[:4]
    batch = Induction(symbols=9, shortest=2, longest=6, context=12).batch(200, 0, 0)
    periods: Counter[int] = Counter()
    for row, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        seen: dict[int, int] = {}
        for place, (symbol, label) in enumerate(zip(row, labels, strict=True)):
            if symbol in seen:
                assert label == row[seen[symbol] + 1]  # what followed it last time
            else:
                assert label == UNLABELLED
            seen[symbol] = place
        periods[len(seen)] += 1
    assert set(periods) == {2, 3, 4, 5, 6}


def test_the_text_that_is_held_out_is_not_learnt_from() -> None:
    given = NextCharacter(context=4, text="a" * 900 + "b" * 100)
    assert given.batch(300, 0, 0).inputs.unique().tolist() == [0]
    held = given.held_out(50)
    assert held.inputs.unique().tolist() == [1] and torch.equal(held.inputs[:, 1:], held.labels[:, :-1])
    assert len(NextCharacter().ids) > 100_000
