"""Why does LayerNorm not stop collapse, and when does it?

**Near the collapsed state.** Let all tokens be x but for small differences R. Scores are then equal within what a token
sees, so attention averages by the row-normalised mask P0. A norm divides every token by all but the same length. Without
skips the derivative of a layer on a mode `P0 v = nu v`, `R = v r^T`, is nu times that of the network on ONE token:

    growth of differences, natural log per layer:   Lambda = lambda + ln|nu|,

lambda the Lyapunov exponent of the one-token network, nu the largest eigenvalue of P0 but the 1 of the common token. With
linear values and a norm, one token follows a linear map on a sphere, which it takes to the direction that grows most:
lambda <= 0 for almost every start. So Lambda <= ln|nu| < 0 whatever the values are, and under a complete mask nu = 0: tokens
come together faster than exponentially. Only what makes lambda larger (an MLP), what leaves a token itself (a skip, with
values that shrink what tokens have in common), or noise of each token's own (dropout) can hold them apart.
`theory/transverse.py` computes Lambda of any network.

**Far from it** scores differ. With values and outputs at random and queries and keys of gain g, scores of normalised tokens have
standard deviation g. Attention to N tokens is then a random energy model (Derrida 1981): below `g = sqrt(2 ln N)` it averages
many tokens, above it picks a few, and tokens that pick different ones stay apart. With one head and g without limit every token
becomes a copy of another one, and lines of descent merge as in the Wright-Fisher model: all tokens are one after about 2 N layers.
With several heads two tokens merge only if all heads agree.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from rankscope.lab import Initialisation, Recipe, Training
from rankscope.lab.tasks import NextCharacter, Sort, Task
from rankscope.lab.training import with_gains
from rankscope.lab.trial import free_memory, train_until
from rankscope.metrics import relative_mu
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.shapes import Float
from rankscope.studies.questions.question import HypothesisVerdict, Question, StudyAnswer, Tables
from rankscope.studies.questions.summaries import spread, spread_of_logs
from rankscope.studies.study import PageTable, Setup
from rankscope.studies.wu2024.networks import DROPOUT, in_training
from rankscope.studies.wu2024.thm3 import random_starts, shares
from rankscope.theory.transverse import slope, transverse_exponent, transverse_modes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MASKS = {"complete": "complete", "causal": "causal", "window ±1": "window:1", "uni-directional": "unidirectional"}
SLOW = ("causal", "window ±1")  # Masks whose rate settles within so many layers: P0 of the last mask is defective
NORMS: dict[str, dict[str, str]] = {
    "none": {"norm": "none"},
    "post": {"norm_place": "post"},
    "pre": {"norm_place": "pre"},
}
FASTER = (
    1.5  # The log of the residual grows by this factor a layer, at least, where collapse is called super-exponential
)
SAME_RATE = 0.1  # A measured rate so near to the predicted one, as a share, is taken for the same
HELD, FALLEN = -2.0, -3.0  # log10 of relative mu above which tokens are apart, and below which they have collapsed
FACTOR = 2.0  # How far a measured boundary may be from the predicted one
UNSURE = 0.1  # A smaller |Lambda| does not decide within the depth of a draw
RIGHT = 0.9  # The share of draws whose fate a rule must tell
LEARNT = 0.3  # Nats below who guesses by frequency, from which on a network has learnt
NOISE = 0.5  # Of values that are a multiple of the identity otherwise: standard deviation times sqrt(width)
FAMILIES: dict[str, dict[str, Any]] = {
    "values, no skip": {},
    "values, skip, post-norm": {"attention_skip": 1.0},
    "values, skip, pre-norm": {"attention_skip": 1.0, "norm_place": "pre"},
    "values, skip, no norm": {"attention_skip": 1.0, "norm": "none"},
    "MLP, no skips": {"mlp": "plain", "activation": "tanh", "mlp_skip": 0.0},
}
"""Networks whose collapsed state is tried for stability: of values `a 1 + noise`, or with the MLP's first matrix times a."""
LAYERS_KEPT = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class NormSizes:
    """How large the experiment is."""

    depth: int  # Of networks near collapse, and of those whose gain is varied
    width: int
    tokens: int
    heads: int
    seeds: int
    gains: tuple[float, ...]  # Of queries: standard deviation of scores
    shapes: tuple[tuple[int, int, int], ...]  # (tokens, width, heads) of networks whose gain is varied
    starts: tuple[float, ...]  # 1 - cosine of tokens at the start
    draws: int  # Networks of each shape and gain
    stable_depth: int
    stable_width: int
    stable_tokens: int
    values: tuple[float, ...]  # a of the families of values
    mlps: tuple[float, ...]  # a of the family of MLPs
    constructed: tuple[int, ...]  # Tokens of theorem 3's construction
    constructed_starts: int
    train_depths: tuple[int, ...]
    train_width: int
    context: int
    batch: int
    steps: int
    lr: float
    train_seeds: int


