"""One of several processes that train a model together in the ways that loops do, run by `test_parallel.py`.

A way is named by words: `tp` and `sp` split the model over two processes, without and with sequence parallelism;
`fsdp` shards it over the others; `pipeline` gives each of two its own blocks; `inline` measures training batches,
`tokens` their tokens alone; further words as in `built`. Each way trains once without a monitor and once with one.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

import rankscope
from rankscope import Monitor
from rankscope.errors import RankscopeError, WatchError
from rankscope.live import processes
from rankscope.live.attention_readings import AttentionReadings
from rankscope.live.processes import tensor_parallel_of
from tests.monitor.loops import llama, nanogpt
from tests.raising import raises

ALL = ["relative_mu", "mu", "entropy", "largest_logit", "head_mu"]
STEPS, EVERY = 4, 2


class Built(NamedTuple):
    """A model as one process has it, and how that process calls it."""

    model: Any
    share: Callable[[Tensor], Tensor]  # its samples of a batch
    stage: int = 0  # in a pipeline
    schedule: Any = None


def main(rank: int, number: int, folder: Path, ways: list[str]) -> None:
    limit = timedelta(seconds=240)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=number, timeout=limit)
    try:
        for way in ways:
            try:
                run(way, rank, number, folder / way)
            except RankscopeError as error:
                sys.stdout.write(f"{way}: {type(error).__name__} about {error.subject}: {error}\n")
    finally:
        dist.destroy_process_group()


def run(way: str, rank: int, number: int, folder: Path) -> None:
    words = way.split()
    with surroundings(words, rank, number):
        if "detection" in words:
            detect()
            return
        if "watch" in words:
            watch(words, rank, number, folder)
            return
        way_to_train = accelerated if "accelerate" in words else nanogpt_of if "nanogpt" in words else train
        bare, monitored = (way_to_train(words, rank, number, run) for run in (None, folder))
        assert bare[0] == monitored[0] and all(map(torch.equal, bare[1], monitored[1])), way


@contextmanager
def surroundings(words: list[str], rank: int, number: int) -> Iterator[None]:
    """What a way needs around it."""
    with ExitStack() as stack:
        if "dtensor" in words:  # torch's fused kernel of CPUs takes no DTensor
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if number > 1:
                stack.enter_context(implicit_replication())
        if "written" in words:
            stack.callback(setattr, llama, "attend", llama.attend)
            llama.attend = written
        if "fails" in words and rank == 1:
            stack.callback(setattr, AttentionReadings, "_read", AttentionReadings._read)
            AttentionReadings._read = failing  # type: ignore[method-assign,assignment]
        if "alone" in words:
            stack.callback(setattr, processes, "PATIENCE", processes.PATIENCE)
            processes.PATIENCE = 3.0
        yield


def detect() -> None:
    """Which of two processes share a model is told by its weights."""
    mesh = init_device_mesh("cpu", (2,))

    def model(*places: Any, axes: int = 2) -> nn.Module:
        made = nn.Module()
        for k, place in enumerate(places):
            weight = nn.Parameter(distribute_tensor(torch.ones(*[4] * axes), mesh, [place]))
            made.add_module(f"part{k}", nn.Module())
            made.get_submodule(f"part{k}").register_parameter("weight", weight)
        return made

    assert tensor_parallel_of(nn.Linear(4, 4)) is None
    assert tensor_parallel_of(model(Replicate())) is None
    assert tensor_parallel_of(model(Shard(0), axes=3)) is None  # each process has its own experts
    found = tensor_parallel_of(model(Shard(1), Replicate()))
    assert found is not None and (found.size, found.index, found.keeps_copies) == (2, dist.get_rank(), True)
    found = tensor_parallel_of(model(Shard(1), axes=3))
    assert found is not None and not found.keeps_copies and [*found.splits.values()] == [1]
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=mesh)
    assert tensor_parallel_of(sharded) is None
    plain = nn.Linear(4, 4)
    plain.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    for refused in (plain, transformers_of_old()):
        with raises(WatchError, subject="model"):
            tensor_parallel_of(refused)
    with raises(WatchError, subject="heads"):  # two heads of 3 fit no projection
        split = llama.Llama().split(mesh, False)
        together = tensor_parallel_of(split)
        assert together is not None
        together.has_all_heads(split.layers["0"], [6, 6])


def transformers_of_old() -> nn.Module:
    """A model whose weights transformers has split without a DTensor."""
    model = nn.Linear(4, 4)
    model._tp_size = 2  # type: ignore[assignment]
    return model


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention without a kernel."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)).softmax(-1) @ v


def failing(*args: Any) -> None:
    raise WatchError("made up", subject="attention")


def built(words: list[str], rank: int, number: int) -> Built:
    """The model on this process, parallel in these ways if there are several."""
    if "hf" in words:
        return Built(transformers_llama(number), lambda x: x)
    model = llama.Llama()
    if number == 1 or "context" in words:
        return Built(model, lambda x: x)
    split = "tp" in words or "sp" in words
    sharded, staged = "fsdp" in words, "pipeline" in words
    sizes = {"pipeline": 2 if staged else 1, "fsdp": 2 if sharded else 1, "tp": 2 if split else 1}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    place = {name: mesh[name].get_local_rank() for name in sizes}
    if staged:
        model.stage(place["pipeline"])
    if split:
        model.split(mesh["tp"], "sp" in words, "dtensor" in words, "gathered" in words)
    if "compiled" in words:
        for block in model.layers.values():
            block.compile(backend="aot_eager", fullgraph=True)
    if sharded:
        for block in model.layers.values():
            for part in block.modules() if "finer" in words else ():
                if isinstance(part, nn.Linear):
                    fully_shard(part, mesh=mesh["fsdp"])
            fully_shard(block, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    schedule = None
    if staged:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        group = mesh["pipeline"].get_group()
        stage = PipelineStage(model, place["pipeline"], 2, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=llama.loss_of)
    return Built(model, lambda x: x.chunk(sizes["fsdp"])[place["fsdp"]], place["pipeline"], schedule)


def transformers_llama(number: int) -> nn.Module:
    """The Llama of transformers, split by its own plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "vocab_size": llama.WORDS,
    }
    heads: dict[str, Any] = {"num_attention_heads": llama.HEADS, "num_key_value_heads": llama.KEY_HEADS}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=16)).double()
    if number > 1:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        apply_tensor_parallelism(model, init_device_mesh("cpu", (number,), mesh_dim_names=("tp",)))
    return model


