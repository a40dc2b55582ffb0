"""The predictor is a Gaussian process: scikit-learn's own gives the same numbers."""

from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.optimize import minimize
from scipy.stats import spearmanr
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern

from rankscope.errors import LabError
from rankscope.forecasts import POINTS, Outcome, Predictor, outcomes, trainings
from rankscope.forecasts.predictor import SPREAD
from rankscope_studies.forecasts.designs import draw_design
from rankscope_studies.forecasts.trainings import trained_settings

WEIGHTS = {"a": 0.7, "b": 0.3, "c": 0.0}
PLACE, LEARNS = Outcome(0.8, 0.1), Outcome(1.3, 0.4)


def tables(designs: int = 40, seed: int = 0) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Designs whose outcome hangs on entries a and b."""
    draw = np.random.default_rng(seed)
    points = pl.DataFrame({"number": range(designs), **{name: draw.normal(size=designs) for name in "abc"}})
    loss = points["a"].to_numpy() + 0.5 * points["b"].to_numpy() ** 2 + 0.1 * draw.normal(size=designs)
    place = (loss.argsort().argsort() + 0.5) / designs
    results = pl.DataFrame({"number": points["number"], "task": ["any"] * designs, "loss": loss})
    return points, results.with_columns(learns=pl.Series(loss < np.median(loss)), place=pl.Series(place))


def predictor() -> Predictor:
    return Predictor(*tables(), WEIGHTS, 0.2, PLACE, LEARNS)


def reference(way: Outcome, X: Any, y: Any) -> GaussianProcessRegressor:
    kernel = ConstantKernel(way.amplitude) * (
        Matern(nu=1.5) + ConstantKernel(0.2) * DotProduct(sigma_0=0.0, sigma_0_bounds="fixed")
    )
    return GaussianProcessRegressor(kernel, alpha=way.noise, optimizer=None).fit(X, y)


def scaled(found: Predictor) -> Any:
    return found.points * found.weights


def test_it_predicts_what_another_gaussian_process_predicts() -> None:
    found, (other, _) = predictor(), tables(7, seed=1)
    X, new = scaled(found), found.entries(other) * found.weights
    averages, places, spreads = found.predict_all(other)
    place, deviation = reference(PLACE, X, found.targets["place"]).predict(new, return_std=True)
    np.testing.assert_allclose(places, (place / SPREAD + 0.5).clip(0, 1), atol=1e-9)
    np.testing.assert_allclose(spreads, np.sqrt(deviation**2 + PLACE.noise) / SPREAD, atol=1e-9)
    np.testing.assert_allclose(averages, reference(LEARNS, X, found.targets["learns"]).predict(new), atol=1e-9)


def test_without_itself_is_what_the_others_say() -> None:
    found = predictor()
    X, y = scaled(found), found.targets["learns"]
    for k in range(0, len(X), 7):
        rest = np.arange(len(X)) != k
        alone = reference(LEARNS, X[rest], y[rest]).predict(X[k : k + 1])
        assert found.without_itself["learns"][k] == pytest.approx(alone[0], abs=1e-9)


def test_probabilities_are_those_of_logistic_regression() -> None:
    found = predictor()
    m, learnt = found.without_itself["learns"], found.results["learns"].to_numpy()

    def loss(at: Any) -> float:
        z = at[0] * m + at[1]
        return float(np.logaddexp(0, np.where(learnt, -z, z)).sum() + 0.5e-3 * (at**2).sum())

    a, b = minimize(loss, np.zeros(2), tol=1e-12).x
    np.testing.assert_allclose(found.probabilities(m), 1 / (1 + np.exp(-(a * m + b))), atol=1e-4)


@pytest.mark.parametrize("known", [{"a"}, {"b", "others"}])
def test_a_missing_entry_is_not_looked_at(known: set[str]) -> None:
    """As by a Gaussian process over the known entries alone, by scikit-learn, of the likeliest amplitude and noise."""
    found, (other, _) = predictor(), tables(7, seed=1)
    name = min(known & set(found.names))
    one = found.knowing(known)
    k = found.names.index(name)
    X, new = scaled(found)[:, [k]], (found.entries(other) * found.weights)[:, [k]]
    for at in range(len(other)):
        said = found.predict({name: other[name][at], "nothing of ours": 3.0})
        place, deviation = reference(one.place, X, found.targets["place"]).predict(new[[at]], return_std=True)
        assert said.place == pytest.approx(float((place[0] / SPREAD + 0.5).clip(0, 1)), abs=1e-7)
        assert said.place_spread == pytest.approx(np.sqrt(deviation[0] ** 2 + one.place.noise) / SPREAD, abs=1e-7)
        average = reference(one.learns, X, found.targets["learns"]).predict(new[[at]])
        assert said.probability == pytest.approx(float(one.probabilities(average)[0]), abs=1e-7)
        assert (said.known, said.entries) == (1, 2)
    for way, y in ((one.place, found.targets["place"]), (one.learns, found.targets["learns"])):
        best = likelihood(way, X, y)
        for amplitude, noise in ((1.1, 1.0), (0.9, 1.0), (1.0, 1.1), (1.0, 0.9)):
            assert likelihood(Outcome(way.amplitude * amplitude, way.noise * noise), X, y) < best


def likelihood(way: Outcome, X: Any, y: Any) -> float:
    """The log of the marginal likelihood, from its definition."""
    r = np.sqrt(3) * np.abs(X - X.T)
    K = way.amplitude * ((1 + r) * np.exp(-r) + 0.2 * X @ X.T) + way.noise * np.eye(len(X))
    return float(-0.5 * y @ np.linalg.solve(K, y) - 0.5 * np.linalg.slogdet(K)[1])


def test_the_share_that_is_told_right_is_counted_without_itself() -> None:
    found = predictor().knowing(["b"])
    X, y = scaled(found), found.targets["learns"]
    alone = np.array([
        reference(found.learns, np.delete(X, k, 0), np.delete(y, k)).predict(X[[k]])[0] for k in range(len(X))
    ])  # fmt: skip
    right = (found.probabilities(alone) > 0.5) == found.results["learns"].to_numpy()
    assert found.share_right == right.mean()
    assert found.share_frequent == 0.5  # those below the median learn


def test_all_known_is_the_predictor_itself_and_nothing_known_is_refused() -> None:
    found = predictor()
    assert found.knowing(["b", "a", "c"]) is found and found.knowing(["a"]) is found.knowing(["a", "c"])
    with pytest.raises(LabError, match="one known reading"):
        found.predict({"c": 1.0})


def test_entries_are_places_among_trained_networks() -> None:
    found, (points, _) = predictor(), tables()
    assert found.names == ["a", "b"]
    assert (found.points.argsort(0) == points.select("a", "b").to_numpy().argsort(0)).all()
    np.testing.assert_allclose(found.points.mean(0), 0.0, atol=1e-12)
    np.testing.assert_allclose(found.points.std(0), 1.0, rtol=1e-3)
    beyond = found.entries(pl.DataFrame({"a": [-1e300, 1e300], "b": [0.0, 0.0]}))
    assert abs(beyond[:, 0]) == pytest.approx(SPREAD / 2)


def test_a_network_that_was_trained_is_its_own_nearest() -> None:
    found, (points, _) = predictor(), tables()
    said = found.predict(points.row(3, named=True))
    assert said.nearest["number"][0] == 3 and said.similarity == pytest.approx(1.0) and not said.unfamiliar
    assert said.nearest["similarity"].is_sorted(descending=True)
    assert 0 < said.probability < 1 and 0 <= said.place <= 1 and said.place_spread > 0


def test_what_is_beyond_all_trained_networks_is_named() -> None:
    points, _ = tables()
    assert predictor().predict(points.row(3, named=True) | {"b": 99.0}).unfamiliar[0] == "b"


def test_a_design_that_was_trained_is_read_as_the_table_has_it() -> None:
    """Depths are logs, rounded in the table: the same number must not count as beyond."""
    found = Predictor.shipped()
    row = pl.read_csv(BytesIO(files("rankscope").joinpath(POINTS).read_bytes())).row(11, named=True)
    near = {name: value + 3e-5 * (value != round(value)) for name, value in row.items() if name != "number"}
    assert found.predict(near).similarity > 0.9999 and not found.predict(near).unfamiliar


def test_each_trained_design_is_predicted_by_the_others() -> None:
    """Far above what the residual alone tells (0.63). The weights were fitted to these designs."""
    found = Predictor.shipped()
    results = found.results.with_columns(
        said=pl.Series(found.without_itself["place"]),
        right=pl.Series(found.probabilities(found.without_itself["learns"]) > 0.5) == pl.col("learns"),
    )
    for task, least, share in (("next-character", 0.85, 0.92), ("induction", 0.7, 0.78)):
        mine = results.filter(pl.col("task") == task)
        assert mine.height > 200
        assert spearmanr(mine["said"], mine["place"])[0] > least
        assert mine["right"].to_numpy().mean() > share


def test_outcomes_are_ranked_within_a_task() -> None:
    for _, mine in outcomes().group_by("task"):
        ordered = mine.sort("loss")
        assert ordered["place"].is_sorted() and mine["place"].mean() == pytest.approx(0.5)
        assert ordered["learns"].to_list() == sorted(ordered["learns"].to_list(), reverse=True)


def test_what_was_trained_is_told_by_the_designs_themselves() -> None:
    """What the file says of sizes, rates and forms is what designs of those numbers have."""
    trained, table = Predictor.shipped().trained, trainings()
    assert trained == trained_settings(outcomes()["number"])
    assert trained["layers"] == [table["layers"].min(), table["layers"].max()] == [3, 48]
    assert trained["rate"] == [table["lr"].min(), table["lr"].max()] == [1e-3, 3e-3]
    designs = [draw_design(number) for number in table["number"][:300]]
    assert {design.width for design in designs} == {*trained["width"]}
    assert {design.remedy for design in designs} <= {*trained["remedy"]}
    inside = {"rate": 2e-3, "layers": 48, "mask": "causal", "experts": None, "unheard of": 3}
    assert Predictor.shipped().outside(inside) == []
    assert Predictor.shipped().outside({"layers": 49, "mask": "complete", "rate": 9e-4}) == [
        "layers 49 (trained: 3 to 48)", "mask complete (trained: causal, causal&window:16, causal&window:4)",
        "rate 0.0009 (trained: 0.001 to 0.003)",
    ]  # fmt: skip
