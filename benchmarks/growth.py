"""How time and memory of `measure` grow with layers, tokens, width and samples, beside a plain forward pass.

    python -m benchmarks.growth cpu FOLDER     # or cuda: writes growth_cpu.csv after each point, then .txt and .png
    python -m benchmarks.growth draw FOLDER    # tables and figures again, from growth_*.csv

One of the four sizes changes at a time, about a base. On the CPU times are seconds of processor time of one thread, so
that neighbours do not count, and memory is that of a process of its own; on a GPU they are seconds of the wall clock
once passes are recorded, and what torch's allocator holds at the peak.
"""

import gc
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import torch

from benchmarks.timing import forward, last_line, peak
from rankscope import figures as fig
from rankscope.deviation.replay import replay_cache
from rankscope.files import atomic
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import expected_seconds, measure
from rankscope.profiles.pass_cost import entries, multiply_adds, rate

ROUNDS = 3
QUICK = 0.2  # seconds of a round: what is shorter is called again, and its fastest call counts
WARM = 3  # passes on a GPU before the clock runs: recorded, captured, replayed
SLOW = 5.0  # seconds of them after which no further one is begun
BATCH = 16  # samples that run together, in a plain pass as in `measure`
LIMIT = {"cpu": 660.0, "cuda": 140.0}  # seconds after which no further point is begun


class Point(NamedTuple):
    """The size of a network and of its input."""

    layers: int
    tokens: int
    width: int
    samples: int
    head_width: int = 32

    @property
    def arch(self) -> Architecture:
        """A post-norm network with plain MLPs."""
        return Architecture(layers=self.layers, width=self.width, heads=self.width // self.head_width)


BASE = {"cpu": Point(2, 256, 64, 1), "cuda": Point(4, 512, 512, 2, head_width=64)}
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {
        "layers": (2, 4, 8, 16, 32, 48),
        "tokens": (128, 256, 512, 1024, 2048, 4096),
        "width": (64, 128, 256, 512, 1024),
        "samples": (1, 4, 16, 32, 64),
    },
    "cuda": {
        "layers": (4, 8, 16, 32, 48),
        "tokens": (256, 512, 1024, 2048, 4096),
        "width": (256, 512, 1024, 1536, 2048),
        "samples": (2, 8, 32, 64, 128),
    },
}
SMALL = {"layers": (1, 2), "tokens": (4, 8), "width": (32, 64), "samples": (1, 2)}

FAINTEST = {"seconds": 1e-4, "memory_mb": 1.0}  # below which the figure shows no difference
CASES = {
    "plain": ("transformer", "float64", "forward pass in float64"),
    "float64": ("transformer", "float64", "measure in float64"),
    "deviation": ("transformer", "deviation", "measure, with its second pass"),
    "plain, san": ("san", "float64", "forward pass of pure attention"),
    "float64, san": ("san", "float64", "measure in float64, pure attention"),
    "deviation, san": ("san", "deviation", "measure of pure attention"),
}
"""By name: the variant, the arithmetic, and what the figure calls it."""


def points(device: str, small: bool = False) -> Iterator[tuple[str, int, Point]]:
    """(what changes, to what, the sizes), small ones of everything first: what is cut off is cut off of all alike."""
    base = Point(1, 8, 32, 1) if small else BASE[device]
    sizes = SMALL if small else SIZES[device]
    for row in zip_longest(*sizes.values()):
        for factor, size in zip(sizes, row, strict=True):
            if size is not None:
                yield factor, size, base._replace(**{factor: size})


def cases(point: Point, device: str) -> dict[str, tuple[Callable[[], object], float]]:
    """By name of a case: what runs it, and the seconds that are told beforehand."""
    net = Transformer.random(point.arch).to(device=device)
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(point.samples, point.tokens, point.width, generator=generator, dtype=torch.float64).to(device)
    made: dict[str, tuple[Callable[[], object], float]] = {}
    for name, (variant, arithmetic, _) in CASES.items():
        shown = net.variant(variant)
        shown.fingerprint  # noqa: B018  taken once a network, and kept
        if name.startswith("plain"):
            run: Callable[[], object] = partial(_plain, shown, X)
        else:
            run = partial(measure, shown, X, arithmetic=arithmetic, batch_size=BATCH)
        made[name] = run, expected_seconds(shown, X, arithmetic, batch_size=BATCH)
    return made


def _plain(net: Transformer, X: torch.Tensor) -> None:
    for start in range(0, len(X), BATCH):
        forward(net, X[start : start + BATCH])


def _seconds(run: Callable[[], object], device: str) -> float:
    """The fastest of the calls that a round has time for."""
    if device == "cuda":
        torch.cuda.synchronize()
    clock, taken, begun = time.process_time if device == "cpu" else time.perf_counter, math.inf, time.perf_counter()
    while taken == math.inf or time.perf_counter() - begun < QUICK:
        start = clock()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken = min(taken, clock() - start)
    return taken


