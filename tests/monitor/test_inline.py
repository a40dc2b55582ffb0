"""Training batches measured as they pass: in parts or whole, recomputed or not, compiled or not."""

from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn

import rankscope
from rankscope import Monitor
from rankscope.errors import MonitorError, TrainingWarning, WatchError
from tests.monitor.loops import nanogpt
from tests.monitor.training import batch, gpt2, loss_of, train
from tests.raising import raises

METRICS = ["relative_mu", "mu", "mean_cosine"]


def inline(run: Path, **options: Any) -> Any:
    return lambda model: Monitor(model, **{"metrics": METRICS, "every": 3, "run": run, **options})


def table(run: Path) -> pl.DataFrame:
    return rankscope.read(run).tables["training"]


def closest(a: pl.DataFrame, b: pl.DataFrame) -> float:
    """The largest relative difference of two tables of the same rows."""
    keys = ["step", "layer", "head", "metric"]
    a, b = (each.filter(pl.col("metric").is_in(METRICS)).sort(keys) for each in (a, b))
    assert a.select(*keys, "samples").equals(b.select(*keys, "samples")) and len(a)
    apart = [((a[name] - b[name]) / a["value"]).abs().to_list() for name in ("value", "least", "most")]
    return float(max(each for column in apart for each in column))


def test_the_numbers_are_those_of_the_batch(tmp_path: Path) -> None:
    model = gpt2(dropout=0.0)
    with Monitor(model, METRICS, every=1, run=tmp_path / "inline") as monitor:
        model(input_ids=batch(5)).logits.sum().backward()
        monitor.step()
    with Monitor(model, METRICS, every=1, probe={"input_ids": batch(5)}, run=tmp_path / "probe"):
        pass
    probed = table(tmp_path / "probe").with_columns(step=pl.lit(1, pl.Int64))
    assert closest(table(tmp_path / "inline"), probed) < 1e-6  # float32, in train mode and in eval mode


def test_micro_batches_merge_into_the_step(tmp_path: Path) -> None:
    """Two halves of a batch give the numbers of the whole."""
    model = gpt2(dropout=0.0).double()
    for name, parts in (("whole", [batch(5)]), ("halves", list(batch(5).split(2)))):
        with Monitor(model, METRICS, every=1, run=tmp_path / name) as monitor:
            for part in parts:
                model(input_ids=part)
            monitor.step()
    assert closest(table(tmp_path / "whole"), table(tmp_path / "halves")) < 1e-12
    assert set(table(tmp_path / "whole")["samples"]) == {4}


