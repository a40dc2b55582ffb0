"""`python -m rankscope_studies.forecasts COMMAND`: the trainings behind the predictor, made again.

| command              | what it does                                                              | goes on with |
|----------------------|---------------------------------------------------------------------------|--------------|
| `train FILE`         | trains designs of the lab (on a GPU: `--device cuda --workers 12`)        | `FILE`       |
| `read FILE`          | reads the same designs before their first step                            | `FILE`       |
| `tables FILE...`     | writes `data/forecast_trainings.csv` and `data/forecast_readings.csv`     |              |
| `fit`                | fits the predictor to both tables, writes `data/forecast_predictor.json`  |              |
| `validate`           | prints how well designs are predicted by predictors fitted without them   |              |
| `register FILE`      | forecasts designs that the predictor never saw, and writes that down      |              |
| `score FILE FILE...` | prints how often forecasts were right: what was registered, then trained  |              |
"""

import argparse
import json
import sys
from importlib.resources import files
from pathlib import Path

import polars as pl
from scipy.stats import spearmanr

from rankscope.files import atomic
from rankscope.forecasts import POINTS, TABLE, WEIGHTS, outcomes
from rankscope_studies.forecasts import registration, trainings
from rankscope_studies.forecasts.fitting import cross_validate, fit_predictor

PACKAGE = Path(str(files("rankscope")))


def main() -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m rankscope_studies.forecasts", description=__doc__)
    parser.add_argument("command", choices=("train", "read", "tables", "fit", "validate", "register", "score"))
    parser.add_argument("files", nargs="*", type=Path, help="as the table above says")
    parser.add_argument("--first", type=int, default=0, help="the number of the first design")
    parser.add_argument("--designs", type=int, default=100, help="how many numbers from the first on")
    parser.add_argument("--every", type=int, default=1, help="of these numbers, every so many")
    parser.add_argument("--seed", type=int, default=0, help="of the trainings")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    if asked.command not in ("fit", "validate") and not asked.files:
        parser.error(f"{asked.command} must be given a FILE")
    numbers = range(asked.first, asked.first + asked.designs, asked.every)
    if asked.command == "train":
        pieces = [(design_number, asked.seed) for design_number in numbers]
        trainings.train_designs(pieces, asked.files[0], workers=asked.workers, device=asked.device, say=print)
    elif asked.command == "read":
        trainings.read_designs(numbers, asked.files[0], workers=asked.workers, say=print)
    elif asked.command == "tables":
        lines = trainings.lines_of(*asked.files)
        trainings.training_table(line for line in lines if "loss" in line).write_csv(PACKAGE / TABLE)
        trainings.point_table(line for line in lines if "point" in line).write_csv(PACKAGE / POINTS)
    elif asked.command == "register":
        registered = registration.register(numbers, asked.files[0], asked.workers)
        sys.stdout.write(f"{registered['time']} {registered['digest']}\n")
    elif asked.command == "score":
        registered = json.loads(asked.files[0].read_text(encoding="utf-8"))
        results = registration.results(registered, trainings.lines_of(*asked.files[1:]))
        asks = (registration.score, registration.reliability, registration.confusion, registration.mistakes)
        with pl.Config(tbl_formatting="ASCII_MARKDOWN", tbl_rows=60, tbl_hide_dataframe_shape=True, float_precision=3,
                       tbl_hide_column_data_types=True, tbl_cols=-1):  # fmt: skip
            sys.stdout.write("\n\n".join(str(ask(results)) for ask in asks) + "\n")
    elif asked.command == "validate":
        table = cross_validate(pl.read_csv(PACKAGE / POINTS), outcomes(), workers=asked.workers)
        for (task,), mine in table.sort("task").group_by("task", maintain_order=True):
            rank = float(spearmanr(mine["predicted_place"], mine["place"])[0])
            right = ((mine["probability"] > 0.5) == mine["learns"]).to_numpy().mean()
            summary = f"{mine.height} designs in ten folds, Spearman {rank:.3f}, learns or not {right:.1%} right"
            sys.stdout.write(f"{task}: {summary}\n")
    else:
        results = outcomes()
        trained = trainings.trained_settings(results["number"])
        predictor = fit_predictor(pl.read_csv(PACKAGE / POINTS), results, trained=trained)
        with atomic(PACKAGE / WEIGHTS) as path:
            path.write_text(json.dumps(predictor.to_dict(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
