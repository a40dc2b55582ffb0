"""Which criterion says best which layers can go? And is a model without them faster for real?

    python -m benchmarks.cutting train runs/cutting --device cuda     # GPTs and ViTs of the lab; goes on where it was
    python -m benchmarks.cutting cut runs/cutting --device cuda       # every criterion, search and share; goes on too
    python -m benchmarks.cutting report runs/cutting                  # the tables

Networks of the lab (`gpt-L`: the next character of Moby Dick; `vit-L`: scikit-learn's digits) are trained with several
seeds; `minilm` is the bundled model, `rxnfp` and `antiberty` are those of `make weights` (reactions put together
of common reactants; antibodies with mutations), and their seeds are other calibration texts. Layers are chosen on
calibration samples of the training data, and what is left is held against the whole network on held-out ones:

| number           | what it is                                                                                       |
|------------------|--------------------------------------------------------------------------------------------------|
| `relative_error` | of the output                                                                                    |
| `cosine`         | of the output's tokens with those of the whole network                                           |
| `loss`           | of the task, through the head of the whole network; `loss_whole` is that of the whole            |
| `rank_agreement` | of encoders: Spearman's correlation of the similarities of all pairs of held-out texts, their    |
|                  | embeddings (means of tokens) by the cut network against those by the whole                       |
| `nearest`        | of encoders: the share of held-out texts whose nearest other text is the same                    |

`gradient` is of the task's loss in the lab, and of a random direction for encoders without a head. Nothing is healed.
`rows` (for `make bench`) gives the time of a forward pass with layers taken out, over that of the whole model.
"""

import argparse
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor

from benchmarks.timing import Row, least_seconds
from rankscope.depths import cut
from rankscope.depths.criteria import CRITERIA, Sample
from rankscope.depths.cut import SEARCHES, fidelity_of
from rankscope.files import append_whole
from rankscope.lab import Digits, Model, NextCharacter, Recipe, Task, Training
from rankscope.nets import Transformer
from rankscope_studies.dong2021.networks import CHEMISTRY

KEEPS = (0.9, 0.75, 0.67, 0.5, 0.33, 0.25)
LAB = [f"{kind}-{layers}" for layers in (6, 12, 24) for kind in ("gpt", "vit")]
CHECKPOINTS = {
    "rxnfp": ("rxnfp/models/transformers/bert_ft", "bert", "vocab.txt"),
    "antiberty": ("antiberty/trained_models/AntiBERTy_md_smooth", None, "../vocab.txt"),
}
ENCODERS = ["minilm", *CHECKPOINTS]
NETWORKS = [*ENCODERS, *LAB]
TEXTS, CHOSEN = 48, 8  # texts of an encoder that numbers are taken on, and that layers are chosen on
ACIDS = ("CC", "CCC", "CCCC", "CC(C)", "c1ccccc1", "Clc1ccc(cc1)", "c1ccccc1C", "C1CC1")  # before C(=O)O
ALCOHOLS = ("OC", "OCC", "OCCC", "OC(C)C", "OCc1ccccc1", "OC1CCCCC1", "OCCCCC", "OCCO")
AMINES = ("NC", "NCC", "NCCC", "NC(C)C", "NCc1ccccc1", "NC1CCCCC1", "N1CCCCC1", "NCCO")
ANTIBODY = "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQER"
MOST_SETS = {True: 70, False: 1000}  # of layers, of encoders and others: beyond it no exact search is made
WIDTH, HEADS, CONTEXT, BATCH, STEPS = 128, 4, 64, 32, 3000
DRAWS = 10  # of random layers, for each seed
CALIBRATION, HELD = 16, 256  # samples that layers are chosen on, and that numbers are taken on


class Case(NamedTuple):
    """A network, what its layers are chosen on, and the numbers that are taken of what is left."""

    net: Transformer
    sample: Sample
    numbers: Callable[[Transformer], dict[str, float]]


