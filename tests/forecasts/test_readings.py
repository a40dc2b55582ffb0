"""Readings at initialisation: what the loss of the labels' frequencies cannot see, and weights left as they were."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rankscope.forecasts.readings import LOWEST, architecture_numbers, drifted, output_readings, readings
from rankscope.lab import Copying, Recipe, Training
from rankscope.lab.tasks.base import UNLABELLED
from rankscope.nets import Architecture, Transformer

TASK = Copying(symbols=4, length=3)
RECIPE = Recipe(steps=16, batch_size=4, lr=1e-2)


def fresh(**fields: object) -> Training:
    """A small training in float64, not begun."""
    return Training(TASK, TASK.architecture(2, 8, 2, **fields), RECIPE, dtype=torch.float64)


def test_weights_are_as_before() -> None:
    model = fresh().models[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    readings(model, TASK, RECIPE)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with drifted(model, Recipe(steps=1, lr=0.1)):
        moved = [float((before[name] - tensor).std()) for name, tensor in model.state_dict().items() if tensor.ndim > 1]
    assert all(0.05 < size < 0.15 for size in moved)


def test_the_input_gradient_of_the_head_is_that_of_centred_errors() -> None:
    model = fresh().models[0]
    found = readings(model, TASK, RECIPE)
    batch = TASK.batch(RECIPE.batch_size, 0, 0)
    with torch.no_grad():
        H = model.net(model.tokens(batch.inputs))
        labelled = batch.labels != UNLABELLED
        h, y = H[labelled], batch.labels[labelled]
        r = (model.head(h).softmax(-1) - F.one_hot(y, 4)) / len(y)
        by_hand = h.mT @ (r - r.mean(0))
    reach = RECIPE.lr * RECIPE.steps * float(by_hand.abs().sum())  # the bias has none: centred errors add up to zero
    assert found["reach_head"] == pytest.approx(math.log10(reach), abs=1e-9)


def test_tokens_that_are_alike_leave_nothing_to_learn_from() -> None:
    bare = {"norm": "none", "final_norm": False, "mlp": "none", "attention_skip": 0.0, "kernel": "uniform"}
    found = readings(fresh(mask="complete", **bare).models[0], TASK, RECIPE)
    assert found["residual_last"] == -30.0
    assert found["lowest_query"] == -30.0
    whole = readings(fresh().models[0], TASK, RECIPE)
    assert whole["residual_last"] > -2
    assert whole["lowest_query"] > -12


def test_the_curvature_is_the_second_derivative_along_the_signs() -> None:
    model = fresh().models[0]
    found = readings(model, TASK, RECIPE)
    batch = TASK.batch(RECIPE.batch_size, 0, 0)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradient = torch.autograd.grad(TASK.loss(model(batch.inputs), batch), weights)

    def loss(at: float) -> float:
        with torch.no_grad():
            for weight, g in zip(weights, gradient, strict=True):
                weight.add_(at * g.sign())
            value = float(TASK.loss(model(batch.inputs), batch))
            for weight, g in zip(weights, gradient, strict=True):
                weight.sub_(at * g.sign())
        return value

    h = 3e-6  # the third derivative is large: at 1e-4 it is seen
    second = (loss(h) - 2 * loss(0.0) + loss(-h)) / h**2
    assert found["curvature"] == pytest.approx(math.log10(abs(second)), abs=1e-3)


def test_shares_of_the_output_are_those_of_a_variance_taken_apart() -> None:
    """By numpy: the part of all tokens that their mean has not, and what means by position and by symbol explain."""
    draw = torch.Generator().manual_seed(0)
    Y, symbols = torch.randn(5, 4, 6, generator=draw) + 2.0, torch.randint(3, (5, 4), generator=draw)
    found = output_readings(Y, Y[..., :3], symbols)
    H = Y.double().numpy().reshape(-1, 6)
    C = H - H.mean(0)

    def explained(groups: np.ndarray) -> float:
        means = np.stack([C[groups == g].mean(0) for g in groups])
        return float((means**2).sum() / (C**2).sum())

    assert found["share_batch"] == pytest.approx(np.log10(np.linalg.norm(C) / np.linalg.norm(H)), abs=1e-6)
    assert found["share_position"] == pytest.approx(explained(np.tile(np.arange(4), 5)), abs=1e-6)
    assert found["share_current"] == pytest.approx(explained(symbols.flatten().numpy()), abs=1e-6)
    nothing = output_readings(torch.zeros(5, 4, 6), torch.zeros(5, 4, 3), symbols)
    assert nothing["share_batch"] == LOWEST and nothing["share_current"] == 0.0


def test_numbers_of_a_network_are_its_fields() -> None:
    """By name, as the predictor takes them; without a MLP its skip is that of attention."""
    usual = Architecture(layers=8, width=8, heads=2)
    found = architecture_numbers(usual, 1e-3)
    assert found == {
        "depth": 3.0, "rate": pytest.approx(-3.0), "attention_skip": 1.0, "mlp_skip": 1.0, "no_norm": 0.0,
        "norm_after": 1.0, "centred_norm": 1.0, "last_norm": 0.0, "no_mlp": 0.0, "gated_mlp": 0.0, "bounded": 0.0,
        "window": 0.0, "no_table": 1.0, "remedies": 0.0,
    }  # fmt: skip
    changes: list[tuple[dict[str, Any], dict[str, float]]] = [
        ({"norm": "none"}, {"no_norm": 1, "norm_after": 0, "centred_norm": 0}),
        ({"norm": "rms"}, {"centred_norm": 0}),
        ({"norm_place": "pre", "final_norm": True}, {"norm_after": 0, "last_norm": 1}),
        ({"mlp": "none", "attention_skip": 0.5}, {"attention_skip": 0.5, "mlp_skip": 0.5, "no_mlp": 1}),
        ({"mlp_skip": 0.25}, {"mlp_skip": 0.25}),
        ({"mlp": "gated"}, {"gated_mlp": 1}),
        ({"activation": "tanh"}, {"bounded": 1}),
        ({"mask": "causal & window:3"}, {"window": 1}),
        ({"positions": "absolute", "length": 4}, {"no_table": 0}),
        ({"layers": 2}, {"depth": 1}),
    ]
    for fields, changed in changes:
        assert architecture_numbers(usual.replace(**fields), 1e-3) == found | changed
    assert architecture_numbers(Transformer.random(usual).with_remedy("rezero").arch, 1e-3)["remedies"] == 1
