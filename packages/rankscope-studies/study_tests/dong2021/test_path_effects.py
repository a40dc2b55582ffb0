"""What a few paths are good for, on networks small enough to enumerate."""

import random
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from rankscope.lab import Model
from rankscope.lab.tasks.base import UNLABELLED
from rankscope.paths import Decomposition, all_paths
from rankscope_studies.dong2021.fig4 import TaskPlan
from rankscope_studies.dong2021.path_effects import drawn_path, draws, path_effects


def test_paths_are_evaluated_as_if_one_by_one(trained: tuple[TaskPlan, Model], decomposed: Decomposition) -> None:
    """Every path on its own, by `Decomposition.path`; summed as often as drawn, normalised, classified."""
    plan, model = trained
    data = plan.task.data[1].part(slice(None))
    table = path_effects(model, data, counts=(3,), repeats=2, seed=5)
    real = data.labels != UNLABELLED
    drawn = draws(2, 2, (3,), 2, 5)

    def share(terms: list[torch.Tensor]) -> float:
        Y = F.layer_norm(torch.stack(terms).sum(0), (8,), eps=1e-12)
        return float((model.head(Y).argmax(-1) == data.labels)[real].double().mean())

    for row in table.iter_rows(named=True):
        if row["attention"] == "full":
            logits = model(data.inputs, data.padding)
            assert row["accuracy"] == float((logits.argmax(-1) == data.labels)[real].double().mean())
            continue
        paths = (
            list(all_paths(2, 2, row["length"]))
            if row["paths"] == "all"
            else list(drawn[row["paths"], row["length"], row["repeat"]].elements())
        )
        one_by_one = share([decomposed.path(path, row["attention"]).term for path in paths])
        assert row["accuracy"] == pytest.approx(one_by_one, abs=0.011)  # float32: a tie may fall otherwise
    assert len(table) == 1 + 2 * 3 * 2 + 3


def test_all_lengths_together_are_the_network(trained: tuple[TaskPlan, Model], decomposed: Decomposition) -> None:
    plan, model = trained
    data = plan.task.data[1].part(slice(None))
    whole = torch.stack([decomposed.keep(lengths=[k]) for k in range(3)]).sum(0)
    torch.testing.assert_close(model.head(whole), model(data.inputs, data.padding))
    assert float(decomposed.by_length().bias.abs().max()) == 0  # every path starts at the embedding


def test_a_path_of_its_own_is_the_published_procedure(
    trained: tuple[TaskPlan, Model], decomposed: Decomposition
) -> None:
    """Through a head: attention of the path's own tokens, then LayerNorm without gain and bias; past the
    heads: nothing at all."""
    plan, model = trained
    data, tensors = plan.task.data[1].part(slice(None)), model.net.tensors()
    for path in all_paths(2, 2):
        X = model.tokens(data.inputs)
        for layer, head in enumerate(path):
            if head is None:
                continue
            w = {name: tensors[f"layers.{layer}.attention.{name}.weight"] for name in
                 ("query", "key", "value", "output")}  # fmt: skip
            b = {name: tensors[f"layers.{layer}.attention.{name}.bias"] for name in ("query", "key")}
            q, k = (X @ w[name][:, head] + b[name][head] for name in ("query", "key"))
            scores = q @ k.mT / 2  # the root of the width of a head, 4
            P = scores.masked_fill((data.labels == UNLABELLED)[:, None], -torch.inf).softmax(-1)
            X = F.layer_norm(P @ X @ w["value"][:, head] @ w["output"][head], (8,), eps=1e-12)
        real = data.labels != UNLABELLED
        torch.testing.assert_close(decomposed.path(path, "own").term[real], X[real])


def test_paths_are_drawn_by_length_and_seed() -> None:
    drawn = draws(6, 2, (5, 20), 5, 0)
    assert drawn == draws(6, 2, (5, 20), 5, 0) != draws(6, 2, (5, 20), 5, 1)
    for (count, length, _), paths in drawn.items():
        assert paths.total() == int(count)
        assert all(len(path) == 6 and sum(head is not None for head in path) == length for path in paths)
    draw = random.Random(0)
    often = Counter(drawn_path(3, 2, 2, draw) for _ in range(6000))
    assert len(often) == 12
    assert all(abs(number - 500) < 100 for number in often.values())
