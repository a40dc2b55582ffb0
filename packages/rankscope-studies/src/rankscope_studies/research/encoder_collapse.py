"""Which number sees first that an encoder collapses? Small encoders that learn without labels, some losing a safeguard.

    python -m rankscope_studies.research.encoder_collapse train runs/encoders --workers 2    # goes on where it was
    python -m rankscope_studies.research.encoder_collapse report runs/encoders

An encoder (2 layers of width 64) learns scikit-learn's digits from pairs of views, in three ways. After `CALM` steps
half of the trainings lose what keeps samples apart (`WAYS`); the others go on. Two monitors read RankMe, alpha-ReQ,
LiDAR, uniformity and alignment of the same 256 pairs: at the embedding, which the loss is of, and at the
representation, of which a linear classifier reads the digit at the same steps.

`report` sets a threshold for each number: the worst that healthy trainings of half of the seeds had after `CALM`. On
the other seeds it counts false alarms and collapses that are seen, two measurements in a row, and after how many steps.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.files import atomic
from rankscope.lab import Digits
from rankscope.monitor import Monitor
from rankscope.runs import read
from rankscope.workers import run_pieces

STEPS, CALM, EVERY = 400, 150, 10
BATCH, WIDTH, PAIRS, HELD = 64, 64, 256, 360
PATIENCE = 2  # measurements in a row beyond a threshold
DONE = "done"  # the file of a training that came to its end
WAYS = {
    "siamese": "SimSiam (Chen & He 2021); then without the stop-gradient",
    "variance": "VICReg (Bardes et al. 2022); then without its variance term",
    "masked": "I-JEPA (Assran et al. 2023); then targets of the encoder itself, with gradients",
}
NUMBERS = {"rankme": -1, "alpha_req": 1, "lidar": -1, "uniformity": 1, "alignment": -1}  # where collapse moves each
PLACES = ("embedding", "representation")
RUNS = [(way, collapses, seed) for way in WAYS for seed in range(6) for collapses in (False, True)]


class Encoder(nn.Module):
    """Patches of images to a representation, the mean of its tokens, and an embedding of that."""

    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(4, width), nn.Parameter(torch.randn(16, width))
        self.mask_token = nn.Parameter(torch.randn(width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.projector: nn.Module = mlp(width, 2 * width, width)

    def tokens(self, images: Tensor, masked: Tensor | None = None) -> Tensor:
        """Tokens after the last layer; `masked` `[image, token]` are hidden."""
        x = self.patches(images)
        x = x if masked is None else torch.where(masked[..., None], self.mask_token, x)
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(The embedding, the representation) of images."""
        representation = self.tokens(images).mean(1)
        return self.projector(representation), representation


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two linear maps, with a norm over the batch between them."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )  # fmt: skip


class Siamese(nn.Module):
    """Predicts the embedding of one view from that of the other."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder, self.predictor = encoder, mlp(WIDTH, WIDTH // 2, WIDTH)

    def forward(self, views: Tensor, generator: torch.Generator, safe: bool) -> Tensor:
        """The loss; `safe` with the stop-gradient."""
        embedding = self.encoder(views)[0]
        target = embedding.detach() if safe else embedding
        predicted = self.predictor(embedding).unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        return -F.cosine_similarity(predicted, target).mean()


class Variance(nn.Module):
    """Makes views agree, entries vary and be uncorrelated, with the weights of its authors."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, views: Tensor, generator: torch.Generator, safe: bool) -> Tensor:
        """The loss; `safe` with the variance term."""
        embedding = self.encoder(views)[0].unflatten(0, (-1, 2))
        loss = 25 * F.mse_loss(embedding[:, 0], embedding[:, 1])
        for z in embedding.unbind(1):
            centred = z - z.mean(0)
            covariance = centred.T @ centred / (len(z) - 1)
            loss = loss + (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]
            if safe:
                loss = loss + 25 * F.relu(1 - (covariance.diagonal() + 1e-4).sqrt()).mean()
        return loss


class Masked(nn.Module):
    """Predicts tokens that are hidden from those that are not, as a moving average of the encoder gives them."""

    def __init__(self, encoder: Encoder, rate: float = 0.02) -> None:
        super().__init__()
        encoder.projector = nn.Identity()
        self.encoder, self.rate = encoder, rate
        self.teacher = copy.deepcopy(encoder).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, views: Tensor, generator: torch.Generator, safe: bool) -> Tensor:
        """The loss; `safe` with targets of the moving average."""
        masked = torch.rand(views.shape[:2], generator=generator) < 0.5
        predicted = self.predictor(self.encoder.tokens(views, masked))
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, self.rate)
        target = F.layer_norm((self.teacher if safe else self.encoder).tokens(views), (WIDTH,))
        return F.smooth_l1_loss(predicted[masked], target[masked])


