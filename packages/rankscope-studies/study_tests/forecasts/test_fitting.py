"""Weights are fitted by the likelihood of a Gaussian process, and find what outcomes hang on."""

import math

import numpy as np
import polars as pl
import torch
from scipy.stats import multivariate_normal, spearmanr

from rankscope_studies.forecasts.fitting import _negative_log_likelihood, cross_validate, fit_predictor
from tests.forecasts.test_predictor import tables


def test_the_likelihood_is_that_of_a_normal_distribution() -> None:
    draw = np.random.default_rng(0)
    X, Y, logs, others = draw.normal(size=(9, 3)), draw.normal(size=(9, 2)), draw.normal(size=3), draw.normal(size=5)
    found = _negative_log_likelihood(*map(torch.from_numpy, (X, Y, logs, others)))
    U = X * np.exp(logs)
    r = math.sqrt(3) * np.linalg.norm(U[:, None] - U[None], axis=-1)
    K = (1 + r) * np.exp(-r) + math.exp(others[0]) * U @ U.T
    true = 0.0
    for k in range(2):
        covariance = math.exp(others[1 + k]) * K + (math.exp(others[3 + k]) + 1e-6) * np.eye(9)
        true -= multivariate_normal(cov=covariance).logpdf(Y[:, k]) + 4.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(float(found), true, rtol=1e-6)


def test_what_outcomes_hang_on_gets_the_weight() -> None:
    points, results = tables(80)
    found = fit_predictor(points, results, price=2.0)
    weights = dict(zip(found.names, found.weights, strict=True))
    assert min(weights["a"], weights["b"]) > 3 * weights.get("c", 0.0)


def test_cross_validation_predicts_every_design_once() -> None:
    points, results = tables(60)
    said = cross_validate(points, results, folds=3, price=2.0, steps=60)
    assert said["number"].to_list() == list(range(60))
    assert spearmanr(said["predicted_place"], said["place"])[0] > 0.8
    assert ((said["probability"] > 0.5) == said["learns"]).to_numpy().mean() > 0.8


def test_the_order_of_designs_does_not_matter() -> None:
    points, results = tables(30)
    one, other = (fit_predictor(points, results[order], steps=20) for order in (slice(None), list(range(29, -1, -1))))
    assert one.to_dict()["weights"].keys() == other.to_dict()["weights"].keys()
    np.testing.assert_allclose(one.predict_all(points)[1], other.predict_all(points.select(pl.all()))[1], atol=1e-3)