def task_of(name: str) -> Task:
    """What a network of the lab learns."""
    return NextCharacter(CONTEXT) if name.startswith("gpt") else Digits()


def train(folder: Path, name: str, seeds: int, device: str, steps: int = STEPS, width: int = WIDTH) -> None:
    """Train a network of the lab with all seeds at once, unless it is there; write its weights."""
    path = folder / f"{name}.pt"
    if path.is_file():
        return
    task, layers = task_of(name), int(name.partition("-")[2])
    recipe = Recipe(steps=steps, batch_size=BATCH, lr=1e-3 if layers < 24 else 5e-4)
    training = Training(
        task, task.architecture(layers, width, HEADS), recipe, seeds=range(seeds), device=device, capture=True
    ).finish()
    losses = [evaluation.loss for evaluation in training.evaluate(HELD)]
    folder.mkdir(parents=True, exist_ok=True)
    states = [{key: tensor.cpu() for key, tensor in model.state_dict().items()} for model in training.models]
    torch.save({"layers": layers, "width": width, "losses": losses, "states": states}, path)
    print(f"{name}: held-out loss {', '.join(f'{loss:.3f}' for loss in losses)}", flush=True)


@torch.no_grad()
def lab_case(folder: Path, name: str, seed: int, device: str) -> Case:
    """A trained network of the lab, in float64; its gradients are those of the task's loss."""
    saved, task = torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True), task_of(name)
    arch = task.architecture(saved["layers"], saved["width"], HEADS)
    model = Model(Transformer.random(arch, dtype=torch.float32), task.interface)
    model.load_state_dict(saved["states"][seed])
    model = model.double().to(device).eval()
    chosen_on = task.batch(CALIBRATION, seed, 10**6).to(device)  # of the training data, at a step that was not made
    held, net = task.held_out(HELD).to(device), model.network()
    tokens = model.tokens(held.inputs).detach()
    whole = net.run(tokens).output

    @torch.no_grad()
    def numbers(small: Transformer) -> dict[str, float]:
        Y = small.run(tokens).output
        close, logits = fidelity_of(whole, Y, torch.ones_like(Y[..., 0], dtype=torch.bool)), model.logits(Y, None)
        loss, accuracy = float(task.loss(logits, held)), float(task.accuracy(logits, held))
        return {**close._asdict(), "loss": loss, "accuracy": accuracy}

    def loss(Y: Tensor) -> Tensor:
        return task.loss(model.logits(Y, None), chosen_on)

    return Case(net, Sample(model.tokens(chosen_on.inputs).detach(), None, loss, seed), numbers)


def reactions() -> list[list[str]]:
    """Esters and amides of every acid with every alcohol and amine, in tokens."""
    pairs = [(acid, other) for acid in ACIDS for other in (*ALCOHOLS, *AMINES)]
    made = [f"{acid}C(=O)O.{other}>>{acid}C(=O){other}" for acid, other in pairs]
    return [["[CLS]", *re.findall(CHEMISTRY, reaction), "[SEP]"] for reaction in made]


def antibodies(count: int = 128) -> list[list[str]]:
    """An antibody with every fifth residue, on average, changed to another."""
    draw = random.Random(0)
    changed = [
        [draw.choice("ACDEFGHIKLMNPQRSTVWY") if draw.random() < 0.2 else x for x in ANTIBODY] for _ in range(count)
    ]
    return [["[CLS]", *sequence, "[SEP]"] for sequence in changed]


