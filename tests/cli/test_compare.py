"""`rankscope compare`: depths, widths and runs side by side, and a verdict that follows from the numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rankscope import Profile, Transformer, fresh, measure
from rankscope.cli.compare import Side, unique_titles
from rankscope.sources import bundled_excerpts, load
from rankscope_explorer.network_cache import NetworkCache
from tests.cli.running import answered, inside, printed, rankscope
from tests.made_trainings import falling, written

SHORT = ["--max-length", "8", "--samples", "2"]
TWO = ["--metrics", "relative_residual,mu", *SHORT]


def test_depths_and_widths_may_differ_and_the_numbers_are_those_of_measure() -> None:
    answer = json.loads(
        rankscope("compare", "bert-tiny", "bert-mini:san", "--metrics", "relative_mu", *SHORT, "--json").out
    )
    tiny, mini = answer["lines"]
    assert (tiny["name"], mini["name"]) == ("bert-tiny (random weights)", "bert-mini:san (random weights)")
    for found, model, variant in ((tiny, "bert-tiny", "transformer"), (mini, "bert-mini", "san")):
        net = fresh(model).variant(variant)
        X, padding = net.encode(bundled_excerpts(8)[:2], 8)
        expected = measure(net, X, padding, ["relative_mu"]).curve("relative_mu", "log10").mean(0)
        assert torch.allclose(torch.tensor(found["log10"], dtype=torch.float64), expected, atol=1e-12)
        assert len(found["log10"]) == net.arch.layers + 1
    assert tiny["uniform_from"] is None and mini["uniform_from"] is not None
    below = f"bert-mini:san (random weights) (below 0.001 from layer {mini['uniform_from']}, "
    assert "tokens stay apart in bert-tiny (random weights) (" in answer["verdict"] and below in answer["verdict"]


@pytest.mark.slow
def test_a_run_of_measure_and_one_of_compare_can_be_compared_again(tmp_path: Path) -> None:
    with inside(tmp_path):
        rankscope("measure", "bert-tiny", "--variants", "san,transformer", *TWO, "-o", "runs/a")
        first = rankscope("compare", "runs/a", "bert-mini", *TWO, "-o", "runs/b")
        assert first.code == 0 and first.out.splitlines()[-1] == "Report: runs/b/report.html"
        assert "Runs keep the text" in first.out
        joined = Profile.read("runs/b/profile.parquet")
        assert joined.variants == ["a:san", "a:transformer", "bert-mini (random weights)"]
        assert [network.variant for network in joined.manifest.networks] == joined.variants
        assert joined.manifest.more["compared"] == {"a": "runs/a", "bert-mini (random weights)": "bert-mini"}
        assert "a: random weights (seed 0, init bert)." in first.out
        assert "bert-mini: random weights (seed 0, init bert)." in first.out
        assert "random weights" in Path("runs/b/report.html").read_text()
        written = Path("runs/a/report.html").read_text()
        assert "bert-tiny, random weights (seed 0, init bert)" in written
        alone = Profile.read("runs/a/profile.parquet")
        assert torch.equal(joined.curve("mu", "log10", variant="a:san"), alone.curve("mu", "log10", variant="san"))
        again = rankscope("compare", "runs/b", "--metrics", "mu")
        assert "bert-mini: random weights (seed 0, init bert)." in again.out
        assert again.code == 0 and "b:a:san" in again.out and "At the last layer mu is largest" in again.out
        refused = rankscope("compare", "runs/a", "bert-tiny", "--metrics", "entropy", *SHORT)
        assert refused.code == 2 and "runs/a must have been measured in entropy; it has" in refused.err


def test_metrics_that_rank_them_differently_are_said_to() -> None:
    """Without norms tokens grow from layer to layer: the network is first by size, and last by share."""
    asked = ["compare", "bert-tiny", "bert-tiny:san+skip", "--layers", "6", "--init", "xavier", *SHORT]
    answer = json.loads(rankscope(*asked, "--metrics", "relative_mu,mu", "--json").out)
    ends = {
        metric: {
            row["variant"]: row["value"]
            for row in answer["table"] if row["metric"] == metric and row["layer"] == 6 and row["sample"] == 0
        }
        for metric in ("relative_mu", "mu")
    }  # fmt: skip
    whole, bare = ends["mu"]
    orders = {values[whole] > values[bare] for values in ends.values()}
    assert len(orders) == 2 and answer["disagreement"].startswith("Metrics rank them differently: by relative_mu")
    assert json.loads(rankscope(*asked, "--metrics", "mu", "--json").out)["disagreement"] is None


def test_seeds_go_to_random_weights_alone() -> None:
    mixed = [
        json.loads(rankscope("compare", "bert-tiny", "bert-mini", *SHORT, "--seed", seed, "--json").out)
        for seed in ("0", "1")
    ]
    assert mixed[0]["lines"] != mixed[1]["lines"]


def test_names_of_lines_are_unique() -> None:
    things = ["one/model", "two/model", "bert-tiny", "bert-tiny:san"]
    titles = unique_titles([Side.parse(thing).title for thing in things], things)
    assert titles == things


def test_a_variant_that_is_named_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    net = fresh("bert-tiny")
    X, padding = net.encode(bundled_excerpts(8)[:1], 8)
    profile = measure(net, X, padding, variant="[red]<b>[/red]")
    profile.save(tmp_path / "profile.parquet")
    answer = rankscope("compare", str(tmp_path))
    assert answer.code == 0 and "[red]<b>[/red]" in answer.out.replace("\n", "")


@pytest.mark.slow
def test_random_weights_are_said_wherever_a_network_is_named() -> None:
    small = ["bert-tiny", "--max-length", "8", "--samples", "1", "--seed", "3"]
    one = ["--variants", "transformer", "--metrics", "mu", "--no-check"]
    for command in (["measure", *one], ["bounds", "--theorems", "dobrushin"], ["paths"]):
        printed = rankscope(command[0], *small, *command[1:]).out
        assert "bert-tiny: random weights (seed 3, init bert)." in printed, command
    manifest = json.loads(rankscope("measure", *small, *one, "--json").out)["manifest"]
    assert manifest["origin"] == {"name": "bert-tiny", "weights": "random", "seed": 3, "init": "bert"}
    assert "bert-tiny, random weights (seed 3, init bert)" in repr(fresh("bert-tiny", seed=3))
    networks = NetworkCache({"minilm": load("minilm")}, ["gpt2"])
    assert {each["name"]: each["drawn"] for each in networks.described()} == {
        "minilm": False, "gpt2": True, "random": False
    }  # fmt: skip
    assert "random weights" not in rankscope("measure", "minilm", "--max-length", "8", "--samples", "1", *one).out


def test_hidden_states_of_checkpoints_of_one_shape_are_compared(tmp_path: Path) -> None:
    """Two networks of nearly one curve are not alike: by how much their outputs differ is said."""
    one, other = fresh("bert-tiny", seed=0), fresh("bert-tiny", seed=0)
    moved = {name: x + x.std() * torch.randn_like(x) if "mlp" in name and x.ndim > 1 else x
             for name, x in other.state_dict().items()}  # fmt: skip
    other = replace(Transformer.from_weights(other.arch, moved), origin=other.origin)
    one.save(tmp_path / "one")
    other.save(tmp_path / "other")
    asked = ["compare", str(tmp_path / "one"), str(tmp_path / "other"), *SHORT]
    X, padding = one.encode(bundled_excerpts(8)[:2], 8)
    Y, Z = (net.run(X, padding).output[~padding[..., None].expand_as(X)].view(2, 8, -1) for net in (one, other))
    expected = sum(float(((z - y) ** 2).sum() / (y**2).sum()) ** 0.5 for y, z in zip(Y, Z, strict=True)) / 2
    told = json.loads(rankscope(*asked, "--json").out)
    (difference,) = told["hidden_states"]
    assert (difference["name"], difference["other"]) == ("other", "one") and expected > 0.05
    assert difference["relative"] == pytest.approx(expected, rel=1e-9)
    said = " ".join(rankscope(*asked).out.split())
    assert f"those of other from those of one by {100 * expected:.3g} %" in said
    of_variants = json.loads(rankscope("compare", "bert-tiny", "bert-tiny:san", *SHORT, "--json").out)
    assert of_variants["hidden_states"] == []
    assert "not what they hold" in " ".join(rankscope("compare", "bert-tiny", "bert-tiny:san", *SHORT).out.split())


def test_an_order_that_the_texts_do_not_decide_is_said(tmp_path: Path) -> None:
    for seed in (0, 1):
        fresh("bert-tiny", seed=seed).save(tmp_path / str(seed))
    asked = ["compare", str(tmp_path / "0"), str(tmp_path / "1"), "bert-tiny:san", "--max-length", "8", "--json"]
    told = json.loads(rankscope(*asked, "--samples", "4").out)
    ends = {name: np.log10([row["value"] for row in told["table"] if row["metric"] == "relative_residual"
                            and row["variant"] == name and row["layer"] == 2]) for name in ("0", "1")}  # fmt: skip
    difference = ends["0"] - ends["1"]
    assert len(difference) == 4
    tied = abs(difference.mean()) <= np.std(difference, ddof=1)
    assert bool(tied) == bool(told["undecided"] and "between" in told["undecided"])
    assert "san" not in (told["undecided"] or "")  # whose tokens are 10^9 times as close
    assert "of one text" in json.loads(rankscope(*asked, "--samples", "1").out)["undecided"]


def test_runs_are_compared_at_the_steps_that_they_share(tmp_path: Path) -> None:
    """Layer 2 of the second run is twice as large from step 30 on, layer 1 for a while only."""

    def other(step: int, layer: int) -> float:
        far = (layer == 2 and step >= 30) or (layer == 1 and step == 20)
        return falling(step, layer) * (2 if far else 1.05)

    a = written(tmp_path / "a")
    b = written(tmp_path / "b", range(0, 100, 15), values=other)
    found = answered("compare", str(a), str(b))
    assert found["steps"] == [0, 30]
    parted = {line["of"]: line["parted_at"] for line in found["lines"]}
    assert parted == {"loss": None, "layer 0": None, "layer 1": None, "layer 2": 30, "layer 3": None}
    assert found["lines"][3]["values"] == {str(a): falling(30, 2), str(b): 2 * falling(30, 2)}
    said = " ".join(printed("compare", "a", "b", cwd=tmp_path).split())
    assert "they part first at layer 2, from step 30 on; in 1 of 4 layers" in said
    assert "They end at steps 50, 90" in said


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("compare run bert-tiny", "bert-tiny is none"),
        ("compare run", "at least two training runs"),
        ("compare run run", "run comes twice"),
        ("compare run odd", "none in common"),
        ("compare run odd --metrics entropy", "must all have entropy"),
        ("compare run odd -o page", "rankscope report run odd"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, line: str, sentence: str) -> None:
    written(tmp_path / "run")
    written(tmp_path / "odd", [1, 3])
    code, out, err = rankscope(*line.split(), cwd=tmp_path)
    assert code == 2 and out == "" and sentence in err and len(err.splitlines()) == 1, err


def test_a_ratio_is_that_of_the_second_run_to_the_first_where_it_is_a_number(tmp_path: Path) -> None:
    """Also of numbers whose product leaves the range of floats; one beyond that range is none."""
    ends = [(1e200, 3e200), (1e-200, 2e200), (0.0, 1.0), (4.0, 2.0)]
    for index, name in enumerate("ab"):
        written(tmp_path / name, [0], values=lambda step, layer, index=index: ends[layer][index])
    said = printed("compare", "a", "b", cwd=tmp_path)
    for layer, ratio in enumerate(("3", "–", "–", "0.5")):
        assert re.search(rf"\n layer {layer} +\S+ +\S+ +{re.escape(ratio)} ", said), said