QUICK = NormSizes(
    depth=32, width=32, tokens=16, heads=4, seeds=3, gains=(1.0, 2.0, 4.0, 8.0, 16.0),
    shapes=((4, 32, 4), (16, 32, 4), (64, 32, 4), (16, 32, 1)), starts=(1.0, 0.25), draws=6,
    stable_depth=48, stable_width=16, stable_tokens=8, values=(-2.5, -1.5, -0.5, 0.5, 1.5), mlps=(1.0, 4.0, 16.0, 64.0),
    constructed=(2, 4), constructed_starts=500, train_depths=(2, 4), train_width=32, context=16, batch=16, steps=200,
    lr=3e-3, train_seeds=2,
)  # fmt: skip
FULL = NormSizes(
    depth=128, width=128, tokens=64, heads=4, seeds=5, gains=tuple(2.0 ** (k / 2) for k in range(-2, 13)),
    shapes=((4, 64, 4), (16, 64, 4), (64, 64, 4), (256, 64, 4), (16, 256, 4), (64, 256, 4), (64, 16, 4), (64, 64, 16),
            (16, 64, 1), (64, 64, 1), (256, 64, 1)),
    starts=(1.0, 0.3, 0.1, 0.03), draws=20, stable_depth=64, stable_width=32, stable_tokens=16,
    values=(-3.0, -2.5, -1.75, -1.25, -0.75, -0.25, 0.25, 1.0, 2.0), mlps=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
    constructed=(2, 3, 4, 6, 8), constructed_starts=10_000, train_depths=(2, 3, 4, 6, 8), train_width=128, context=32,
    batch=32, steps=1500, lr=1e-3, train_seeds=5,
)  # fmt: skip


def gather(setup: Setup, sizes: NormSizes) -> dict[str, pl.DataFrame]:
    """Run every experiment; one cached piece for each mask, shape, family and training."""
    device = setup.device
    shape = {"depth": sizes.depth, "width": sizes.width, "tokens": sizes.tokens, "heads": sizes.heads}
    near: dict[str, Callable[[], pl.DataFrame]] = {
        f"near {mask} {norm}": partial(near_rows, mask, norm, sizes, device) for mask, norm in product(MASKS, NORMS)
    }
    far: dict[str, Callable[[], pl.DataFrame]] = {
        f"far {n} {d} {h} {start:g}": partial(far_rows, (n, d, h), start, sizes, device)
        for (n, d, h), start in starts_of(sizes)
    }
    stable: dict[str, Callable[[], pl.DataFrame]] = {
        f"{family} {mask} {a:g}": partial(stable_rows, family, mask, a, sizes)
        for family, mask in product(FAMILIES, ("complete", *SLOW))
        for a in (sizes.mlps if "MLP" in family else sizes.values)
    }
    built: dict[str, Callable[[], pl.DataFrame]] = {
        f"built {n}": partial(_built, n, sizes.constructed_starts) for n in sizes.constructed
    }
    trained: dict[str, Callable[[], pl.DataFrame]] = {
        f"trained {task} {depth} {dropout:g} {skip:g}": partial(trained_rows, task, depth, dropout, skip, sizes, device)
        for task, depth, (dropout, skip) in product(TASKS, sizes.train_depths, ((0.0, 0.0), (DROPOUT, 0.0), (0.0, 1.0)))
    }
    drawn = {"seeds": sizes.seeds, "tokens": sizes.stable_tokens, "width": sizes.stable_width}
    learning = {
        "width": sizes.train_width, "context": sizes.context, "batch": sizes.batch, "steps": sizes.steps,
        "lr": sizes.lr, "seeds": sizes.train_seeds,
    }  # fmt: skip
    return {
        "near": setup.cached_parts(near, **shape, seeds=sizes.seeds),
        "far": setup.cached_parts(far, gains=sizes.gains, depth=sizes.depth, draws=sizes.draws),
        "stable": setup.cached_parts(stable, **drawn, depth=sizes.stable_depth, noise=NOISE),
        "built": setup.cached_parts(built, starts=sizes.constructed_starts),
        "trained": setup.cached_parts(trained, **learning),
    }


def starts_of(sizes: NormSizes) -> list[tuple[tuple[int, int, int], float]]:
    """(shape, start) of all networks whose gain is varied: every shape from random tokens, the second also from nearer."""
    return [*((shape, sizes.starts[0]) for shape in sizes.shapes), *((sizes.shapes[1], s) for s in sizes.starts[1:])]


def bare(layers: int, width: int, heads: int, **fields: Any) -> Architecture:
    """Attention and a LayerNorm after it, no skip, no MLP, no biases; `fields` are in place of these."""
    usual: dict[str, Any] = {
        "mlp": "none",
        "norm": "layer",
        "norm_place": "post",
        "attention_skip": 0.0,
        "biases": False,
    }
    return Architecture(layers=layers, width=width, heads=heads, **usual | fields)


