"""README and docs are true: their Python runs, and their commands are commands."""

import builtins
import re
import shlex
import subprocess
import symtable
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [page for page in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/docs/**/*.md")])
         if "_build" not in page.parts]  # fmt: skip
PACKAGES = sorted(ROOT.glob("packages/**/README.md"))
QUICK = {"start.md"}
"""Pages whose Python is always run, with that of the README: `make slow` runs all others."""


def blocks(language: str, page: Path = ROOT / "README.md") -> list[str]:
    return re.findall(rf"```(?:{language})\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("readme", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_python_of_the_readme_and_docs_runs(readme: bool, tmp_path: Path) -> None:
    """README and first page in one process, the others in another, each page with names of its own.

    The folder that pages call `path/to/model` is there; an id on the hub needs a network and is left out."""
    pages = {str(page.relative_to(ROOT)).removeprefix("docs/"): blocks("python", page) for page in PAGES}
    with_python = {page for page, code in pages.items() if code}
    assert with_python >= {*QUICK, "models.md", "do/measure.md"}
    code = ["exec({!r}, {{}})".format("\n".join(blocks("python"))), GIVEN] if readme else [GIVEN]
    for page in sorted(with_python & QUICK if readme else with_python - QUICK):
        lines = [line for line in "\n".join(pages[page]).splitlines() if "google-bert/" not in line]
        code.append(f"exec({chr(10).join(lines)!r}, {{}})")
    # x-transformers uses what torch has deprecated
    errors = ["-W", "error", "-W", "ignore:`torch.jit.script` is deprecated:DeprecationWarning"]
    done = subprocess.run([sys.executable, *errors, "-c", "\n".join(code)], cwd=tmp_path, timeout=900)
    assert done.returncode == 0
    assert not readme or (tmp_path / "run.parquet").is_file()


GIVEN = """
from rankscope import load
from transformers import BertConfig, BertModel

small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(**small)).save_pretrained("path/to/model")
load("minilm").origin.tokenizer.save_pretrained("path/to/model")
"""
OF_THE_READERS_LOOP = {
    "accelerator", "get_batch", "gradient_accumulation_steps", "max_iters", "out_dir",  # Accelerate, nanoGPT
    "ColwiseParallel", "fully_shard", "mesh", "parallelize_module", "plan", "tokens",  # torchtitan
    "PipelineStage", "device", "loader", "num_stages", "part", "schedule", "stage_index",
}  # fmt: skip
"""Names of fragments (`py`, not `python`), which stand in a loop that the page names."""


def undefined(code: str, known: set[str]) -> set[str]:
    """Names that `code` reads and neither makes nor knows; what it makes is added to `known`."""
    tables = [symtable.symtable(code, "page", "exec")]
    read: set[str] = set()
    for table in tables:
        tables += table.get_children()
        top = table.get_type() == "module"
        known |= {each.get_name() for each in table.get_symbols() if top and (each.is_assigned() or each.is_imported())}
        read |= {each.get_name() for each in table.get_symbols() if each.is_referenced() and (top or each.is_global())}
    return read - known - set(dir(builtins))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_make_every_name_that_they_use(page: Path) -> None:
    """A reader who copies a page from its top needs nothing else; fragments may use what the reader's loop has."""
    known: set[str] = set()
    for language, code in re.findall(r"```(py|python)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        assert undefined(code, known) <= (OF_THE_READERS_LOOP if language == "py" else set()), code


def test_names_that_nothing_makes_are_found() -> None:
    code = "from a import b\ndef f(x):\n    return x + c + b\n[y for y in d]\nprint(f)"
    known = {"d"}
    assert undefined(code, known) == {"c"} and known == {"b", "d", "f"}


def test_the_readme_counts_metrics_and_families_rightly() -> None:
    from rankscope.metrics import METRICS
    from rankscope.sources import FAMILIES

    text = (ROOT / "README.md").read_text()
    assert f"routing, {len(METRICS)} in all" in text and f"[{len(FAMILIES)} families]" in text


OF_THE_READER = {
    "path/to/model", "my_model/", "notes.txt", "corpus/", "history.csv", "outputs/mine", "lightning_logs/version_0",
    "lightning_logs/version_0/checkpoints", "runs/mine", "runs/other", "runs/a", "runs/b",
}  # fmt: skip
"""Files and folders whose names say that the reader has them: a model, texts, a table, trainings."""


def shell_lines(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PACKAGES, *PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_shell_blocks_need_no_bash_and_name_no_file_that_is_not_there(page: Path) -> None:
    """A file is there if the page shows it (a block of its kind after its name), an earlier line writes it, or a
    monitor on the page does."""
    text = page.read_text(encoding="utf-8")
    made = OF_THE_READER | set(re.findall(r'run="([^"]+)"', text))
    for language, block in re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL):
        before = text[: text.index(block)].rsplit("```", 1)[0]
        made |= {name for name in re.findall(r"`([\w-]+\.\w+)`", before[-200:]) if name.endswith(f".{language}")}
        if language != "sh":
            continue
        assert subprocess.run(["sh", "-n"], input=block, text=True, capture_output=True).returncode == 0
        for line in shell_lines(block):
            words = shlex.split(line, comments=True)
            assert not re.search(r"\{[^ ]*,[^ ]*\}|<\(|\[\[|&>|\$'", " ".join(words)), line
            after = dict(zip(words[1:], words, strict=False))
            for word in words if words[:1] != ["pip"] else []:
                path = word.partition(":")[0]
                if "/" in path or re.search(r"\.(toml|json|jsonl|csv|txt)$", path):
                    if after.get(word) in ("-o", "register", "train"):
                        made.add(path)
                    shipped = path.startswith(("digit-vit/", "moby-gpt/"))
                    assert path in made or shipped, f"{page.name}: where does {path} come from? {line}"


def test_the_commands_of_the_readme_and_docs_are_understood(tmp_path: Path) -> None:
    """By the application: every option, with a value of its type, and every argument."""
    from typer.main import get_command

    from rankscope.cli import app
    from tests.cli.running import inside

    known: Any = get_command(app)
    shown = [block for page in [ROOT / "README.md", *PAGES] for block in blocks("sh", page)]
    commands = [line for block in shown for line in shell_lines(block) if re.match(r"rankscope \w", line)]
    assert len(commands) >= 40
    for name in OF_THE_READER:
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("text") if place.suffix else place.mkdir(exist_ok=True)
    with inside(tmp_path):
        for line in commands:
            _, command, *arguments = shlex.split(line, comments=True)
            known.commands[command].make_context(command, arguments)


def modules() -> dict[str, Path]:
    """The file of each module of ours that pages run, by name."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "RESULTS.md", *PACKAGES, *PAGES]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    files = {}
    for name in set(re.findall(r"python -m ((?:rankscope|rankscope_studies|benchmarks|tests)\b[\w.]*\w)", text)):
        found = find_spec(name)
        assert found is not None, name
        run = find_spec(f"{name}.__main__") if found.submodule_search_locations is not None else found
        assert run is not None and run.origin is not None, name
        files[run.name] = Path(run.origin)
    return files


def test_the_modules_that_pages_run_are_there() -> None:
    assert len(modules()) > 15 and any(name.startswith("rankscope_studies.research.") for name in modules())


@pytest.mark.slow
def test_modules_with_options_say_what_they_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name, path in modules().items() if "argparse" in path.read_text(encoding="utf-8")]:
        monkeypatch.setattr("sys.argv", [name, "--help"])
        with pytest.raises(SystemExit, match="^0$"):
            import_module(name).main()
        assert "usage:" in capsys.readouterr().out, name


def test_the_studies_that_pages_show_have_cells() -> None:
    from rankscope.engine import spec_of

    shown = [block for page in PAGES for block in blocks("toml", page) if "[project]" not in block]
    assert len(shown) >= 3 and all(len(spec_of(tomllib.loads(block)).cells) > 10 for block in shown)


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = [block for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] for block in blocks("sh", page)]
    for target in re.findall(r"^make (\w+)", "\n".join(shown), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_every_file_that_the_docs_link_to_is_there() -> None:
    for page in [*ROOT.glob("*.md"), *PAGES, *PACKAGES, *ROOT.glob("docs/*.ipynb")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:", "mailto:")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
