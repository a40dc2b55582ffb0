"""Loss spikes, and what came before them: against slow references, and on runs whose order of events is known."""

import json
import math
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rankscope import Monitor
from rankscope.errors import FileError
from rankscope.monitor.measurement import Measurement
from rankscope.trainings import Signal, find_spikes, order_of_events, read_signals, read_training
from rankscope.trainings import spikes as module
from rankscope.trainings.signals import run_events, split_loss
from rankscope.trainings.spikes import deviations_from_mean, spike_score
from tests.made_trainings import opened, spiking

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


@given(
    st.lists(st.sampled_from([1.0, 1.1, 1.3, 0.7, 1e7, -1e12, 1e140, 1e-9]), min_size=30, max_size=120),
    st.integers(20, 30),
    st.sampled_from([math.inf, 7.0]),
)
@settings(max_examples=60, deadline=None)
def test_a_large_value_leaves_no_trace_in_the_sums(values: list[float], window: int, outlier: float) -> None:
    found, kept = deviations_from_mean(values, window, outlier), list[float]()
    for value, deviation in zip(values, found.tolist(), strict=True):
        before = np.array(kept[-window:]) - (kept[-1] if kept else 0.0)
        if len(before) >= module.LEAST and before.std() > 0:
            exact = (value - kept[-1] - before.mean()) / before.std()
            assert deviation == pytest.approx(exact, rel=1e-6, abs=1e-6)
        if abs(deviation) < outlier:
            kept.append(value)


def test_a_first_loss_of_ten_million_hides_no_later_spike_and_makes_none() -> None:
    steps = np.arange(2000)
    values = 2 + 0.1 * noise(11, 2000) + 3.0 * (steps == 1500)
    values[0] = 1e7
    assert [spike.first for spike in find_spikes(Signal("loss", steps, values))] == [1500]
    values[1200:1203] = math.inf, -math.inf, 1e300
    infinite, real = find_spikes(Signal("loss", steps, values))
    assert (infinite.first, infinite.last, real.first) == (1200, 1202, 1500)
    assert infinite.peak == math.inf and infinite.description == "is no number"


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


def test_the_chance_of_a_lead_is_the_share_of_quiet_steps_with_one_as_long() -> None:
    """Counted by hand. The signal leaves its band 10 values before the spike. Elsewhere it does so for 5, 10, 10 and 20
    values: at the end of each 10, and in the 20 from the tenth value on, it has been outside for 10 or more. Quiet are
    the steps from 21 on, until 50 before the spike, and from 151 after it."""
    steps = np.arange(800)
    wave = np.resize([-3.0, -1.0, 1.0, 3.0], len(steps))
    falls = wave.copy()
    for first, size in ((100, 5), (200, 10), (300, 10), (400, 20), (490, 10)):
        falls[first : first + size] = -99.0
    loss = Signal("loss", 5 * steps, np.where(steps == 500, 2.0, 1 + 0.01 * noise(3, 800)))
    found = order_of_events(loss, [Signal("falls", 5 * steps, falls), Signal("calm", 5 * steps, wave)])
    assert [(spike.first, spike.last) for spike in found.spikes] == [(2500, 2500)]
    (event,) = found.events.rows(named=True)
    assert (event["signal"], event["step"], event["lead"], event["direction"]) == ("falls", 2450, 50, -1)
    longer, quiet = 1 + 1 + 11, (450 - 21) + (800 - 651)
    assert event["chance"] == (longer + 1) / (quiet + 1)
    assert event["adjusted"] == pytest.approx(2 * event["chance"])  # two signals


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


def test_folders_of_tensorboard_are_kept_apart_and_the_later_of_two_runs_counts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'rankscope[tensorboard]'")
    from torch.utils.tensorboard import SummaryWriter

    for folder, scale in (("train", 1.0), ("validation", 10.0)):
        for first, factor in ((0, scale), (3, 2 * scale)):  # the second run goes on from step 3
            with SummaryWriter(str(tmp_path / folder), filename_suffix=f".{first}", purge_step=first or None) as writer:
                for step in range(first, 6 - first // 3):
                    writer.add_scalar("loss", factor, step)
    loss, (validation,) = split_loss(read_signals([tmp_path]))
    assert (loss.name, validation.name) == ("train/loss", "validation/loss")
    assert loss.values.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0] and validation.values[0] == 10.0
    (alone,) = read_signals([tmp_path / "train"])
    assert alone.name == "loss"
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("train/loss", 5.0, 0)
    with pytest.raises(FileError, match="train/loss is in .* or there twice"):
        read_signals([tmp_path])