Measured = tuple[str, list[float], float, float | None]
"""A case, its seconds in each round, the seconds told, and MB of memory above those before it, if taken here."""


def measured(point: Point, device: str) -> Iterator[Measured]:
    """All cases of a point: on the CPU one round; on a GPU `ROUNDS`, since its passes are recorded first."""
    for name, (run, told) in cases(point, device).items():
        if device == "cpu":
            yield name, [_seconds(run, device)], told, None
            continue
        replay_cache.clear()  # graphs of other cases
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begun = time.perf_counter()
        for _ in range(WARM):
            if time.perf_counter() - begun < SLOW:
                run()
        seconds = [_seconds(run, device) for _ in range(ROUNDS)]
        yield name, seconds, told, (torch.cuda.max_memory_allocated() - before) / 2**20


def memory_of(point: Point) -> dict[str, float]:
    """MB that each case takes at its peak, on the CPU, in a process of its own."""
    found: dict[str, float] = json.loads(last_line("-m", "benchmarks.growth", "memory", json.dumps(point)))
    return found


def print_memory(point: Point) -> None:
    """Print `memory_of` as JSON, from the process that it starts."""
    torch.set_num_threads(1)
    for run, _ in cases(Point(1, 8, 2 * point.head_width, 1, point.head_width), "cpu").values():
        run()  # what is loaded at first use
    print(json.dumps({name: peak(run) for name, (run, _) in cases(point, "cpu").items()}))


def run(device: str, folder: Path, small: bool = False) -> pl.DataFrame:
    """Measure all points, written after each, then draw them."""
    if device == "cpu":
        torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, 1 thread"
    machine += f", torch {torch.__version__}"
    speed = rate(torch.float64, torch.device(device))
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, object]] = []
    begun = time.perf_counter()
    for _, (call, _) in cases(Point(1, 8, 64, 1), device).items():
        call()  # what is loaded at first use
    memory: dict[tuple[Point, str], float] = {}
    for turn in range(ROUNDS if device == "cpu" else 1):  # of all points in turn: neighbours slow rounds, not points
        for factor, size, point in points(device, small):
            if time.perf_counter() - begun > LIMIT[device]:
                print(f"{LIMIT[device]:.0f} seconds are over: without {factor} {size:,} in round {turn}")
                continue
            if device == "cpu" and turn == 0:
                memory |= {(point, name): taken for name, taken in memory_of(point).items()}
            for name, seconds, told, held in measured(point, device):
                sizes = {"machine": machine, "rate": speed, "factor": factor, "size": size, **point._asdict()}
                megabytes = memory[point, name] if held is None else held
                lines += [
                    {**sizes, "case": name, "round": turn + k, "seconds": taken, "told": told, "memory_mb": megabytes}
                    for k, taken in enumerate(seconds)
                ]
            with atomic(folder / f"growth_{device}.csv") as path:
                pl.DataFrame(lines).write_csv(path)
            print(f"{factor} {size:,}: {time.perf_counter() - begun:.0f} s", flush=True)
    return pl.DataFrame(lines)


def exponents(table: pl.DataFrame, factor: str, case: str, column: str = "seconds") -> np.ndarray:
    """The power of a size with which time or memory grows: the slope of a least-squares line through logs, over the
    upper half of its sizes; one of each round that has them all."""
    mine = table.filter(factor=factor, case=case).sort("round", "size")
    sizes = mine["size"].unique().sort().to_list()
    mine = mine.filter(pl.col("size").is_in(sizes[-max(2, math.ceil(len(sizes) / 2)) :]))
    rounds = [group for _, group in mine.group_by("round", maintain_order=True)]
    rounds = [each for each in rounds if len(each) == max(map(len, rounds))]
    return np.array([np.polyfit(each["size"].log(), each[column].clip(1e-9).log(), 1)[0] for each in rounds])


