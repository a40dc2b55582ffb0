"""Run directories are read whatever their manifests hold; what is none is named. Every file of a run, damaged: one
sentence that names it, or a page; never another exception."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from rankscope.errors import FileError, RankscopeError
from rankscope.files import write_text
from rankscope.nets import Transformer
from rankscope.paths import decompose
from rankscope.profiles import Profile, Summary
from rankscope.report import read_run, write_report
from rankscope.report.chapter import chapter
from rankscope.report.reported_run import TABLES as COLUMNS
from rankscope.report.reported_run import checked_profile
from rankscope.runs import Manifest, Store, manifest_of, read
from rankscope.runs.tables import METADATA_KEY
from rankscope.theory import Certificates, certify
from tests.raising import raises
from tests.report.runs import NET, X, profile_of, study, summary_of


def test_a_manifest_of_another_make_is_no_stumbling_block(written: tuple[Profile, Path], tmp_path: Path) -> None:
    shutil.copytree(written[1].parent, tmp_path, dirs_exist_ok=True)
    for odd in ({"networks": "none", "origin": "here"}, {"networks": [{"architecture": {"layers": 1}}]}):
        (tmp_path / "manifest.json").write_text(json.dumps(odd))
        assert "Tokens stay apart" in write_report([tmp_path], tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_chapter_is_of_one_network(tmp_path: Path) -> None:
    """What another network has left in the folder is not shown, and a note says so."""
    other = Transformer.random(NET.arch, seed=1, init="xavier")
    profile, paths = profile_of(("san", "transformer")), decompose(other, X)
    for net, model, left_out in ((NET, "a", False), (other, "a", True), (NET, "b", True)):
        found = certify(net.variant("san"), X, variant="san")
        certificates = Certificates(found.table, found.manifest.adding(model=model))
        with Store(tmp_path) as store:
            store.write("measure", profile.manifest.adding(model="a"), {"profile": with_model(profile, "a")})
            store.write("bounds", certificates.manifest, {"certificates": certificates})
        run = read_run(tmp_path)
        assert list(run.certificates) == ([] if left_out else ["san"])
        assert [note for note in run.notes if "certificates.parquet" in note] == run.notes and bool(
            run.notes
        ) == left_out
        assert ("What is proved" in write_report([tmp_path], tmp_path / "report.html").read_text()) != left_out
    with Store(tmp_path) as store:
        described = {"fingerprint": other.fingerprint, "architecture": other.arch.to_dict()}
        manifest = manifest_of(described, "cpu", "transformer", "float64", [], {})
        store.write("paths", manifest, {"lengths": paths.by_length().table})
    assert "lengths" not in read_run(tmp_path).tables


def with_model(profile: Profile, model: str) -> Profile:
    return Profile(profile.table, profile.manifest.adding(model=model))


def test_a_folder_that_is_no_run_is_a_sentence(written: tuple[Profile, Path], tmp_path: Path) -> None:
    """The subject of the error is the folder, or the file that is not as it must be."""

    def refused(path: Path, folder: Path = tmp_path) -> None:
        with raises(FileError, subject=str(path)):
            read_run(folder)

    refused(tmp_path)
    refused(tmp_path / "nowhere", tmp_path / "nowhere")
    with raises(FileError, subject="folders"):
        write_report([], tmp_path / "report.html")
    with raises(FileError, subject=str(tmp_path)):
        write_text(tmp_path, "page")
    heads, profile = (tmp_path / name for name in ("heads.parquet", "profile.parquet"))
    heads.write_text("no table")
    refused(heads)
    written[0].table.write_parquet(heads)
    refused(heads)
    pl.DataFrame({name: ["word"] for name in COLUMNS["heads"]}).write_parquet(heads)
    refused(heads)
    heads.unlink()
    Profile(written[0].table.head(0), written[0].manifest).save(profile)
    refused(profile)
    written[0].table.write_parquet(profile, metadata={"rankscope": "[1"})
    refused(profile)


TABLES = ["profile", "cloud", "spectrum", "lengths", "heads", "certificates_san", "summary"]
ODD = (None, -1.5, "word", [1], {"a": None})
SIXTHS = pytest.mark.parametrize("sixth", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 6))])
"""There are many ways: every sixth of them in each run, the others in `make slow`."""


@pytest.fixture(scope="module")
def whole(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every file that there is."""
    folder = tmp_path_factory.mktemp("whole")
    profile, stored = Profile.read(everything / "profile.parquet"), read(everything)
    profile = Profile(few(profile.table), profile.manifest)
    tables: dict[str, Any] = {name: stored.table(name) for name in COLUMNS} | {"profile": profile}
    tables["certificates_san"] = Certificates.read(everything / "certificates_san.parquet")
    summary = summary_of(Profile(few(profile_of(("transformer", "san")).table), profile.manifest))
    with Store(folder) as store:
        store.write("measure", profile.manifest, tables)
        store.write("corpus", summary.manifest, {"summary": summary})
    Image.new("RGB", (40, 30)).save(folder / "drawn.png")
    study(folder / "study", (folder / "drawn.png").read_bytes())
    return folder


