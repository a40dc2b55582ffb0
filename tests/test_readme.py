"""README and docs are true: their Python runs, and their commands are commands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if "_build" not in page.parts]
QUICK = {"start.md"}
"""Pages whose Python is always run, with that of the README: `make slow` runs all others."""


def blocks(language: str, page: Path = ROOT / "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("readme", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_python_of_the_readme_and_docs_runs(readme: bool, tmp_path: Path) -> None:
    """README and first page in one process, the others in another, each page with names of its own.

    What a page of the docs takes as given is there: for models.md a model in memory, its tokenizer and the
    folder that it names; an id on the hub needs a network and is left out."""
    pages = {str(page.relative_to(ROOT / "docs")): blocks("python", page) for page in PAGES}
    with_python = {page for page, code in pages.items() if code}
    assert with_python >= {*QUICK, "models.md", "do/measure.md"}
    code = ["exec({!r}, {{}})".format("\n".join(blocks("python"))), GIVEN] if readme else [GIVEN]
    for page in sorted(with_python & QUICK if readme else with_python - QUICK):
        lines = [line for line in "\n".join(pages[page]).splitlines() if "google-bert/" not in line]
        code.append(f"exec({chr(10).join(lines)!r}, dict(given))")
    # x-transformers uses what torch has deprecated
    errors = ["-W", "error", "-W", "ignore:`torch.jit.script` is deprecated:DeprecationWarning"]
    done = subprocess.run([sys.executable, *errors, "-c", "\n".join(code)], cwd=tmp_path, timeout=900)
    assert done.returncode == 0
    assert not readme or (tmp_path / "run.parquet").is_file()


GIVEN = """
from rankscope import load
from transformers import BertConfig, BertModel

tokenizer = load("minilm").origin.tokenizer
small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = BertModel(BertConfig(**small))
model.save_pretrained("path/to/model")
tokenizer.save_pretrained("path/to/model")
given = {"model": model, "tokenizer": tokenizer}
"""


def test_the_readme_counts_metrics_and_families_rightly() -> None:
    from rankscope.metrics import METRICS
    from rankscope.sources.families import FAMILIES

    text = (ROOT / "README.md").read_text()
    assert f"routing, {len(METRICS)} in all" in text and f"[{len(FAMILIES)} families]" in text


def test_the_commands_of_the_readme_and_docs_are_understood() -> None:
    from typer.main import get_command

    from rankscope.cli import app

    known: Any = get_command(app)
    shown = [block for page in [ROOT / "README.md", *PAGES] for block in blocks("sh", page)]
    commands = [line for block in shown for line in block.splitlines() if re.match(r"rankscope \w", line)]
    assert len(commands) >= 4
    for line in commands:
        _, command, *arguments = shlex.split(line, comments=True)
        options = {name for parameter in known.commands[command].params for name in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("-")} <= options


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = [block for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] for block in blocks("sh", page)]
    for target in re.findall(r"^make (\w+)", "\n".join(shown), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_every_file_that_the_docs_link_to_is_there() -> None:
    for page in [*ROOT.glob("*.md"), *PAGES, *ROOT.glob("docs/*.ipynb")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:", "mailto:")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
