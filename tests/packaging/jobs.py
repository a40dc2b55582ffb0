"""What an environment must be able to do, by the extra that is installed: `python jobs.py CASE`, in an empty
folder. Nothing of the tests is imported here: only what the environment has."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

TEXTS = ["Call me Ishmael. Some years ago, never mind how long precisely", "It was the best of times"]
SPEC = '[all]\nmodel = "bert-tiny"\nsamples = 1\ntokens = 8\n[grid]\nskip = [0.0, 1.0]\n'
PRINTED = (
    "measure bert-tiny --max-length 8",
    "compare bert-tiny bert-mini --max-length 8",
    "paths bert-tiny --max-length 8",
    "bounds bert-tiny --max-length 8",
    "forecast design.json --tokens 8 --no-mends",
    "depth bert-tiny --max-length 8 --samples 1 --no-heads",
    "masks",
    "metrics",
    "models",
    "plugins",
)
"""Commands of the core that need nothing else."""
MISSING = {
    "demo": ["demo"],
    "demo --decoder": ["models", "report"],
    "demo --train": ["report"],
    "measure minilm": ["demo"],
    "measure digit-vit": ["models"],
    "depth": ["demo"],
    "depth digit-vit": ["models"],
    "checkpoints digit-vit": ["models", "report"],
    "measure ./model": ["models"],
    "measure bert-tiny --max-length 8 -o out": ["report"],
    "paths bert-tiny --max-length 8 -o out": ["report"],
    "bounds bert-tiny --max-length 8 -o out": ["report"],
    "compare bert-tiny bert-mini --max-length 8 -o out": ["report"],
    "sweep spec.toml": ["report"],
    "checkpoints trained": ["models", "report"],
    "reproduce dong2021 rate": ["studies"],
    "study": ["studies"],
    "remedies": ["studies"],
    "report plain": ["report"],
    "follow plain --page": ["explore"],
    "explore": ["explore"],
}
"""Commands of the core, and the extras that the line they end with installs."""


def command(*words: str, code: int = 0) -> str:
    """`rankscope` with these words: what it says."""
    program = Path(sys.executable).with_name("rankscope")
    done = subprocess.run([program, *words], text=True, capture_output=True)
    assert done.returncode == code, f"rankscope {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout if code == 0 else done.stderr


def watched(run: str, **more: Any) -> Any:
    """A plain loop of torch with a monitor in it."""
    import torch

    from rankscope import Monitor

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    X = torch.randn(4, 6, 16)
    monitor = Monitor(model, probe=X, every=2, run=run, optimizer=optimizer, **more)
    for _ in range(4):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=loss)
    monitor.close()
    return X


def measured() -> Any:
    """A random network, measured: attention alone collapses below what floating point can see."""
    from rankscope import fresh, measure

    net = fresh("bert-mini").variant("san")
    profile = measure(net, TEXTS)
    assert profile.curve("relative_residual", "log10")[:, -1].max() < -16
    return profile


def page(name: str) -> None:
    """A report, whole."""
    text = Path(name).read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>") and "Plotly" in text, name


def core() -> None:
    """Measuring, watching and the terminal; of the rest, what to install."""
    import rankscope

    assert "torch" not in sys.modules, "import rankscope must not import torch"
    version = command("--version").split()[1]
    assert version == rankscope.__version__ and "measure" in command("--help")
    import torch

    from rankscope import Architecture, Transformer, certify, decompose, read
    from rankscope.metrics import relative_mu

    X = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    assert abs(float(relative_mu(X)) - 0.5**0.5) < 1e-12  # centred: four halves, of a norm of root two
    net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    tokens = torch.randn(1, 5, 8, dtype=torch.float64)
    assert len(certify(net, tokens).table) and len(decompose(net, tokens).by_length().table)
    measured().save("run.parquet")
    Path("design.json").write_text(json.dumps({"layers": 2, "width": 8, "heads": 2}))
    watched("plain")
    assert {0, 2, 4} >= set(read("plain").tables["training"]["step"]) > {2}
    assert "step 4" in command("follow", "plain", "--once")
    for words in PRINTED:
        assert command(*words.split()), words
    Path("spec.toml").write_text(SPEC)
    for folder in ("model", "trained/checkpoint-1"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text('{"model_type": "bert"}')
    for words, extras in MISSING.items():
        said = command(*words.split(), code=2).strip()
        found = re.search(r"not installed: pip install 'rankscope\[(.*)\]'$", said)
        assert found and "\n" not in said and found[1].split(",") == extras, f"{words}: {said}"
    assert not Path("out").exists() and not Path("runs").exists(), "a command that could not run wrote a folder"


def models() -> None:
    """A model of transformers, loaded and held against itself; the one that comes with the wheel, by name."""
    import torch
    from transformers import BertConfig, BertModel

    from rankscope import load, measure

    config = BertConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=32)
    net = load(BertModel(config).eval())
    origin: Any = net.origin
    assert origin.parity.states < 1e-9
    assert measure(net, net.encode(torch.arange(1000, 1008)[None])).curve("relative_residual").shape == (1, 3)
    command("measure", "digit-vit", "--samples", "1")
    command("depth", "digit-vit", "--samples", "1", "--no-heads")
    command("measure", "moby-gpt", "--max-length", "8", "--samples", "1")


def plot() -> None:
    """A figure."""
    measured().plot("relative_residual").savefig("figure.png")
    assert Path("figure.png").stat().st_size > 1000


def report() -> None:
    """Folders with figures and a page; pages of runs; a sweep."""
    command("measure", "bert-tiny", "--max-length", "8", "-o", "out")
    page("out/report.html")
    Path("spec.toml").write_text(SPEC)
    command("sweep", "spec.toml", "-o", "swept", "--workers", "1")
    watched("plain")
    command("report", "out", "swept", "plain", "-o", "all.html")
    page("all.html")


def explore(*models: str) -> None:
    """The explorer's page and one answer of it; a training's page."""
    setting = {"model": "random", "shape": {"layers": 2, "width": 8, "heads": 2}, "text": TEXTS[0]}
    asked = json.dumps({"setting": setting}).encode()
    for part in served("explore", *models):
        head = {"Content-Type": "application/json", "Origin": part.rstrip("/")}
        with urlopen(Request(f"{part}api/answer", asked, head)) as answer:
            lines = [json.loads(line) for line in answer.read().splitlines()]
        assert lines and "error" not in lines[0], lines[:1]
    watched("followed")
    for part in served("follow", "followed", "--page"):
        with urlopen(f"{part}api/training") as answer:
            assert json.load(answer)["step"] == 4


def served(*words: str) -> Any:
    """The address of a page, while it is served."""
    line = [str(Path(sys.executable).with_name("rankscope")), *words, "--no-open", "--json"]
    with subprocess.Popen(line, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            said = ""
            while not said.rstrip().endswith("}"):
                part = process.stdout.readline()
                assert part, said
                said += part
            address = json.loads(said)["address"]
            with urlopen(address) as answer:
                assert b"<html" in answer.read()
            with urlopen(f"{address}plotly.js") as answer:
                assert len(answer.read()) > 1e6
            yield address
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode in (0, 130), process.returncode


def lab() -> None:
    """Images of digits."""
    from rankscope.lab import Digits

    assert Digits().batch(3, 0, 0).inputs.shape == (3, 16, 4)


def demo() -> None:
    """The demo, and the model in it by name."""
    command("demo", "-o", "out")
    page("out/report.html")
    assert "minilm" in Path("out/report.html").read_text(encoding="utf-8").lower()
    command("measure", "minilm", "--max-length", "8", "--samples", "1")


def full() -> None:
    """All of these together."""
    for each in (core_of_full, models, plot, report, lab, demo):
        each()
    command("checkpoints", "digit-vit", "--samples", "1", "-o", "trained")
    page("trained/report.html")
    command("demo", "--decoder", "-o", "decoder")
    page("decoder/report.html")
    command("depth", "minilm", "--max-length", "8", "--samples", "1", "--no-heads")
    explore("minilm")


def core_of_full() -> None:
    """What the core does, where nothing is missing."""
    measured()
    watched("watched")
    assert "step 4" in command("follow", "watched", "--once")


def ray() -> None:
    """The same table as without Ray."""
    from rankscope import sweep

    spec = {"all": {"model": "bert-tiny", "samples": 1, "tokens": 8}, "grid": {"skip": [0.0, 1.0]}}
    assert sweep(spec, "here", workers=1).table.equals(sweep(spec, "there", on="ray", workers=1).table)


def studies() -> None:
    """A figure of a paper, by a command that another package brings."""
    command("reproduce", "dong2021", "lengths", "-o", "out")
    (written,) = Path("out").rglob("report.html")
    assert "data:image/png" in written.read_text(encoding="utf-8")
    assert "hysteresis" in command("study", "--help") and "--remedy" in command("remedies", "--help")


def trainer() -> None:
    """In transformers' Trainer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from rankscope import read
    from rankscope.monitor.loops.transformers import MonitorCallback

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=2, n_head=2))
    ids = torch.randint(0, 32, (8, 12))
    rows: Any = [{"input_ids": each, "labels": each} for each in ids]
    args = TrainingArguments("out", max_steps=4, report_to=[], use_cpu=True, save_strategy="no")
    callback = MonitorCallback(probe={"input_ids": ids}, every=2, run="run")
    Trainer(model, args, train_dataset=rows, callbacks=[callback]).train()
    assert 4 in read("run").tables["training"]["step"]


