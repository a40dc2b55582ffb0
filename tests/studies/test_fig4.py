"""Figure 4: tasks, training, and the evaluation of paths, on networks small enough to enumerate."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch.nn import functional as F

from rankscope.errors import StudyError
from rankscope.lab import pace
from rankscope.nets.dropout import Dropout, training_states
from rankscope.paths import Decomposition, all_paths, decompose
from rankscope.studies import Setup, chosen, reproduce
from rankscope.studies.dong2021 import fig4
from rankscope.studies.dong2021.effects import drawn_path, draws, effects
from rankscope.studies.dong2021.tasks import (
    Task,
    architecture,
    ceiling,
    hull_task,
    memorization_task,
    on_hull,
    prose,
    sort_task,
)
from rankscope.studies.dong2021.train import (
    Recipe,
    Tensors,
    accuracy,
    classify,
    embed,
    logits,
    network,
    train,
)

RECIPE = Recipe(epochs=4, batch=10, rate=3e-3, keep_every=1)


def small(task: Task, layers: int = 2, heads: int = 2) -> Task:
    return replace(task, arch=architecture(layers, heads, 8))


@pytest.fixture(scope="module")
def sorted_small() -> Task:
    return small(sort_task(train=40, test=12))


def corners(points: np.ndarray) -> list[bool]:
    """On the hull: inside no triangle of other points. O(n^4) and nothing like what is tested."""

    def side(a: np.ndarray, b: np.ndarray, p: np.ndarray) -> float:
        return float((b[0] - a[0]) * (p[1] - a[1]) - (b[1] - a[1]) * (p[0] - a[0]))

    def inside(p: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> bool:
        return len({side(a, b, p) > 0, side(b, c, p) > 0, side(c, a, p) > 0}) == 1

    return [
        not any(inside(p, *triangle) for triangle in combinations(np.delete(points, at, 0), 3))
        for at, p in enumerate(points)
    ]


def test_sorted_symbols_are_the_labels() -> None:
    task = sort_task()
    assert (len(task.train), len(task.test)) == (1000, 200)
    assert task.test.inputs.shape == (200, 8)
    assert set(task.train.inputs.flatten().tolist()) == set(range(10))
    for data in (task.train, task.test):
        assert data.labels.tolist() == [sorted(row) for row in data.inputs.tolist()]


def test_points_on_the_hull_are_in_no_triangle() -> None:
    task = hull_task(train=30, test=5)
    for points, labels in zip(task.train.inputs, task.train.labels, strict=True):
        assert corners(points.double().numpy()) == labels.bool().tolist()
    assert on_hull(np.array([[0.0, 0], [1, 0], [0, 1], [0.3, 0.3]])).tolist() == [True, True, True, False]


def test_the_majority_of_points_is_on_the_hull() -> None:
    """The mean number of corners among 10 uniform points is 5.96."""
    task = hull_task(train=4000, test=2000)
    assert task.baselines["majority"] == pytest.approx(0.596, abs=0.01)
    assert float(task.test.labels.double().mean()) == task.baselines["majority"]


def best(labelled: list[tuple[str, int]]) -> int:
    """How many of these words one can label rightly that gives each word one label."""
    words = {word for word, _ in labelled}
    return sum(max(labelled.count((word, label)) for label in (0, 1)) for word in words)


def test_memorization_has_a_random_label_per_word_and_known_ceilings() -> None:
    task = memorization_task(texts=12, longest=30, width=8)
    data = task.train
    assert task.test is data
    assert data.inputs.shape == (12, 30)
    words = prose(12, 30)
    assert [int(n) for n in (~data.padding).sum(1)] == [len(text) for text in words]
    assert (
        len(set(data.inputs[~data.padding].tolist())) == task.vocabulary == len({w for t in words for w in t})
    )

    labelled = [list(zip(*each, strict=False)) for each in zip(words, data.labels.tolist(), strict=True)]
    whole = [pair for text in labelled for pair in text]
    together = sum(map(best, labelled)) / len(whole)
    assert task.baselines["ceiling"] == together
    assert task.baselines["context-free ceiling"] == best(whole) / len(whole)
    assert 0.5 <= task.baselines["majority"] < task.baselines["context-free ceiling"] < together < 1
    with pytest.raises(StudyError, match="were asked for"):
        prose(10**6, 30)


def test_a_ceiling_is_the_share_of_the_commonest_label_of_what_is_seen() -> None:
    assert ceiling("aab", [0, 1, 1]) == 2 / 3
    assert ceiling("abc", [0, 1, 1]) == 1


def test_every_draw_is_the_seeds() -> None:
    for make in (sort_task, hull_task):
        one, two, other = make(20, 5), make(20, 5), make(20, 5, seed=1)
        assert torch.equal(one.train.inputs, two.train.inputs)
        assert not torch.equal(one.train.inputs, other.train.inputs)


def test_the_rate_rises_then_falls_to_nothing() -> None:
    rates = [pace(step, 100, 0.1) for step in range(100)]
    assert rates[0] == 0.1
    assert max(rates) == rates[9] == 1
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] < 0.001


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_goes_on_from_a_checkpoint_to_the_same_numbers(
    sorted_small: Task, tmp_path: Path, stop: int, dropout: float
) -> None:
    recipe = replace(RECIPE, dropout=dropout)
    whole = train(sorted_small, recipe, tmp_path / "whole.pt")
    train(sorted_small, recipe, tmp_path / "broken.pt", stop=stop)
    again = train(sorted_small, recipe, tmp_path / "broken.pt")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    done = train(sorted_small, recipe, tmp_path / "whole.pt")  # nothing is left to do
    assert all(torch.equal(whole[name], done[name]) for name in whole)
    assert not any(each.requires_grad for each in whole.values())


def test_a_checkpoint_of_another_recipe_is_not_used(sorted_small: Task, tmp_path: Path) -> None:
    other = replace(RECIPE, rate=1e-3)
    train(sorted_small, RECIPE, tmp_path / "a.pt")
    found, afresh = (train(sorted_small, other, tmp_path / name) for name in ("a.pt", "b.pt"))
    assert all(torch.equal(found[name], afresh[name]) for name in found)


def test_training_learns(tmp_path: Path) -> None:
    task = small(sort_task(60, 10))
    tensors = train(task, Recipe(epochs=20, batch=10, rate=1e-2, keep_every=20), tmp_path / "c.pt")
    assert accuracy(task, tensors, task.train) > task.baselines["majority"] + 0.15


@pytest.fixture(scope="module")
def decomposed(trained: tuple[Task, Tensors]) -> Decomposition:
    task, tensors = trained
    data = task.test.trimmed()
    return decompose(network(task, tensors), embed(task, tensors, data), data.padding)


def test_dropout_is_of_the_training_alone(trained: tuple[Task, Tensors]) -> None:
    """Nothing dropped, training's pass is the model's own; with dropout the head's input is dropped too."""
    task, tensors = trained
    data = task.test.trimmed()
    plain = logits(task, tensors, data)
    none = logits(task, tensors, data, Dropout.seeded(0.0, 0, "cpu"))
    torch.testing.assert_close(none, plain)
    some = logits(task, tensors, data, Dropout.seeded(0.3, 1, "cpu"))
    assert not torch.allclose(some[~data.padding], plain[~data.padding], atol=1e-3)
    drop = Dropout.seeded(0.3, 1, "cpu")
    padding = data.padding if bool(data.padding.any()) else None
    *_, last = training_states(network(task, tensors), embed(task, tensors, data), drop, padding)
    torch.testing.assert_close(some, classify(tensors, drop(last)))
    assert torch.equal(plain, logits(task, tensors, data))


