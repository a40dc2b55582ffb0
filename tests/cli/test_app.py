"""One voice: every command has the same options, answers in the same forms and ends in the same ways."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from rankscope.cli import app
from tests.cli.conftest import COMMANDS, WrittenRuns
from tests.cli.running import COMMAND, SMALL, inside, printed, process, rankscope


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("mesure", "Did you mean 'measure'"),
        ("--foo", "no such option: --foo"),
        ("measure --foo", "see rankscope measure --help"),
        ("measure bert-tiny extra", "unexpected extra argument"),
        ("measure bert-tiny --layers 0", "invalid value for '--layers'"),
        ("measure bert-tiny --layers x", "invalid value for '--layers'"),
        ("measure bert-tiny --seed -1", "--seed must lie in 0..2147483647; got -1"),
        ("measure minilm --seed 1", "--seed must go with random weights, which minilm does not have"),
        ("paths minilm --init xavier --seed 1", "--init and --seed must go with random weights"),
        ("measure bert-tiny --device tpu", "device must be one that torch has"),
        ("measure bert-tiny --stream", "bert-tiny has random weights: leave stream out"),
        ("reproduce wu2024 fig1 --device tpu", "device must be one that torch has"),
        ("remedies --remedy gates", "remedy must be one of shaped"),
        ("remedies --depths 6,x", "--depths must be whole numbers from 1 on, as 6,12,24; got '6,x'"),
        ("remedies --device tpu", "device must be one that torch has"),
        ("remedies nowhere", "nowhere"),
        ("measure bert-tiny --split line", "--split and --field must go with --text"),
        ("measure bert-tiny --metrics mew", "metric must be one of"),
        ("measure bert-tiny --metrics ,", "--metrics must name at least one"),
        ("measure bert-tiny --variants ,", "--variants must name at least one; got ','"),
        ("measure bert-tiny --variants sam", "a variant must be 'transformer', 'san' and parts"),
        ("measure bert-tiny --arithmetic float8", "arithmetic must be one of"),
        ("measure bert-tiny --mask windw:1", "did you mean 'window'?"),
        ("measure bert-tiny --init zero", "init must be one of"),
        ("measure bert-tiny --max-length 100000", "ask for fewer samples or tokens"),
        ("measure bert-tiny -o afile", "afile must be a place that can be written"),
        ("measure bert-bse", "did you mean bert-base? rankscope models lists the names"),
        ("compare bert-tiny bert-bse:san", "did you mean bert-base? rankscope models lists the names"),
        ("explore ./absent", "there is none at ./absent"),
        ("measure bert-tiny --text absent.txt", "there is none at absent.txt"),
        ("measure absent.json", "there is none at absent.json"),
        ("compare", "missing argument"),
        ("compare bert-tiny", "compare must be given at least two things"),
        ("compare bert-tiny bert-tiny", "things to compare must differ; bert-tiny comes twice"),
        ("compare bert-tiny bert-tiny:sam", "after a model's colon comes a variant"),
        ("compare bert-tiny absent.parquet", "there is none at absent.parquet"),
        ("compare bert-tiny bert-tiny:san --threshold nan", "threshold must be a number > 0"),
        ("compare minilm minilm:san --seed 1", "--seed must go with random weights"),
        ("paths bert-tiny --mask foo", "mask must be one of"),
        ("paths bert-tiny --text absent.txt", "there is none at absent.txt"),
        ("paths bert-tiny --variant sam", "a variant must be 'transformer'"),
        ("paths bert-tiny -o afile", "afile must be a place that can be written"),
        ("bounds bert-tiny --scale 0", "--scale must be a number > 0; got 0"),
        ("bounds bert-tiny --threshold inf", "threshold must be a number > 0"),
        ("bounds bert-tiny --threshold 0", "threshold must be a number > 0"),
        ("bounds bert-tiny --theorems dong", "theorem must be one of"),
        ("bounds bert-tiny -o afile", "afile must be a place that can be written"),
        ("reproduce wu2024 fig1 -o afile", "afile must be a place that can be written"),
        ("reproduce dong2021 fig7", "figure of dong2021 must be one of fig2, fig3, fig4, lengths"),
        ("demo -o afile", "afile must be a place that can be written"),
        ("masks edges:0>99", "edges must join tokens 0..15"),
        ("masks window:1 --tokens 0", "invalid value for '--tokens'"),
        ("models x", "unexpected extra argument"),
    ],
)
def test_every_mistake_is_one_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "afile").touch()
    with inside(tmp_path):
        code, out, err = rankscope(*line.split())
    assert code == 2 and out == "" and sentence in err, err
    assert len(err.splitlines()) == 1 and err.startswith("rankscope: ")


def commands() -> dict[str, Any]:
    found: Any = get_command(app)
    return dict(found.commands)


def test_an_option_means_the_same_everywhere() -> None:
    """The same name has the same help, kind and panel; only its default and its size may differ."""
    said: dict[str, set[tuple[str, str, bool]]] = {}
    for command in commands().values():
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                key = (parameter.help, str(parameter.rich_help_panel), parameter.is_flag)
                said.setdefault(parameter.opts[-1], set()).add(key)
    own = {"--tokens", "--output"}  # of masks: tokens that they join, not of a task's sample; of report: one page
    own |= {"--remedy", "--train"}  # of remedies: each alone, not all on one network; of demo: its own GPT
    own |= {"--seed"}  # of cut: of random choices, not of weights
    own |= {"--steps"}  # of forecast: of a training that is not made
    assert {name for name, meanings in said.items() if len(meanings) > 1} <= own


def test_every_command_has_the_options_that_make_sense_for_it() -> None:
    has = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in commands().items()
    }
    for name in has:
        assert {"--json", "--quiet", "-q"} <= has[name], name
    for name in ("measure", "compare", "paths", "bounds"):
        assert {"--mask", "--layers", "--init", "--seed", "--text", "--split", "--field",
                "--samples", "--max-length", "-o", "--output"} <= has[name], name  # fmt: skip
    for name in ("measure", "compare", "paths", "bounds", "reproduce"):
        assert "--device" in has[name]


def test_every_option_stands_under_one_heading_that_fits() -> None:
    """Nothing of a training under "Text", nothing of the machine under "Network", nothing without a heading."""
    panels: dict[str, set[str]] = {}
    for command in commands().values():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                given = parameter.rich_help_panel
                panels.setdefault(parameter.opts[-1], set()).add(given if isinstance(given, str) else "None")
    assert {name: found for name, found in panels.items() if len(found) != 1 or "None" in found} == {}
    headings = set().union(*panels.values())
    under = {heading: {name for name, found in panels.items() if heading in found} for heading in headings}
    assert {"--steps", "--lr", "--task", "--train", "--depths"} <= under["Training"]
    assert {"--device", "--stream", "--on", "--workers", "--threads", "--batch-size"} <= under["Where it runs"]
    assert under["Text"] == {"--text", "--split", "--field", "--samples", "--max-length", "--tokens", "--scale"}


def test_help_says_what_san_is_and_describes_a_model_once() -> None:
    for name, command in commands().items():
        for parameter in command.params:
            if re.search(r"\bsan\b", parameter.help or ""):
                assert "attention alone" in str(parameter.help), f"{name} {parameter.opts[0]}"
        if any(parameter.name == "model" for parameter in command.params):
            assert "MODEL is" not in command.help, f"{name}: its argument says what MODEL is"


def test_every_help_is_one_line_and_fits() -> None:
    for name, command in commands().items():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help and "\n" not in parameter.help and len(parameter.help) <= 84, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "line",
    [
        ["measure", *SMALL, "--arithmetic", "float32", "--metrics", "relative_mu,sigma_min"],
        ["compare", "bert-tiny", "bert-tiny:san", "--max-length", "8", "--samples", "1"],
        ["paths", *SMALL, "--variant", "san", "--top", "2"],
        ["bounds", *SMALL, "--variant", "san"],
        ["masks", "unidirectional", "edges:0>1"],
    ],
)
def test_json_is_all_there_is_on_stdout(line: list[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    code, out, err = rankscope(*line, "--json")
    assert code == 0 and err == "" and out.count("\n") == 1
    json.loads(out, parse_constant=refuse)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("columns", ["60", "200"])
@pytest.mark.parametrize(
    "line",
    [
        ["measure", *SMALL],
        ["compare", "bert-tiny", "bert-tiny:san+norm+mlp+mlp_skip", "--max-length", "8", "--samples", "1"],
        ["paths", *SMALL],
        ["bounds", *SMALL, "--variant", "san"],
        ["masks"],
    ],
)
def test_tables_fit_their_terminal_and_a_pipe_has_no_colours(
    line: list[str], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, err = rankscope(*line)
    assert code == 0 and err == ""
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "…" not in out  # nothing is cut off


@pytest.mark.slow
def test_quiet_leaves_out_where_things_lie(runs: WrittenRuns, tmp_path: Path) -> None:
    quiet = rankscope("measure", *SMALL, *COMMANDS["measure"], "-o", "measure", "--quiet", cwd=tmp_path).out
    assert "measure/report.html" in runs.outputs["measure"] and "report.html" not in quiet
    assert runs.outputs["measure"].startswith(quiet.rstrip())


@pytest.mark.slow
def test_own_text_in_paths_bounds_and_compare(tmp_path: Path) -> None:
    """The same words give the same numbers, wherever they come from."""
    from rankscope.sources import bundled_excerpts

    (tmp_path / "mine.txt").write_text("\n\n".join(bundled_excerpts(8)[:2]))
    own = ["--text", str(tmp_path / "mine.txt")]
    for line in (["paths", *SMALL], ["bounds", *SMALL, "--variant", "san"],
                 ["compare", "bert-tiny", "bert-tiny:san", *SMALL[1:]]):  # fmt: skip
        bundled, mine = (json.loads(rankscope(*line, *more, "--json").out) for more in ([], own))
        for key in {"lengths", "heads", "table", "collapse", "lines", "verdict"} & set(bundled):
            assert bundled[key] == mine[key]
        assert mine["manifest"]["text"]["path"] == own[1] and mine["manifest"]["samples"] == 2


def test_paths_take_a_mask_and_a_depth() -> None:
    answer = json.loads(rankscope("paths", *SMALL, "--mask", "causal", "--layers", "3", "--json").out)
    assert answer["manifest"]["networks"][0]["architecture"]["mask"] == "causal"
    assert max(row["length"] for row in answer["lengths"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["masks --tokens 512 bigbird:1:1:2:0 --picture", pytest.param("masks --json", marks=pytest.mark.slow)]
)
def test_a_closed_pipe_ends_quietly(line: str) -> None:
    pipe = subprocess.PIPE
    run = subprocess.Popen([*COMMAND, *line.split()], stdout=pipe, stderr=pipe, text=True)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    assert run.stderr.read() == ""
    assert run.wait(120) == 141
    run.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("line", ["--version", pytest.param("masks", marks=pytest.mark.slow)])
def test_a_full_disk_is_a_sentence(line: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, line], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "rankscope: No space left on device\n"


def test_asking_for_nothing_gives_the_help() -> None:
    done = process()
    assert done.returncode == 0 and "Usage: rankscope" in done.stdout and done.stderr == ""


def test_help_version_and_what_is_not_there_do_not_import_torch() -> None:
    code = (
        "import sys, rankscope, rankscope.cli\n"
        "from typer.testing import CliRunner\n"
        "for ask in ('--help', '--version', 'measure --help'):\n"
        "    assert CliRunner().invoke(rankscope.cli.app, ask.split()).exit_code == 0\n"
        "for ask in ('measure --text absent.txt', 'paths minilm --text absent.txt', 'bounds nowhere'):\n"
        "    assert CliRunner().invoke(rankscope.cli.app, ask.split()).exit_code == 2\n"
        "heavy = {'torch', 'polars', 'matplotlib', 'scipy', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys, rankscope.cli\n"
        "from typer.testing import CliRunner\n"
        "said = CliRunner().invoke(rankscope.cli.app, ['--help']).stdout\n"
        "assert 'Measure how uniform the tokens become' in said\n"
        "loaded = {name for name in sys.modules if name.startswith('rankscope.cli.')}\n"
        "assert loaded == {'rankscope.cli.app'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_listed_of_a_command_begins_its_help() -> None:
    for name, command in commands().items():
        listed = command.help
        assert command.params and listed.endswith((".", "?")), name
        assert command.help.split("\n\n")[0] == listed, name


def test_version() -> None:
    from importlib.metadata import version

    assert printed("--version") == f"rankscope {version('rankscope')}\n"


def test_a_bad_option_is_exit_code_two() -> None:
    assert process("measure", "--samples", "-3").returncode == 2
    assert process("mesure").returncode == 2