def few(rows: pl.DataFrame) -> pl.DataFrame:
    """One metric of two variants: there are many ways to damage them."""
    return rows.filter(pl.col("metric") == "relative_residual", pl.col("variant").is_in(["transformer", "san"]))


def alone(whole: Path, folder: Path, name: str) -> Path:
    """A run directory with this one file; its path."""
    shutil.copy(whole / name, folder / name)
    return folder / name


def said(path: Path) -> str:
    """All that a page would hold of the file's folder, or a sentence that names the file."""
    try:
        found = chapter(read_run(path.parent), 1, "a run")
        words = [
            *found.notes,
            *found.facts,
            found.run.manifest.command or "",
            *(check["said"] for check in found.checks),
        ]
    except RankscopeError as error:
        assert path.name in str(error), error
        assert "\n" not in str(error)
        return str(error)
    return f"page {found.finding} {words} {[each.heading for each in found.sections]}"


def typed(text: str) -> bool:
    """Whether every field of the manifest is of its type."""
    try:
        return bool(Manifest.from_dict(json.loads(text)))
    except ValueError:
        return False


def rewritten(path: Path, change: Callable[[pl.DataFrame], pl.DataFrame]) -> str:
    """The same with a changed table, its manifest kept."""
    kept = path.read_bytes()
    metadata = {key: text for key, text in pl.read_parquet_metadata(path).items() if key == METADATA_KEY}
    change(pl.read_parquet(path)).write_parquet(path, metadata=metadata)
    try:
        return said(path)
    finally:
        path.write_bytes(kept)


