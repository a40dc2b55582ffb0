"""Figure 4: training, and the tables and figures of the study."""

import shutil
from functools import partial
from pathlib import Path

import polars as pl
import pytest
import torch

from rankscope.lab import Model
from rankscope.lab.tasks.base import UNLABELLED
from rankscope.nets import Dropout, training_states
from rankscope_studies import Setup, chosen, reproduce
from rankscope_studies.dong2021 import fig4
from rankscope_studies.dong2021.fig4 import PublishedSort, TaskPlan
from rankscope_studies.dong2021.tasks import Hull, Memorization
from study_tests.dong2021.plans import small


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
    assert {plan.dropout for plan in (*fig4.QUICK.values(), *fig4.FULL.values())} == {0.1}
    assert fig4.QUICK["sort"].training(0).initialisation.dropout == 0.1


def test_norms_keep_a_gain_of_one_and_positions_are_before_the_first(trained: tuple[TaskPlan, Model]) -> None:
    plan, model = trained
    gains = [tensor for name, tensor in model.named_parameters() if name.endswith(".gain")]
    assert len(gains) == 2 and all(bool((gain == 1).all()) for gain in gains)
    X = model.tokens(plan.task.data[1].inputs)
    torch.testing.assert_close(X.var(-1, correction=0), torch.ones_like(X[..., 0]))
    assert model.net.arch.positions == "none" and (plan.task.name == "sort") == hasattr(model.embed, "positions")


@pytest.mark.slow
def test_the_study_writes_figure_tables_and_comparisons_and_can_be_run_again(tmp_path: Path) -> None:
    tasks = (Memorization(texts=6, longest=20), PublishedSort(20, 6), Hull(20, 6))
    plans = {
        task.name: small(task, layers=6, epochs=1, checkpoint_every=1, seeds=2 if task.name == "sort" else 1)
        for task in tasks
    }
    run = partial(fig4._run, plans=plans, repeats=1)
    study = chosen("dong2021", "fig4")[0]
    lines: list[str] = []
    outcome = reproduce(study, Setup(tmp_path, say=lines.append), run)
    home = tmp_path / "quick/dong2021/fig4"
    for name in ("fig4.png", "fig4.svg", "accuracies.parquet", "summary.parquet", "baselines.parquet"):
        assert (home / name).stat().st_size > 0
    kinds = outcome.tables["summary"].group_by("task", "attention", "paths").len()
    assert len(kinds) == 3 * (1 + 2 + 3)
    assert {comparison.what.partition(":")[0] for comparison in outcome.comparisons} == {"memorization", "sort", "hull"}
    assert any("sort" in line for line in lines)
    seeds = outcome.tables["accuracies"].group_by("task").agg(pl.col("seed").n_unique()).sort("task")
    assert seeds["seed"].to_list() == [1, 1, 2]
    assert sum("2 training seeds give" in comparison.because for comparison in outcome.comparisons) == 2

    first = pl.read_parquet(home / "accuracies.parquet")
    assert outcome.tables["accuracies"].equals(first)
    lines.clear()
    assert run(Setup(home, say=lines.append)).tables["accuracies"].equals(first)
    assert not lines  # nothing was computed again
    for part in (home / "parts").glob("sort*"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    assert run(Setup(home)).tables["accuracies"].equals(first)


def test_the_range_over_seeds_is_of_their_means() -> None:
    rows = [
        {"task": "sort", "seed": seed, "attention": "own", "paths": "5", "length": 0, "repeat": repeat,
         "accuracy": accuracy}
        for seed, accuracies in enumerate(((0.1, 0.3), (0.4, 0.6)))
        for repeat, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    (ends,) = fig4.by_seed(pl.DataFrame(rows)).iter_rows(named=True)
    assert (ends["least"], ends["most"], ends["seeds"]) == (pytest.approx(0.2), pytest.approx(0.5), 2)