class Busy(nn.Module):
    """A block of tokens first, which does not say so. Another thread calls the `model`, if there is one, after
    attention in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.model = nn.Linear(8, 8), list[nn.Module]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).transpose(0, 1)[:, None]
        y = nn.functional.scaled_dot_product_attention(y, y, y)[:, 0].transpose(0, 1)
        if self.model:
            evaluation = Thread(target=torch.no_grad()(self.model.pop()), args=(torch.randn(5, 3, 8),))
            evaluation.start()
            evaluation.join()
        return x + y


def test_an_evaluation_beside_the_first_batch_does_not_take_its_tokens_away(tmp_path: Path) -> None:
    for name in ("quiet", "busy"):
        torch.manual_seed(0)
        blocks = [Busy(), Busy()]
        model = nn.Sequential(*blocks)
        with Monitor(model, METRICS, every=1, run=tmp_path / name, blocks=blocks) as monitor:
            blocks[0].model += [model] if name == "busy" else []
            model(torch.linspace(0, 1, 112).reshape(7, 2, 8).sin())
            monitor.step()
    assert table(tmp_path / "quiet").equals(table(tmp_path / "busy"))
    assert set(table(tmp_path / "busy")["layer"].drop_nulls()) == {0, 1, 2}


def test_padding_is_left_out(tmp_path: Path) -> None:
    model, ids = gpt2(dropout=0.0).double(), batch(5, 1)
    padded = torch.cat([ids, ids], 1)[:, :12]
    padded[:, 8:] = 0
    mask = torch.ones_like(padded)
    mask[:, 8:] = 0
    for name, given in (
        ("alone", {"input_ids": ids[:, :8]}),
        ("padded", {"input_ids": padded, "attention_mask": mask}),
    ):
        with Monitor(model, METRICS, every=1, run=tmp_path / name) as monitor:
            model(**given)
            monitor.step()
    assert closest(table(tmp_path / "alone"), table(tmp_path / "padded")) < 1e-12


def test_a_forward_made_again_is_not_counted(tmp_path: Path) -> None:
    tables = []
    for again in (False, True):
        model = gpt2().train()
        if again:
            model.gradient_checkpointing_enable()
        train(inline(tmp_path / str(again)), steps=6, model=model)
        tables.append(table(tmp_path / str(again)))
    assert closest(*tables) < 1e-9 and set(tables[0].filter(metric="mu")["samples"]) == {4}
    gradients = [each.filter(metric="grad_tokens") for each in tables]
    assert set(gradients[0]["layer"]) == set(gradients[1]["layer"]) == {0, 1, 2}
    assert float((gradients[0]["value"] / gradients[1]["value"] - 1).abs().max()) < 1e-5  # type: ignore[arg-type]


def test_gradients_at_tokens_are_those_of_autograd(tmp_path: Path) -> None:
    """Of the mean of the samples' losses, times their number: each sample's own."""
    model = gpt2(dropout=0.0).double()
    with Monitor(model, "mu", every=1, run=tmp_path) as monitor:
        loss_of(model(input_ids=batch(5)).logits, batch(5)).backward()
        monitor.step()
    found = table(tmp_path).filter(metric="grad_tokens").sort("layer")["value"].to_list()
    kept: list[torch.Tensor] = []
    for layer in range(3):
        sizes = []
        for ids in batch(5).split(1):
            at = model.transformer.h[layer] if layer < 2 else model.transformer.ln_f
            hook = at.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
            loss = loss_of(model(input_ids=ids).logits, ids)
            hook.remove()
            sizes.append(torch.autograd.grad(loss, kept.pop())[0].norm().item())
        assert found[layer] == pytest.approx(sum(sizes) / 4, rel=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_there_is_one_graph_and_the_numbers_are_the_same(backend: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    eager = train(inline(tmp_path / "eager"), steps=9, model=gpt2(dropout=0.0))
    torch._dynamo.utils.counters.clear()
    found = train(inline(tmp_path / "compiled"), steps=9, model=gpt2(dropout=0.0), compiled=backend)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert found.losses == pytest.approx(eager.losses, rel=1e-4)
    a, b = table(tmp_path / "eager"), table(tmp_path / "compiled")
    assert closest(a, b) < (1e-9 if backend == "aot_eager" else 1e-3)
    assert b["step"].unique().sort().to_list() == [3, 6, 9]


def test_attention_and_heads_of_training_batches(tmp_path: Path) -> None:
    metrics = ["relative_mu", "entropy", "head_mu"]
    train(inline(tmp_path, metrics=metrics), steps=6)
    found = table(tmp_path)
    assert set(found["metric"]) == {*metrics, "loss"}
    assert found.filter(metric="entropy")["head"].n_unique() == 2
    with raises(MonitorError, subject="metrics"):
        Monitor(torch.compile(gpt2(), backend="aot_eager"), metrics, run=tmp_path / "compiled")  # type: ignore[arg-type]


class Bent(nn.Linear):
    """A projection that may become more than a linear map."""

    bent = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + y.sin() if self.bent else y


def test_a_projection_that_cannot_be_taken_apart_later_does_not_end_the_training(tmp_path: Path) -> None:
    model = nanogpt.GPT(dropout=0.0).train()
    projection = model.transformer["h"][1].attn.c_proj = Bent(nanogpt.WIDTH, nanogpt.WIDTH)  # type: ignore[index]
    with Monitor(model, "head_mu", every=1, run=tmp_path) as monitor:
        for step in range(3):
            projection.bent = step == 1
            model(*nanogpt.get_batch(seed=step))[1].backward()
            with pytest.warns(TrainingWarning, match="must sum to its output") if projection.bent else nullcontext():
                monitor.step()
    assert table(tmp_path)["step"].unique().sort().to_list() == [1, 3]


class Ordered(nn.Module):
    """Calls its blocks in this order; the same block may come again, as in ALBERT."""

    def __init__(self, *order: int, listed: bool = False) -> None:
        super().__init__()
        blocks = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(max(order) + 1)]
        self.layers = nn.ModuleList([blocks[k] for k in order] if listed else blocks)
        self.order = [*range(len(order))] if listed else order

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.hidden(X)[-1]

    def hidden(self, X: torch.Tensor) -> list[torch.Tensor]:
        return [*accumulate(self.order, lambda hidden, k: self.layers[k](hidden), initial=X)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("order", "listed"),
    [((0, 0, 0), True), ((0, 0, 0), False), ((0, 0, 1, 1), False), ((0, 1, 0, 1), False), ((0, 1, 0, 0, 2), False)],
)
def test_a_block_called_many_times_is_as_many_layers(order: tuple[int, ...], listed: bool, tmp_path: Path) -> None:
    model, X = Ordered(*order, listed=listed).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    with Monitor(model, METRICS, every=1, run=tmp_path / "inline", alarms=()) as monitor:
        for _ in range(2):  # two micro-batches
            (model(X.requires_grad_()) ** 3).sum(dim=(1, 2)).mean().backward()
        monitor.step()
    hidden = model.hidden(X)
    gradients = torch.autograd.grad((hidden[-1] ** 3).sum(), hidden)
    sizes = [x.norm(dim=(1, 2)).mean().item() for x in gradients]
    rows = table(tmp_path / "inline").sort("layer").with_columns(pl.col("samples") // 2)
    assert rows.filter(metric="grad_tokens")["value"].to_list() == pytest.approx(sizes, rel=1e-9)
    with Monitor(model, METRICS, every=1, probe=X.detach(), run=tmp_path / "probe"):
        pass
    assert closest(rows, table(tmp_path / "probe").with_columns(step=pl.lit(1, pl.Int64))) < 1e-9
    assert rows["layer"].max() == len(order)


@pytest.mark.slow
def test_a_block_called_many_times_is_as_many_layers_in_compiled_code(tmp_path: Path) -> None:
    for order, listed in (((0, 0, 0), True), ((0, 0, 0), False)):
        torch._dynamo.reset()
        model, X = Ordered(*order, listed=listed).double(), torch.randn(2, 5, 8, dtype=torch.float64)
        compiled: Any = torch.compile(model, backend="aot_eager")
        for name, called in (("eager", model), ("compiled", compiled)):
            with Monitor(called, METRICS, every=1, run=tmp_path / f"{name}{listed}", alarms=()) as monitor:
                called(X).sum().backward()
                monitor.step()
        assert closest(table(tmp_path / f"eager{listed}"), table(tmp_path / f"compiled{listed}")) < 1e-9
        assert table(tmp_path / f"eager{listed}")["layer"].max() == 3


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_blocks_in_another_order_are_refused(order: tuple[int, ...], tmp_path: Path) -> None:
    """Listed as they are called they are measured, as a watch measures them."""
    model, X = Ordered(*order), torch.randn(2, 5, 8)
    with raises(MonitorError, subject="blocks"), Monitor(model, "mu", every=1, run=tmp_path / "a") as monitor:
        model(X).sum().backward()
        monitor.step()
    listed = [f"layers.{k}" for k in order]
    with Monitor(model, "mu", every=1, blocks=listed, run=tmp_path / "b", alarms=()) as monitor:
        model(X).sum().backward()
        monitor.step()
    with torch.no_grad(), rankscope.watch(model, "mu") as w:
        model(X)
    found = table(tmp_path / "b").filter(metric="mu", step=1).sort("layer")["value"].to_list()
    assert found == pytest.approx(w.profile().curve("mu").mean(0).tolist(), rel=1e-5)


@pytest.mark.parametrize("metrics", [["mu"], ["mu", "entropy"]])
def test_an_evaluation_between_steps_is_not_counted(metrics: list[str], tmp_path: Path) -> None:
    model = gpt2(dropout=0.0)
    with Monitor(model, metrics, every=1, run=tmp_path) as monitor:
        model(input_ids=batch(5))
        model.eval()
        with torch.no_grad():
            model(input_ids=batch(6, 9))
        model.train()
        monitor.step()
    assert set(table(tmp_path).filter(metric="mu")["samples"]) == {4}


class Weighing(nn.Module):
    """A block that returns its attention, averaged over heads, before its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        Y, weights = self.attention(X, X, X)
        return weights, Y