def test_every_network_of_the_figure_is_trained_with_the_published_dropout() -> None:
    """BertConfig's default, which the published code leaves as it is."""
    assert {recipe.dropout for plan in (fig4.QUICK, fig4.FULL) for _, recipe in plan.values()} == {0.1}


def test_norms_keep_a_gain_of_one(sorted_small: Task, tmp_path: Path) -> None:
    tensors = train(sorted_small, RECIPE, tmp_path / "c.pt")
    gains = [each for name, each in tensors.items() if name.endswith(".gain")]
    assert len(gains) == sorted_small.arch.layers
    assert all(bool((gain == 1).all()) for gain in gains)


@pytest.fixture(
    scope="module",
    params=[partial(sort_task, 40, 12), partial(hull_task, 40, 12), partial(memorization_task, 8, 24)],
    ids=["sort", "hull", "memorization"],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, Tensors]:
    """Two layers, two heads; memorization with padding."""
    task = small(request.param())
    tensors = train(task, RECIPE, tmp_path_factory.mktemp("fig4") / "c.pt")
    return task, {name: each.double() for name, each in tensors.items()}


def test_paths_are_evaluated_as_if_one_by_one(
    trained: tuple[Task, Tensors], decomposed: Decomposition
) -> None:
    """Every path on its own, by `Decomposition.path`; summed as often as drawn, normalised, classified."""
    task, tensors = trained
    data = task.test.trimmed()
    table = effects(task, tensors, data, counts=(3,), repeats=2, seed=5)
    real = ~data.padding
    drawn = draws(2, 2, (3,), 2, 5)

    def share(terms: list[torch.Tensor]) -> float:
        Y = F.layer_norm(torch.stack(terms).sum(0), (8,), eps=1e-12)
        return float((classify(tensors, Y).argmax(-1) == data.labels)[real].double().mean())

    for row in table.iter_rows(named=True):
        if row["attention"] == "full":
            assert row["accuracy"] == accuracy(task, tensors, data)
            continue
        paths = (
            list(all_paths(2, 2, row["length"]))
            if row["paths"] == "all"
            else list(drawn[row["paths"], row["length"], row["repeat"]].elements())
        )
        one_by_one = share([decomposed.path(path, row["attention"]).term for path in paths])
        assert row["accuracy"] == pytest.approx(one_by_one, abs=0.011)  # float32: a tie may fall otherwise
    assert len(table) == 1 + 2 * 3 * 2 + 3