def lightning() -> None:
    """In Lightning's Trainer."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from rankscope import read
    from rankscope.monitor.loops.lightning import LightningMonitor

    class Learner(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    X = torch.randn(4, 6, 16)
    callback = LightningMonitor(probe=X, part="model", every=2, run="run")
    fit = Trainer(max_steps=4, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False)
    rows: Any = list(X)
    fit.fit(Learner(), torch.utils.data.DataLoader(rows, batch_size=2))
    assert 4 in read("run").tables["training"]["step"]


def tensorboard() -> None:
    """What TensorBoard reads back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rankscope.monitor.writers import TensorBoard

    watched("run", writers=[TensorBoard("board")])
    assert "monitor/loss" in EventAccumulator("board").Reload().Tags()["scalars"]


def wandb() -> None:
    """A run of Weights & Biases, offline."""
    from rankscope.monitor.writers import WandB

    watched("run", writers=[WandB(mode="offline", project="here", dir=".")])
    assert list(Path().glob("wandb/offline-run-*/*.wandb"))


def mlflow() -> None:
    """What MLflow reads back."""
    import os

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # mlflow-skinny has no database
    from mlflow import MlflowClient

    from rankscope.monitor.writers import MLflow

    store = Path("mlruns").resolve().as_uri()
    watched("run", writers=[MLflow(experiment="collapse", uri=store)])
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("collapse")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert "monitor/loss" in run.data.metrics


def trackio() -> None:
    """What Trackio keeps."""
    import os

    os.environ["TRACKIO_DIR"] = str(Path().resolve())
    from rankscope.monitor.writers import Trackio

    watched("run", writers=[Trackio("here", name="first")])
    assert list(Path().glob("here*.db"))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
