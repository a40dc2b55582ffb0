"""The registered test: forecasts that are written down before any of their designs is trained, and scored after.

`register` draws designs that no predictor was fitted to, forecasts each, and writes all of it with the time and with a
digest of designs and forecasts. `score` takes what the trainings gave (`trainings.train_designs`) and says how often
the forecasts were right, beside simple readings of the same networks:

| rival | what it is | higher loss where it is |
|---|---|---|
| `depth` | the number of layers | larger |
| `residual` | log10 of the relative residual after the last layer | smaller |
| `gradient` | log10 of the gradient of values in the layer that has least | smaller |
| `gradient_ratio` | |log10| of the gradients of values, last layer to first | larger |
| `both` | the ranks of the residual and of the gradient's ratio, added | larger |
| `activation_growth` | OLMo 2's exponent of activations, `|lambda|` of `growth_exponents` | larger |
| `gradient_growth` | the same of gradients | larger |
| `loss_early` | the held-out loss after a tenth of the training (no forecast: it is trained) | larger |
| `another_seed` | the final loss of the same design with another seed: the ceiling | larger |
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from scipy.stats import spearmanr

from rankscope.errors import FileError, LabError
from rankscope.files import atomic
from rankscope.forecasts import LEARNT, Plan, Predictor
from rankscope.workers import run_pieces
from rankscope_studies.forecasts.designs import draw_design
from rankscope_studies.forecasts.trainings import read_design

RIVALS = ("depth", "residual", "gradient", "gradient_ratio", "both", "activation_growth", "gradient_growth",
          "loss_early")  # fmt: skip
READINGS = ("depth", "residual_last", "lowest_value", "tilt_value")  # Readings that rivals are made of
PARTS = ("norm", "norm_place", "mlp", "activation", "mask", "positions")  # Fields of a design that mistakes are told by
BINS = 5  # Into how many parts probabilities are put to see how often each came true


def register(numbers: Iterable[int], output: Path, workers: int = 2) -> dict[str, Any]:
    """Forecast designs and write the forecasts down.

    Args:
        numbers: The designs; those of the calibration are refused.
        output: The file, which must not be there: what is registered is not written over.
        workers: Processes.

    Raises:
        FileError: The file is there already.
        LabError: The predictor was fitted to a design.

    Returns:
        What was written: time · digest · forecasts, of each number · key · probability · place · point (readings that
        rivals are made of, `READINGS`) · growth (`growth_exponents`).
    """
    if output.exists():
        raise FileError(f"{output} must not be there yet: forecasts are registered once; take another name")
    predictor, lines, chosen = Predictor.shipped(), [], list(numbers)
    if known := sorted({*predictor.results["number"].to_list()} & {*chosen}):
        sentence = f"designs must be ones that the predictor was not fitted to; it was fitted to {known[0]}"
        raise LabError(f"{sentence}: take larger numbers", subject="numbers")
    for result in run_pieces(_read, chosen, workers):
        if result.value is None:
            raise FileError(f"design {result.piece} could not be read: {result.error}")
        prediction = predictor.predict(result.value["point"])
        lines.append({
            "number": result.value["number"], "key": result.value["key"],
            "probability": round(prediction.probability, 6), "place": round(prediction.place, 6),
            "growth": result.value["growth"],
            "point": {name: result.value["point"][name] for name in READINGS},
        })  # fmt: skip
    lines.sort(key=lambda line: line["number"])
    registered = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "digest": digest(lines), "forecasts": lines}
    with atomic(output) as path:
        path.write_text(json.dumps(registered) + "\n", encoding="utf-8")
    return registered


def _read(number: int) -> dict[str, Any]:
    """What is read off a design before its first step, for its forecast and for the rivals."""
    return read_design(number) | {"growth": growth_exponents(draw_design(number).plan())}


def growth_exponents(plan: Plan) -> dict[str, float]:
    """OLMo 2's exponents of a network before its first step, `lambda = (1/L) log(|v'| / |v|)`, L its layers.

    Args:
        plan: The network and what it is to learn; its first batch is looked at.

    Returns:
        `activations`, v the tokens before the first layer and v' those after the last; `gradients`, v the gradient of
        the loss at the tokens after the last layer and v' that before the first. Norms are of the whole batch. Zero
        where a norm is zero or not finite.
    """
    model, batch = plan.model().double(), plan.task.batch(plan.recipe.batch_size, plan.recipe.seed, 0)
    net = model.network()
    with torch.enable_grad():
        first = model.tokens(batch.inputs).detach().requires_grad_()
        *_, last = (step.state for step in net.steps(first, batch.padding))
        loss = plan.task.loss(model.logits(net.finish(last), batch.padding), batch)
        at_first, at_last = torch.autograd.grad(loss, (first, last))
    layers = plan.arch.layers
    return {"activations": _log_ratio(last, first) / layers, "gradients": _log_ratio(at_first, at_last) / layers}


def _log_ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    above, below = float(a.detach().norm()), float(b.detach().norm())
    ratio = above / below if below else math.nan
    return math.log(ratio) if 0 < ratio < math.inf else 0.0


def digest(forecasts: Sequence[dict[str, Any]]) -> str:
    """The SHA-256 of designs and forecasts: one that was changed afterwards has another."""
    told = [[line["number"], line["key"], line["probability"], line["place"]] for line in forecasts]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def results(registered: dict[str, Any], trainings: Iterable[dict[str, Any]]) -> pl.DataFrame:
    """Forecasts beside what came of them: number · task · probability · place · loss · learns · blind · loss_early ·
    another (the final loss with seed 1, where there is one) · the rivals' readings · fields of the design (`PARTS`, its
    remedy).

    Args:
        registered: What `register` wrote.
        trainings: Lines of `trainings.train_designs` of these designs, of one seed or several.

    Raises:
        FileError: Forecasts are not those of their digest.
    """
    if digest(registered["forecasts"]) != registered["digest"]:
        raise FileError("forecasts must be those that were registered; their digest is another")
    by_piece = {(line["number"], line["seed"]): line for line in trainings}
    rows = []
    for line in registered["forecasts"]:
        training = by_piece.get((line["number"], 0))
        if training is None or training["key"] != line["key"]:
            continue
        another, point = by_piece.get((line["number"], 1)), line["point"]
        task, loss = training["design"]["task"], _finite(training["loss"])
        rows.append({
            "number": line["number"], "task": task, "probability": line["probability"], "place": line["place"],
            "loss": loss, "blind": training["blind"], "learns": loss < training["blind"] - LEARNT[task],
            "loss_early": _finite(training["loss_early"]),
            "another": None if another is None else _finite(another["loss"]),
            "depth": point["depth"], "residual": -point["residual_last"], "gradient": -point["lowest_value"],
            "gradient_ratio": abs(point["tilt_value"]), "activation_growth": abs(line["growth"]["activations"]),
            "gradient_growth": abs(line["growth"]["gradients"]), "remedy": training["design"].get("remedy", ""),
            **{part: str(training["design"].get("fields", {}).get(part, "")) for part in PARTS},
        })  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None)


def score(table: pl.DataFrame) -> pl.DataFrame:
    """Say of each task how well forecasts and their rivals rank final losses, and tell what learns from what does not.

    Args:
        table: What `results` returns.

    Returns:
        task · by · designs · spearman · right (the share that a threshold tells rightly: 1/2 for forecasts, for rivals
        the best one, chosen with the results in sight).
    """
    rows = []
    for (task,), mine in table.sort("task").group_by("task", maintain_order=True):
        ranks = [mine[name].rank() for name in ("residual", "gradient_ratio")]
        mine = mine.with_columns(both=ranks[0] + ranks[1])
        right = ((mine["probability"] > 0.5) == mine["learns"]).mean()
        rows.append(_row(task, "forecast", mine["place"], mine["loss"], right))
        for name in RIVALS:
            rows.append(_row(task, name, mine[name], mine["loss"], _best_threshold(mine[name], mine["learns"])))
        again = mine.drop_nulls("another")
        if again.height > 2:
            agrees = ((again["another"] < again["blind"] - LEARNT[task]) == again["learns"]).mean()
            rows.append(_row(task, "another_seed", again["another"], again["loss"], agrees))
    return pl.DataFrame(rows)


def reliability(table: pl.DataFrame, bins: int = BINS) -> pl.DataFrame:
    """How often what was forecast came true: probability (the mean of its bin) · designs · learnt (their share).

    Args:
        table: What `results` returns.
        bins: Equal parts of probabilities from 0 to 1.
    """
    part = (table["probability"] * bins).floor().clip(0, bins - 1).cast(pl.Int64)
    grouped = table.with_columns(part=part).group_by("part").agg(
        probability=pl.col("probability").mean(), designs=pl.len(), learnt=pl.col("learns").mean()
    )  # fmt: skip
    return grouped.sort("part").drop("part")


def confusion(table: pl.DataFrame) -> pl.DataFrame:
    """How many designs learnt and did not, by what was forecast: task · forecast ("learns", "does not") · learnt ·
    did_not.

    Args:
        table: What `results` returns.
    """
    verdict = pl.when(pl.col("probability") > 0.5).then(pl.lit("learns")).otherwise(pl.lit("does not"))
    grouped = table.group_by("task", verdict.alias("forecast"))
    counts = grouped.agg(learnt=pl.col("learns").sum(), did_not=(~pl.col("learns")).sum())
    return counts.sort("task", "forecast", descending=[False, True])


def mistakes(table: pl.DataFrame, least: int = 8) -> pl.DataFrame:
    """Where forecasts fail: the share of designs that were told wrongly, by a field of theirs: part · value · designs ·
    wrong, the worst first.

    Args:
        table: What `results` returns.
        least: Designs that a value must have to be listed.
    """
    wrong = table.with_columns(
        wrong=(pl.col("probability") > 0.5) != pl.col("learns"),
        depth=pl.when(pl.col("depth") < 3).then(pl.lit("below 8")).when(pl.col("depth") < 4.5)
        .then(pl.lit("8 to 22")).otherwise(pl.lit("23 and more")),
    )  # fmt: skip
    rows = [
        wrong.group_by(value=pl.col(part)).agg(designs=pl.len(), wrong=pl.col("wrong").mean())
        .select(pl.lit(part).alias("part"), "value", "designs", "wrong")
        for part in ("task", "depth", "remedy", *PARTS)
    ]  # fmt: skip
    return (
        pl.concat(rows)
        .filter(pl.col("designs") >= least)
        .sort("wrong", "part", "value", descending=[True, False, False])
    )


def _row(task: Any, by: str, said: pl.Series, loss: pl.Series, right: Any) -> dict[str, Any]:
    varied = said.n_unique() > 1 and loss.n_unique() > 1
    correlation = float(spearmanr(said.to_numpy(), loss.to_numpy())[0]) if varied else math.nan
    return {"task": task, "by": by, "designs": len(loss), "spearman": correlation, "right": float(right)}


def _best_threshold(said: pl.Series, learns: pl.Series) -> float:
    """The largest share of designs that a threshold on a reading tells rightly: those below learn."""
    values, learnt = said.to_numpy(), learns.to_numpy()
    tries = partial(np.equal, learnt)
    return max(float(tries(values <= threshold).mean()) for threshold in (-np.inf, *values))


def _finite(loss: float) -> float:
    """A loss that is none, of a training that diverged, counts as ten nats: more than any that did not."""
    return float(loss) if np.isfinite(loss) else 10.0
