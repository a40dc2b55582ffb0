"""Loss spikes, and what came before them: against slow references, and on runs whose order of events is known."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rankscope import Monitor
from rankscope.errors import FileError
from rankscope.runs import spikes as module
from rankscope.runs.signals import read_signals, split_loss
from rankscope.runs.spikes import Signal, deviations_from_mean, find_spikes, order_of_events, spike_score

STEPS = np.arange(600)


def noise(seed: int, size: int = 600) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size)


def loss_with_spike(at: int = 500, seed: int = 0) -> Signal:
    return Signal("loss", STEPS, 3 * np.exp(-STEPS / 200) + 1 + 0.02 * noise(seed) + 2.0 * (abs(STEPS - at - 2) <= 2))


@pytest.mark.slow
@given(st.lists(st.floats(-1e3, 1e3), min_size=30, max_size=80), st.integers(20, 40), st.floats(-1e6, 1e6))
@settings(max_examples=60, deadline=None)
def test_deviations_are_those_of_numpy(values: list[float], window: int, shift: float) -> None:
    shifted = np.array(values) + shift
    found = deviations_from_mean(shifted, window)
    for k in range(module.LEAST, len(values)):
        before = shifted[max(0, k - window) : k]
        sd = before.std()
        if sd > 1e-4 * (1 + np.abs(before - shifted[0]).max()):  # sums of squares resolve it
            assert found[k] == pytest.approx((shifted[k] - before.mean()) / sd, rel=1e-4, abs=1e-4)
    assert not found[: module.LEAST].any()


def test_the_spike_score_counts_values_far_from_all_before() -> None:
    values = np.where(np.arange(2000) % 500 == 499, 50.0, noise(1, 2000))
    slow = [
        abs(values[k] - values[max(0, k - 1000) : k].mean()) >= 7 * values[max(0, k - 1000) : k].std()
        for k in range(20, 2000)
    ]
    assert spike_score(values) == pytest.approx(100 * sum(slow) / 2000)
    assert spike_score(noise(2, 3000)) == 0.0
    assert spike_score([]) == 0.0


def test_spikes_near_to_each_other_are_one_and_a_loss_that_is_no_number_is_one() -> None:
    values = 1 + 0.01 * noise(3)
    values[[300, 305, 400]] = 2.0
    values[590:] = math.nan
    found = find_spikes(Signal("loss", 10 * STEPS, values))
    assert [(spike.first, spike.last) for spike in found] == [(3000, 3050), (4000, 4000), (5900, 5990)]
    assert found[0].peak == 2.0 and found[2].peak == math.inf


def test_a_falling_loss_has_no_spike() -> None:
    assert not find_spikes(Signal("loss", STEPS, 5 * np.exp(-STEPS / 50) + 0.01 * noise(4)))
    assert not find_spikes(Signal("loss", STEPS[:5], np.array([1.0, 9.0, 1.0, 9.0, 1.0])))


def test_signals_are_ordered_by_when_they_left_their_band() -> None:
    logit = Signal("largest_logit", STEPS, np.exp(2 + 0.1 * noise(5) + 3.0 * ((STEPS >= 460) & (STEPS < 520))), 3)
    gradient = Signal("grad_mlp", STEPS, np.exp(0.1 * noise(6) - 2.0 * ((STEPS >= 480) & (STEPS < 520))), 1)
    calm = [Signal(f"calm {k}", STEPS, noise(10 + k)) for k in range(20)]
    found = order_of_events(loss_with_spike(), [*calm, gradient, logit])
    assert [spike.first for spike in found.spikes] == [500]
    sure = found.events.filter(pl.col("adjusted") <= 0.05)
    assert sure.select("signal", "layer", "step", "lead", "direction").rows() == [
        ("largest_logit", 3, 460, 40, 1), ("grad_mlp", 1, 480, 20, -1),
    ]  # fmt: skip
    assert "largest_logit of layer 3 rose 40 steps earlier" in found.sentences[1]


def test_layers_that_leave_their_band_together_are_one_event() -> None:
    leaves = {(1, 0): 460, (1, 1): 460, (4, 0): 460, (2, 0): 480}
    signals = [
        Signal("largest_logit", STEPS, np.exp(0.1 * noise(20 + k) + 3.0 * ((step <= STEPS) & (STEPS < 520))), *place)
        for k, (place, step) in enumerate(leaves.items())
    ]
    signals.append(Signal("lr", STEPS, np.exp(0.1 * noise(30) - 3.0 * ((STEPS >= 490) & (STEPS < 520)))))
    found = order_of_events(loss_with_spike(), signals)
    assert [event[:4] for event in found.order(0)] == [
        ("largest_logit", "3 heads of layers 1, 4", 40, True), ("largest_logit", "layer 2, head 0", 20, True),
        ("lr", "", 10, False),
    ]  # fmt: skip
    assert max(event.chance for event in found.order(0)) == found.sure(0)["adjusted"].max()


def test_a_signal_that_leaves_its_band_all_the_time_is_not_believed() -> None:
    restless = noise(7) + 20.0 * ((STEPS // 20) % 2)  # outside for 20 of 40 steps, as it is before the spike
    found = order_of_events(loss_with_spike(at=519), [Signal("restless", STEPS, restless)])
    assert len(found.spikes) == 1
    assert not found.events.filter(pl.col("adjusted") <= 0.05).height


def test_what_moves_with_the_spike_or_after_does_not_lead() -> None:
    together = Signal("together", STEPS, noise(8) + 50.0 * (STEPS >= 500))
    found = order_of_events(loss_with_spike(), [together])
    assert found.events.height == 0 and "none of 1 signals" in found.sentences[1]


def test_few_of_many_calm_signals_are_believed_by_accident() -> None:
    wrong = 0
    for seed in range(20):
        signals = [Signal(f"{k}", STEPS, noise(1000 * seed + k)) for k in range(10)]
        found = order_of_events(loss_with_spike(seed=seed), signals)
        wrong += bool(found.events.filter(pl.col("adjusted") <= 0.05).height)
    assert wrong <= 4  # 5% of 20 runs is 1; more than 4 has a chance of 3 in a thousand


def test_signals_of_other_steps_and_of_infinite_values_are_taken() -> None:
    coarse = np.arange(0, 600, 10)
    values = 1 + 0.05 * noise(9, 60)
    values[46:50] = math.inf
    signal = Signal("grad_tokens", coarse, values, 2)
    found = order_of_events(loss_with_spike(), [signal])
    assert found.events.select("step", "lead", "direction").rows() == [(460, 40, 1)]


def test_adjusted_chances_are_those_of_benjamini_and_hochberg() -> None:
    chances = np.array([0.01, 0.04, 0.03, 0.5])
    slow = [min(1.0, *(p * 6 / sum(chances <= p) for p in chances if p >= own)) for own in chances]
    assert module._adjusted(chances, 6) == pytest.approx(slow)


def wide_table() -> pl.DataFrame:
    loss = loss_with_spike()
    logit = np.exp(2 + 0.1 * noise(5) + 3.0 * ((STEPS >= 460) & (STEPS < 520)))
    return pl.DataFrame({"Step": STEPS, "mine - train/loss": loss.values, "mine - train/loss__MIN": loss.values,
                         "mine - attention/layer_3/largest_logit": logit, "_timestamp": 1e9 + STEPS})  # fmt: skip


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_tables_of_other_tools_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"history.{kind}"
    getattr(wide_table(), {"jsonl": "write_ndjson"}.get(kind, f"write_{kind}"))(path)
    loss, others = split_loss(read_signals([path]))
    assert loss.name == "train/loss" and [signal.name for signal in others] == ["attention/layer_3/largest_logit"]
    assert order_of_events(loss, others).events["lead"].to_list() == [40]


def test_long_tables_and_single_numbers_of_tensorboard_are_read(tmp_path: Path) -> None:
    long = pl.DataFrame({"step": [1, 2, 1, 2], "metric": ["entropy", "entropy", "loss", "loss"],
                         "layer": [1, 1, None, None], "value": [0.5, 0.25, 3.0, 2.0]})  # fmt: skip
    long.write_csv(tmp_path / "long.csv")
    loss, (entropy,) = split_loss(read_signals([tmp_path / "long.csv"]))
    assert loss.values.tolist() == [3.0, 2.0] and (entropy.layer, entropy.values.tolist()) == (1, [0.5, 0.25])
    pl.DataFrame({"Wall time": [1.0, 2.0], "Step": [1, 2], "Value": [7.0, 8.0]}).write_csv(tmp_path / "grad_norm.csv")
    (signal,) = read_signals([tmp_path / "grad_norm.csv"])
    assert (signal.name, signal.values.tolist()) == ("grad_norm", [7.0, 8.0])


def test_files_of_tensorboard_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'rankscope[tensorboard]'")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(5):
            writer.add_scalar("loss", 2.0 * step, step)
            writer.add_scalar("h.2/entropy", 0.5, step)
    loss, (entropy,) = split_loss(read_signals([tmp_path]))
    assert loss.values.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0] and entropy.name == "h.2/entropy"


def test_a_run_of_a_monitor_is_read_with_the_largest_loss_between_measurements(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with Monitor(model, "relative_mu", every=5, probe=torch.randn(2, 5, 8), run=tmp_path, alarms=()) as monitor:
        for step in range(1, 21):
            monitor.step(loss=9.0 if step == 7 else math.nan if step == 18 else 1.0)
    loss, others = split_loss(read_signals([tmp_path]))
    assert loss.steps.tolist() == [5, 10, 15, 20] and loss.values[:3].tolist() == [1.0, 9.0, 1.0]
    assert math.isnan(loss.values[3])
    assert {(signal.name, signal.layer) for signal in others} >= {("relative_mu", 0), ("relative_mu", 2)}


def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path: Path) -> None:
    pl.DataFrame({"a": [1.0]}).write_csv(tmp_path / "none.csv")
    (tmp_path / "text.txt").write_text("hello")
    pl.DataFrame({"step": [1], "a": [1.0]}).write_csv(tmp_path / "lossless.csv")
    for path, sentence in ((tmp_path / "none.csv", "column of steps"), (tmp_path / "text.txt", "must be one of"),
                           (tmp_path / "gone.csv", "nothing is")):  # fmt: skip
        with pytest.raises(FileError, match=sentence):
            read_signals([path])
    with pytest.raises(FileError, match="give --loss"):
        split_loss(read_signals([tmp_path / "lossless.csv"]))
    with pytest.raises(FileError, match="one source"):
        read_signals([tmp_path / "lossless.csv"] * 2)
