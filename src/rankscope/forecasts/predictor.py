"""`Predictor`: what a training will make of a network, from what is read off it before its first step.

A Gaussian process: the networks that were trained, each a point x whose entries are its readings and the numbers of
its architecture (`readings.py`), and what became of them, its values. The package has both: `TABLE`, a row for each
training, and `POINTS`, what was read off each design before its first step; `python -m rankscope_studies.forecasts`
trains, reads and writes them. With weights w, one for each entry, fitted to the trainings (the studies'
`forecasts/fitting.py`), two networks are as similar as

    k(a, b) = (1 + sqrt(3) r) e^{-sqrt(3) r} + c sum_j w_j^2 a_j b_j,      r^2 = sum_j w_j^2 (a_j - b_j)^2,

and a prediction is an average of outcomes of trained networks, `k(x, X) (k(X, X) + s I)^-1 y`, in which similar ones
count most. Entries go in as their places among trained networks, so that a log of 1e-300 is "the least", not a number
that outweighs all others. Two outcomes are predicted by the same similarity:

- the **place**: 0 the lowest final loss of all designs of the same task, 1 the highest;
- whether it **learns**: its final loss is below that of guessing by frequencies, by `LEARNT` nats. The
  average of +1 and -1 becomes a probability by a logistic curve, fitted to what each trained network would have been
  predicted without itself.

What is far from every trained network is said to be so (`Prediction.unfamiliar`).

Of a network that not everything can be read of (`live_module.py`), entries that are not known have weight zero
(`Predictor.knowing`): networks are then alike by what is known. How much of the outcomes such a similarity explains is
fitted anew, by the marginal likelihood, and so is the logistic curve; the share of trained networks that are told right
without themselves (`Predictor.share_right`) says what the missing entries cost.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
import polars as pl
from scipy.optimize import minimize_scalar
from scipy.special import expit

from rankscope.errors import LabError, require

STEPS = 300  # Of each training
TABLE = "data/forecast_trainings.csv"
DIGITS = 4  # Decimals of readings, in the table and of what is compared with it
LEARNT = {"next-character": 0.1, "induction": 0.05}
"""By task, the nats by which a final loss must be below `Task.blind` for the network to have learnt anything."""


def trainings() -> pl.DataFrame:
    """The table of designs that were trained: number · seed · key · task · layers · lr · blind · loss_start ·
    loss_early · loss · accuracy · diverged. A design is what
    `rankscope_studies.forecasts.draw_design` gives for its number, if its key still is.

    >>> trainings().columns[:3]
    ['number', 'seed', 'key']
    """
    return pl.read_csv(BytesIO(files("rankscope").joinpath(TABLE).read_bytes()))


def outcomes() -> pl.DataFrame:
    """What became of each design when it was first trained: number · task · loss · learns · place.

    A design learns if its loss is below that of guessing by frequencies by `LEARNT` nats. Its place is its rank among
    designs of its task, 0 the lowest loss and 1 the highest; those that diverged have the highest.

    >>> sorted(outcomes().columns)
    ['learns', 'loss', 'number', 'place', 'task']
    """
    table = trainings().filter(pl.col("seed") == 0)
    loss = pl.when(pl.col("diverged") == 1).then(math.inf).otherwise(pl.col("loss").fill_nan(math.inf))
    margin = pl.col("task").replace_strict(LEARNT, return_dtype=pl.Float64)
    rank = (pl.col("loss").rank() - 0.5).over("task") / pl.len().over("task")
    return table.with_columns(loss=loss.fill_null(math.inf)).select(
        "number", "task", "loss", learns=pl.col("loss") < pl.col("blind") - margin, place=rank
    )


POINTS, WEIGHTS = "data/forecast_readings.csv", "data/forecast_predictor.json"
UNUSUAL = 0.01
"""A network is unfamiliar if it is less similar to the nearest trained one than trained networks are to each other, but
for this share of them."""
WEIGHTY = 0.1  # The share of the largest weight from which on an entry beyond all trained networks is told
BROKEN = -40.0  # What stands for a reading that is no number, of a network that gives none
RIDGE = 1e-3  # The price on squares of the logistic curve's two numbers
NOISES = (-12.0, 12.0)  # Natural logs of noise over amplitude between which the likeliest is looked for
NEAREST = 5  # Trained networks that a prediction names
SPREAD = math.sqrt(12.0)  # Places are uniform between 0 and 1: times this, their variance is one


NEAREST_SCHEMA = {"number": pl.Int64, "similarity": pl.Float64, "task": pl.String, "loss": pl.Float64,
                  "learns": pl.Boolean}  # fmt: skip
"""The columns of `Prediction.nearest`."""


@dataclass(frozen=True)
class Prediction:
    """What trained networks say of another one."""

    probability: float  # That it learns
    place: float  # Where its final loss is expected among designs of the same task: 0 the lowest, 1 the highest
    place_spread: float  # The standard deviation of the place, as far as trained networks tell
    similarity: float  # That to the nearest trained network; 1 is the same point
    unfamiliar: tuple[str, ...]
    """What is unlike all trained networks: names of entries beyond what any of them had, and "similarity" where the
    whole point is far from each of them."""
    nearest: pl.DataFrame  # number · similarity · task · loss · learns of the trained networks that are most similar
    known: int  # How many of the predictor's entries were known
    entries: int  # How many the predictor looks at
    share_right: float
    """Of trained networks, the share of which it is told right whether they learn, each by the others and by the known
    entries alone."""
    share_frequent: float  # The share that would be right if the more frequent outcome were said of each


@dataclass(frozen=True)
class Outcome:
    """How one outcome is predicted: the variance that similarity explains, and that which it does not."""

    amplitude: float
    noise: float


class Predictor:
    """The Gaussian process of the module's docstring.

    Args:
        points: number · one column for each entry, of networks that were trained.
        results: number · task · loss · learns · place of the same networks (`outcomes`).
        weights: The weight w of each entry, by name; entries of weight zero are not looked at.
        linear: c, the share of what is linear.
        place: How places are predicted.
        learns: How it is predicted whether a network learns.
        trained: The values that the trained networks had of each setting (`Plan.settings`): the least and the
            largest of a number, else every value.
    """

    def __init__(
        self,
        points: pl.DataFrame,
        results: pl.DataFrame,
        weights: dict[str, float],
        linear: float,
        place: Outcome,
        learns: Outcome,
        trained: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self.trained, self._restricted = dict(trained or {}), dict[frozenset[str], Predictor]()
        together = results.join(points, on="number", how="inner", maintain_order="left")
        self.names = [name for name, weight in weights.items() if weight > 0]
        self.weights = np.array([weights[name] for name in self.names])
        self.linear, self.place, self.learns = linear, place, learns
        self.results = together.select("number", "task", "loss", "learns", "place")
        self._raw = together.select(self.names)
        self._sorted = np.sort(_known(self._raw.to_numpy()), axis=0)
        self.points = self.entries(self._raw)
        self.targets = {
            "place": (self.results["place"].to_numpy() - 0.5) * SPREAD,
            "learns": np.where(self.results["learns"].to_numpy(), 1.0, -1.0),
        }

    @classmethod
    @cache
    def shipped(cls) -> "Predictor":
        """The predictor of this version, from the tables that come with it."""
        fitted = json.loads(files("rankscope").joinpath(WEIGHTS).read_text(encoding="utf-8"))
        points = pl.read_csv(BytesIO(files("rankscope").joinpath(POINTS).read_bytes()))
        ways = {name: Outcome(**fitted[name]) for name in ("place", "learns")}
        return cls(points, outcomes(), fitted["weights"], fitted["linear"], **ways, trained=fitted["trained"])

    def outside(self, settings: Mapping[str, Any]) -> list[str]:
        """A phrase for each of these settings that no trained network had, with the values that trained networks had.

        >>> Predictor.shipped().outside({"rate": 1e-6, "width": 64, "parallel": True})
        ['rate 1e-06 (trained: 0.001 to 0.003)', 'parallel True (trained: False)']
        """
        sentences = []
        for name, value in settings.items():
            known = self.trained.get(name, [value])
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (known[0] <= value <= known[-1] if is_number else value in known):
                values = [f"{x:g}" if is_number else str(x) or "none" for x in dict.fromkeys(known)]
                shown = f"{value:g}" if is_number else str(value)
                sentences.append(f"{name} {shown} (trained: {(' to ' if is_number else ', ').join(values)})")
        return sentences

    def knowing(self, names: Iterable[str]) -> "Predictor":
        """The predictor that looks at these entries alone; itself where all of its own are among them.

        Args:
            names: The entries that are known; others than the predictor's are ignored.

        Raises:
            LabError: None of them is the predictor's.
        """
        known = frozenset(self.names) & frozenset(names)
        if len(known) == len(self.names):
            return self
        require(known, "a prediction needs one known reading at least; got none", LabError, "point")
        if known in self._restricted:
            return self._restricted[known]
        weights = {name: weight for name, weight in zip(self.names, self.weights, strict=True) if name in known}
        points = self._raw.select(self.results["number"], *weights)
        refitted = Predictor(points, self.results, weights, self.linear, self.place, self.learns)
        values, vectors = np.linalg.eigh(refitted.kernel(refitted.points, refitted.points))
        refitted.place, refitted.learns = (
            _likeliest(values.clip(0.0), vectors.T @ refitted.targets[name]) for name in ("place", "learns")
        )
        self._restricted[known] = refitted
        return refitted

    @cached_property
    def share_right(self) -> float:
        """The share of trained networks of which it is told right whether they learn, each by the others."""
        predicted = self.probabilities(self.without_itself["learns"]) > 0.5
        return float((predicted == self.results["learns"].to_numpy()).mean())

    @property
    def share_frequent(self) -> float:
        """The share of trained networks that have the more frequent outcome: learning, or not."""
        learnt = float(self.results["learns"].to_numpy().mean())
        return max(learnt, 1 - learnt)

    def to_dict(self) -> dict[str, Any]:
        """Everything that was fitted, for JSON."""
        weights = dict(zip(self.names, self.weights.tolist(), strict=True))
        fitted = {"linear": self.linear, "place": asdict(self.place), "learns": asdict(self.learns)}
        return {"weights": dict(sorted(weights.items(), key=lambda item: -item[1])), **fitted, "trained": self.trained}

    def entries(self, table: pl.DataFrame) -> Any:
        """Columns as places among trained networks, between -sqrt(3) and sqrt(3), `[network, entry]`: of mean zero, and
        variance one where no two networks have the same number."""
        values = _known(table.select(self.names).to_numpy())
        ranks = np.zeros(values.shape)
        for k, column in enumerate(self._sorted.T):
            for side in ("left", "right"):
                ranks[:, k] += np.searchsorted(column, values[:, k], side=side)
        return (ranks / (2 * len(self._sorted)) - 0.5) * SPREAD

    def similarity(self, a: Any, b: Any) -> Any:
        """The first term of k between points a and b, `[a, b]`: 1 where they are the same."""
        u, v = a * self.weights, b * self.weights
        square = (u * u).sum(1)[:, None] + (v * v).sum(1)[None] - 2 * u @ v.T
        r = np.sqrt(3 * square.clip(0.0))
        return (1 + r) * np.exp(-r)

    def kernel(self, a: Any, b: Any) -> Any:
        """k between points a and b, `[a, b]`."""
        return self.similarity(a, b) + self.linear * (a * self.weights) @ (b * self.weights).T

    @cached_property
    def _inverses(self) -> dict[str, Any]:
        """The inverse of `amplitude k(X, X) + noise I`, for each outcome."""
        K = self.kernel(self.points, self.points)
        ways = {"place": self.place, "learns": self.learns}
        return {name: np.linalg.inv(way.amplitude * K + way.noise * np.eye(len(K))) for name, way in ways.items()}

    @cached_property
    def without_itself(self) -> dict[str, Any]:
        """What each trained network would have been predicted without itself: `place` from 0 to 1, and `learns`, the
        average of +1 and -1 (leave-one-out, in closed form)."""
        predictions = {}
        for name, inverse in self._inverses.items():
            y = self.targets[name]
            predictions[name] = y - (inverse @ y) / inverse.diagonal()
        return {"place": predictions["place"] / SPREAD + 0.5, "learns": predictions["learns"]}

    @cached_property
    def _least_similar(self) -> float:
        """The similarity to the nearest other one that all but the share `UNUSUAL` of trained networks have."""
        among = self.similarity(self.points, self.points) - 2 * np.eye(len(self.points))
        return float(np.quantile(among.max(1), UNUSUAL))

    @cached_property
    def _logistic(self) -> tuple[float, float]:
        """(a, b) of the probability `1 / (1 + e^{-(a m + b)})` of an average m, by Newton's method; `RIDGE` keeps them
        finite where every network is told apart."""
        m, learnt = self.without_itself["learns"], self.results["learns"].to_numpy().astype(float)
        X, at = np.stack([m, np.ones_like(m)], 1), np.zeros(2)

        def loss(at: Any) -> float:
            z = X @ at
            return float((np.logaddexp(0.0, z) - learnt * z).sum() + 0.5 * RIDGE * at @ at)

        for _ in range(50):
            p = expit(X @ at)
            slope = X.T @ (learnt - p) - RIDGE * at
            step = np.linalg.solve((X * (p * (1 - p))[:, None]).T @ X + RIDGE * np.eye(2), slope)
            while loss(at + step) > loss(at) and np.abs(step).max() > 1e-12:  # too far where all are told apart
                step = step / 2
            at = at + step
        return float(at[0]), float(at[1])

    def median_of_learners(self, task: str) -> dict[str, float]:
        """By entry, the median of networks that learnt this task, or any task if it is none of theirs."""
        learnt, mine = self.results["learns"], self.results["task"] == task
        rows = _known(self._raw.filter(learnt & mine if bool(mine.any()) else learnt).to_numpy())
        return dict(zip(self.names, np.median(rows, axis=0).tolist(), strict=True))

    def probabilities(self, averages: Any) -> Any:
        """The chance that networks learn whose predicted averages of +1 and -1 are these."""
        return expit(self.log_odds(averages))

    def log_odds(self, averages: Any) -> Any:
        """The log of p / (1 - p), p the chance that networks learn whose predicted averages of +1 and -1 are these."""
        a, b = self._logistic
        return a * averages + b

    def predict_all(self, table: pl.DataFrame) -> tuple[Any, Any, Any]:
        """(averages of +1 and -1, places, their standard deviations) of networks, a row of entries each."""
        x = self.entries(table)
        k = self.kernel(x, self.points)
        learns = self.learns.amplitude * k @ (self._inverses["learns"] @ self.targets["learns"])
        outcome, K = self.place, self._inverses["place"]
        mean = outcome.amplitude * k @ (K @ self.targets["place"])
        prior_variance = outcome.amplitude * self.kernel(x, x).diagonal() + outcome.noise
        left = (prior_variance - outcome.amplitude**2 * ((k @ K) * k).sum(1)).clip(0.0)
        return learns, (mean / SPREAD + 0.5).clip(0.0, 1.0), np.sqrt(left) / SPREAD

    def predict(self, point: Mapping[str, float]) -> Prediction:
        """What is expected of one network.

        Args:
            point: Its readings and the numbers of its architecture, by name; others than the predictor's are ignored,
                and of those that are left out nothing is known (`knowing`).

        Raises:
            LabError: Nothing is known.
        """
        predictor = self.knowing(point)
        table = pl.DataFrame([{name: point[name] for name in predictor.names}])
        averages, places, spreads = predictor.predict_all(table)
        similar = predictor.similarity(predictor.entries(table), predictor.points)[0]
        nearest = np.argsort(-similar)[:NEAREST]
        named = predictor.results[nearest.tolist()].with_columns(similarity=pl.Series(similar[nearest]))
        most, values = float(similar[nearest[0]]), _known(table.to_numpy()[0])
        outside = (values < predictor._sorted[0]) | (values > predictor._sorted[-1])
        beyond = np.array(predictor.names)[outside & (predictor.weights >= WEIGHTY * predictor.weights.max())].tolist()
        return Prediction(
            probability=float(predictor.probabilities(averages)[0]),
            place=float(places[0]),
            place_spread=float(spreads[0]),
            similarity=most,
            unfamiliar=(*beyond, *(["similarity"] if most < predictor._least_similar else [])),
            nearest=named.select(list(NEAREST_SCHEMA)),
            known=len(predictor.names),
            entries=len(self.names),
            share_right=predictor.share_right,
            share_frequent=predictor.share_frequent,
        )


def _likeliest(values: Any, y: Any) -> Outcome:
    """The outcome whose marginal likelihood is largest: with noise `t` times the amplitude a, the likeliest a is
    `mean(y^2 / (values + t))`, and what is left is to find t. `values` are the eigenvalues of k(X, X), and y is what
    became of the networks, in the basis of the eigenvectors."""

    def amplitude(log: float) -> float:
        return float(np.mean(y**2 / (values + math.exp(log))))

    def negative(log: float) -> float:
        return len(y) * math.log(amplitude(log)) + float(np.log(values + math.exp(log)).sum())

    log = float(minimize_scalar(negative, bounds=NOISES, method="bounded").x)
    return Outcome(amplitude(log), amplitude(log) * math.exp(log))


def _known(values: Any) -> Any:
    """Readings as they are compared: as many decimals as the table has, and a number for each that is none."""
    return np.round(np.where(np.isnan(values), BROKEN, values), DIGITS)
