"""A corpus on a cluster has the numbers of one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

from rankscope import fresh
from rankscope.engine import Cluster, measure_on_cluster
from rankscope.profiles import corpus_steps, measure_corpus
from rankscope.runs import Store
from rankscope.sources import bundled_excerpts
from tests.cli.running import answered

pytest.importorskip("ray", reason="pip install 'rankscope[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.mark.slow
@pytest.mark.parametrize("excerpts", [200, 10_000])
def test_a_corpus_has_the_statistics_of_one_process(excerpts: int, nodes: Any, tmp_path: Path) -> None:
    words = " ".join(bundled_excerpts(20)).split()
    texts = [" ".join(words[7 * n % 4000 :][: 1 + n % 9]) + (f" {n}" if n % 11 else "") for n in range(excerpts)]
    net = fresh("bert-tiny")
    nets = {"transformer": net, "san": net.variant(skip=0.0)}
    options: dict[str, Any] = {"metrics": ["relative_mu", "entropy"], "max_length": 8, "batch_size": 32}
    in_process = measure_corpus(nets, texts, **options)
    with Cluster() as cluster, Store(tmp_path) as store:
        steps = list(corpus_steps(nets, iter(texts), store, **options, runner=partial(measure_on_cluster, cluster)))
        on_ray = steps[-1].summary()
    assert on_ray.excerpts == in_process.excerpts == excerpts
    assert_frame_equal(on_ray.table, in_process.table, check_exact=True)


@pytest.mark.slow
def test_measure_goes_to_the_cluster(nodes: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(bundled_excerpts(12)[:6]))
    arguments = [
        "measure",
        "minilm",
        "--text",
        str(text),
        "--max-length",
        "8",
        "--variants",
        "san",
        "--batch-size",
        "2",
    ]
    assert answered(*arguments, "--on", "ray")["table"] == answered(*arguments)["table"]