def report(table: pl.DataFrame) -> str:
    """The exponents, what `measure` takes beside a plain pass, and what was told beforehand, as tables in Markdown."""
    lines = [
        "| grows with | forward pass | measure, float64 | more by | measure | more by |",
        "|---|---|---|---|---|---|",
    ]
    factors = table["factor"].unique(maintain_order=True).to_list()
    for factor in factors:
        for san in ("", ", san"):
            plain = exponents(table, factor, f"plain{san}")
            cells = [f"{factor}{', pure attention' * bool(san)}", f"{np.median(plain):.2f}"]
            for case in ("float64", "deviation"):
                mine = exponents(table, factor, case + san)
                cells += [f"{np.median(mine):.2f}", _spread(mine - plain, "+.2f")]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| memory grows with | forward pass | measure, float64 | measure |", "|---|---|---|---|"]
    for factor in factors:
        for san in ("", ", san"):
            cells = [f"{factor}{', pure attention' * bool(san)}"]
            for case in ("plain", "float64", "deviation"):
                cells.append(f"{exponents(table, factor, case + san, 'memory_mb')[0]:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| largest sizes | time / forward pass | memory / forward pass | taken / told |", "|---|---|---|---|"]
    last = table.filter(pl.col("size") == pl.col("size").max().over("factor"))
    for case, (variant, _, name) in CASES.items():
        reference = "plain" if variant == "transformer" else "plain, san"
        cells = [name]
        for column in ("seconds", "memory_mb"):
            ratios = _medians(last, case)[column] / _medians(last, reference)[column]
            cells.append(_spread(ratios.to_numpy(), ".1f"))
        known = _medians(table, case)
        known = known.filter(pl.col("seconds") > 0.1)
        cells.append(_spread((known["seconds"] / known["told"]).to_numpy(), ".2f") if len(known) else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([table["machine"][0] + ".", "", *lines])


def _medians(table: pl.DataFrame, case: str) -> pl.DataFrame:
    """A row for each point of a case, in one order."""
    mine = table.filter(case=case).group_by("factor", "size")
    return mine.agg(pl.col("seconds", "told", "memory_mb").median()).sort("factor", "size")


def _spread(values: np.ndarray, form: str) -> str:
    return f"{np.median(values):{form}} ({values.min():{form}} to {values.max():{form}})"


def costs(table: pl.DataFrame) -> str:
    """What `COSTS` of `profiles/pass_cost.py` would be by this table: least squares of relative errors."""
    from scipy.optimize import nnls

    lines = []
    for kind, names in {"float": ("plain", "float64"), "checked": ("deviation",)}.items():
        mine = table.filter(pl.col("case").is_in([name + san for name in names for san in ("", ", san")]))
        parts = []
        for row in mine.iter_rows(named=True):
            arch = Point(*(row[name] for name in Point._fields)).arch
            arch = arch.replace(mlp="none") if row["case"].endswith("san") else arch
            size = arch, row["samples"], row["tokens"]
            starts = arch.layers * math.ceil(row["samples"] / BATCH)
            parts.append([multiply_adds(*size) / row["rate"], entries(*size) / row["rate"], starts])
        taken = mine["seconds"].to_numpy()
        products, beside, start = nnls(np.array(parts) / taken[:, None], np.ones(len(taken)))[0]
        lines.append(f"{kind}: Cost({products:.2g}, {beside:.2g}, {start:.2g})")
    return "\n".join(lines)


def chart(table: pl.DataFrame) -> fig.Chart:
    """Time above and memory below, by each size."""
    columns = ("size", "case", "seconds", "memory_mb")
    panels = []
    titles = {"seconds": "seconds", "memory_mb": "MB at the peak"}
    for column, title in titles.items():
        powers = fig.Powers(table[column].clip(FAINTEST[column]).log10().to_list())
        for factor in table["factor"].unique(maintain_order=True):
            mine = table.filter(factor=factor)
            sizes = mine["size"].unique().sort().to_list()
            x = fig.Axis(factor, labels={math.log2(size): f"{size:,}" for size in sizes})
            marks = []
            for index, (case, (variant, _, name)) in enumerate(CASES.items()):
                medians = _medians(mine, case)
                places = [math.log2(size) for size in medians["size"]]
                dash = "dash" if variant == "san" else "solid"
                y = medians[column].clip(FAINTEST[column]).log10().to_list()
                line = fig.Line(places, y, fig.line_colour(index % 3), name, name, index, "index", dash, 1.6)
                marks.append(line)
            panels.append(fig.Panel(x, fig.Axis(title, powers), marks))
    data = table.select(columns).to_dict(as_series=False)
    alt = "Time and memory of a forward pass and of measure, by layers, tokens, width and samples"
    return fig.Chart(panels, data, alt, columns=4, shared=True, size=(3.0, 2.6))


def draw(folder: Path) -> None:
    """Write table and figure of every growth_*.csv of a folder, and print the tables."""
    from rankscope.figures import plot, png, rendered

    for path in sorted(folder.glob("growth_*.csv")):
        table = pl.read_csv(path)
        path.with_suffix(".txt").write_text(report(table) + "\n")
        path.with_suffix(".png").write_bytes(png(rendered(plot(chart(table)))))
        print(report(table), costs(table), sep="\n\n")


if __name__ == "__main__":
    what, argument = sys.argv[1:]
    if what == "memory":
        print_memory(Point(*json.loads(argument)))
    else:
        if what != "draw":
            run(what, Path(argument))
        draw(Path(argument))