@torch.no_grad()
def encoder_case(name: str, seed: int, device: str) -> Case:
    """A trained encoder on texts of its kind; each seed chooses layers on other texts."""
    from rankscope.sources import bundled_excerpts, load

    if name == "minilm":
        net, texts = load("minilm", device=device), bundled_excerpts(TEXTS)
        (X, padding), start = net.encode(texts[-TEXTS:], 64), CHOSEN * seed
        chosen_on = net.encode(texts[:-TEXTS][start : start + CHOSEN], 64)
    else:
        path, family, vocabulary = CHECKPOINTS[name]
        folder = Path(os.environ.get("RANKSCOPE_WEIGHTS", ".weights")) / path
        net = load(folder, family=family, device=device)
        words = {word: k for k, word in enumerate((folder / vocabulary).read_text().split("\n"))}
        ids = [[words[word] for word in each] for each in (reactions() if name == "rxnfp" else antibodies())]
        random.Random(0).shuffle(ids)
        longest = max(map(len, ids))
        filled = torch.tensor([each + [0] * (longest - len(each)) for each in ids])
        hidden = torch.tensor([[k >= len(each) for k in range(longest)] for each in ids])
        mine = slice(TEXTS + CHOSEN * seed, TEXTS + CHOSEN * (seed + 1))
        X, padding = net.encode(filled[:TEXTS], longest, padding=hidden[:TEXTS])
        chosen_on = net.encode(filled[mine], longest, padding=hidden[mine])
    valid = ~padding

    def output(small: Transformer) -> Tensor:
        return small.run(X, padding).output * valid[..., None]

    Y = output(net)
    whole = similarities(Y, valid)
    pairs = torch.triu_indices(len(X), len(X), 1)

    @torch.no_grad()
    def numbers(small: Transformer) -> dict[str, float]:
        Z = output(small)
        found = similarities(Z, valid)
        agreement = spearman(found[pairs[0], pairs[1]], whole[pairs[0], pairs[1]])
        nearest = float((nearest_texts(found) == nearest_texts(whole)).double().mean())
        return {**fidelity_of(Y, Z, valid)._asdict(), "rank_agreement": agreement, "nearest": nearest}

    return Case(net, Sample(chosen_on.X, chosen_on.padding, None, seed), numbers)


def similarities(Y: Tensor, valid: Tensor) -> Tensor:
    """Cosines of the embeddings of all pairs of texts: the means of their tokens after the last layer."""
    means = Y.sum(1) / valid.sum(1)[:, None]
    unit = torch.nn.functional.normalize(means, dim=-1)
    return unit @ unit.T


def nearest_texts(similar: Tensor) -> Tensor:
    """The text, other than itself, that each is most similar to."""
    return similar.masked_fill(torch.eye(len(similar), dtype=torch.bool, device=similar.device), -2).argmax(1)


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks."""
    ranks = torch.stack([values.argsort().argsort().double() for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def removals(case: Case, by: str, search: str, encoder: bool = False) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(share that stays, layers that go) for every share of `KEEPS`; greedy and one-shot choices are made once."""
    depth, sample = case.net.arch.layers, case.sample
    options: dict[str, Any] = {"by": by, "search": search, "padding": sample.padding, "loss": sample.loss}
    counts = {keep: depth - max(1, math.floor(keep * depth + 0.5)) for keep in KEEPS}
    if search != "exact":
        for draw in range(DRAWS if by == "random" else 1):
            found = cut(case.net, sample.X, min(KEEPS), seed=DRAWS * sample.seed + draw, **options)
            yield from ((keep, found.layers[:count]) for keep, count in counts.items())
        return
    for keep, count in counts.items():
        if math.comb(depth, count) <= MOST_SETS[encoder]:
            yield keep, cut(case.net, sample.X, keep, seed=sample.seed, **options).layers


