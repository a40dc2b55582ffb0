"""Figure 4: training, and the evaluation of paths, on networks small enough to enumerate."""

import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch.nn import functional as F

from rankscope.lab import Model
from rankscope.lab.tasks import Hull, Memorization
from rankscope.lab.tasks.fixed import FixedTask
from rankscope.lab.tasks.task import UNLABELLED
from rankscope.nets.dropout import Dropout, training_states
from rankscope.paths import Decomposition, all_paths, decompose
from rankscope.studies import Setup, chosen, reproduce
from rankscope.studies.dong2021 import fig4
from rankscope.studies.dong2021.fig4 import PublishedSort, TaskPlan
from rankscope.studies.dong2021.path_effects import drawn_path, draws, path_effects


def small(task: FixedTask, **fields: Any) -> TaskPlan:
    sizes = {"epochs": 4, "batch": 10, "lr": 3e-3, "layers": 2, "dropout": 0.0, "checkpoint_every": 1}
    return TaskPlan(task, 8, 2, **sizes | fields)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_resumes_from_a_checkpoint_to_the_same_numbers(tmp_path: Path, dropout: float) -> None:
    plan = small(PublishedSort(40, 12), dropout=dropout)
    whole = plan.training(1, tmp_path / "whole").finish()
    broken = iter(plan.training(1, tmp_path / "broken"))
    assert [next(broken) for _ in range(6)][-1] == 6  # the checkpoint is of step 4, the end of an epoch
    broken.close()
    again = plan.training(1, tmp_path / "broken")
    assert again.steps == 4 and sorted(path.name for path in (tmp_path / "broken").iterdir()) == ["checkpoint.pt"]
    again.finish()
    for name, tensor in whole.models[0].state_dict().items():
        assert torch.equal(tensor, again.models[0].state_dict()[name])
    assert plan.training(1, tmp_path / "whole").steps == 16  # nothing is left to do
    assert small(plan.task, lr=1e-3).training(1, tmp_path / "whole").steps == 0  # another recipe begins anew


def test_training_learns() -> None:
    plan = small(PublishedSort(60, 10), epochs=20, lr=1e-2)
    model = plan.training(0).finish().models[0].eval()
    train = plan.task.data[0]
    right = (model(train.inputs).argmax(-1) == train.labels).double().mean()
    assert right > plan.task.baselines["majority"] + 0.15


@pytest.fixture(
    scope="module", params=[PublishedSort(40, 12), Hull(40, 12), Memorization(8, 24)], ids=lambda task: task.name
)
def trained(request: pytest.FixtureRequest) -> tuple[TaskPlan, Model]:
    """Two layers, two heads; memorization with padding."""
    plan = small(request.param)
    return plan, plan.training(0).finish().models[0].double().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def decomposed(trained: tuple[TaskPlan, Model]) -> Decomposition:
    plan, model = trained
    data = plan.task.data[1].part(slice(None))
    return decompose(model.network(), model.tokens(data.inputs), data.padding)


def test_dropout_is_of_the_training_alone(trained: tuple[TaskPlan, Model]) -> None:
    """Nothing dropped, training's pass is the model's own; with dropout the head's input is dropped too."""
    plan, model = trained
    data = plan.task.data[1].part(slice(None))
    padding, real = data.padding, data.labels != UNLABELLED
    plain = model(data.inputs, padding)
    torch.testing.assert_close(model(data.inputs, padding, Dropout.seeded(0.0, 0, "cpu")), plain)
    some = model(data.inputs, padding, Dropout.seeded(0.3, 1, "cpu"))
    assert not torch.allclose(some[real], plain[real], atol=1e-3)
    drop = Dropout.seeded(0.3, 1, "cpu")
    *_, last = training_states(model.network(), model.tokens(data.inputs), drop, padding)
    torch.testing.assert_close(some, model.head(drop(last)))
    assert torch.equal(plain, model(data.inputs, padding))


def test_every_network_of_the_figure_is_trained_with_the_published_dropout() -> None:
    """BertConfig's default, which the published code leaves as it is."""
    plans = [*fig4.QUICK.values(), *fig4.FULL.values()]
    assert {plan.training(0).initialisation.dropout for plan in plans} == {0.1}


def test_norms_keep_a_gain_of_one_and_positions_are_before_the_first(trained: tuple[TaskPlan, Model]) -> None:
    plan, model = trained
    gains = [tensor for name, tensor in model.named_parameters() if name.endswith(".gain")]
    assert len(gains) == 2 and all(bool((gain == 1).all()) for gain in gains)
    X = model.tokens(plan.task.data[1].inputs)
    torch.testing.assert_close(X.var(-1, correction=0), torch.ones_like(X[..., 0]))
    assert model.net.arch.positions == "none" and (plan.task.name == "sort") == hasattr(model.embed, "positions")


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


def test_the_study_writes_figure_tables_and_comparisons_and_can_be_run_again(tmp_path: Path) -> None:
    tasks = (Memorization(texts=6, longest=20), PublishedSort(20, 6), Hull(20, 6))
    plans = {
        task.name: small(task, layers=6, epochs=1, checkpoint_every=1, seeds=2 if task.name == "sort" else 1)
        for task in tasks
    }
    run = partial(fig4.effectiveness, plans=plans, repeats=1)
    study = chosen("dong2021", "fig4")[0]
    said: list[str] = []
    found = reproduce(study, Setup(tmp_path, say=said.append), run)
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
    assert reproduce(study, Setup(tmp_path, say=said.append), run).tables["accuracies"].equals(first)
    assert not said  # nothing was computed again
    for part in (home / "parts").glob("sort*"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    assert reproduce(study, Setup(tmp_path), run).tables["accuracies"].equals(first)


def test_the_range_over_seeds_is_of_their_means() -> None:
    rows = [
        {"task": "sort", "seed": seed, "attention": "own", "paths": "5", "length": 0, "repeat": repeat,
         "accuracy": accuracy}
        for seed, accuracies in enumerate(((0.1, 0.3), (0.4, 0.6)))
        for repeat, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    (found,) = fig4.by_seed(pl.DataFrame(rows)).iter_rows(named=True)
    assert (found["least"], found["most"], found["seeds"]) == (pytest.approx(0.2), pytest.approx(0.5), 2)