def train(words: list[str], rank: int, number: int, run: Path | None) -> tuple[list[float], list[Tensor]]:
    """(losses, this process's part of the weights in the end)."""
    model, share, stage, schedule = built(words, rank, number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = None
    if run is not None:
        monitor = Monitor(
            model, every=EVERY, run=run, optimizer=optimizer, spectra=True, **options(words, share, rank, stage)
        )
    losses = []
    for step in range(STEPS):
        X, loss = share(llama.batch(step)), None
        optimizer.zero_grad()
        if schedule is not None:
            of_parts: list[Tensor] = []
            schedule.step(*([X] if stage == 0 else []), **({"target": X, "losses": of_parts} if stage else {}))
            loss = torch.stack(of_parts).mean() if of_parts else None
        elif "pipeline" in words:  # in one process: the same two parts
            of_parts = [llama.loss_of(model(part), part) for part in X.chunk(2)]
            loss = torch.stack(of_parts).mean()
            loss.backward()
        else:
            loss = llama.loss_of(logits(model(X)), X)
            loss.backward()
        optimizer.step()
        losses += [] if loss is None else [float(loss.detach())]
        if monitor is not None:
            monitor.step(loss=loss)
    if monitor is not None:
        monitor.close()
    weights = [getattr(weight, "to_local", weight.clone)().detach() for weight in model.parameters()]
    return losses, weights


def accelerated(words: list[str], rank: int, number: int, run: Path | None) -> tuple[list[float], list[Tensor]]:
    """Accelerate's loop: each step is made of four batches of two samples, however many processes there are."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from torch.utils.data import DataLoader

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
    os.environ.update({name: str(value) for name, value in places.items()} if number > 1 else {})
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4 // number)
    assert accelerator.num_processes == number
    model = llama.Llama()
    loader: Any = DataLoader(llama.batch(5, 2 * 4 * STEPS), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    monitor = None
    if run is not None:
        share = partial(torch.chunk, chunks=number)
        given = options(words, lambda x: share(x)[rank], rank, 0)
        monitor = Monitor(model, every=EVERY, run=run, optimizer=optimizer, spectra=True, **given)
    losses = []
    for X in loader:
        with accelerator.accumulate(model):
            loss = llama.loss_of(model(X), X)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if accelerator.sync_gradients and monitor is not None:
            monitor.step(loss=1.0)
    if monitor is not None:
        monitor.close()
    return losses, [weight.detach().clone() for weight in model.parameters()]


def nanogpt_of(words: list[str], rank: int, number: int, run: Path | None) -> tuple[list[float], list[Tensor]]:
    """nanoGPT's loop over DDP; every process calls the monitor, and one evaluates."""
    inline = "tokens" in words

    def monitored(model: nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
        assert run is not None
        given: dict[str, Any] = {"metrics": ALL[:2] if inline else ALL, "spectra": True}
        given |= {} if inline else {"probe": nanogpt.get_batch(samples=3, seed=rank), "loss": lambda output: output[1]}
        return Monitor(model, every=EVERY, run=run, optimizer=optimizer, **given)

    made = None if run is None else monitored
    backend = "aot_eager" if "compiled" in words else ""
    losses, model, _ = nanogpt.train(made, steps=STEPS, backend=backend, rank=rank, ddp=number > 1)
    return losses, [weight.detach().clone() for weight in model.parameters()]


def options(words: list[str], share: Callable[[Tensor], Tensor], rank: int, stage: int) -> dict[str, Any]:
    """What the monitor is given beside the model and its optimiser."""
    given: dict[str, Any] = {"metrics": ALL[:2] if "tokens" in words else ALL[:-1] if "gathered" in words else ALL}
    if "pipeline" in words and "forgotten" not in words:
        given["first_block"] = (3 if "gap" in words else 2) * stage
    if "layers" in words:
        given["layers"] = [0, 3]
    if "inline" in words or "tokens" in words or ("pipeline" in words and "probe" not in words):
        return given
    ids = share(llama.batch(99 + (rank if "different" in words else 0)))
    return given | {"probe": [ids], "loss": lambda output: llama.loss_of(logits(output), ids)}


def logits(output: Any) -> Tensor:
    result: Tensor = getattr(output, "logits", output)
    return result


def watch(words: list[str], rank: int, number: int, folder: Path) -> None:
    """The profile that `watch` gives each process, as a file."""
    model, X = built(words, rank, number).model, llama.batch(99)
    if "alike" in words:  # tokens before positions come in: what each process has is the same
        X = torch.full_like(X, 3)
    if "keep" in words:
        rankscope.watch(model, ALL, keep="attention")
    if "alone" in words and rank:
        return
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        w = stack.enter_context(rankscope.watch(model, ALL))
        if "context" in words:
            stack.enter_context(context_parallel(init_device_mesh("cpu", (2,)), buffers=[X], buffer_seq_dims=[1]))
        if "around" in words:  # a call that enters no block is no measurement, and processes do not wait for its heads
            layers, model.layers = model.layers, nn.ModuleDict()
            model(X)
            model.layers = layers
        model(X)
    folder.mkdir(parents=True, exist_ok=True)
    w.profile().table.write_parquet(folder / f"{rank}.parquet")
    assert number == 1 or "context" in words or any("2 processes share the model" in note for note in w.notes)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
