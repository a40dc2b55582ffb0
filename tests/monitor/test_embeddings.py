"""Collapse across the samples of a probe: the authors' formulas on states computed by hand, and a training that does
not notice, also where a projector with batch statistics stands outside of the model."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope import Monitor
from rankscope.errors import MonitorError
from rankscope.metrics import distance_floor, rankme_floor
from rankscope.monitor.measurement import UNMEASURED
from tests.metrics import sample_formulas
from tests.monitor.small import encoder, loss_of, tokens
from tests.monitor.training import probe, probed, train
from tests.raising import raises

OF_SAMPLES = ("rankme", "alpha_req", "uniformity")
OF_VIEWS = ("lidar", "alignment")
OFF: dict[str, Any] = {"metrics": "mu", "alarms": ()}


def rows(run: Path, metric: str, step: int = 0) -> pl.DataFrame:
    return rankscope.read(run).tables["training"].filter(metric=metric, step=step).sort("layer")


def numbers(run: Path, metric: str, step: int = 0) -> list[float]:
    return rows(run, metric, step)["value"].to_list()


def states(model: Any, X: Tensor, padding: Tensor | None = None) -> list[Tensor]:
    """By hand: what the first block takes, and what each block gives."""
    found = [X]
    with torch.no_grad():
        for block in copy.deepcopy(model).eval().layers:
            found.append(block(found[-1], src_key_padding_mask=padding))
    return found


def test_every_layer_has_the_numbers_of_its_mean_tokens_without_padding(tmp_path: Path) -> None:
    model, X = encoder(), tokens(0, samples=30)
    lengths = 1 + torch.arange(30) % 6
    padding = torch.arange(6) >= lengths[:, None]
    given = {"src": X.masked_fill(padding[..., None], 7.0), "src_key_padding_mask": padding}
    Monitor(model, probe=given, run=tmp_path, embeddings="mean", **OFF).close()
    means = [
        torch.stack([x[:length].mean(0) for x, length in zip(hidden, lengths, strict=True)])
        for hidden in states(model, X.masked_fill(padding[..., None], 7.0), padding)
    ]
    assert rows(tmp_path, "rankme")["layer"].to_list() == [0, 1, 2, 3]
    for name, slow in (
        ("rankme", sample_formulas.rankme),
        ("alpha_req", partial(sample_formulas.alpha_req, last=15)),  # all but one direction of the width 16
        ("uniformity", sample_formulas.uniformity),
    ):
        assert numbers(tmp_path, name) == pytest.approx([slow(Z) for Z in means], rel=1e-6), name
    assert not set(OF_VIEWS) & set(rankscope.read(tmp_path).tables["training"]["metric"])


@pytest.mark.parametrize("views", [1, 2, 3])
def test_a_function_gives_numbers_of_the_run(views: int, tmp_path: Path) -> None:
    model, X = encoder(), tokens(0, samples=20 * views)
    Monitor(model, probe=X, run=tmp_path, embeddings=lambda y: y.mean(1).unflatten(0, (20, views)), **OFF).close()
    Z = states(model, X)[-1].mean(1).unflatten(0, (20, views))
    expected = {"rankme": sample_formulas.rankme(Z[:, 0]), "uniformity": sample_formulas.uniformity(Z[:, 0])}
    expected["alpha_req"] = sample_formulas.alpha_req(Z[:, 0], last=15)
    if views > 1:
        pairs = [(i, j) for i in range(views) for j in range(i)]
        expected["lidar"] = sample_formulas.lidar(Z)
        expected["alignment"] = sum(sample_formulas.alignment(Z[:, i], Z[:, j]) for i, j in pairs) / len(pairs)
    for name in (*OF_SAMPLES, *OF_VIEWS):
        found = rows(tmp_path, name)
        values = [expected[name]] if name in expected else []
        assert found["layer"].to_list() == [None] * len(values)
        assert found["value"].to_list() == pytest.approx(values, rel=1e-6), name


def test_layers_can_be_chosen(tmp_path: Path) -> None:
    Monitor(encoder(), probe=tokens(0, 30), run=tmp_path, embeddings="mean", layers=[0, 3], **OFF).close()
    assert rows(tmp_path, "rankme")["layer"].to_list() == [0, 3]


@pytest.mark.slow
def test_losses_weights_and_generators_are_those_of_a_run_without_it(tmp_path: Path) -> None:
    alone = train(steps=8)
    assert alone.same(train(probed(tmp_path / "mean", embeddings="mean", every=2), 8))
    of_output = probed(tmp_path / "function", embeddings=lambda output: output.logits.mean(1), every=2)
    assert alone.same(train(of_output, 8))
    with_loss = {"embeddings": "mean", "loss": lambda output: output.logits.square().mean(), "every": 2}
    assert alone.same(train(probed(tmp_path / "loss", **with_loss), 8))
    metrics = rankscope.read(tmp_path / "loss").tables["training"]["metric"].unique().to_list()
    assert {"grad_tokens", "rankme"} <= set(metrics)
    for run in ("mean", "function"):
        assert rankscope.read(tmp_path / run).tables["training"]["step"].unique().sort().to_list() == [0, 2, 4, 6, 8]


def siamese(monitor: Callable[[nn.Module, nn.Module], Monitor] | None) -> list[Tensor]:
    """What the weights and buffers of an encoder and of a projector outside of it are after some steps."""
    model = encoder()
    torch.manual_seed(1)
    parts: list[nn.Module] = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16)]
    projector = nn.Sequential(*parts).double().train()
    optimizer = torch.optim.SGD([*model.parameters(), *projector.parameters()], lr=0.01)
    watching = None if monitor is None else monitor(model, projector)
    for step in range(4):
        z = projector(model(tokens(step, samples=8)).mean(1))
        loss = loss_of(model, tokens(step)) + (z[:4] - z[4:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if watching is not None:
            watching.step(loss=loss)
            assert all(part.training for part in projector.modules())
    if watching is not None:
        watching.close()
    tensors = [*model.state_dict().values(), *projector.state_dict().values(), torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("error")
def test_a_projector_outside_of_the_model_is_run_in_eval_mode_and_stays_as_it_was(
    compiled: bool, tmp_path: Path
) -> None:
    taken: list[Tensor] = []

    def monitor(model: nn.Module, projector: nn.Module) -> Monitor:
        called: Any = torch.compile(projector, backend="eager") if compiled else projector

        def embeddings(output: Tensor) -> Tensor:
            taken.append(called(output.mean(1)))
            still = copy.deepcopy(projector).eval()(output.mean(1))
            assert torch.equal(taken[-1], still) and not taken[-1].requires_grad
            return taken[-1]

        return Monitor(model, every=1, probe=tokens(99, 30), run=tmp_path, embeddings=embeddings, **OFF)

    assert all(map(torch.equal, siamese(None), siamese(monitor)))
    assert len(taken) == 5 and numbers(tmp_path, "rankme", 4) == pytest.approx([sample_formulas.rankme(taken[-1])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_that_have_become_the_same_are_at_their_floors(dtype: torch.dtype, tmp_path: Path) -> None:
    model = encoder().to(dtype)
    X = tokens(0, samples=1).to(dtype)
    turned = 1 + torch.finfo(dtype).eps * torch.randint(-2, 3, (40, 6, 16), dtype=dtype)
    probe = X * turned  # rounded otherwise
    function = lambda output: output.mean(1).unflatten(0, (-1, 2))  # noqa: E731
    Monitor(model, probe=probe, run=tmp_path / "views", embeddings=function, **OFF).close()
    found = rankscope.read(tmp_path / "views").tables["training"]
    floors = {"rankme": rankme_floor(20, 16, dtype), "alignment": distance_floor(dtype)}
    floors["uniformity"] = 2 * distance_floor(dtype)
    for name, floor in floors.items():
        row = found.filter(metric=name).to_dicts()[0]
        assert row["floor"] == pytest.approx(floor) and abs(row["value"]) <= row["floor"] and row["samples"] == 1
    for name in ("alpha_req", "lidar"):  # would be those of rounding, which fills all directions
        row = found.filter(metric=name).to_dicts()[0]
        assert row["value"] is None and row["samples"] == 0
    assert found["broken"].sum() == 0


def test_under_autocast_the_floor_is_that_of_its_dtype(tmp_path: Path) -> None:
    model, X = encoder().float(), tokens(0, samples=40).float()
    for how in ("mean", lambda output: output.float().mean(1)):
        run = tmp_path / str(how == "mean")
        with torch.autocast("cpu", torch.bfloat16):
            Monitor(model, probe=X, run=run, embeddings=how, **OFF).close()
        floors = rows(run, "rankme")["floor"].to_list()
        assert floors == pytest.approx([rankme_floor(40, 16, torch.bfloat16)] * len(floors))


def test_embeddings_that_are_no_numbers_are_counted_and_the_training_goes_on(tmp_path: Path) -> None:
    model = encoder()
    with Monitor(model, every=1, probe=tokens(0, 20), run=tmp_path, embeddings="mean", **OFF) as monitor:
        with torch.no_grad():
            next(iter(model.layers[1].parameters())).fill_(torch.nan)
        monitor.step()
        found = rows(tmp_path, "rankme", 1)
        assert found["value"].is_null().to_list() == found["broken"].to_list() == [0, 0, 1, 1]
        assert not monitor.notes or UNMEASURED not in " ".join(monitor.notes)


def test_a_function_that_fails_later_is_an_alarm(tmp_path: Path) -> None:
    calls = []

    def embeddings(output: Tensor) -> Tensor:
        calls.append(output)
        return output.mean(1) if len(calls) == 1 else output.mean()

    with (
        pytest.warns(rankscope.errors.TrainingWarning),
        Monitor(encoder(), every=1, probe=tokens(0, 20), run=tmp_path, embeddings=embeddings, **OFF) as monitor,
    ):
        monitor.step()
    assert [alarm["rule"] for alarm in rankscope.read(tmp_path).tables["alarms"].to_dicts()] == [UNMEASURED]


@pytest.mark.parametrize(
    "options",
    [
        {"embeddings": "median"},
        {"embeddings": 3},
        {"embeddings": "mean", "probe": None},
        {"embeddings": lambda output: output.mean(1), "probe": None},
        {"embeddings": lambda output: output["z"]},
        {"embeddings": lambda output: output.mean()},
        {"embeddings": lambda output: output.mean(1).long()},
        {"embeddings": lambda output: None},
    ],
)
def test_bad_embeddings_are_one_sentence(options: dict[str, Any], tmp_path: Path) -> None:
    with raises(MonitorError, subject="embeddings") as raised:
        Monitor(**{"model": encoder(), "probe": tokens(0, 20), "run": tmp_path, **OFF, **options})
    assert len(str(raised.value).splitlines()) == 1 and not (tmp_path / ".lock").exists()


def test_one_sample_is_refused_and_few_are_noted(tmp_path: Path) -> None:
    with raises(MonitorError, subject="probe"):
        Monitor(encoder(), probe=tokens(0, 1), run=tmp_path / "one", embeddings="mean", **OFF)
    with Monitor(encoder(), probe=tokens(0, 9), run=tmp_path / "nine", embeddings="mean", **OFF) as monitor:
        assert sum("rankme is at most 9" in note for note in monitor.notes) == 1
        assert sum("alpha_req is not measured" in note for note in monitor.notes) == 1
    assert not len(rows(tmp_path / "nine", "alpha_req")) and len(rows(tmp_path / "nine", "rankme")) == 4
    assert max(numbers(tmp_path / "nine", "rankme")) < 9.01
    with Monitor(encoder(), probe=tokens(0, 40), run=tmp_path / "forty", embeddings="mean", **OFF) as monitor:
        assert not monitor.notes and not math.isnan(sum(numbers(tmp_path / "forty", "alpha_req")))


def test_a_run_continues_from_a_checkpoint(tmp_path: Path) -> None:
    model = encoder()
    options: dict[str, Any] = {"every": 1, "probe": tokens(0, 20), "run": tmp_path, "embeddings": "mean", **OFF}
    with Monitor(model, **options) as monitor:
        monitor.step()
        state = monitor.state_dict()
        monitor.step()
    with Monitor(model, **options) as monitor:
        monitor.load_state_dict(state)
        monitor.step()
    assert rows(tmp_path, "rankme", 2)["layer"].to_list() == [0, 1, 2, 3]
    assert numbers(tmp_path, "rankme", 2) == numbers(tmp_path, "rankme", 0)


def test_a_language_model_has_them_too(tmp_path: Path) -> None:
    from tests.monitor.training import gpt2

    Monitor(gpt2(), probe=probe(20), run=tmp_path, embeddings="mean", **OFF).close()
    assert rows(tmp_path, "rankme")["layer"].to_list() == [0, 1, 2]
