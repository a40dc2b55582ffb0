"""Do the changes that a forecast proposes help? Designs that were forecast not to learn, their best changes trained.

    # before any of them is trained
    python -m rankscope_studies.research.mends register REGISTERED.json MENDS.json --designs 40
    python -m rankscope_studies.research.mends train MENDS.json OUTCOMES.jsonl --device cuda --workers 11
    python -m rankscope_studies.research.mends report MENDS.json OUTCOMES.jsonl

`register` takes designs of the registered test (`forecasts/registration.py`) whose probability of learning is below
0.3, forecasts every change of them, and writes down the best change of each kind (`changes.PARTS`) with its forecast,
the time and a digest. `train` trains the changed designs. `report` says how many learnt, by kind of change.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rankscope.errors import FileError, RankscopeError
from rankscope.files import atomic
from rankscope.forecasts import LEARNT, Plan, changes, forecast_of
from rankscope.lab import Initialisation
from rankscope.nets import Architecture
from rankscope.workers import run_pieces
from rankscope_studies.forecasts import EVALUATION, draw_design, lines_of

UNLIKELY = 0.3  # Designs whose probability of learning is below this are mended
KINDS = ("norm", "skips", "gains", "temperature", "initialisation", "remedies")


def best_changes(number: int, kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """The best change of each kind of a design, with its forecast and all that is needed to train it."""
    plan, best = draw_design(number).plan(), []
    for kind in kinds:
        found = []
        for change, make in changes(plan, (kind,)):
            try:
                changed = make()
                found.append((change, changed, forecast_of(changed, layers=False)))
            except RankscopeError:  # a change that does not go onto this network
                continue
        if found:
            change, changed, forecast = max(found, key=lambda line: (line[2].probability, -line[2].place))
            said = {"probability": round(forecast.probability, 6), "place": round(forecast.place, 6)}
            best.append({"number": number, "kind": kind, "change": change, **said, **written(changed)})
    return best


def written(plan: Plan) -> dict[str, Any]:
    """All that tells a changed plan from the plan of its design, for JSON."""
    return {
        "arch": plan.arch.to_dict(), "lr": plan.recipe.lr, "initialisation": asdict(plan.initialisation),
        "remedies": list(plan.remedies),
    }  # fmt: skip


def plan_of(line: dict[str, Any]) -> Plan:
    """The plan of a changed design from what was written of it."""
    original, start = draw_design(line["number"]).plan(), dict(line["initialisation"])
    start["gains"] = tuple((name, gain) for name, gain in start["gains"])
    return replace(
        original, arch=Architecture.from_dict(line["arch"]), initialisation=Initialisation(**start),
        remedies=line["remedies"], recipe=replace(original.recipe, lr=line["lr"]),
    )  # fmt: skip


def train(line: dict[str, Any], device: str) -> dict[str, Any]:
    """The final loss of a changed design, and whether it learnt."""
    plan, start = plan_of(line), time.perf_counter()
    training = plan.training(device)
    for _ in training:
        pass
    loss = training.evaluate(EVALUATION)[0].loss
    learns = loss < plan.task.blind - LEARNT[plan.task.name]
    return {
        "number": line["number"], "kind": line["kind"], "loss": loss, "learns": learns,
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def digest(lines: list[dict[str, Any]]) -> str:
    """The SHA-256 of changes and forecasts."""
    return hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()


def register(registered: Path, output: Path, designs: int, workers: int, kinds: Sequence[str]) -> None:
    """Write the best changes of designs that were forecast not to learn."""
    if output.exists():
        raise FileError(f"{output} must not be there yet: forecasts are registered once; take another name")
    forecasts = json.loads(registered.read_text())["forecasts"]
    numbers = [line["number"] for line in forecasts if line["probability"] < UNLIKELY][:designs]
    lines: list[dict[str, Any]] = []
    for result in run_pieces(partial(best_changes, kinds=kinds), numbers, workers):
        if result.value is None:
            raise FileError(f"design {result.piece} could not be forecast: {result.error}")
        lines += result.value
        print(result.piece, f"{result.seconds:.1f} s", flush=True)
    lines.sort(key=lambda line: (line["number"], line["kind"]))
    registered_now = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "digest": digest(lines)}
    with atomic(output) as path:
        path.write_text(json.dumps({**registered_now, "changes": lines}) + "\n")


def report(lines: list[dict[str, Any]], outcomes: list[dict[str, Any]]) -> str:
    """The table: by kind of change, and of the best change of each design, how many were expected to learn and did."""
    learnt = {(line["number"], line["kind"]): line["learns"] for line in outcomes}
    trained = [line for line in lines if (line["number"], line["kind"]) in learnt]
    best: dict[int, dict[str, Any]] = {}
    for line in trained:
        if line["number"] not in best or line["probability"] > best[line["number"]]["probability"]:
            best[line["number"]] = line
    rows = ["| change | designs | learnt | expected (sum of probabilities) | told right |", "|---|---|---|---|---|"]
    groups = {kind: [line for line in trained if line["kind"] == kind] for kind in KINDS}
    for name, chosen in {**groups, "the best of a design": list(best.values())}.items():
        if chosen:
            came = [learnt[line["number"], line["kind"]] for line in chosen]
            expected = sum(line["probability"] for line in chosen)
            right = sum((line["probability"] > 0.5) == did for line, did in zip(chosen, came, strict=True))
            cells = f"{len(chosen)} | {sum(came)} | {expected:.1f} | {right / len(chosen):.0%}"
            rows.append(f"| {name} | {cells} |")
    return "\n".join(rows)


def main() -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("register", "train", "report"))
    parser.add_argument("files", nargs=2, type=Path)
    parser.add_argument("--designs", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of changes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    options = parser.parse_args()
    first, second = options.files
    if options.command == "register":
        register(first, second, options.designs, options.workers, options.kinds)
        return
    content = json.loads(first.read_text())
    if digest(content["changes"]) != content["digest"]:
        raise FileError(f"{first} must hold what was registered; its digest is another")
    if options.command == "train":
        done = {(line["number"], line["kind"]) for line in lines_of(second)}
        pieces = [line for line in content["changes"] if (line["number"], line["kind"]) not in done]
        until = time.time() + 60 * options.minutes
        with second.open("a") as file:
            for result in run_pieces(partial(train, device=options.device), pieces, options.workers, deadline=until):
                if result.value is None:
                    print(result.error, flush=True)
                else:
                    file.write(json.dumps(result.value) + "\n")
                    file.flush()
    print(report(content["changes"], lines_of(second)))


if __name__ == "__main__":  # workers find functions by the name of their module, and none in __main__
    import_module("rankscope_studies.research.mends").main()
