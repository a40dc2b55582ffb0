"""Every kind of result: saved and read back, drawn, as JSON and back, as a card, as text, and in a report."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

import rankscope
from rankscope import Architecture, Transformer, certify, decompose, depth, forecast, fresh, measure, sweep
from rankscope.depths import cut
from rankscope.errors import FileError, PluginWarning
from rankscope.forecasts import Design, Recipe
from rankscope.profiles import measure_corpus
from rankscope.report import write_report
from rankscope.results import KINDS, Result, class_of, results_of
from rankscope.results.cards import TEXT_LINES
from rankscope.runs import Manifest, Store
from rankscope.runs import read as read_run
from rankscope.theory import collapse_depth
from rankscope.trainings import compare_runs, order_of_events, read_training
from rankscope.trainings.signals import run_signals, split_loss
from tests.made_trainings import measurement, opened, spiking, written
from tests.raising import raises
from tests.results.test_cards import Page

TEXTS = ["Call me Ishmael. Some years ago", "never mind how long precisely"]


@cache
def net() -> Transformer:
    return fresh("bert-tiny")


def trained(folder: Path) -> Any:
    """A calm run with one spike, after signals that moved."""
    writer = opened(folder / "trained")
    for step in range(0, 4000, 10):
        writer.write(spiking(step, 3500))
    writer.close()
    return read_training(folder / "trained")


def _sweep(folder: Path) -> Result:
    spec = {"metrics": "relative_residual", "all": {"model": "bert-tiny", "samples": 1, "tokens": 4},
            "grid": {"depth": [1, 2], "seed": [0, 1]}}  # fmt: skip
    return sweep(spec, folder / "sweep", workers=1)


def _comparison(folder: Path) -> Result:
    for name in ("one", "other"):
        written(folder / name)
    return compare_runs([read_training(folder / name) for name in ("one", "other")], ["one", "other"])


def _spikes(folder: Path) -> Result:
    loss, signals = split_loss(run_signals(trained(folder)))
    return order_of_events(loss, signals)


MADE: dict[str, Callable[[Path], Any]] = {
    "profile": lambda _: measure(net(), TEXTS),
    "summary": lambda _: measure_corpus({"whole": net()}, TEXTS),
    "certificates": lambda _: certify(net().variant("san"), TEXTS),
    "collapse": lambda _: collapse_depth(net().variant("san"), TEXTS),
    "decomposition": lambda _: decompose(net(), TEXTS),
    "by_length": lambda _: decompose(net(), TEXTS).by_length(),
    "depth": lambda _: depth(net(), TEXTS),
    "cut": lambda _: cut(net(), TEXTS, keep=0.5),
    "forecast": lambda _: forecast(
        Architecture(layers=2, width=16, heads=2), design=Design(tokens=16), recipe=Recipe(steps=100)
    ),
    "sweep": _sweep,
    "training": lambda folder: read_training(written(folder)),
    "comparison": _comparison,
    "spikes": _spikes,
}
UNDRAWN = ("cut", "spikes")  # tables and sentences alone


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The result of a kind, made once."""
    return cache(lambda kind: MADE[kind](tmp_path_factory.mktemp(kind)))


def test_every_kind_is_here() -> None:
    assert set(MADE) == set(KINDS)
    for kind in KINDS:
        assert class_of(kind).kind == kind
    with raises(FileError, "kind"):
        class_of("profil")


@pytest.mark.parametrize("kind", MADE)
def test_it_is_saved_and_read_back_as_its_class(kind: str, made: Callable[[str], Result], tmp_path: Path) -> None:
    result = made(kind)
    assert result.kind == kind and result.tables.keys() <= type(result).schemas.keys()
    again = rankscope.read(result.save(tmp_path / "run"))
    assert type(again) is type(result) is class_of(kind)
    assert again.equals(result) and result.equals(again)
    assert again.manifest == result.manifest and tuple(again.notes) == tuple(result.notes)
    for name, table in result.tables.items():
        assert again.tables[name].equals(table) and again.tables[name].schema == table.schema
    assert type(result).read(tmp_path / "run").equals(result)
    assert repr(again).partition(" in ")[0] == repr(result).partition(" in ")[0]
    (tmp_path / "none").mkdir()
    with pytest.raises(FileError):
        type(result).read(tmp_path / "none")


