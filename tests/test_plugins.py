"""What a package of a stranger adds is there, what is wrong with one is said, and neither touches the rest."""

import importlib.metadata
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope import Monitor, Profile, fresh, load, measure, plugins
from rankscope.cli.app import ELSEWHERE, SOURCES
from rankscope.engine import spec_of
from rankscope.engine.work import CellInputs, InputsLoader, measure_cell
from rankscope.errors import MetricError, PluginError, PluginWarning, TrainingWarning
from rankscope.live import OBSERVERS
from rankscope.metrics import METRICS, metric
from rankscope.monitor import default_rules
from rankscope.remedies import REMEDIES, NamedRemedy
from rankscope.report import ReportedRun, render
from rankscope.report.reported_run import CHAPTERS
from rankscope.sources import FAMILIES
from rankscope.theory.theorem import own_objects
from tests.cli.running import answered, rankscope
from tests.packaging.environment import Environment
from tests.strangers import HERE, installed
from tests.test_light import without

ROOT = Path(__file__).parents[1]
STRANGERS = ("rankscope-stranger", "rankscope-broken")


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path / "site", "whole"):
        yield


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path / "site", "broken"):
        yield


def states(group: Any) -> dict[str, str]:
    """What is wrong with each entry point of a group, by its name; each is said in a warning, once."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = {state.entry.name: state.trouble for state in group.states if not state.entry.shipped}
        assert len(group) == len(list(group))
    assert sorted(str(each.message) for each in said) == sorted(filter(None, found.values()))
    assert all(each.category is PluginWarning for each in said)
    return found


def reported(profile: Profile, folder: Path) -> ReportedRun:
    return ReportedRun(folder, profile.manifest, measured=profile)


def test_pyproject_declares_what_is_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name.removeprefix("rankscope."): entries for name, entries in project["entry-points"].items()}
    assert declared == {group: {"rankscope": value} for group, value in plugins.SHIPPED.items()}


def test_the_page_on_parts_of_ones_own_has_the_whole_package() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    files = [path for path in (HERE / "whole").rglob("*.*") if path.suffix in (".py", ".toml")]
    assert len(files) == 4
    assert [path.name for path in files if path.read_text(encoding="utf-8") not in page] == []
    missing = [group for group in plugins.SHIPPED if f"| `rankscope.{group}` |" not in page]
    assert missing == []


def test_all_that_is_shipped_is_found() -> None:
    for group in plugins.every_group():
        assert group.shipped or group.name == "pages"  # which are served by a package beside this one
        assert list(group)[: len(group.shipped)] == list(group.shipped)


def test_entry_points_are_those_that_importlib_finds(whole: None, broken: None) -> None:
    ours = {(each.group, each.name, each.value, each.package) for each in plugins.entry_points() if not each.shipped}
    assert len([each for each in ours if each[3] in STRANGERS]) == 19
    theirs = {
        (entry.group.removeprefix("rankscope."), entry.name, entry.value, path.name.partition("-")[0].replace("_", "-"))
        for path in [Path(str(each._path)) for each in importlib.metadata.distributions()]  # type: ignore[attr-defined]
        for entry in importlib.metadata.PathDistribution(path).entry_points
        if entry.group.startswith("rankscope.") and not path.name.startswith("rankscope-0")
    }
    assert ours == theirs


def test_a_metric_and_an_alarm_rule_and_a_family_of_a_stranger_are_used(whole: None, tmp_path: Path) -> None:
    assert states(METRICS) == {"spread": ""} and metric("spread") is METRICS["spread"]
    net = fresh("bert-tiny")
    X, padding = net.encode(["Call me Ishmael."], 8)
    profile = measure(net, X, padding, ["spread", "mu"])
    assert torch.allclose(profile.curve("spread")[0, 0], X[0].abs().max())
    assert [rule.name for rule in default_rules()][-1] == "tokens point one way"
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with (
        pytest.warns(TrainingWarning, match="at layer 0 the mean cosine is 1.0000") as said,
        Monitor(model, ["mean_cosine"], 1, torch.ones(1, 3, 8), run=tmp_path) as monitor,
    ):
        monitor.step()
        monitor.step()
    assert len(said) == 1 and "Look at the skips" in str(said[0].message)
    transformers = pytest.importorskip("transformers")

    class Config(transformers.BertConfig):
        model_type = "stranger-bert"

    config = Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    assert "stranger_bert" in FAMILIES
    loaded: Any = load(transformers.BertModel(config))
    assert loaded.origin.parity.states < 1e-9 and loaded.origin.family == "stranger_bert"


def test_a_remedy_of_a_stranger_goes_onto_a_network_by_its_name(whole: None) -> None:
    net = fresh("bert-tiny").with_remedy("weak_skip:share=0.25")
    assert net.arch.attention_skip == 0.25 and "weak_skip" in REMEDIES

    @dataclass(frozen=True)
    class Part(NamedRemedy):
        name, place = "mine", "attention"

        def plain(self, x: Any, block: Any, rules: Any, inside: Any) -> Any:
            return x / 2

    assert own_objects(net.arch.replace(parts=(Part(),))) == "mine"  # which no theorem knows


def test_a_command_of_a_stranger_is_listed_and_run(whole: None) -> None:
    assert "Say how large the tokens of a model are." in rankscope("--help").out
    shown = rankscope("spread", "--help").out
    assert "Of its last layer, on a sentence." in shown and "--scale" in shown and "--json" in shown
    one, two = (rankscope("spread", "bert-tiny", "--scale", scale).out for scale in ("1", "2"))
    assert one.startswith("spread: ") and two.startswith("spread: ")


def test_a_chapter_and_a_job_of_a_stranger_are_in_a_report_and_a_sweep(whole: None, tmp_path: Path) -> None:
    net = fresh("bert-tiny")
    spec = spec_of({"metrics": "mu", "sizes": True, "all": {"model": "bert-tiny", "samples": 1, "tokens": 4}})
    loader = InputsLoader("tiny", lambda: CellInputs(net, *net.encode(["Call me Ishmael."], 4)))
    outcome = measure_cell(spec.cells[0], loader, spec.options, torch.get_num_threads(), "cpu")
    assert outcome.reason is None and outcome.tables["sweep_sizes"]["width"].to_list() == [128]
    assert spec.options.asked["sizes"] is True and {"sweep", "sweep_sizes"} == set(outcome.tables)
    assert "How deep each variant is" in render([reported(measure(net, "Call me Ishmael.", metrics="mu"), tmp_path)])


def test_what_a_stranger_adds_is_gone_with_the_package(tmp_path: Path) -> None:
    with installed(tmp_path, "whole"):
        assert "spread" in METRICS and "spread" in SOURCES
    assert "spread" not in METRICS and "spread" not in SOURCES
    code, _, err = rankscope("spread")
    assert code == 2 and "no such command 'spread'" in err


def test_what_is_wrong_is_said_in_a_sentence_each(broken: None) -> None:
    said = states(METRICS)
    assert list(said) == ["failing", "taken", "kind", "lost"]
    for name, why in {
        "failing": "it does not load, OSError: libmine.so.1: cannot open shared object file",
        "taken": "what it calls mu must have a name of its own, and that is taken",
        "kind": "it must name a Metric, or a list or table of them; got a str",
        "lost": "it does not load, AttributeError: module 'rankscope_broken.parts' has no attribute 'lost'",
    }.items():
        assert said[name].startswith("a plugin of rankscope-broken 0.1 is left out (rankscope.metrics: "), said[name]
        assert said[name].endswith(f"): {why}; update rankscope-broken, or pip uninstall rankscope-broken")
    rules: Any = next(group for group in plugins.every_group() if group.name == "alarms")
    assert "it does not load, TypeError: Can't instantiate abstract class Rule" in states(rules)["rule"]
    commands = states(SOURCES)
    assert "No module named 'rankscope_broken.nowhere'" in commands["lost"]
    assert "what it calls measure must have a name" in commands["measure"] and commands["failing"] == ""


def test_the_rest_works_beside_a_broken_package(broken: None, tmp_path: Path) -> None:
    net = fresh("bert-tiny")
    assert len(measure(net, "Call me Ishmael.", metrics="mu").table) == 3  # nothing is said: no plugin was asked for
    with pytest.warns(PluginWarning), pytest.raises(MetricError, match="metric must be one of"):
        metric("spreading")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        assert len(default_rules()) == 9 and len(OBSERVERS) == 4
        assert "failing_sections" in CHAPTERS
    with pytest.warns(PluginWarning, match="it fails with KeyError: 'width'"):
        page = render([reported(measure(net, "Call me Ishmael.", metrics="mu"), tmp_path)])
    assert "How uniform the tokens become" in page


def test_commands_name_what_is_broken_and_go_on(broken: None) -> None:
    done = rankscope("masks", "causal")
    assert done.code == 0 and done.err == ""
    listed = rankscope("--help")
    assert listed.code == 0 and "Measure how uniform" in listed.out and "Fail when it is called" in listed.out
    assert len(listed.err.splitlines()) == 2 and listed.err.startswith("rankscope: a plugin of rankscope-broken 0.1")
    failed = rankscope("failing")
    assert failed.code == 2 and len(failed.err.splitlines()) == 1
    assert "the command must be importable from rankscope_broken.failing:failing; it is not, OSError" in failed.err


def test_what_a_plugin_prints_while_it_is_imported_spoils_no_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rankscope_chatty.py").write_text('print("a banner that nobody asked for")\nnumber = 1\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.loaded("rankscope_chatty:number") == 1
    assert capsys.readouterr() == ("", "a banner that nobody asked for\n")


def test_plugins_are_listed_with_what_is_wrong(whole: None, broken: None) -> None:
    rows = answered("plugins")
    assert [row["group"] for row in rows if row["package"] == "rankscope"] == list(plugins.SHIPPED)
    strange = {(row["package"], row["group"], row["name"]): row for row in rows if row["package"] in STRANGERS}
    assert len(strange) == 19 and all(row["version"] in ("0.1", "1.2") for row in strange.values())
    assert {key[0] for key, row in strange.items() if row["trouble"] is None} == {"rankscope-stranger"} | {
        "rankscope-broken"  # its chapter fails when it is used
    }
    assert strange["rankscope-stranger", "jobs", "sizes"]["adds"] == ["sizes"]
    assert "must be of that kind; it is of kind 'count'" in strange["rankscope-broken", "results", "tally"]["trouble"]
    assert "did you mean 'metrics'" in strange["rankscope-broken", "metrcs", "mine"]["trouble"]
    assert "OSError" in strange["rankscope-broken", "commands", "failing"]["trouble"]
    shown = rankscope("plugins").out
    assert max(map(len, shown.splitlines())) <= 80 and "rankscope-stranger 1.2" in shown


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_command_of_a_package_that_is_not_there_says_the_line_that_installs_it(name: str) -> None:
    code = f"from rankscope.cli import main; import sys; sys.argv[1:] = ['{name}', 'all', '--quiet']; main()"
    done = without((ELSEWHERE[name],), code)
    needed = f"rankscope: rankscope {name} needs {ELSEWHERE[name]}, which is not installed: "
    extra = {"rankscope_studies": "studies", "rankscope_explorer": "explore"}[ELSEWHERE[name]]
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == f"{needed}pip install 'rankscope[{extra}]'"


def test_a_report_of_studies_without_their_package_says_the_line_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "outcome.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "below"):
        code = f"from rankscope.cli import main; import sys; sys.argv[1:] = ['report', {str(folder)!r}]; main()"
        done = without((ELSEWHERE["study"],), code)
        assert done.returncode == 2 and done.stderr.endswith("not installed: pip install 'rankscope[studies]'\n")


def test_a_table_of_commands_must_lead_somewhere() -> None:
    entry = plugins.EntryPoint("commands", "all", "tests.test_plugins:LOST", "mine", "1")
    with pytest.raises(PluginError, match="there is none at one = nowhere.at:all"):
        SOURCES._read(entry)


LOST = {"one": "nowhere.at:all"}


@pytest.mark.slow
def test_wheels_of_strangers_in_a_fresh_environment(tmp_path: Path) -> None:
    """The wheel of rankscope and of both packages; all else is taken from this environment."""
    for tree in (ROOT, HERE / "whole", HERE / "broken"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
        subprocess.run(command, cwd=tree, check=True)
    environment = Environment.make(tmp_path / "environment", tmp_path / "elsewhere", tmp_path / "dist")
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    here = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    (site / "others.pth").write_text("\n".join(map(str, here)))
    environment.pip("install", "--no-index", "--no-deps", *sorted((tmp_path / "dist").glob("*.whl")))
    code = (
        "import rankscope, warnings; from rankscope import fresh, measure\n"
        "from rankscope.plugins import entry_points\n"
        "assert {each.version for each in entry_points() if each.package == 'rankscope-stranger'} == {'1.2'}\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    profile = measure(fresh('bert-tiny'), 'Call me Ishmael.', metrics=['spread', 'mu'])\n"
        "assert profile.metrics == ['spread', 'mu'] and len(said) == 4, said\n"
        "print(rankscope.__file__)\n"
    )
    done = environment.run("-c", code)
    assert done.returncode == 0 and str(site) in done.stdout, done.stderr
    spoken = environment.run("-m", "rankscope", "spread", "--json")
    assert spoken.returncode == 0 and spoken.stdout.startswith('{"spread": '), spoken.stderr
    listed = environment.run("-m", "rankscope", "plugins")
    assert listed.returncode == 0 and "rankscope-stranger 1.2" in listed.stdout and not listed.stderr, listed.stderr
