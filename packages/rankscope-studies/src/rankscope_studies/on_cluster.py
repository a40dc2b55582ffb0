"""Studies on a Ray cluster: the numbers of one process, exactly. `rankscope reproduce --on ray` calls
`reproduce_on_cluster`."""

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankscope.engine import Cluster
from rankscope.files import atomic
from rankscope_studies.reproduce import chosen, home, reproduce
from rankscope_studies.study import Setup, Study, StudyResult


def reproduce_on_cluster(
    cluster: Cluster, studies: Sequence[Study], setup: Setup
) -> Iterator[tuple[Study, StudyResult]]:
    """Run studies, each on one worker; the driver writes each as it ends.

    Parts that an earlier run has computed go along with a study, so that they are not computed again.
    """
    remote_setup = replace(setup, say=_say_nothing)
    folders = [home(setup) / study.paper / study.figure for study in studies]
    pieces = (
        (index, (study.paper, study.figure, remote_setup, _read_parts(folders[index])))
        for index, study in enumerate(studies)
    )
    for index, result in cluster.run(_run_study, pieces):
        if isinstance(result, Exception):
            raise result
        outcome, parts = pickle.loads(result)

        def finished(local: Setup, outcome: StudyResult = outcome, parts: dict[str, bytes] = parts) -> StudyResult:
            _write_parts(local.folder, parts)
            return outcome

        yield studies[index], reproduce(studies[index], setup, finished)


def _run_study(paper: str, figure: str, setup: Setup, parts: dict[str, bytes]) -> bytes:
    """The task that Ray runs for a study: its outcome and its parts, pickled.

    Pickled, because arrays that come through Ray's store are read-only, and matplotlib writes to those of a
    figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        local = replace(setup, folder=Path(folder), elsewhere={})
        _write_parts(local.folder, parts)
        outcome = chosen(paper, figure)[0].run(local)
        outcome = replace(outcome, notes=[*outcome.notes, *local.notes()])
        return pickle.dumps((outcome, _read_parts(local.folder)))


def _read_parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "parts").glob("*.parquet"))}


def _write_parts(folder: Path, parts: dict[str, bytes]) -> None:
    for name, data in parts.items():
        with atomic(folder / "parts" / name) as temporary:
            temporary.write_bytes(data)


def _say_nothing(_: Any) -> None:
    """The `say` of a study on a worker, where nobody reads it."""
