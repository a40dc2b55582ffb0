"""A trial trains a remedy with several seeds and measures what became of it."""

import math
import time
from dataclasses import replace

import polars as pl
import pytest
import torch
from torch.nn import functional as F

from rankscope.lab import Training
from rankscope.nets import Transformer
from rankscope_studies.trial import SETTINGS, Trial, TrialDeadlineError, TrialSizes, gradients, train_until
from tests.raising import raises

SIZES = TrialSizes(width=8, heads=2, context=6, batch=2, steps=4, evaluation_samples=4, probe_samples=2)


def trial(remedy: str = "none", setting: str = "pre", depth: int = 2, sizes: TrialSizes = SIZES) -> Trial:
    return Trial(remedy, setting, depth, (0, 3), sizes)


def value(table: pl.DataFrame, quantity: str, seed: int = 3) -> float:
    return float(table.filter(quantity=quantity, seed=seed)["value"].item())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_it_says_all_that_it_should(setting: str) -> None:
    table = trial(setting=setting).table()
    assert table["refused"].null_count() == len(table)
    for seed in (0, 3):
        shares = [value(table, f"path_share_{length}", seed) for length in range(3)]
        assert sum(shares) == pytest.approx(1, abs=1e-9)
        assert setting != "no skips" or abs(shares[2]) > abs(shares[0] + shares[1])  # those begin at biases
        assert value(table, "relative_residual", seed) == value(table, "relative_residual_at_2", seed) < 0
        assert 0 < value(table, "entropy", seed) < math.log(16 if setting == "images" else 6)
        assert value(table, "diverged", seed) == 0 == value(table, "parameters_added", seed)
        assert 0 <= value(table, "accuracy", seed) <= 1
    assert value(table, "loss") == pytest.approx(trial(setting=setting).training().finish().evaluate(4)[1].loss)
    assert value(table, "loss_start") == trial(setting=setting).training().evaluate(4)[1].loss


@pytest.mark.slow
def test_parameters_are_counted() -> None:
    added = {"attnscale": 2 * 2, "rezero": 2 - 5 * 2 * 8, "sigmareparam": 2 * 6 + 1}
    plain = trial().training().models[0]
    for remedy, more in added.items():
        table = trial(remedy).table()
        assert value(table, "parameters_added") == more
        assert value(table, "parameters") == sum(each.numel() for each in plain.parameters()) + more


@pytest.mark.parametrize(
    ("remedy", "setting", "says"),
    [
        ("deepnorm", "pre", "norm_place must be 'post'"),
        ("lnscale", "post", "must be 'pre' or"),
        ("lambda", "no skips", "lambda is a weight of skips"),
        ("sinkhorn", "pre", "no token may read later ones; with sinkhorn this network does"),
    ],
)
def test_what_does_not_go_there_is_refused_in_the_table(remedy: str, setting: str, says: str) -> None:
    (row,) = trial(remedy, setting).table().iter_rows(named=True)
    assert says in row["refused"] and (row["remedy"], row["setting"]) == (remedy, setting)
    assert row["quantity"] is row["value"] is row["seed"] is None


@pytest.mark.slow
def test_what_cannot_be_measured_says_why() -> None:
    table = trial("valueresidual").table()
    paths = table.filter(quantity="path_share")
    assert paths["value"].null_count() == 2 and "valueresidual changes the values" in paths["refused"][0]
    (entropy,) = trial("centred").table().filter(quantity="entropy", seed=0).iter_rows(named=True)
    assert entropy["value"] is None and "negative" in entropy["refused"]


def test_a_network_that_says_nothing_has_no_numbers_but_reasons() -> None:
    """ReZero without skips: every layer gives zero, and learns nothing."""
    table = trial("rezero", "no skips").table().filter(seed=0)
    assert not table["value"].is_infinite().any() and value(table, "loss", 0) > 0
    reasons = dict(table.drop_nulls("refused").select("quantity", "refused").iter_rows())
    assert reasons["gradient_first_end"] == "the gradient is zero"
    assert reasons["path_share"] == "the output is zero" and "relative_residual" in reasons


@pytest.mark.slow
def test_one_that_diverges_is_marked_and_stops_early() -> None:
    wild = trial(sizes=replace(SIZES, lr=1e30, steps=60))
    table = wild.table()
    assert value(table, "diverged", 0) == 1 == value(table, "diverged", 3)
    assert {"loss_start", "diverged", "gradient_first_start"} <= {*table["quantity"]}
    assert not {"loss", "relative_residual", "gradient_first_end"} & {*table["quantity"]}
    training = wild.training()
    assert train_until(training) == [False, False] and training.steps == 20


def test_one_seed_that_diverges_leaves_the_others_alone() -> None:
    sick = trial().training(dtype=torch.float64)
    well = replace(trial(), seeds=(3,)).training(dtype=torch.float64)
    with torch.no_grad():
        sick.models[0].head.weight.fill_(torch.inf)
    assert train_until(sick) == [False, True] and train_until(well) == [True]
    for name, each in well.models[0].state_dict().items():
        torch.testing.assert_close(sick.models[1].state_dict()[name], each, rtol=1e-10, atol=1e-10)
    assert math.isfinite(sick.evaluate(4)[1].loss)


@pytest.mark.parametrize("remedy", ["attnscale", "contranorm", "sigmareparam"])
def test_gradients_are_those_of_the_loss(remedy: str) -> None:
    """Of the network on tensors that ask for them, and a cross-entropy written out."""
    training: Training = trial(remedy).training()
    model, batch = training.models[1], training.task.held_out(3)
    said = {name: value for _, name, value, _ in gradients(3, training.task, model, batch, "start")}
    net = model.network().to(torch.float64)
    tensors = {name: each.clone().requires_grad_() for name, each in net.state_dict().items()}
    found = Transformer.from_weights(net.arch, tensors)
    with torch.no_grad():
        X = model.tokens(batch.inputs).double()
        head, bias = model.head.weight.double(), model.head.bias.double()
    logs = F.log_softmax(found.run(X).output @ head + bias, -1)
    loss = -logs.gather(-1, batch.labels[..., None]).mean()
    for place, name in ((0, "first"), (1, "last")):
        mine = [each for key, each in tensors.items() if key.startswith(f"layers.{place}.")]
        squares = sum(each.square().sum() for each in torch.autograd.grad(loss, mine, retain_graph=True))
        expected = 0.5 * math.log10(float(squares))
        if remedy == "sigmareparam":  # at other parameters: g, and W off its first singular direction
            assert said[f"gradient_{name}_start"] == pytest.approx(expected, abs=0.5)
        else:
            assert said[f"gradient_{name}_start"] == pytest.approx(expected, abs=1e-6)


def test_it_ends_when_the_time_is_over() -> None:
    with raises(TrialDeadlineError, subject="until"):
        trial().table(until=time.time())