def test_blocks_that_return_more_than_tokens_are_refused(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Weighing() for _ in range(2))

        def forward(self, X: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                _, X = layer(X)
            return X

    model = Odd()
    with Monitor(model, every=1, run=tmp_path), raises(MonitorError, subject="blocks"):
        model(torch.randn(2, 5, 8))


@pytest.mark.parametrize("metrics", [["mu"], ["mu", "entropy"]])
def test_a_call_without_gradients_is_no_training_batch(metrics: list[str], tmp_path: Path) -> None:
    model = gpt2(dropout=0.0)
    with Monitor(model, metrics, every=1, run=tmp_path) as monitor:
        with torch.no_grad():  # in train mode, as an average of weights or a teacher is computed
            model(input_ids=batch(6, 9))
        loss_of(model(input_ids=batch(5)).logits, batch(5)).backward()
        with torch.no_grad():
            model(input_ids=batch(7, 9))
        monitor.step()
    assert set(table(tmp_path).filter(metric="mu")["samples"]) == {4}


@pytest.mark.parametrize("metrics", [["mu"], ["mu", "entropy"]])
def test_training_in_eval_mode_is_measured_and_an_evaluation_beside_it_is_not(
    metrics: list[str], tmp_path: Path
) -> None:
    model = gpt2(dropout=0.5).eval()
    with Monitor(model, metrics, every=1, run=tmp_path) as monitor:
        for step in range(2):
            loss_of(model(input_ids=batch(step)).logits, batch(step)).backward()
            monitor.step()
        model(input_ids=batch(6, 9))  # an evaluation with gradients, and with the batches in train mode
        model.train()
        loss_of(model(input_ids=batch(5)).logits, batch(5)).backward()
        model.eval()
        model(input_ids=batch(7, 9))
        monitor.step()
    rows = table(tmp_path).filter(pl.col("metric").is_in(["mu", "grad_tokens"]), layer=1)
    assert rows.filter(metric="mu")["step"].to_list() == [1, 2, 3] and set(rows["samples"]) == {4}
    assert rows.filter(metric="grad_tokens")["step"].to_list() == ([1, 2, 3] if metrics == ["mu"] else [])


def test_blocks_that_stay_in_eval_mode_are_layers_too(tmp_path: Path) -> None:
    model = gpt2(dropout=0.0).train()
    model.transformer.h[0].eval()  # frozen
    with Monitor(model, "mu", every=1, run=tmp_path) as monitor:
        model(input_ids=batch(5))
        monitor.step()
    assert table(tmp_path).filter(metric="mu")["layer"].to_list() == [0, 1, 2]


@pytest.mark.slow
def test_a_compiled_model_that_was_called_before_is_measured(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = gpt2(dropout=0.0, layers=1).train()
    called: Any = torch.compile(model, backend="aot_eager")
    loss_of(called(input_ids=batch(0)).logits, batch(0)).backward()
    with Monitor(called, METRICS, every=1, run=tmp_path / "compiled") as monitor:
        loss_of(called(input_ids=batch(5)).logits, batch(5)).backward()
        monitor.step()
    with Monitor(model, METRICS, every=1, run=tmp_path / "eager") as monitor:
        loss_of(model(input_ids=batch(5)).logits, batch(5)).backward()
        monitor.step()
    assert closest(table(tmp_path / "eager"), table(tmp_path / "compiled")) < 1e-6


@pytest.mark.parametrize("metrics", [["mu"], ["mu", "entropy"]])
def test_a_hook_that_fails_later_does_not_reach_the_model(metrics: list[str], tmp_path: Path) -> None:
    class Growing(nn.Module):
        """A block that returns more tokens than it took, once it is told to."""

        def __init__(self) -> None:
            super().__init__()
            self.attention, self.more = nn.MultiheadAttention(8, 2, batch_first=True), False

        def forward(self, X: torch.Tensor) -> torch.Tensor:
            Y = X + self.attention(X, X, X)[0]
            return torch.cat([Y, Y], 1) if self.more else Y

    last = Growing()
    model = nn.Sequential(Growing(), last)
    with Monitor(model, metrics, every=1, run=tmp_path, alarms=()) as monitor:
        for step in range(4):
            last.more = step == 1
            model(torch.randn(2, 5, 8)).sum().backward()
            if step == 1:
                with pytest.warns(TrainingWarning):
                    monitor.step()
            else:
                monitor.step()
    assert table(tmp_path)["step"].unique().sort().to_list() == [1, 3, 4]
    with Monitor(model, metrics, every=1, run=tmp_path / "first"), raises(WatchError):
        last.more = True
        model(torch.randn(2, 5, 8))


def test_a_step_without_a_call_is_said(tmp_path: Path) -> None:
    with Monitor(gpt2(), every=1, run=tmp_path) as monitor, raises(MonitorError, subject="model"):
        monitor.step()


class TokensFirst(nn.Module):
    """A block written by hand on `[token, batch, width]`; without attention, nothing shows which axis counts tokens."""

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.mixed, self.mlp, self.attends = nn.Linear(8, 24), nn.Linear(8, 8), attends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attends:
            q, k, v = (part.transpose(0, 1) for part in self.mixed(x).chunk(3, -1))
            x = x + ((q @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1)
        return x + self.mlp(x)


class OfTokensFirst(nn.Module):
    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([TokensFirst(attends) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained_tokens_first(run: Path, monitored: bool = True, backend: str = "", **options: Any) -> tuple[Any, Any]:
    """(a model after three steps, its monitor); 7 tokens of 3 samples."""
    model: Any = OfTokensFirst(options.pop("attends", True))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    called: Any = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    monitor = Monitor(called, METRICS, every=1, run=run, optimizer=optimizer, **options) if monitored else None
    for step in range(3):
        x = torch.randn(7, 3, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(loss=loss)
    if monitor is not None:
        monitor.close()
    return model, monitor


@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_tokens_on_the_first_axis_are_found_by_attention(backend: str, tmp_path: Path) -> None:
    """Training batches of hand-written blocks were measured across the batch. In compiled code nothing is found."""
    plain, _ = trained_tokens_first(tmp_path, monitored=False)
    model, monitor = trained_tokens_first(tmp_path / "found", backend=backend)
    _, told = trained_tokens_first(tmp_path / "told", backend=backend, layout="token first")
    same = all(map(torch.equal, plain.parameters(), model.parameters()))
    assert same or backend
    said = [note for note in monitor.notes if "was assumed" in note]
    assert bool(said) is bool(backend) and not [note for note in told.notes if "was assumed" in note]
    assert table(tmp_path / "told")["samples"].filter(table(tmp_path / "told")["metric"] == "mu").unique().item() == 3
    if not backend:
        a, b = table(tmp_path / "found"), table(tmp_path / "told")
        assert closest(a, b) == 0 and a.filter(metric="grad_tokens").equals(b.filter(metric="grad_tokens"))


@pytest.mark.parametrize("probed", [True, False])
def test_a_layout_that_nothing_shows_is_said(probed: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"probe": torch.randn(7, 3, 8)} if probed else {}
    _, monitor = trained_tokens_first(tmp_path, attends=False, **options)
    assert any("was assumed; layout= says it" in note for note in monitor.notes)


def test_a_first_block_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """Attention is followed from torch function to torch function only while the first block runs."""
    model = OfTokensFirst()
    with Monitor(model, METRICS, every=1, run=tmp_path) as monitor:
        with pytest.raises(RuntimeError):
            model(torch.randn(7, 3, 9))
        assert not torch._C._len_torch_function_stack()
        model(torch.randn(7, 3, 8)).sum().backward()
        monitor.step()
    assert table(tmp_path).filter(metric="mu")["samples"].unique().item() == 3


def test_a_call_whose_begin_no_hook_sees_begins_with_its_first_block(tmp_path: Path) -> None:
    """A loop may call a method of the model in place of the model itself; micro-batches of it are calls, too."""
    model, X = Ordered(0, 1).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    for name, call in (("whole", model), ("method", lambda X: model.hidden(X)[-1])):
        with Monitor(model, METRICS, every=1, run=tmp_path / name, alarms=()) as monitor:
            for part in X.split(1):
                call(part).sum().backward()
            monitor.step()
    assert table(tmp_path / "whole").equals(table(tmp_path / "method"))
    assert set(table(tmp_path / "method").filter(metric="mu")["samples"]) == {2}


class Told(nn.Module):
    """A model that is given a mask, and looks at nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_mask_that_may_mean_either_is_said(tmp_path: Path) -> None:
    """True may stand for a token or for padding: every token counts, as in a watch, and a note says so."""
    model, X = Told(), torch.randn(2, 5, 8)
    mask = torch.tensor([[True, True, False, False, False], [True, True, True, False, False]])
    with torch.no_grad(), rankscope.watch(model, "mu", layout="batch first") as w:
        model(X, mask)
    with Monitor(model, "mu", every=1, run=tmp_path, layout="batch first") as monitor:
        model(X, mask).sum().backward()
        monitor.step()
    assert any(note.startswith("mask may be True at tokens or at padding") for note in monitor.notes)
    found = table(tmp_path).filter(metric="mu").sort("layer")["value"].to_list()
    assert found == pytest.approx(w.profile().curve("mu").mean(0).tolist(), rel=1e-6)