def test_all_lengths_together_are_the_network(
    trained: tuple[Task, Tensors], decomposed: Decomposition
) -> None:
    task, tensors = trained
    whole = torch.stack([decomposed.keep(lengths=[k]) for k in range(3)]).sum(0)
    torch.testing.assert_close(classify(tensors, whole), logits(task, tensors, task.test.trimmed()))
    assert float(decomposed.by_length().bias.abs().max()) == 0  # every path starts at the embedding


def test_a_path_of_its_own_is_the_published_procedure(
    trained: tuple[Task, Tensors], decomposed: Decomposition
) -> None:
    """Through a head: attention of the path's own tokens, then LayerNorm without gain and bias; past the
    heads: nothing at all."""
    task, tensors = trained
    data = task.test.trimmed()
    for path in all_paths(2, 2):
        X = embed(task, tensors, data)
        for layer, head in enumerate(path):
            if head is None:
                continue
            w = {name: tensors[f"net.layers.{layer}.attention.{name}.weight"] for name in
                 ("query", "key", "value", "output")}  # fmt: skip
            b = {name: tensors[f"net.layers.{layer}.attention.{name}.bias"] for name in ("query", "key")}
            q, k = (X @ w[name][:, head] + b[name][head] for name in ("query", "key"))
            scores = q @ k.mT / 2  # the root of the width of a head, 4
            P = scores.masked_fill(data.padding[:, None], -torch.inf).softmax(-1)
            X = F.layer_norm(P @ X @ w["value"][:, head] @ w["output"][head], (8,), eps=1e-12)
        real = ~data.padding
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


def test_the_study_writes_figure_tables_and_comparisons_and_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Recipe(epochs=1, batch=10, rate=1e-3)
    tasks = (memorization_task(texts=6, longest=20), sort_task(20, 6), hull_task(20, 6))
    plans = {task.name: (partial(small, task, layers=6), quick) for task in tasks}
    monkeypatch.setattr(fig4, "QUICK", plans)
    monkeypatch.setattr(fig4, "REPEATS", 1)
    monkeypatch.setattr(fig4, "SEEDS", {"memorization": 1, "sort": 2, "hull": 1})
    study = chosen("dong2021", "fig4")[0]
    said: list[str] = []
    found = reproduce(study, Setup(tmp_path, say=said.append))
    home = tmp_path / "quick/dong2021/fig4"
    for name in ("fig4.png", "fig4.svg", "accuracies.parquet", "summary.parquet", "baselines.parquet"):
        assert (home / name).stat().st_size > 0
    kinds = found.tables["summary"].group_by("task", "attention", "paths").len()
    assert len(kinds) == 3 * (1 + 2 + 3)
    assert {each.what.partition(":")[0] for each in found.comparisons} == {"memorization", "sort", "hull"}
    assert any("sort" in each for each in said)
    seeds = found.tables["accuracies"].group_by("task").agg(pl.col("seed").n_unique()).sort("task")
    assert seeds["seed"].to_list() == [1, 1, 2]
    assert sum("2 training seeds give" in each.because for each in found.comparisons) == 2

    first = pl.read_parquet(home / "accuracies.parquet")
    assert found.tables["accuracies"].equals(first)
    said.clear()
    assert reproduce(study, Setup(tmp_path, say=said.append)).tables["accuracies"].equals(first)
    assert not said  # nothing was computed again
    for part in (home / "parts").glob("sort*"):
        part.unlink()
    assert reproduce(study, Setup(tmp_path)).tables["accuracies"].equals(first)


def test_the_range_over_seeds_is_of_their_means() -> None:
    rows = [
        {"task": "sort", "seed": seed, "attention": "own", "paths": "5", "length": 0, "repeat": repeat,
         "accuracy": accuracy}
        for seed, accuracies in enumerate(((0.1, 0.3), (0.4, 0.6)))
        for repeat, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    (found,) = fig4.by_seed(pl.DataFrame(rows)).iter_rows(named=True)
    assert (found["least"], found["most"], found["seeds"]) == (pytest.approx(0.2), pytest.approx(0.5), 2)