WORDS = ["0.5", "Infinity", "-inf", "nan", "NaN", "None", "", "1e400", "0.25"]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_words_for_numbers_are_numbers_and_the_later_of_repeated_steps_counts(tmp_path: Path, kind: str) -> None:
    steps = [1, 2, 3, 4, 5, 6, 7, 8, 1]
    table, path = pl.DataFrame({"step": steps, "loss": WORDS, "name": ["a"] * 9}), tmp_path / f"log.{kind}"
    if kind == "jsonl":  # as Python's own json writes them, and killed in the middle of a line
        values = [math.inf if word == "Infinity" else math.nan if word == "NaN" else word or None for word in WORDS]
        lines = [json.dumps({"step": step, "loss": value}) for step, value in zip(steps, values, strict=True)]
        path.write_text("\n".join([*lines, '{"step": 9, "lo']))
    elif kind == "parquet":
        table.with_columns(pl.col("step").cast(pl.Float64).replace(8.0, math.nan)).write_parquet(path)
    else:
        table.write_csv(path, separator="\t" if kind == "tsv" else ",")
    (loss,) = read_signals([path])
    expected = {1: 0.25, 2: math.inf, 3: -math.inf, 4: math.nan, 5: math.nan, 8: math.inf}
    if kind == "parquet":
        del expected[8]  # pandas has NaN for a step that is not there
    assert loss.steps.tolist() == [*expected]
    np.testing.assert_array_equal(loss.values, [*expected.values()])


HOSTILE = {
    "fractions.csv": "step,loss\n0.1,1\n0.2,1\n", "words.csv": "step,loss\none,1\ntwo,1\n",
    "inf.csv": "step,loss\ninf,1\n",
    "huge.csv": "step,loss\n1e300,1\n", "layers.csv": "step,metric,layer,value\n1,loss,first,2\n",
    "values.csv": "step,metric,value\n1,loss,a\n", "mixed.csv": "step,loss\n1,0.5\n2,oops\n3,0.5\n",
    "ragged.csv": "step,loss\n1,2,3\n", "empty.csv": "",
    "list.jsonl": "[]\n{}\n", "deep.jsonl": "[" * 10**5 + "\n{}\n", "half.jsonl": '{"step": 1\n{"step": 2}\n',
    "none.parquet": "PAR1", "lists.jsonl": '{"step": [1], "loss": {"a": 1}}\n', "latin.jsonl": b'{"\xe9": 1}\n',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_table_that_holds_something_else_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    content, path = HOSTILE[name], tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    with pytest.raises(FileError, match=f"{name} must"):
        read_signals([path])


CELLS = st.text('01.-einfa,\n"[{}:', max_size=8) | st.none() | st.floats() | st.integers()


@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=6), st.sampled_from(["csv", "jsonl", "parquet"]))
@settings(max_examples=100, deadline=None)
def test_no_table_brings_a_raw_error(rows: list[list[Any]], kind: str) -> None:
    table = pl.DataFrame(
        {name: [row[k] for row in rows] for k, name in enumerate(("step", "loss", "layer"))}, strict=False
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"log.{kind}"
        getattr(table, {"jsonl": "write_ndjson"}.get(kind, f"write_{kind}"))(path)
        with suppress(FileError):
            order_of_events(*split_loss(read_signals([path])))


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


def test_events_are_found_of_a_run_with_a_loss_alone(tmp_path: Path) -> None:
    for name in ("with", "without"):
        run_writer = opened(tmp_path / name)
        for step in range(0, 2400, 10):
            found = spiking(step, 2300)
            kept = found.rows.filter(pl.col("metric") != "loss") if name == "without" else found.rows
            run_writer.write(Measurement(step, kept))
        run_writer.close()
    assert run_events(read_training(tmp_path / "without")) is None
    report = run_events(read_training(tmp_path / "with"))
    assert report is not None and [spike.first for spike in report.spikes] == [2300] and report.sure(0).height


def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path: Path) -> None:
    pl.DataFrame({"a": [1.0]}).write_csv(tmp_path / "none.csv")
    (tmp_path / "text.txt").write_text("hello")
    pl.DataFrame({"step": [1], "a": [1.0]}).write_csv(tmp_path / "lossless.csv")
    for path, sentence in ((tmp_path / "none.csv", "column of steps"), (tmp_path / "text.txt", "must be one of"),
                           (tmp_path / "gone.csv", "nothing is")):  # fmt: skip
        with pytest.raises(FileError, match=sentence):
            read_signals([path])
    for name, came in (
        (None, "numbers, a; got none of the usual names: give --loss"),
        ("b", "numbers, a; got b: give"),
    ):
        with pytest.raises(FileError, match=came):
            split_loss(read_signals([tmp_path / "lossless.csv"]), name)
    with pytest.raises(FileError, match="numbers, none; got"):
        split_loss([])
    with pytest.raises(FileError, match="one source"):
        read_signals([tmp_path / "lossless.csv"] * 2)
