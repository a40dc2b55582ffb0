"""Models that several processes share or divide among them: the numbers of one process, and the same training.

Every way of `parallel_worker.py` is run by one process, and by two or four; the worker itself asserts that the
training with a monitor is the one without, to the last bit."""

from pathlib import Path

import polars as pl
import pytest

import rankscope
from tests.live.ranks import beside, together
from tests.monitor.loops import parallel_worker

KEYS = ["step", "layer", "head", "metric"]
COLUMNS = ["value", "spread", "least", "most"]
QUICK = ["watch sp", "watch tp around", "pipeline"]
TWO = [
    "tp",
    "sp",
    "sp tokens",
    "tp inline",
    "sp inline",
    "sp dtensor",
    "sp dtensor tokens",
    "tp written",
    "hf",
    "hf inline",
]
TWO += [
    "tp gathered",
    "fsdp finer tokens",
    "accelerate",
    "accelerate inline",
    "fsdp",
    "fsdp inline",
    "fsdp compiled",
    "fsdp tokens compiled",
    "pipeline tokens",
    "pipeline layers",
]
NANOGPT = ["nanogpt compiled", "nanogpt tokens compiled"]
FOUR = ["fsdp sp", "fsdp sp tokens", "fsdp tp compiled", "pipeline sp tokens", "pipeline sp", "pipeline fsdp"]
WATCHED = ["watch tp", "watch tp written", "watch sp dtensor", "watch sp alike"]
REFUSED = {
    "tp different": "ranks", "tp fails": "ranks", "watch tp keep": "keep",
    "watch context": "model", "watch tp gathered": "heads", "fsdp finer": "heads",
    "pipeline forgotten": "first_block", "pipeline gap": "first_block", "pipeline probe": "probe",
    "watch tp alone": "ranks",  # the last: processes count their watches, and no longer alike
}  # fmt: skip


def table(folder: Path, way: str) -> pl.DataFrame:
    return rankscope.read(folder / way).tables["training"].sort(KEYS)


def hold(way: str, one: pl.DataFrame, several: pl.DataFrame) -> None:
    """The two tables have the same rows, with the same numbers."""
    assert one.select(KEYS).equals(several.select(KEYS)), way
    metrics = {*one["metric"]}
    assert {"relative_mu", "mu", "grad_mlp", "update_query_key", "stable_rank_value_output", "loss", "lr"} <= metrics
    if "tokens" not in way:
        assert {"entropy", "largest_logit"} <= metrics
        assert "head_mu" in metrics or "gathered" in way
        assert {*one.filter(metric="entropy")["head"]} == {0, 1, 2, 3}
    for name in metrics:
        mine, ours = one.filter(metric=name), several.filter(metric=name)
        # Each of the processes that have their own samples gives a loss of its own.
        pooled = name == "loss" and ("fsdp" in way or "accelerate" in way)
        assert pooled or mine["samples"].equals(ours["samples"]), (way, name)
        scale = 2.0 if name == "grad_tokens" and "pipeline" in way else 1.0  # torch scales the weights' gradients alone
        for column in COLUMNS[:1] if pooled else COLUMNS:
            assert ((scale * mine[column] - ours[column]).abs() <= 1e-9 * mine["value"].abs()).all(), (
                way,
                name,
                column,
            )


def hold_watched(way: str, one: Path, two: Path) -> None:
    """Each of two processes has seen what one alone sees."""
    alone = pl.read_parquet(one / way / "0.parquet")
    assert {*alone.filter(metric="entropy")["head"]} == {0, 1, 2, 3}
    for rank in range(2):
        ours = pl.read_parquet(two / way / f"{rank}.parquet")
        names = ["sample", "layer", "head", "metric"]
        assert alone.select(names).equals(ours.select(names))
        assert ((alone["value"] - ours["value"]).abs() <= 1e-9 * alone["value"].abs() + 1e-13).all()


@pytest.mark.slow
def test_two_processes_see_what_one_sees(tmp_path: Path) -> None:
    """Heads and tokens that are split over two; and stages with blocks of their own."""
    (tmp_path / "1").mkdir()
    parallel_worker.main(0, 1, tmp_path / "1", QUICK)
    beside(parallel_worker, tmp_path / "2", *QUICK)
    hold_watched("watch sp", tmp_path / "1", tmp_path / "2")
    hold_watched("watch tp around", tmp_path / "1", tmp_path / "2")
    hold("pipeline", table(tmp_path / "1", "pipeline"), table(tmp_path / "2", "pipeline"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process wrote, in `1`."""
    made = tmp_path_factory.mktemp("parallel")
    (made / "1").mkdir()
    parallel_worker.main(0, 1, made / "1", [*TWO, *FOUR, *WATCHED])
    return made


@pytest.fixture(scope="module")
def two(folder: Path) -> tuple[Path, list[str]]:
    """(Where two processes wrote, what each printed)."""
    return folder / "2", together(parallel_worker, 2, folder / "2", *TWO, *NANOGPT, *WATCHED, *REFUSED, "detection")


@pytest.fixture(scope="module")
def four(folder: Path) -> Path:
    """Where four processes wrote."""
    together(parallel_worker, 4, folder / "4", *FOUR)
    return folder / "4"


@pytest.mark.slow
@pytest.mark.parametrize("way", TWO)
def test_numbers_of_two_are_those_of_one(way: str, folder: Path, two: tuple[Path, list[str]]) -> None:
    one = table(folder / "1", way)
    if "tokens compiled" in way:  # no hook of autograd runs in compiled code
        one = one.filter(pl.col("metric") != "grad_tokens")
    hold(way, one, table(two[0], way))


@pytest.mark.slow
@pytest.mark.parametrize("way", NANOGPT)
def test_nanogpt_of_two_processes_counts_the_samples_of_both(way: str, two: tuple[Path, list[str]]) -> None:
    rows = table(two[0], way)
    samples = 2 * 2 * 2 if "tokens" in way else 2 * 3  # processes, accumulated batches and their samples; or probes
    assert rows.filter(metric="mu")["samples"].unique().to_list() == [samples]
    assert rows.filter(metric="grad_mlp")["samples"].unique().to_list() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("way", FOUR)
def test_numbers_of_four_are_those_of_one(way: str, folder: Path, four: Path) -> None:
    hold(way, table(folder / "1", way), table(four, way))


@pytest.mark.slow
@pytest.mark.parametrize("way", WATCHED)
def test_watch_sees_all_heads_and_tokens_in_every_process(way: str, folder: Path, two: tuple[Path, list[str]]) -> None:
    hold_watched(way, folder / "1", two[0])


@pytest.mark.slow
@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_measured_is_said_by_every_process(way: str, two: tuple[Path, list[str]]) -> None:
    said = [[line for line in printed.splitlines() if line.startswith(f"{way}: ")] for printed in two[1]]
    if "alone" in way:  # the second process is not there
        assert len(said[0]) == 1 and not said[1] and "did not come" in said[0][0]
    else:
        assert [len(lines) for lines in said] == [1, 1], said
    subjects = {line.split(" about ")[1].split(":")[0] for lines in said for line in lines}
    expected = {REFUSED[way]} | ({"attention"} if "fails" in way else set())  # what one says, and what it was
    assert subjects == expected
