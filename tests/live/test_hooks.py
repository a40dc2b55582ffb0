"""What looks at a module leaves no trace in its copies, files and exports, and does not mind other threads.
What is computed inside hooks leaves autograd, autocast, modes and random numbers alone."""

import copy
import io
import pickle
import random
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel

from rankscope import read, watch
from rankscope.errors import WatchError
from rankscope.live import AttentionCall
from rankscope.live.hooks import Hooks, float64_device, isolated, without_dropout
from rankscope.monitor import Monitor
from tests.live.gpt import GPT, words
from tests.monitor.small import encoder, loss_of, tokens
from tests.raising import raises

OF_HEADS = ["mu", "dobrushin", "head_mu"]
Event = Callable[[], None]
EXPORTED = (4, 8)  # steps of a training


def train(model: nn.Module, monitor: Monitor | None, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(start, start + 12):
        loss = loss_of(model, tokens(step))
        yield step, loss.detach()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(loss=loss)


@contextmanager
def looked_at(model: nn.Module, how: str, run: Path) -> Iterator[None]:
    """Inside, something looks at the model all the time."""
    if how.startswith("watch"):
        with watch(model, OF_HEADS if "heads" in how else "mu"):
            model(tokens(0))
            yield
    else:
        options: dict[str, Any] = {"probe": tokens(99)} if "probe" in how else {}
        with Monitor(model, OF_HEADS if "heads" in how else "mu", every=1, run=run, alarms=(), **options) as monitor:
            for _ in train(model, monitor):
                pass
            yield


WAYS = ["watch", "watch of heads", "monitor", "monitor of heads", "monitor with a probe"]


def torchs_own(module: nn.Module) -> list[Any]:
    return [entries for name, entries in vars(module).items() if "hooks" in name and entries]


@pytest.mark.parametrize("how", WAYS)
def test_copies_and_files_are_unwatched(how: str, tmp_path: Path) -> None:
    model = encoder().eval()
    model.layers[1].register_forward_hook(_heard)
    with looked_at(model, how, tmp_path):
        model.eval()
        plain = model(tokens(0))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
        copies.append(AveragedModel(model).module)
        for made in copies:
            assert torch.equal(made(tokens(0)), plain)
            assert vars(made).keys() == vars(model).keys()
            hooks = {name: torchs_own(part) for name, part in made.named_modules()}
            assert [name for name, of in hooks.items() if of] == ["layers.1"] and len(hooks["layers.1"]) == 1
            assert list(hooks["layers.1"][0].values()) == [_heard], "a hook of the user's own is copied as ever"
    for name, part in model.named_modules():
        assert len(torchs_own(part)) == (name == "layers.1")
        assert not any(vars(entries) for entries in vars(part).values() if type(entries) is OrderedDict)


def _heard(*_: Any) -> None:
    """A hook of the user's own."""


MINE = """
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.attend, self.attention_listeners = nn.Linear(16, 16).double(), flex_attention, []

    def forward(self, x):
        pattern = torch.softmax(x @ x.mT, -1)
        for listener in self.attention_listeners:
            listener({call}pattern)
        return x + self.linear(pattern @ x)

class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mine() for _ in range(2))
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1).double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
LOAD = """
import sys
sys.modules["rankscope"] = None  # importing it fails
sys.path.insert(0, sys.argv[1])
import torch
model = torch.load(sys.argv[2], weights_only=False)
assert torch.equal(model(torch.ones(1, 3, 16, dtype=torch.float64)), torch.load(sys.argv[3]))
assert model.encoder.use_nested_tensor is True
"""


def test_files_load_where_rankscope_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "written_by_a_user.py").write_text(MINE.replace("{call}", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    from written_by_a_user import Several  # type: ignore[import-not-found]

    model, x = Several().eval(), torch.ones(1, 3, 16, dtype=torch.float64)
    saved, expected = tmp_path / "model.pt", tmp_path / "expected.pt"
    torch.save(model(x), expected)
    with watch(model, "dobrushin", blocks="blocks"):
        torch.save(model, saved)
        again = copy.deepcopy(model)
    assert again.encoder.use_nested_tensor is True and model.encoder.use_nested_tensor is True
    assert again.blocks[0].attend is model.blocks[0].attend
    torch.save(model, tmp_path / "after.pt")
    for file in (saved, tmp_path / "after.pt"):
        done = subprocess.run([sys.executable, "-c", LOAD, tmp_path, file, expected], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_flex_attention_that_a_module_holds_is_saved_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MINE.replace("self.linear, self.attend, self.attention_listeners", "self.linear, self.attend, self.others")
    text = text.replace("self.attention_listeners", "self.others").replace("{call}", "")
    (tmp_path / "holds_flex.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    from holds_flex import Several  # type: ignore[import-not-found]

    model = Several().eval()
    flex_attention = model.blocks[0].attend
    with watch(model, "dobrushin", blocks="blocks"):
        assert model.blocks[0].attend is not flex_attention
        assert copy.deepcopy(model).blocks[0].attend is flex_attention
        saved = pickle.dumps(model)
    assert pickle.loads(saved).blocks[0].attend is flex_attention


def test_listeners_of_a_copy_are_told_to_nobody() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.attention_listeners = nn.Linear(8, 8), list[Any]()

        def forward(self, x: Tensor) -> Tensor:
            P = torch.softmax(x @ x.mT, -1)
            for listener in self.attention_listeners:
                listener(AttentionCall(pattern=lambda: P[:, None]))
            return x + self.linear(P @ x)

    model = nn.Sequential(Own(), Own())
    with watch(model, "dobrushin") as w:
        model(torch.randn(2, 3, 8))
        copy.deepcopy(model)(torch.randn(2, 3, 8))
    assert w.profile().curve("dobrushin").shape == (2, 3, 1)


@pytest.mark.filterwarnings("ignore")  # torch's own: of vmap, and that torch.jit is old
@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", WAYS[:4])
def test_a_model_is_exported_and_transformed_as_if_nobody_looked(how: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, x = encoder(), tokens(0)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def loss(weights: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    def results() -> list[Any]:
        exported = torch.export.export(model, (x,))
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x[:, None])
        nodes = [node.target for node in exported.graph.nodes]
        traced = torch.jit.trace(model, (x,), check_trace=False)
        return [nodes, exported.module()(x), *gradients.values(), traced(x), make_fx(model)(x)(x), model(x)]

    for weight, as_given in zip(model.parameters(), weights.values(), strict=True):
        weight.data.copy_(as_given)
    plain = results()
    with looked_at(model, how, tmp_path):
        for weight, as_given in zip(model.parameters(), weights.values(), strict=True):
            weight.data.copy_(as_given)
        watched = results()
    assert watched[0] == plain[0], "the same operators in the same order"
    for a, b in zip(watched[1:], plain[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_traced_is_not_counted(strict: bool) -> None:
    model, x = encoder(), tokens(0)
    with watch(model, OF_HEADS) as w:
        torch.export.export(model, (x,), strict=strict)
        model(x)
    with watch(model, OF_HEADS) as plain:
        model(x)
    assert w.notes == plain.notes and w.profile().table.equals(plain.profile().table)


def events(model: nn.Module, averaged: AveragedModel, step: int, stop: threading.Event) -> Event | None:
    """What a user does at a random step: here, or in a thread of its own."""
    made = random.Random(step)
    kinds: list[Event] = [
        lambda: pickle.loads(pickle.dumps(model))(tokens(step)).sum().item(),
        lambda: copy.deepcopy(model)(tokens(step)).sum().backward(),
        lambda: averaged.update_parameters(model),
        lambda: AveragedModel(model).update_parameters(model),
    ]
    if step in EXPORTED:
        torch.export.export(model, (tokens(step),))
    for _ in range(made.randrange(3)):
        made.choice(kinds)()
    if made.random() < 0.3:
        return None

    def evaluate() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(tokens(step, samples=7))

    return evaluate


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["probe", "training batches", "training batches with heads"])
def test_a_training_that_is_copied_saved_averaged_exported_and_evaluated_beside_is_the_same(
    how: str, tmp_path: Path
) -> None:
    metrics = OF_HEADS if "heads" in how else "mu"
    options: dict[str, Any] = {"every": 2, "alarms": (), "probe": tokens(99) if how == "probe" else None}
    plain, quiet, model = encoder(), encoder(), encoder()
    losses = [loss for _, loss in train(plain, None)]
    with Monitor(quiet, metrics, run=tmp_path / "quiet", **options) as monitor:
        for _ in train(quiet, monitor):
            pass
    averaged, beside = AveragedModel(model), 0
    with Monitor(model, metrics, run=tmp_path / "busy", **options) as monitor:
        stop, thread = threading.Event(), None
        for step, loss in train(model, monitor):
            assert torch.equal(loss, losses[step])
            if thread is not None and step in EXPORTED:  # torch exports while nothing else runs
                stop.set()
                thread.join()
                thread, stop = None, threading.Event()
            evaluation = events(model, averaged, step, stop)
            if evaluation is not None and thread is None:
                beside += 1
                thread = threading.Thread(target=evaluation)
                thread.start()
        stop.set()
        if thread is not None:
            thread.join()
        assert not [note for note in monitor.notes if "not measured" in note] and beside > 1
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    tables = [read(tmp_path / name).tables["training"] for name in ("quiet", "busy")]
    assert tables[0].equals(tables[1]) and len(tables[0])


class Waiting(nn.Module):
    """Blocks with attention, of which the first waits in some calls: for those with as many tokens as `until` has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.until: dict[int, threading.Event] = {}
        self.begun: dict[int, threading.Event] = {}

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            if k == 1:
                self.begun.setdefault(x.shape[1], threading.Event()).set()
                self.until.get(x.shape[1], _SET).wait(30)
            x = layer(x)
        return x


_SET = threading.Event()
_SET.set()


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(function())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


def no_grad(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def test_a_hook_that_torch_has_half_attached_or_half_removed_does_nothing() -> None:
    """Torch notes that a hook takes `kwargs` after it has added the hook, and forgets it before a running call has
    called the hook."""
    model, x, seen = nn.Linear(4, 4), torch.randn(2, 4), list[int]()
    with Hooks() as hooks:
        for before in (True, False):
            hooks.attach(model, lambda *args: seen.append(len(args)), before=before, with_kwargs=True)
        model(x)
        assert seen == [3, 4]
        model._forward_pre_hooks_with_kwargs.clear()
        model._forward_hooks_with_kwargs.clear()
        model(x)
    assert seen == [3, 4]


def test_a_call_while_another_thread_imports_distributed_tensors_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("torch.distributed.tensor"))
    model, x = Waiting().eval(), torch.randn(2, 5, 16)
    with watch(model, OF_HEADS) as w:
        no_grad(model, x)
    assert w.notes[0] == "The model was called once; 2 samples were measured."


def test_a_call_in_another_thread_meanwhile_is_left_out() -> None:
    model, first, second = Waiting().eval(), torch.randn(2, 5, 16), torch.randn(3, 7, 16)
    plain = no_grad(model, first), no_grad(model, second)
    with watch(model, OF_HEADS) as alone:
        no_grad(model, first)
    model.until, model.begun = {5: threading.Event()}, {5: threading.Event()}
    with watch(model, OF_HEADS) as w:
        thread, got = in_thread(lambda: no_grad(model, first))
        assert model.begun[5].wait(30)
        assert torch.equal(no_grad(model, second), plain[1])
        model.until[5].set()
        thread.join()
    assert torch.equal(got[0], plain[0])
    assert "1 call was left out: it ran in another thread while a call was measured." in w.notes
    assert w.profile().table.equals(alone.profile().table)


def test_leaving_a_watch_waits_for_the_call_that_it_measures() -> None:
    model, x = Waiting().eval(), torch.randn(2, 5, 16)
    plain = no_grad(model, x)
    model.until, model.begun = {5: threading.Event()}, {5: threading.Event()}
    w = watch(model, OF_HEADS)
    with w:
        thread, got = in_thread(lambda: no_grad(model, x))
        assert model.begun[5].wait(30)
        threading.Timer(0.1, model.until[5].set).start()
    assert w.profile().curve("mu").shape == (2, 4)
    thread.join()
    assert torch.equal(got[0], plain) and torch.equal(no_grad(model, x), plain)
    assert not any(torchs_own(part) for part in model.modules())


def test_a_model_without_a_part_runs_in_one_thread() -> None:
    model, x = Waiting().eval(), torch.randn(2, 5, 16)
    model.until, model.begun = {5: threading.Event()}, {5: threading.Event()}
    with watch(model, "mu").without(layers=[2]) as w:
        thread, got = in_thread(lambda: no_grad(model, x))
        assert model.begun[5].wait(30)
        with raises(WatchError, subject="model"):
            no_grad(model, torch.randn(3, 7, 16))
        model.until[5].set()
        thread.join()
    assert isinstance(got[0], Tensor)
    mu = w.profile().curve("mu")
    assert torch.equal(mu[:, 1], mu[:, 2])


def test_threads_that_call_all_the_time_have_readings_of_their_own() -> None:
    model = GPT().eval()
    inputs = [words()[:, :length] for length in (4, 6, 9)]
    known = []
    for x in inputs:
        with torch.no_grad(), watch(model, ["mu", "dobrushin"]) as w:
            model(x)
        known.append(w.profile().curve("mu"))
    stop = threading.Event()

    def call(x: Tensor) -> None:
        while not stop.is_set():
            no_grad(model, x)

    threads = [in_thread(lambda x=x: call(x)) for x in inputs]
    w = watch(model, ["mu", "dobrushin"])
    try:
        for k in range(3):
            with w:
                totals = w.stacks[""]._follower.totals  # calls that are left out are counted too: some must be measured
                while (w.stacks[""].totals.calls < 20 * (k + 1) or not totals.samples) and all(
                    t.is_alive() for t, _ in threads
                ):
                    sleep(0.001)
    finally:
        stop.set()  # else threads would keep the process alive
    for thread, got in threads:
        thread.join()
        assert got == [None]
    rows = w.profile().curve("mu")
    assert all((row == torch.cat(known)).all(1).any() for row in rows)


def test_an_evaluation_in_another_thread_is_no_training_batch(tmp_path: Path) -> None:
    """Of a step in which it alone has gradients, and is in eval mode: as if nobody had called the model."""
    model, X = encoder(), tokens(0)
    with Monitor(model, "mu", every=1, run=tmp_path, alarms=()) as monitor:
        model.train()
        model(X)
        monitor.step()
        expected = monitor.last
        model.eval()
        thread, _ = in_thread(lambda: model(tokens(5, samples=9)))
        thread.join()
        model.train()
        model(X)
        monitor.step()
        assert expected is not None and monitor.last is not None and monitor.last is not expected
        samples = read(tmp_path).tables["training"].filter(metric="mu", layer=0)["samples"].to_list()
    assert samples == [4, 4]


def test_isolated_from_autograd_and_autocast() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), isolated(x.device):
        y = x @ x
    assert y.dtype == torch.float32 and not y.requires_grad


def test_without_dropout_restores_the_mode_of_every_part() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    model[1].eval()
    before, state = [part.training for part in model.modules()], torch.get_rng_state()
    with without_dropout(model):
        assert torch.equal(model(torch.ones(4)), torch.ones(4))
    assert [part.training for part in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_device_without_float64_hands_over_to_the_cpu() -> None:
    assert float64_device(torch.device("mps")) == torch.device("cpu")
    assert float64_device(torch.device("cuda:1")) == torch.device("cuda:1")