@pytest.mark.parametrize("name", TABLES)
def test_a_file_that_is_no_table(whole: Path, tmp_path: Path, name: str) -> None:
    path = alone(whole, tmp_path, f"{name}.parquet")
    good = path.read_bytes()
    drawn = random.Random(0)
    broken = [b"", b"PAR1", b"garbage" * 100, good[: len(good) // 2], good[:-9], good[100:]]
    for _ in range(4):
        bits = bytearray(good)
        for place in (drawn.randrange(len(bits)) for _ in range(20)):
            bits[place] ^= 1 << drawn.randrange(8)
        broken.append(bytes(bits))
    for number, content in enumerate(broken):
        path.write_bytes(content)
        assert ("must be a Parquet file" in said(path)) or number > 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TABLES)
def test_columns_that_are_missing_or_of_another_kind(whole: Path, tmp_path: Path, name: str) -> None:
    path = alone(whole, tmp_path, f"{name}.parquet")
    for column in pl.read_parquet(path).columns:
        sentence = rewritten(path, lambda table, column=column: table.drop(column))
        needed = column in COLUMNS.get(name, (column,)) and column != "digits"  # earlier versions had none
        assert (f"{path.name} must " in sentence) == needed != sentence.startswith("page")
        rewritten(path, lambda table, column=column: table.with_columns(pl.lit(None).alias(column)))
        rewritten(path, lambda table, column=column: table.with_columns(pl.lit([1]).alias(column)))
        rewritten(
            path,
            lambda table, column=column: table.with_columns(
                pl.lit(7.5 if table[column].dtype == pl.String else "word").alias(column)
            ),
        )


@pytest.mark.sampled(2)
@SIXTHS
@pytest.mark.parametrize("name", [*TABLES[:-1], pytest.param("summary", marks=pytest.mark.slow)])
def test_values_that_are_missing_or_out_of_range(whole: Path, tmp_path: Path, name: str, sixth: int) -> None:
    path = alone(whole, tmp_path, f"{name}.parquet")
    schema = pl.read_parquet_schema(path)
    for number, (column, kind) in enumerate(schema.items()):
        values: list[tuple[object, bool]] = [(None, True), (None, False)]
        if kind.is_float():
            values += [(float("nan"), False), (float("inf"), True), (-1e300, True)][: 2 if name == "summary" else 3]
        elif kind.is_integer():
            values += [(-1, True), (2**62, True), (1, False)]
        elif kind == pl.String:
            values += [("", True), ("<b>", False), ("9" * 5000, True)]
        for value, some in values[(sixth - number) % 6 :: 6]:
            place = pl.int_range(pl.len()) % 3 == 1 if some else pl.lit(True)
            given = pl.when(place).then(pl.lit(value, dtype=kind)).otherwise(pl.col(column)).alias(column)
            found = rewritten(path, lambda table, given=given: table.with_columns(given))
            if value is None:
                assert found.startswith("page") or f"must have no gap in the column {column};" in found
            elif kind.is_float():  # a gap in the figures
                assert found.startswith("page") and not re.search(r"\b(nan|inf|None)\b", found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TABLES)
def test_rows_that_are_missing_or_come_twice(whole: Path, tmp_path: Path, name: str) -> None:
    path = alone(whole, tmp_path, f"{name}.parquet")
    good = said(path)
    shown = name in ("cloud", "spectrum")  # pictures of other tables: with nothing in them they are left out
    assert rewritten(path, lambda table: table.head(0)).endswith("[]" if shown else ": run it again")
    rewritten(path, lambda table: table.head(1))
    rewritten(path, lambda table: table.tail(1))
    rewritten(path, lambda table: table.gather_every(3, 1))
    twice = rewritten(path, lambda table: pl.concat([table, table]))
    assert twice == good or (name == "certificates_san" and "must have a row for each layer" in twice)
    assert rewritten(path, lambda table: table.sample(fraction=1.0, shuffle=True, seed=0)) == good


@pytest.mark.sampled(1)
@SIXTHS
@pytest.mark.parametrize("name", ["profile", "summary", "certificates_san"])
def test_manifests_of_another_make(whole: Path, tmp_path: Path, name: str, sixth: int) -> None:
    path = alone(whole, tmp_path, f"{name}.parquet")
    table, good = pl.read_parquet(path), json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
    texts = ["", "{", "[1]", "[" * 2000 + "]" * 2000, '{"a":' * 600 + "1" + "}" * 600]
    texts += [json.dumps({**good, key: odd}) for key in good for odd in ODD]
    texts += [json.dumps({key: each for key, each in good.items() if key != left}) for left in good]
    first = good.get("networks", [{}])[0]
    for key in first:
        texts += [json.dumps({**good, "networks": [{**first, key: odd}]}) for odd in ODD]
    for number, text in list(enumerate(texts))[sixth::6]:
        table.write_parquet(path, metadata={METADATA_KEY: text})
        assert ("must hold a manifest" in said(path)) == (number < 4 or not typed(text))


@pytest.mark.slow
@SIXTHS
def test_json_of_another_make(whole: Path, tmp_path: Path, sixth: int) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for path in (folder / "manifest.json", folder / "study" / "outcome.json"):
        if path.name == "manifest.json":
            for large in ("cloud", "spectrum", "lengths", "heads", "summary"):
                (folder / f"{large}.parquet").unlink()
        good = json.loads(path.read_text())
        contents = [b"", b"\xff\xfe", b"[]", b"{", b"null", b"[" * 10**5, b'{"a":' * 700 + b"1" + b"}" * 700]
        contents += [json.dumps({**good, key: odd}).encode() for key in good for odd in ODD]
        for entry, each in good.get("entries", {}).items():
            changed = [{**each, key: odd} for key in each for odd in ODD]
            changed += [{**each, "files": {"cloud.parquet": odd, "../profile.parquet": {}}} for odd in ODD]
            contents += [json.dumps({"entries": {entry: odd}}).encode() for odd in changed]
        for number, content in list(enumerate(contents))[sixth::6]:
            path.write_bytes(content)
            try:
                found = chapter(read_run(folder), 1, "a run")
                assert found.sections and found.finding and found.facts
            except RankscopeError as error:
                assert path.name in str(error) and "\n" not in str(error)
            else:
                assert number > 5
        path.write_text(json.dumps(good))


def test_a_file_that_is_not_what_was_written_is_named(whole: Path, tmp_path: Path) -> None:
    """Whatever was changed in it: `manifest.json` has its checksum."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in TABLES:
        path = folder / f"{name}.parquet"
        good = path.read_bytes()
        path.write_bytes(good + b"\0")
        for reading in (lambda: read_run(folder), lambda name=name: read(folder).table(name)):
            with raises(FileError, subject=path.name):
                reading()
        path.write_bytes(good)
    assert read(folder).table("cloud").equals(pl.read_parquet(folder / "cloud.parquet"))


def test_a_corpus_is_shown_as_it_was_measured(tmp_path: Path) -> None:
    """Of the share of excerpts below the floor nothing is lost."""
    summary = summary_of(profile_of(("transformer",)))
    shares = Summary(summary.table.with_columns(below_floor=pl.lit(0.25)), summary.manifest)
    shares.save(tmp_path / "summary.parquet")
    measured = read_run(tmp_path).measured
    assert measured is not None and set(measured.table["below_floor"]) == {0.25}


def test_gaps_in_numbers_are_gaps_in_figures(whole: Path, tmp_path: Path) -> None:
    path = alone(whole, tmp_path, "lengths.parquet")
    page = rewritten(path, lambda table: table.with_columns(pl.lit(None, dtype=pl.Float64).alias("share")))
    assert "Which paths carry the output" in page


def test_the_later_of_two_runs_in_a_folder_is_shown(whole: Path, tmp_path: Path) -> None:
    """And no picture of the other."""
    later = Summary.read(whole / "summary.parquet")
    later = Summary(later.table, later.manifest.adding(created="2999-01-01T00:00:00+00:00"))
    for name in ("profile.parquet", "cloud.parquet"):
        alone(whole, tmp_path, name)
    later.save(tmp_path / "summary.parquet")
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "shown is the later, summary.parquet" in page and "median of 2 excerpts" in page
    assert "cloud.parquet is of another run" in page and 'id="run1-cloud"' not in page


def test_a_few_rows_at_far_places_are_damage() -> None:
    """10^6 layers of two samples are more places than are within reason for 24 rows: a curve would fill the memory."""
    profile = profile_of(("transformer", "san"))
    rows, path = few(profile.table), Path("profile.parquet")
    assert sorted(rows["sample"].unique()) == [0, 1] and len(rows) == 24
    for layer, fits in ((10**5, True), (10**6, False)):
        far = pl.when(pl.int_range(pl.len()) == 0).then(layer).otherwise("layer").alias("layer")
        changed = Profile(rows.with_columns(far), profile.manifest)
        if fits:
            assert checked_profile(path, changed).table["layer"].max() == layer
        else:
            with raises(FileError, subject=str(path)):
                checked_profile(path, changed)