LEARNERS = {"siamese": Siamese, "variance": Variance, "masked": Masked}


@cache
def images_and_digits() -> tuple[Tensor, Tensor]:
    """(All images `[image, token, number]`, which digit each shows); the last `HELD` are held out."""
    images = Digits()._images
    return images.inputs, images.labels


def two_views(images: Tensor, generator: torch.Generator) -> Tensor:
    """Two views of each image `[2 image, token, number]`, one after the other: moved by a pixel, of other contrast,
    with noise."""
    tokens = images.repeat_interleave(2, 0)
    pixels = tokens.view(-1, 4, 4, 2, 2).transpose(2, 3).reshape(-1, 8, 8)
    padded, at = F.pad(pixels, (1, 1, 1, 1), value=-1.0), torch.arange(8)
    row, column = torch.randint(3, (2, len(pixels), 1), generator=generator) + at
    moved = padded[torch.arange(len(pixels))[:, None, None], row[:, :, None], column[:, None, :]]
    contrast = 0.7 + 0.6 * torch.rand(len(moved), 1, 1, generator=generator)
    moved = contrast * moved + 0.1 * torch.randn(moved.shape, generator=generator)
    return moved.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(tokens.shape)


@torch.no_grad()
def accuracy(encoder: Encoder, penalty: float = 1.0) -> float:
    """The share of held-out digits that a linear map of the representation tells, fitted to the others' by ridge
    regression."""
    images, digits = images_and_digits()
    found = encoder.tokens(images).mean(1).double()
    found = torch.cat([found, torch.ones(len(found), 1)], 1)
    X, Y = found[:-HELD], F.one_hot(digits[:-HELD]).double()
    weights = torch.linalg.solve(X.T @ X + penalty * torch.eye(X.shape[1]), X.T @ Y)
    return float(((found[-HELD:] @ weights).argmax(1) == digits[-HELD:]).double().mean())


def pairs_of(part: int) -> Callable[[Any], Tensor]:
    """A function that gives one part of an encoder's output as `[image, view, width]`."""
    return lambda output: output[part].unflatten(0, (-1, 2))