def random_tokens(
    samples: int, tokens: int, width: int, seed: int, start: float = 1.0
) -> Float[Tensor, "sample token width"]:
    """Tokens of entries of size one whose directions have the cosine `1 - start` with one another, on average."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    own = torch.randn(samples, tokens, width, generator=generator, dtype=torch.float64)
    common = torch.randn(samples, 1, width, generator=generator, dtype=torch.float64)
    return math.sqrt(start) * own + math.sqrt(1 - start) * common


def near_rows(mask: str, norm: str, sizes: NormSizes, device: str = "cpu") -> pl.DataFrame:
    """log10 of relative mu by layer with dropout off (deviation arithmetic) and on; per seed the rate of the second half
    of the layers (natural log a layer), by which factor the log grows in the last layer, and ln|nu|."""
    arch = bare(sizes.depth, sizes.width, sizes.heads, mask=MASKS[mask], **NORMS[norm])
    nu = float(transverse_modes(arch, sizes.tokens).abs()[0])
    rows = []
    for seed, dropout in product(range(sizes.seeds), (False, True)):
        net = Transformer.random(arch, seed, "xavier", device=device)
        X = random_tokens(1, sizes.tokens, sizes.width, seed).to(device)
        table = in_training(net, X) if dropout else measure(net, X, metrics="relative_mu").table
        logs = table.filter(metric="relative_mu").sort("layer")["log10"].to_list()
        rate = float(slope(torch.tensor(logs, dtype=torch.float64))) * math.log(10)
        rows += [
            {"mask": mask, "norm": norm, "dropout": dropout, "seed": seed, "layer": layer, "log10": logs[layer],
             "rate": rate, "order": logs[-1] / logs[-2], "predicted": math.log(nu) if nu else -math.inf}
            for layer in (*(k for k in LAYERS_KEPT if k < sizes.depth), sizes.depth)
        ]  # fmt: skip
    return pl.DataFrame(rows)


@torch.no_grad()
def far_rows(shape: tuple[int, int, int], start: float, sizes: NormSizes, device: str = "cpu") -> pl.DataFrame:
    """log10 of relative mu after all layers, in float64, of every draw and gain; a quarter of the layers too."""
    n, d, heads = shape
    rows = []
    for seed in range(sizes.draws):
        net = Transformer.random(bare(sizes.depth, d, heads), seed, "xavier", device=device)
        X = random_tokens(1, n, d, seed, start).to(device)
        for gain in sizes.gains:
            sharp = with_gains(net, [("attention.query.weight", gain)])
            values = [float(relative_mu(step.state)[0]) for step in sharp.steps(X) if step.layer in _looks(sizes)]
            rows += [
                {"tokens": n, "width": d, "heads": heads, "start": start, "gain": gain, "seed": seed, "layer": layer,
                 "log10": math.log10(max(value, 1e-17))}
                for layer, value in zip(_looks(sizes), values, strict=True)
            ]  # fmt: skip
    return pl.DataFrame(rows)


def _looks(sizes: NormSizes) -> tuple[int, int]:
    """The layers at which the fate of tokens is looked at."""
    return sizes.depth // 4, sizes.depth


def family_network(family: str, mask: str, a: float, seed: int, sizes: NormSizes) -> Transformer:
    """A network of a family of `FAMILIES`, with its own weights in each layer."""
    d, heads = sizes.stable_width, 2
    net = Transformer.random(bare(sizes.stable_depth, d, heads, mask=MASKS[mask], **FAMILIES[family]), seed, "xavier")
    if net.arch.mlp != "none":
        return with_gains(net, [("mlp.up.weight", a)])
    generator, tensors, eye = torch.Generator().manual_seed(seed), net.state(), torch.eye(d, dtype=torch.float64)
    for name, tensor in tensors.items():
        if name.endswith("attention.value.weight"):
            tensors[name] = eye.reshape(tensor.shape)
        elif name.endswith("attention.output.weight"):
            noise = NOISE / math.sqrt(d) * torch.randn(d, d, generator=generator, dtype=torch.float64)
            tensors[name] = (a * eye + noise).reshape(tensor.shape)
    return Transformer.from_weights(net.arch, tensors)


def stable_rows(family: str, mask: str, a: float, sizes: NormSizes) -> pl.DataFrame:
    """Lambda about the mean of random tokens, and log10 of relative mu that these tokens end with, of every seed."""
    rows = []
    for seed in range(sizes.seeds):
        net = family_network(family, mask, a, seed, sizes)
        X = random_tokens(1, sizes.stable_tokens, sizes.stable_width, seed)
        found = transverse_exponent(net, X[0].mean(0), sizes.stable_tokens, relative=True)
        logs = measure(net, X, metrics="relative_mu", check=False).curve("relative_mu", "log10")[0]
        rows.append({"family": family, "mask": mask, "a": a, "seed": seed, "predicted": found.rate,
                     "rate": float(slope(logs)) * math.log(10), "log10": float(logs[-1])})  # fmt: skip
    return pl.DataFrame(rows)


def _built(tokens: int, starts: int) -> pl.DataFrame:
    return shares(random_starts(tokens, starts))


TASKS: dict[str, Callable[[NormSizes], Task]] = {
    "sort": lambda sizes: Sort(), "next character": lambda sizes: NextCharacter(sizes.context)
}  # fmt: skip


def trained_rows(
    task: str, depth: int, dropout: float, skip: float, sizes: NormSizes, device: str = "cpu"
) -> pl.DataFrame:
    """Train networks with norms, with or without skips: loss, and before and after log10 of relative mu after the last
    layer (dropout off and on) and the spread of scores in units of sqrt(2 ln n), its largest value over layers."""
    made = TASKS[task](sizes)
    arch = made.architecture(depth, sizes.train_width, sizes.heads, attention_skip=skip, mlp_skip=skip, norm="layer")
    training = Training(
        made, arch, Recipe(steps=sizes.steps, batch=sizes.batch, lr=sizes.lr, warmup=0.1), seeds=range(sizes.train_seeds),
        initialisation=Initialisation("xavier", embedding_std=1.0, dropout=dropout), device=device, capture=True,
    )  # fmt: skip
    before = [*map(_fate, training.networks(), training.tokens(1)[0])]
    alive = train_until(training)
    losses = [evaluation.loss for evaluation in training.evaluate()]
    after = [*map(_fate, training.networks(), training.tokens(1)[0])]
    rows = [
        {"task": task, "depth": depth, "dropout": dropout, "skip": skip, "seed": seed,
         "loss": losses[seed] if alive[seed] else math.nan, "blind": made.blind}
        | {f"{name}_{when}": value for when, found in (("start", before[seed]), ("end", after[seed]))
           for name, value in found.items()}
        for seed in training.seeds
    ]  # fmt: skip
    del training
    free_memory(device)
    return pl.DataFrame(rows)


def _fate(net: Transformer, X: Tensor) -> dict[str, float]:
    wide, X = net.to(torch.float64), X.double()
    noisy = in_training(wide, X).filter(metric="relative_mu").sort("layer")["log10"]
    logs = measure(wide.to(device="cpu"), X.cpu(), metrics="relative_mu", check=False).curve("relative_mu", "log10")[0]
    return {"log10": float(logs[-1]), "noisy": float(noisy[-1]), "scores": max(score_spread(wide, X))}


@torch.no_grad()
def score_spread(net: Transformer, X: Float[Tensor, "sample token width"]) -> list[float]:
    """By layer the standard deviation of scores over the n keys that a query sees, divided by sqrt(2 ln n); the mean over
    samples, heads and queries with n > 1. Log of the pattern is score but for a shift of each row."""
    spreads = []
    for step in net.steps(X):
        if step.attention is not None:
            P = step.attention
            seen = P > 0
            n = seen.sum(-1)
            logs = P.clamp(min=1e-300).log()
            mean = (logs * seen).sum(-1, keepdim=True) / n[..., None]
            deviation = (((logs - mean).square() * seen).sum(-1) / n).sqrt()
            spreads.append(float((deviation / (2 * n.double().log()).sqrt())[n > 1].mean()))
    return spreads


# ---- The answer, from tables alone


def boundary(far: pl.DataFrame, layer: int) -> tuple[float, float, float] | None:
    """(median, 5%, 95%) of the gain at which half of the draws are apart at a layer, over resampled draws; None where
    fewer than half are at every gain, or more at every gain.

    Args:
        far: Rows of one shape and start.
        layer: Of the two that were looked at.
    """
    table = far.filter(layer=layer).pivot("gain", index="seed", values="log10").drop("seed")
    gains = np.log([float(name) for name in table.columns])
    apart = table.to_numpy() > HELD
    generator = np.random.default_rng(0)
    picks = [np.arange(len(apart)), *generator.integers(len(apart), size=(200, len(apart)))]
    crossings = [_crossing(gains, apart[pick].mean(0)) for pick in picks]
    known = [crossing for crossing in crossings if crossing is not None]
    if crossings[0] is None or len(known) < len(crossings) / 2:
        return None
    return math.exp(crossings[0]), *(math.exp(float(np.quantile(known, share))) for share in (0.05, 0.95))


def _crossing(x: "np.ndarray[Any, Any]", share: "np.ndarray[Any, Any]") -> float | None:
    """Where a share first rises through one half, between two points by a straight line."""
    for k in range(1, len(x)):
        if share[k - 1] < 0.5 <= share[k]:
            return float(x[k - 1] + (0.5 - share[k - 1]) / (share[k] - share[k - 1]) * (x[k] - x[k - 1]))
    return None


def critical(tokens: int) -> float:
    """The spread of scores at which attention to so many tokens begins to pick a few of them.

    >>> round(critical(64), 2)
    2.88
    """
    return math.sqrt(2 * math.log(tokens))


def answer(tables: Tables, sizes: NormSizes) -> StudyAnswer:
    """The answer that the tables give."""
    near, far, stable, trained = (tables[name] for name in ("near", "far", "stable", "trained"))
    verdicts = [
        _near_verdict(near), _dropout_verdict(near, sizes), _boundary_verdict(far, sizes), _descent_verdict(far, sizes),
        _stable_verdict(stable), _trained_verdict(trained),
    ]  # fmt: skip
    evidence = [
        _near_table(near, sizes), _far_table(far, sizes), _stable_table(stable), _trained_table(trained),
        PageTable(
            "Theorem 3's construction (Wu et al. 2024): weights with equilibria of every rank",
            ["tokens (= width)", "random starts that end above rank one", "standard error"],
            [[str(n), f"{share:.1%}", f"{error:.1%}"]
             for n, share, error in tables["built"].select("tokens", "share", "error").iter_rows()],
        ),
    ]  # fmt: skip
    notes = [
        f"{sizes.seeds} seeds near the collapsed state and of each family, {sizes.draws} networks of each shape and gain, "
        f"{sizes.train_seeds} of each training. Ranges of boundaries: 5% to 95% of resampled draws."
    ]
    return StudyAnswer(_sentence(near, far, stable, trained, sizes), verdicts, evidence, notes)


def _last(near: pl.DataFrame, sizes: NormSizes, **which: object) -> list[float]:
    rows = near.filter(pl.col("layer") == sizes.depth, *(pl.col(name) == value for name, value in which.items()))
    return rows["log10"].to_list()


def _per_draw(near: pl.DataFrame) -> pl.DataFrame:
    """One row for each draw without dropout."""
    return near.filter(~pl.col("dropout")).unique(["mask", "norm", "seed"], maintain_order=True)


def _near_verdict(near: pl.DataFrame) -> HypothesisVerdict:
    draws = _per_draw(near)
    orders = draws.filter(mask="complete")["order"].to_list()
    ratios = {
        mask: [r / p for r, p in draws.filter(mask=mask).select("rate", "predicted").iter_rows()] for mask in SLOW
    }
    if not orders or not all(ratios.values()):
        return HypothesisVerdict("not measured", None)
    shown = "; ".join(f"{mask}: {spread(values, '.2f')}" for mask, values in ratios.items())
    ours = f"complete: the log grows ×{spread(orders, '.2f')} a layer; rate over ln|ν|: {shown}"
    exact = all(abs(statistics.median(values) - 1) <= SAME_RATE for values in ratios.values())
    return HypothesisVerdict(ours, min(orders) >= FASTER and exact)


def _dropout_verdict(near: pl.DataFrame, sizes: NormSizes) -> HypothesisVerdict:
    ends = {norm: _last(near, sizes, norm=norm, dropout=True) for norm in NORMS}
    if not all(ends.values()):
        return HypothesisVerdict("not measured", None)
    ours = "; ".join(f"{norm}: {spread_of_logs(values)}" for norm, values in ends.items())
    return HypothesisVerdict(f"with dropout, by norm: {ours}", min(map(min, ends.values())) > HELD)


def _of(far: pl.DataFrame, shape: tuple[int, int, int], start: float) -> pl.DataFrame:
    n, d, heads = shape
    return far.filter(tokens=n, width=d, heads=heads, start=start)


def _ratios(far: pl.DataFrame, sizes: NormSizes) -> dict[tuple[int, int, int], float | None]:
    """Measured over predicted boundary of each shape of several heads, from random tokens, after all layers."""
    found: dict[tuple[int, int, int], float | None] = {}
    for shape in sizes.shapes:
        if shape[2] > 1:
            at = boundary(_of(far, shape, sizes.starts[0]), sizes.depth)
            found[shape] = None if at is None else at[0] / critical(shape[0])
    return found


def _boundary_verdict(far: pl.DataFrame, sizes: NormSizes) -> HypothesisVerdict:
    ratios = _ratios(far, sizes)
    known = [ratio for ratio in ratios.values() if ratio is not None]
    if len(known) < 3:
        return HypothesisVerdict(f"a boundary was crossed by {len(known)} of {len(ratios)} shapes", None)
    ours = f"measured over predicted: {spread(known, '.2f')}; crossed by {len(known)} of {len(ratios)} shapes"
    inside = all(1 / FACTOR <= ratio <= FACTOR for ratio in known)
    return HypothesisVerdict(ours, inside and len(known) == len(ratios))


def _descent_verdict(far: pl.DataFrame, sizes: NormSizes) -> HypothesisVerdict:
    """One head at the largest gain: apart at a layer if that is well below 2 N, collapsed if well above."""
    right, total, told = 0, 0, []
    for shape, layer in product((shape for shape in sizes.shapes if shape[2] == 1), _looks(sizes)):
        rows = _of(far, shape, sizes.starts[0]).filter(layer=layer, gain=max(sizes.gains))
        share = float((rows["log10"] > HELD).mean()) if len(rows) else math.nan  # type: ignore[arg-type]
        told.append(f"N = {shape[0]}, layer {layer}: {share:.0%}")
        if layer >= 4 * shape[0] or layer <= shape[0]:
            total += 1
            right += (share >= 0.5) == (layer <= shape[0])
    return HypothesisVerdict("apart: " + ", ".join(told), right == total if total > 1 else None)


def _judged(stable: pl.DataFrame) -> pl.DataFrame:
    """Draws whose exponent decides within their depth, with whether they were held apart and were foretold to be."""
    sure = stable.filter(pl.col("predicted").abs() >= UNSURE)
    return sure.with_columns(held=pl.col("log10") > HELD, foretold=pl.col("predicted") > 0)


def _stable_verdict(stable: pl.DataFrame) -> HypothesisVerdict:
    judged = _judged(stable)
    if not len(judged) or judged["foretold"].n_unique() < 2:
        return HypothesisVerdict("no draw on both sides of the boundary", None)
    right = float((judged["held"] == judged["foretold"]).mean())  # type: ignore[arg-type]
    linear = judged.filter((pl.col("family") == "values, no skip") | ((pl.col("mask") == "complete") & pl.col("family").str.contains("no skip")))  # fmt: skip
    held = int(linear["held"].sum())
    ours = f"fate foretold in {right:.1%} of {len(judged)} draws; held without skips where theory excludes it: "
    return HypothesisVerdict(f"{ours}{held} of {len(linear)}", right >= RIGHT and held == 0)


def _trained_verdict(trained: pl.DataFrame) -> HypothesisVerdict:
    """Of networks without skips that start collapsed: those that learn end apart, those that do not stay."""
    rows = trained.filter((pl.col("skip") == 0) & (pl.col("log10_start") < FALLEN) & pl.col("loss").is_finite())
    learnt = rows["loss"] < rows["blind"] - LEARNT
    apart = rows["log10_end"] > HELD
    ours = (
        f"of {len(rows)} networks that start collapsed {int(learnt.sum())} learn, of which {int((learnt & apart).sum())} "
        f"end apart; of the others {int((~learnt & apart).sum())}"
    )
    if int(learnt.sum()) < 3 or int((~learnt).sum()) < 3:
        return HypothesisVerdict(ours, None)
    return HypothesisVerdict(ours, float((learnt == apart).mean()) >= RIGHT)  # type: ignore[arg-type]


def _sentence(
    near: pl.DataFrame, far: pl.DataFrame, stable: pl.DataFrame, trained: pl.DataFrame, sizes: NormSizes
) -> str:
    with_norm, without = (_last(near, sizes, mask="complete", norm=norm, dropout=False) for norm in ("post", "none"))
    noisy = _last(near, sizes, mask="complete", norm="post", dropout=True)
    first = (
        f"LayerNorm rescales tokens that are averaged to one point: under a complete mask without skips 10^{statistics.median(with_norm):.0f} "
        f"is left at layer {sizes.depth} (10^{statistics.median(without):.0f} without norm), {spread_of_logs(noisy)} with dropout"
    )
    ratios = [ratio for ratio in _ratios(far, sizes).values() if ratio is not None]
    second = (
        f"; tokens stay apart where scores spread by more than {spread(ratios, '.2f')} × √(2 ln N)" if ratios else ""
    )
    judged = _judged(stable)
    third = ""
    if len(judged):
        share = float((judged["held"] == judged["foretold"]).mean())  # type: ignore[arg-type]
        third = f", or a skip or an MLP makes the collapsed state unstable (fate foretold in {share:.0%} of draws)"
    return f"{first}{second}{third}."


def _near_table(near: pl.DataFrame, sizes: NormSizes) -> PageTable:
    rows = []
    for mask, norm in product(MASKS, NORMS):
        draws = _per_draw(near).filter(mask=mask, norm=norm)
        nu = math.exp(draws["predicted"][0])
        rows.append([
            mask, norm, f"{nu:.3f}", spread([math.exp(rate) for rate in draws["rate"]], ".3f"), spread(draws["order"].to_list(), ".2f"),
            spread_of_logs(_last(near, sizes, mask=mask, norm=norm, dropout=False)),
            spread_of_logs(_last(near, sizes, mask=mask, norm=norm, dropout=True)),
        ])  # fmt: skip
    return PageTable(
        f"Attention alone, {sizes.depth} layers, {sizes.tokens} tokens, width {sizes.width}: median (range) over seeds",
        ["mask", "norm", "|ν|", "factor a layer", "growth of the log", "relative mu, dropout off", "dropout on"], rows,
        "|ν|: what theory says differences are multiplied by in a layer. *Factor*: what they were multiplied by, over the "
        "second half of the layers. *Growth of the log*, last layer: 1 is exponential, above it faster.",
    )  # fmt: skip


def _far_table(far: pl.DataFrame, sizes: NormSizes) -> PageTable:
    rows = []
    for shape, start in starts_of(sizes):
        found = [boundary(_of(far, shape, start), layer) for layer in _looks(sizes)]
        most = _of(far, shape, start).filter(layer=sizes.depth, gain=max(sizes.gains))
        rows.append([
            *map(str, shape), f"{start:g}", f"{critical(shape[0]) / start:.2f}",
            *("–" if at is None else f"{at[0]:.2f} ({at[1]:.2f}–{at[2]:.2f})" for at in found),
            f"{float((most['log10'] > HELD).mean()):.0%}",  # type: ignore[arg-type]
        ])  # fmt: skip
    quarter, depth = _looks(sizes)
    return PageTable(
        "Spread of scores (gain) from which on half of the draws stay apart, complete mask, LayerNorm, no skip",
        ["tokens", "width", "heads", "1 − cosine at the start", "predicted", f"measured at layer {quarter}", f"at layer {depth}",
         f"apart at layer {depth}, largest gain"], rows,
        "Predicted: √(2 ln N), divided by 1 − cosine where tokens start near one another. A dash: not crossed.",
    )  # fmt: skip


def _stable_table(stable: pl.DataFrame) -> PageTable:
    rows = []
    for family, mask in product(FAMILIES, ("complete", *SLOW)):
        part = stable.filter(family=family, mask=mask)
        cells = []
        for a in part["a"].unique().sort():
            draws = part.filter(a=a)
            held = float((draws["log10"] > HELD).mean())  # type: ignore[arg-type]
            cells.append(f"{a:g}: {statistics.median(draws['predicted']):+.2f}, {held:.0%}")
        judged = _judged(part)
        right = f"{float((judged['held'] == judged['foretold']).mean()):.0%} of {len(judged)}" if len(judged) else "–"  # type: ignore[arg-type]
        rows.append([family, mask, "; ".join(cells), right])
    return PageTable(
        "Is the collapsed state stable? For each strength a: predicted exponent Λ (median), share of draws held apart",
        ["family", "mask", "a: Λ, held", "foretold"], rows,
        f"Foretold: of the draws with |Λ| ≥ {UNSURE}, those that stay apart exactly where Λ > 0.", wordy=True,
    )  # fmt: skip


def _trained_table(trained: pl.DataFrame) -> PageTable:
    rows = []
    keys = ["task", "skip", "dropout", "depth"]
    for (task, skip, dropout, depth), part in trained.sort(keys, maintain_order=True).group_by(
        keys, maintain_order=True
    ):
        losses = part["loss"].drop_nans().to_list()
        rows.append([
            str(task), "yes" if skip else "no", f"{dropout:g}", str(depth), f"{spread(losses, '.2f')} / {part['blind'][0]:.2f}",
            *(spread_of_logs(part[name].to_list()) for name in ("log10_start", "log10_end", "noisy_end")),
            *(spread(part[name].to_list(), ".2f") for name in ("scores_start", "scores_end")),
        ])  # fmt: skip
    return PageTable(
        "Trained networks with norms: median (range) over seeds",
        ["task", "skips", "dropout in training", "layers", "loss / blind", "relative mu before", "after", "after, dropout on",
         "scores before", "after"], rows,
        "Relative mu after the last layer. *Scores*: the spread of scores in units of √(2 ln n), of the layer where it is largest.",
    )  # fmt: skip


# ---- The figure


def draw(tables: Tables, sizes: NormSizes) -> "dict[str, Figure]":
    """Near collapse by depth; the boundary in the spread of scores; the criterion; trained networks before and after."""
    from rankscope.figures.matplotlib import panels

    figure, axes = panels(2, width=5.4, height=3.9, rows=2)
    _draw_near(axes[0], tables["near"])
    _draw_far(axes[1], tables["far"], sizes)
    _draw_stable(axes[2], tables["stable"])
    _draw_trained(axes[3], tables["trained"])
    return {QUESTION.name: figure}


LOWEST_DRAWN = -16.0  # log10 at which smaller values are drawn


def _draw_near(axes: "Axes", near: pl.DataFrame) -> None:
    from rankscope.figures.matplotlib import palette

    for k, mask in enumerate(MASKS):
        for norm, dropout, style in (("post", False, "-"), ("none", False, ":"), ("post", True, "--")):
            rows = near.filter(mask=mask, norm=norm, dropout=dropout).group_by("layer").agg(pl.col("log10").median())
            rows = rows.sort("layer")
            shown = rows["log10"].clip(lower_bound=2 * LOWEST_DRAWN)
            axes.plot(rows["layer"], shown, color=palette()[k], linestyle=style, linewidth=1.5,
                      label=mask if style == "-" else None)  # fmt: skip
    axes.set_ylim(LOWEST_DRAWN, 0.5)
    axes.set(xlabel="layer", ylabel="log10 of relative mu", title="Solid: LayerNorm; dotted: no norm; dashed: dropout")
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _draw_far(axes: "Axes", far: pl.DataFrame, sizes: NormSizes) -> None:
    from rankscope.figures.matplotlib import palette

    for k, shape in enumerate(sizes.shapes):
        rows = _of(far, shape, sizes.starts[0]).filter(layer=sizes.depth)
        share = rows.group_by("gain").agg((pl.col("log10") > HELD).mean().alias("apart")).sort("gain")
        n, d, heads = shape
        axes.plot(share["gain"] / critical(n), 100 * share["apart"], color=palette()[k % len(palette())], linewidth=1.4,
                  marker="o", markersize=3, linestyle=":" if heads == 1 else "-",
                  label=f"{n} tokens, width {d}, {heads} head{'s' * (heads > 1)}")  # fmt: skip
    axes.axvline(1.0, color="grey", linewidth=0.9)
    axes.set_xscale("log")
    axes.set(xlabel="spread of scores / √(2 ln N)", ylabel=f"per cent apart at layer {sizes.depth}",
             title="LayerNorm, complete mask, no skip", ylim=(-4, 104))  # fmt: skip
    axes.legend(fontsize=7, frameon=False, loc="upper left")


def _draw_stable(axes: "Axes", stable: pl.DataFrame) -> None:
    from rankscope.figures.matplotlib import palette

    for k, family in enumerate(FAMILIES):
        rows = stable.filter(family=family)
        shown = rows["log10"].clip(lower_bound=LOWEST_DRAWN)
        x = rows["predicted"].clip(lower_bound=-2.0)
        axes.plot(
            x, shown, linestyle="none", marker="osD^v"[k], markersize=4, alpha=0.6, color=palette()[k], label=family
        )
    axes.axvline(0.0, color="grey", linewidth=0.9)
    axes.axhline(HELD, color="grey", linewidth=0.9, linestyle=":")
    axes.set(xlabel="predicted exponent Λ, a layer (−2: below)", ylabel="log10 of relative mu, last layer",
             title="Stability of the collapsed state", ylim=(LOWEST_DRAWN - 0.5, 0.7))  # fmt: skip
    axes.legend(fontsize=7, frameon=False, loc="lower right")


def _draw_trained(axes: "Axes", trained: pl.DataFrame) -> None:
    from rankscope.figures.matplotlib import palette

    for k, (task, skip) in enumerate(product(TASKS, (0.0, 1.0))):
        rows = trained.filter(task=task, skip=skip)
        learnt = (rows["loss"] < rows["blind"] - LEARNT).to_list()
        for fill in (True, False):
            part = rows.filter(pl.Series([flag == fill for flag in learnt], dtype=pl.Boolean))
            axes.plot(part["log10_start"].clip(lower_bound=LOWEST_DRAWN), part["log10_end"].clip(lower_bound=LOWEST_DRAWN),
                      linestyle="none", marker="o" if skip == 0 else "s", markersize=5, color=palette()[k],
                      markerfacecolor=palette()[k] if fill else "none",
                      label=f"{task}, {'skips' if skip else 'no skips'}" if fill else None)  # fmt: skip
    axes.plot([LOWEST_DRAWN, 0], [LOWEST_DRAWN, 0], color="grey", linewidth=0.9)
    axes.set(
        xlabel="log10 of relative mu before training", ylabel="after", title="Trained with norms; filled: has learnt"
    )
    axes.legend(fontsize=8, frameon=False, loc="lower right")


QUESTION = Question(
    name="layernorm",
    title="Why does LayerNorm not stop collapse, and when does it?",
    why=(
        "Wu et al. (2024) prove that with LayerNorm equilibria of every rank exist and show a plateau of attention with "
        "LayerNorm that does not collapse; here that plateau was found to belong to dropout, and those equilibria to be mostly "
        "unstable. What is missing is why, and where the boundary is. The derivative of a layer at equal tokens says: without "
        "skips differences are multiplied by |ν| times what the network does to one token, ν the second eigenvalue of the "
        "row-normalised mask (0 if complete). A norm after linear values cannot make the second factor larger than one."
    ),
    hypotheses=(
        "Near the collapsed state the norm changes nothing: without skips a complete mask brings tokens together faster than "
        f"exponentially with every seed (the log grows by ×{FASTER} a layer or more), a causal or window mask by |ν| a layer "
        f"(median rate within {SAME_RATE:.0%} of ln|ν|), with and without norms before or after.",
        f"Dropout of {DROPOUT} holds tokens apart (relative mu above {10**HELD:g}) at full depth under every mask, with and "
        "without norms.",
        "Far from it, with several heads and a complete mask, half of all draws stay apart from a spread of scores of "
        f"√(2 ln N) on (within a factor of {FACTOR:g}), for all numbers of tokens, widths and heads.",
        "With one head sharp attention does not help for long: lines of descent merge, so tokens are apart at layer N, and one "
        "at layer 4 N.",
        f"The linear criterion Λ > 0 tells the fate of {RIGHT:.0%} of all draws where |Λ| ≥ {UNSURE}; without skips no value matrix "
        "(whatever its sign) holds tokens apart, and under a complete mask no MLP does.",
        f"Networks without skips that start collapsed and learn (by {LEARNT} nats) leave the basin, those that do not learn stay: "
        f"right for {RIGHT:.0%} of them.",
    ),
    method=(
        "*Near*: attention alone (Xavier weights, other weights in each layer), no norm, norm before or after attention, four "
        "masks; relative mu (‖X − mean‖ / ‖X‖) in deviation arithmetic with dropout off, in float64 with dropout on.\n\n"
        "*Far*: the same with LayerNorm and a complete mask; queries are multiplied by a gain, which is the standard deviation "
        "of scores of normalised tokens; apart means relative mu above 0.01 after all layers. Tokens start at random, or with a "
        "cosine near one.\n\n"
        "*Criterion*: families of networks with a parameter a: values a·1 + noise with and without a skip, pre-norm, post-norm, no "
        "norm; an MLP (tanh) whose first matrix is multiplied by a, no skips. `transverse_exponent` gives Λ at the mean of "
        "the tokens before anything is measured; random tokens, far from equal, are then followed.\n\n"
        "*Trained*: sorting (complete mask, post-norm, attention alone) and next characters (causal, pre-norm, with MLPs) without skips, "
        "with dropout in training, and with skips as a control; relative mu and the spread of scores before and after."
    ),
    refuted_by=(
        "Layers that share weights (a shared value matrix has directions of its own), biases of values and norms, trained "
        "embeddings of other statistics; a boundary that moves with depth beyond the layers tried here. One learning rate for "
        "all trainings: a network that did not learn might at another rate."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=170.0,
    caption="Medians over seeds; each mark of the lower panels is one draw or one trained network. Values below 1e-16 are drawn there.",
)  # fmt: skip
