"""Tasks: what is asked is what the words say, and the same seed and step ask the same."""

import pytest
import torch

from rankscope.errors import LabError
from rankscope.lab import TASKS, UNLABELLED, Copying, Digits, Induction, Model, NextCharacter, Task, task
from rankscope.lab.tasks.base import HELD_OUT, STEPS
from rankscope.nets import Transformer
from rankscope_studies.dong2021.tasks import Hull, Memorization, Sort
from tests.raising import raises

SMALL: list[Task] = [
    NextCharacter(context=8, text="the whale, the white whale! " * 20),
    Copying(symbols=5, length=4),
    Induction(symbols=9, shortest=2, longest=6, context=12),
    Digits(),
    Sort(30, 10),
    Hull(30, 10),
    Memorization(30, 20),
]


@pytest.mark.parametrize("each", SMALL, ids=lambda each: each.name)
def test_a_batch_is_of_the_seed_and_the_step(each: Task) -> None:
    first, again = each.batch(5, 3, 7), each.batch(5, 3, 7)
    assert torch.equal(first.inputs, again.inputs) and torch.equal(first.labels, again.labels)
    for other in (each.batch(5, 4, 7), each.batch(5, 3, 8)):
        assert other.inputs.shape != first.inputs.shape or not torch.equal(other.inputs, first.inputs)
    asked, held = each.interface, each.held_out(5)
    assert torch.equal(held.inputs, each.held_out(5).inputs) and len(held) == len(first) == 5
    labels = first.labels[first.labels != UNLABELLED]
    assert int(labels.min()) >= 0 and int(labels.max()) < asked.classes
    if asked.symbols:
        assert int(first.inputs.min()) >= 0 and int(first.inputs.max()) < asked.symbols
    assert first.labels.shape == (first.inputs.shape[:2] if asked.per == "token" else (5,))
    assert 0 < each.chance < 1


@pytest.mark.parametrize("each", SMALL[1:3], ids=lambda each: each.name)
def test_held_out_sequences_are_those_of_no_step(each: Task) -> None:
    """torch takes the lowest 32 bits of a seed, so that a large one may draw what a small one draws."""
    assert HELD_OUT % 2**32 >= 40_000 * STEPS  # Beyond all steps of the first 40 000 seeds
    held = each.held_out(64).inputs
    drawn = [each.batch(64, seed, step).inputs for seed in range(3) for step in range(20)]
    assert not any(other.shape == held.shape and torch.equal(other, held) for other in drawn)


@pytest.mark.parametrize("each", SMALL, ids=lambda each: each.name)
def test_the_architecture_it_wants_takes_its_samples(each: Task) -> None:
    """Loss and accuracy are those of a loop over labels."""
    net = Transformer.random(each.architecture(2, 8, 2))
    assert (net.arch.layers, net.arch.width, net.arch.heads) == (2, 8, 2)
    assert each.architecture(2, 8, 2, norm="none").norm == "none"
    batch = each.batch(4, 0, 0)
    said = Model(net, each.interface)(batch.inputs, batch.padding).detach()
    assert said.shape == (*batch.labels.shape, each.interface.classes)
    rows = zip(said.flatten(0, -2), batch.labels.flatten().tolist(), strict=True)
    labelled = [(row.log_softmax(-1), label) for row, label in rows if label != UNLABELLED]
    loss = -sum(float(row[label]) for row, label in labelled) / len(labelled)
    right = sum(int(row.argmax()) == label for row, label in labelled) / len(labelled)
    assert float(each.loss(said, batch)) == pytest.approx(loss, rel=1e-12)
    assert float(each.accuracy(said, batch)) == pytest.approx(right)


def test_by_name() -> None:
    assert {name: task(name).name for name in TASKS} == {name: name for name in TASKS}
    assert task("copying", length=3) == Copying(length=3)
    with raises(LabError, subject="task"):
        task("inductoin")