def train(piece: tuple[str, bool, int], folder: Path, steps: int = STEPS, calm: int = CALM) -> dict[str, Any]:
    """Train one encoder under a monitor of its embedding and one of its representation.

    Args:
        piece: (the way, whether it loses its safeguard, the seed).
        folder: Where runs are, a folder each.
        steps: Steps of the training.
        calm: Steps before the safeguard is lost.
    """
    way, collapses, seed = piece
    images, run = images_and_digits()[0][:-HELD], folder / name_of(*piece)
    torch.manual_seed(seed)
    learner = LEARNERS[way](Encoder())
    encoder: Any = learner.encoder
    optimizer = torch.optim.AdamW(learner.parameters(), lr=2e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    probe = two_views(images[:PAIRS], torch.Generator().manual_seed(10**6))
    with ExitStack() as stack:
        options: dict[str, Any] = {"every": EVERY, "probe": probe, "alarms": (), "padding": "none"}
        monitors = [
            stack.enter_context(Monitor(encoder, "relative_mu", run=run / place, embeddings=pairs_of(k), **options))
            for k, place in enumerate(PLACES)
        ]
        for step in range(1, steps + 1):
            chosen = torch.randint(len(images), (BATCH,), generator=generator)
            views = two_views(images[chosen], generator)
            loss = learner(views, generator, safe=not collapses or step <= calm)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            numbers: dict[str, Any] = {"accuracy": accuracy(encoder)} if step % EVERY == 0 else {}
            for monitor in monitors:
                monitor.step(loss=loss, **numbers)
    with atomic(run / DONE) as path:
        path.write_text(f"{calm}\n")
    return {"way": way, "collapses": collapses, "seed": seed, "loss": float(loss.detach()), **numbers}


def name_of(way: str, collapses: bool, seed: int) -> str:
    """The folder of a training."""
    return f"{way}-{'collapsing' if collapses else 'healthy'}-{seed}"


class Curve(NamedTuple):
    """A number of one training after the calm: its steps, counted from there, and its values; None where it has none,
    since samples differ by rounding alone."""

    steps: list[int]
    values: list[float | None]

    def worst(self, direction: int) -> float:
        """The value that is farthest in the direction of collapse."""
        return max((x for x in self.values if x is not None), key=lambda x: direction * x)

    def seen(self, threshold: float, direction: int) -> int | None:
        """The step at which the value is beyond the threshold, or gone, for the `PATIENCE`-th time in a row."""
        row = 0
        for step, value in zip(self.steps, self.values, strict=True):
            row = row + 1 if value is None or direction * (value - threshold) > 0 else 0
            if row == PATIENCE:
                return step
        return None


def curves_of(folder: Path, way: str, place: str, metric: str) -> dict[tuple[bool, int], Curve]:
    """The curves of a number in all trainings of a way, by (whether it collapses, its seed)."""
    found = {}
    for _, collapses, seed in [piece for piece in RUNS if piece[0] == way]:
        run = folder / name_of(way, collapses, seed)
        if (run / DONE).exists():
            calm = int((run / DONE).read_text())
            rows = read(run / place).table("training").filter(metric=metric).sort("step")
            late = rows.filter(rows["step"] > calm)
            found[collapses, seed] = Curve([step - calm for step in late["step"]], late["value"].to_list())
    return found


class Row(NamedTuple):
    """What a number is worth in one way."""

    way: str
    place: str
    metric: str
    healthy: int  # trainings that keep their safeguard
    false_alarms: int  # of these
    collapsing: int  # trainings that lose it
    steps: list[int]  # after which each of these that was seen was seen


def rows(folder: Path) -> Iterator[Row]:
    """A row for each number and way: thresholds are set on even seeds and tested on odd ones, and the other way."""
    run_numbers = {"accuracy": -1, "loss": -1}  # a collapsing loss falls: it looks like success
    for way in WAYS:
        places = PLACES[:1] if way == "masked" else PLACES  # that has no projector
        measured = [(place, metric, sign) for place in places for metric, sign in NUMBERS.items()]
        for place, metric, direction in [*((PLACES[0], *each) for each in run_numbers.items()), *measured]:
            curves = curves_of(folder, way, place, metric)
            seeds = sorted({seed for _, seed in curves})
            alarms, steps = 0, []
            for odd in (0, 1):
                setting = [seed for seed in seeds if seed % 2 == odd and (False, seed) in curves]
                if not setting:
                    continue
                worst = [curves[False, seed].worst(direction) for seed in setting]
                threshold = max(worst, key=lambda x: direction * x)
                for seed in [seed for seed in seeds if seed % 2 != odd]:
                    alarms += (False, seed) in curves and curves[False, seed].seen(threshold, direction) is not None
                    step = curves[True, seed].seen(threshold, direction) if (True, seed) in curves else None
                    steps += [] if step is None else [step]
            counts = [sum(key[0] == collapses for key in curves) for collapses in (False, True)]
            if any(counts):
                yield Row(way, place, metric, counts[0], alarms, counts[1], sorted(steps))


def ends(folder: Path) -> Iterator[str]:
    """The rows of a table: what each number was at the last step, median and range over seeds; those of embeddings."""
    for way in WAYS:
        names = ("accuracy", "loss", *NUMBERS)
        curves = {name: curves_of(folder, way, PLACES[0], name) for name in names}
        for collapses in (False, True):
            last = {name: [c.values[-1] for key, c in curves[name].items() if key[0] == collapses] for name in names}
            if last["loss"]:
                kind = "collapsing" if collapses else "healthy"
                yield f"| {way} | {kind} | {' | '.join(_spread(values) for values in last.values())} |"


def _spread(values: list[float | None]) -> str:
    """The median of values, and in brackets the least and the most; none of those that are none."""
    numbers = sorted(x for x in values if x is not None)
    return f"{median(numbers):.3g} ({numbers[0]:.3g} to {numbers[-1]:.3g})" if numbers else "–"


def report(folder: Path) -> str:
    """The tables in Markdown: what became of the trainings, and which number saw it when."""
    names = " | ".join(f"`{name}`" for name in ("accuracy", "loss", *NUMBERS))
    lines = [f"| way | trainings | {names} |", "|---" * (4 + len(NUMBERS)) + "|", *ends(folder), ""]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows(folder):
        at = "–" if row.metric in ("accuracy", "loss") else row.place
        when = f" after {median(row.steps):.0f} ({row.steps[0]} to {row.steps[-1]})" if row.steps else ""
        seen = f"{len(row.steps)} of {row.collapsing}{when}, {row.false_alarms} of {row.healthy} false"
        cells.setdefault((row.metric, at), {})[row.way] = seen
    ways = [way for way in WAYS if any(way in by_way for by_way in cells.values())]
    lines += [f"| number | at | {' | '.join(ways)} |", "|---" * (2 + len(ways)) + "|"]
    for (metric, at), by_way in cells.items():
        lines.append(f"| `{metric}` | {at} | {' | '.join(by_way.get(way, '–') for way in ways)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.command == "train":
        left = [piece for piece in RUNS if not (options.folder / name_of(*piece) / DONE).exists()]
        for result in run_pieces(partial(train, folder=options.folder), left, options.workers):
            print(result.value or f"{result.piece}: {result.error}", f"{result.seconds:.0f} s", flush=True)
    print(report(options.folder))


if __name__ == "__main__":  # workers find functions by the name of their module, and none in __main__
    import_module("rankscope_studies.research.encoder_collapse").main()
