"""The README is true: its Python runs, and its commands are commands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True, timeout=300)
    assert (tmp_path / "run.parquet").is_file()


def test_the_commands_of_the_readme_are_understood() -> None:
    from typer.main import get_command

    from rankscope.cli import app

    known: Any = get_command(app)
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("rankscope")]
    assert len(commands) >= 4
    for line in commands:
        _, command, *arguments = shlex.split(line, comments=True)
        options = {name for parameter in known.commands[command].params for name in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("-")} <= options


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_every_file_that_the_docs_link_to_is_there() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.ipynb")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:", "mailto:")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