@pytest.mark.parametrize("kind", MADE)
def test_it_goes_into_strict_json_and_back(kind: str, made: Callable[[str], Result]) -> None:
    result = made(kind)
    text = json.dumps(result.to_dict(), allow_nan=False)
    again = type(result).from_dict(json.loads(text))
    assert again.equals(result)
    for wrong in ({}, {"manifest": {}, "tables": {"a": 1}, "details": {}}):
        with raises(FileError, kind):
            type(result).from_dict(wrong)
    name, whole = next(iter(result.tables)), result.to_dict()
    emptied = {**whole["tables"], name: {"types": {}, "columns": {}}}
    with raises(FileError, kind):
        type(result).from_dict({**whole, "kind": "another"})
    with raises(FileError, name):
        type(result).from_dict({**whole, "tables": emptied})


@pytest.mark.parametrize("kind", MADE)
def test_it_is_drawn(kind: str, made: Callable[[str], Result]) -> None:
    result = made(kind)
    if kind in UNDRAWN:
        with raises(FileError, kind):
            result.plot()
        return
    figure = result.plot()
    assert isinstance(figure, Figure) and figure.axes
    pyplot.close("all")


@pytest.mark.parametrize("kind", MADE)
def test_it_shows_itself(kind: str, made: Callable[[str], Result]) -> None:
    """A few lines in a terminal, all of it when it is printed, and a card in a notebook."""
    result = made(kind)
    shown = repr(result).splitlines()
    assert 1 <= len(shown) <= TEXT_LINES and all(len(line) <= 130 for line in shown)
    assert shown[0] == result.title and "DataFrame" not in repr(result) and "tensor(" not in repr(result)
    printed = str(result)
    assert printed.startswith(result.title)
    for section in result.sections():
        assert section.heading in printed
    page = Page(result._repr_html_())
    assert result.title in page.text and not page.tags & {"script"}
    assert bool(page.images) == (kind not in UNDRAWN)


@pytest.mark.parametrize("kind", MADE)
def test_it_is_a_chapter_of_a_report(kind: str, made: Callable[[str], Result], tmp_path: Path) -> None:
    result = made(kind)
    page = write_report([result.save(tmp_path / "run")], tmp_path / "report.html").read_text(encoding="utf-8")
    for section in result.sections():
        if section.holds_something:
            assert f'id="run1-{section.key}"' in page, section.key


def test_a_training_is_read_while_it_is_written(tmp_path: Path) -> None:
    """The kind is in the manifest from the first measurement on."""
    writer = opened(tmp_path)
    writer.write(measurement(0))
    found = rankscope.read(tmp_path)
    assert isinstance(found, rankscope.TrainingRun) and found.steps == [0]
    writer.close()


def test_folders_of_several_results_and_of_no_kind_are_runs(tmp_path: Path) -> None:
    from rankscope.results import results_of
    from rankscope.runs import Run, Store

    profile, proved = measure(net(), TEXTS), certify(net(), TEXTS, theorems="dobrushin")
    profile.save(tmp_path)
    proved.save(tmp_path)
    run = rankscope.read(tmp_path)
    assert isinstance(run, Run) and run.tables["profile"].equals(profile.table)
    found = results_of(run)
    assert found["profile"].equals(profile) and found["certificates"].equals(proved)
    with Store(tmp_path / "old") as store:
        store.write("measure", profile.manifest, {"profile": profile})
    assert isinstance(rankscope.read(tmp_path / "old"), Run)
    assert type(profile).read(tmp_path / "old").equals(profile)


@pytest.mark.parametrize("kind", ["forecast", "by_length", "cut", "comparison"])
def test_what_stands_beside_the_tables_may_be_damaged(kind: str, made: Callable[[str], Result]) -> None:
    whole = made(kind).to_dict()
    damaged: list[Any] = [{}, [], dict.fromkeys(whole["details"])]
    for details in damaged:
        with raises(FileError, kind):
            type(made(kind)).from_dict({**whole, "details": details})


