"""The weights of the predictor (`predictor.py`), fitted to trained designs.

The marginal likelihood of a Gaussian process rises where similar networks had similar outcomes. Adam climbs it, of both
outcomes at once, with a price on the sum of weights: a reading that adds little gets weight zero, and the predictor
stays small. `python -m rankscope_studies.forecasts fit` runs this, and writes `data/forecast_predictor.json`.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from rankscope.errors import LabError
from rankscope.forecasts import Outcome, Predictor
from rankscope.workers import run_pieces

LEAST = 0.01  # Weights below this share of the largest one are zero
NUGGET = 1e-6  # The least variance that similarity does not explain


def fit_predictor(
    points: pl.DataFrame,
    results: pl.DataFrame,
    *,
    price: float = 5.0,
    steps: int = 150,
    lr: float = 0.08,
    trained: Mapping[str, Sequence[Any]] | None = None,
) -> Predictor:
    """The predictor of these trained designs.

    Args:
        points: number · one column for each entry of a point.
        results: number · task · loss · learns · place (`rankscope.forecasts.outcomes`).
        price: What the log likelihood must gain for a weight to grow by `1 / sqrt(entries)`.
        steps: Steps of Adam.
        lr: Its learning rate.
        trained: The values that the designs have of each setting (`trainings.trained_settings`), for the predictor.
    """
    names = [name for name in points.columns if name != "number"]
    varied = [name for name in names if points[name].n_unique() > 1]
    even = Predictor(points, results, dict.fromkeys(varied, 1.0), 0.0, Outcome(1.0, 1.0), Outcome(1.0, 1.0))
    X = torch.from_numpy(even.points)
    Y = torch.from_numpy(np.stack([even.targets["place"], even.targets["learns"]], 1))
    count = X.shape[1]
    logs = torch.full((count,), -0.5 * math.log(count) - 0.5, dtype=torch.float64, requires_grad=True)
    log_hyperparameters = torch.tensor([-3.0, 0.0, 0.0, -2.0, -2.0], dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([logs, log_hyperparameters], lr=lr)
    for _ in range(steps):
        adam.zero_grad()
        loss = _negative_log_likelihood(X, Y, logs, log_hyperparameters) + price * math.sqrt(count) * logs.exp().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    w = logs.detach().exp()
    w = torch.where(w > LEAST * w.max(), w, 0.0)
    linear, *rest = log_hyperparameters.detach().exp().tolist()
    weights = {name: round(float(weight), 4) for name, weight in zip(varied, w, strict=True) if weight > 0}
    place_outcome, learns_outcome = Outcome(rest[0], rest[2] + NUGGET), Outcome(rest[1], rest[3] + NUGGET)
    return Predictor(points, results, weights, linear, place_outcome, learns_outcome, trained)


def _negative_log_likelihood(X: Tensor, Y: Tensor, logs: Tensor, others: Tensor) -> Tensor:
    """Of both outcomes, but for constants; `others` are the logs of c, two amplitudes and two noises."""
    U = X * logs.exp()
    gram = U @ U.T
    square = (gram.diagonal()[:, None] + gram.diagonal() - 2 * gram).clamp(min=1e-12)
    r = (3 * square).sqrt()
    K = (1 + r) * (-r).exp() + others[0].exp() * gram
    total = torch.zeros((), dtype=X.dtype)
    for k in range(Y.shape[1]):
        noise = (others[3 + k].exp() + NUGGET) * torch.eye(len(K), dtype=K.dtype)
        root = torch.linalg.cholesky(others[1 + k].exp() * K + noise)
        y = Y[:, k : k + 1]
        total = total + 0.5 * (y * torch.cholesky_solve(y, root)).sum() + root.diagonal().log().sum()
    return total


def cross_validate(
    points: pl.DataFrame, results: pl.DataFrame, *, folds: int = 10, seed: int = 0, workers: int = 0, **options: Any
) -> pl.DataFrame:
    """What every design is predicted by a predictor that is fitted without its fold: number · task · loss · learns ·
    place · predicted_place · probability.

    Args:
        points: As of `fit_predictor`.
        results: As of `fit_predictor`.
        folds: Into how many parts designs are put.
        seed: What the parts are drawn from.
        workers: Processes; 0 works in this one.
        options: Those of `fit_predictor`.
    """
    together = results.join(points.select("number"), on="number", how="inner", maintain_order="left")
    fold = np.random.default_rng(seed).permutation(len(together)) % folds
    work = partial(_predicted_fold, points=points, results=together, fold=fold, options=options)
    parts = []
    for result in run_pieces(work, range(folds), workers):
        if result.value is None:
            raise LabError(f"a fold of the cross-validation failed: {result.error}")
        parts.append(result.value)
    return pl.concat(parts).sort("number")


def _predicted_fold(
    k: int, points: pl.DataFrame, results: pl.DataFrame, fold: Any, options: dict[str, Any]
) -> pl.DataFrame:
    """The designs of fold k, predicted by all others."""
    held = results.filter(fold == k)
    predictor = fit_predictor(points, results.filter(fold != k), **options)
    averages, places, _ = predictor.predict_all(
        held.select("number").join(points, on="number", how="left", maintain_order="left")
    )
    columns = {"predicted_place": places, "probability": predictor.probabilities(averages)}
    return held.with_columns(**{name: pl.Series(values) for name, values in columns.items()})
