"""Copying and induction ask for what their names say."""

from collections import Counter

from rankscope.lab import UNLABELLED, Copying, Induction


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