def test_numbers_of_a_manifest_that_json_does_not_have_come_back() -> None:
    profile = measure(net(), TEXTS)
    for closure in (float("inf"), -float("inf")):
        noted = replace(profile, manifest=profile.manifest.adding(closure=closure))
        text = json.dumps(noted.to_dict(), allow_nan=False)
        assert type(noted).from_dict(json.loads(text)).manifest.closure == closure


def test_sentences_have_the_article_of_their_class(tmp_path: Path) -> None:
    file = measure(net(), TEXTS).save(tmp_path / "profile.parquet")
    with pytest.raises(FileError, match=r"must hold certificates; there is nothing of the kind: save it there"):
        rankscope.Certificates.read(tmp_path)
    with pytest.raises(FileError, match=r"must be certificates written by Certificates.save; it is another kind"):
        rankscope.Certificates.read(file)
    with pytest.raises(FileError, match=r"must be a run folder, with all tables of a decomposition; it is one file"):
        rankscope.Decomposition.read(file)
    with pytest.raises(FileError, match=r"it is a file: its class reads it, as in Profile.read\(file\)"):
        rankscope.read(file)


def test_what_is_not_whole_is_named(tmp_path: Path) -> None:
    card = depth(net(), TEXTS, heads=False)
    card.save(tmp_path)
    (tmp_path / "depth_norms.parquet").unlink()
    with raises(FileError):
        rankscope.read(tmp_path)


def test_a_training_is_not_saved_over_another_that_grew(tmp_path: Path) -> None:
    first, second = written(tmp_path / "first"), written(tmp_path / "second", range(0, 30, 10))
    with raises(FileError, subject="training"):
        read_training(second).save(first)
    assert len(read_training(first).steps) == 6
    copied = read_training(second).save(tmp_path / "third")
    assert rankscope.read(copied).equals(read_training(second))


def test_optional_tables_and_notes_come_and_go(tmp_path: Path) -> None:
    training = read_training(written(tmp_path / "run"))
    content = training.to_dict()
    content["tables"] = {"training": content["tables"]["training"]}
    assert type(training).from_dict(content).table.equals(training.table)
    noted = replace(_spikes(tmp_path / "spiking"), notes=("of one run",))  # type: ignore[type-var]
    assert rankscope.read(noted.save(tmp_path / "spikes")).notes == ("of one run",)


def test_a_kind_of_a_plugin_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose module is gone, and one that cannot say what it shows."""
    profile = measure(fresh("bert-tiny"), ["Call me Ishmael."])
    with Store(tmp_path / "run") as store:
        profile.write(store)
        for kind in ("gone", "mute"):
            store.write(kind, profile.manifest, {kind: profile.table}, kind=kind)
    added = {"gone": "no_such_package.parts:Gone", "mute": f"{__name__}:Mute"}
    monkeypatch.setitem(KINDS.__dict__, "states", [])
    monkeypatch.setattr(KINDS, "_added", added, raising=False)
    run = read_run(tmp_path / "run")
    with pytest.warns(PluginWarning, match="called gone, does not load"):
        assert set(results_of(run)) == {"profile", "mute"}
    with (
        pytest.warns(PluginWarning, match="called gone, does not load"),
        pytest.warns(PluginWarning, match="called mute, of a plugin, are left out: KeyError"),
    ):
        page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "How uniform the tokens become" in page


@dataclass(frozen=True)
class Mute(Result):
    """A result of a stranger that cannot say what it shows."""

    kind = "mute"
    schemas: ClassVar = {"mute": {}}
    manifest: Manifest = field(default_factory=Manifest)
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> dict[str, Any]:
        return {}

    @property
    def title(self) -> str:
        return "Mute"

    @classmethod
    def of_run(cls, run: Any, entry: str) -> "Mute":
        return cls()

    @classmethod
    def made_of(cls, tables: Any, manifest: Manifest, details: Any) -> "Mute":
        return cls(manifest)

    def sections(self) -> list[Any]:
        raise KeyError("nothing to say")