def run_cuts(folder: Path, name: str, seeds: Sequence[int], device: str) -> None:
    """Append the numbers of every criterion and search to the file of a network, but for those that are there."""
    path = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    done = {(row["seed"], row["by"], row["search"]) for row in read_rows(path)}
    for seed in seeds:
        left = [
            (by, search)
            for by, criterion in CRITERIA.items()
            for search in SEARCHES
            if (search != "exact" or criterion.sets is not None) and (seed, by, search) not in done
            if (by, search) != ("random", "greedy")  # as random as one_shot
        ]
        if not left:
            continue
        case = encoder_case(name, seed, device) if name in ENCODERS else lab_case(folder, name, seed, device)
        whole = {f"{key}_whole": value for key, value in case.numbers(case.net).items() if key in ("loss", "accuracy")}
        seen: dict[tuple[int, ...], dict[str, float]] = {}  # criteria often agree
        for by, search in left:
            common = {"network": name, "seed": seed, "by": by, "search": search}
            lines = []
            for keep, layers in removals(case, by, search, name in ENCODERS):
                out = tuple(sorted(layers))
                seen[out] = seen.get(out) or case.numbers(case.net.without(out))
                lines.append({**common, "keep": keep, "layers": out, **seen[out], **whole})
            text = "".join(json.dumps(line) + "\n" for line in lines or [common])
            append_whole(path, path.stat().st_size if path.exists() else 0, text)
            print(name, seed, by, search, flush=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, none where there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def report(folder: Path) -> str:
    """A Markdown table for each network and number: means over seeds by criterion and search, a column a share."""
    parts = []
    for name in NETWORKS:
        rows = [row for row in read_rows(folder / f"{name}.jsonl") if "keep" in row]
        if not rows:
            continue
        table = pl.DataFrame(rows, infer_schema_length=None)
        wanted = ("rank_agreement", "nearest", "cosine") if name in ENCODERS else ("loss", "accuracy", "cosine")
        for number in wanted:
            known = f"{number}_whole"
            whole = f", whole {sum(table[known]) / table.height:.3f}" if known in table.columns else ""
            parts.append(f"\n{name}: {number}{whole}, means over {table['seed'].n_unique()} seeds\n")
            parts.append(f"| layers chosen by | search | {' | '.join(f'{keep:g}' for keep in KEEPS)} |")
            parts.append("|---|---|" + "---|" * len(KEEPS))
            means = table.group_by("by", "search", "keep").agg(pl.col(number).mean())
            for by in CRITERIA:
                for search in SEARCHES:
                    of_both = dict(means.filter(by=by, search=search).select("keep", number).iter_rows())
                    if of_both:
                        cells = [f"{of_both[keep]:.3f}" if keep in of_both else "–" for keep in KEEPS]
                        parts.append(f"| {by} | {search} | {' | '.join(cells)} |")
    return "\n".join(parts)


def rows(small: bool = False) -> list[Row]:
    """The time of a forward pass with layers taken out, over that of the whole: BERT of transformers, 4 x 64 tokens."""
    from tempfile import TemporaryDirectory

    from transformers import BertConfig, BertModel

    from rankscope.sources import load
    from rankscope.sources.shortened import write_shortened

    torch.manual_seed(0)
    width, layers = (32, 4) if small else (384, 12)
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": 4}
    kind: Any = BertModel
    whole = kind(BertConfig(num_hidden_layers=layers, **sizes)).eval()
    ids, net = torch.randint(5, 1000, (4, 64)), load(whole)
    cases: dict[str, Any] = {"plain": whole}
    with TemporaryDirectory() as folder:
        for keep in (0.75, 0.5, 0.25):
            out = range(round(keep * layers) + 1, layers + 1)
            cases[f"{round(keep * layers)} of {layers} layers"] = write_shortened(whole, net, out, f"{folder}/{keep}")
    with torch.no_grad():
        seconds = least_seconds({name: lambda m=model: m(input_ids=ids) for name, model in cases.items()})
    base = seconds.pop("plain")
    return [(name, f"the whole, {base:.3f} s", each / base) for name, each in seconds.items()]


def main() -> None:
    """Train, cut or report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "cut", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--width", type=int, default=WIDTH)
    asked = parser.parse_args()
    if asked.what == "report":
        print(report(asked.folder))
        return
    for name in asked.networks:
        if asked.what == "cut":
            run_cuts(asked.folder, name, range(asked.seeds), asked.device)
        elif name in LAB:
            train(asked.folder, name, asked.seeds, asked.device, asked.steps, asked.width)


if __name__ == "__main__":
    main()
