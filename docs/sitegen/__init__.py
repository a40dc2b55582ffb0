"""What Sphinx needs to make a site of docs/: pages that are written from the code, formulas, pictures.

A page says where something is put in that is written from the code:

    ```{generated} metrics
    ```

Each module here writes one such part, as plain Markdown, and knows nothing of Sphinx.
"""

import re
from collections.abc import Callable
from typing import Any

FENCE = re.compile(r"^```\{generated\} (\S+) ?(\S*)\n```$", re.MULTILINE)
FORMULAS = ("idea", "deviation", "paths", "theory", "monitor", "extending", "errors", "reference/theorems")
"""Pages whose formulas, plain text between backticks, are set as formulas."""


def parts() -> dict[str, Callable[..., str]]:
    """What can be put into a page, by name."""
    from sitegen import api, commands, gallery, metrics, remedies, reproduction, tables, theorems

    return {
        "api": api.page,
        "claims": remedies.claims,
        "commands": commands.page,
        "coverage": theorems.coverage,
        "gallery": gallery.page,
        "metrics": metrics.page,
        "paper": reproduction.page,
        "remedies": remedies.page,
        "tables": tables.page,
        "theorems": theorems.page,
        "trainings": remedies.trainings,
    }


def filled(text: str) -> str:
    """A page with its generated parts."""
    return FENCE.sub(lambda fence: parts()[fence[1]](*filter(None, [fence[2]])), text)


def _read(app: Any, name: str, source: list[str]) -> None:
    if app.env.doc2path(name).suffix != ".md":
        return
    if name in FORMULAS:
        from sitegen.markdown import page_formulas

        source[0] = page_formulas(source[0])
    source[0] = filled(source[0]).replace("](../benchmarks/RESULTS.md", "](/benchmarks.md")


def _outdated(app: Any, env: Any, *_: Any) -> list[str]:
    """Pages with parts that are written from the code are read anew each time: it may have changed."""
    pages = {name: env.doc2path(name) for name in env.found_docs}
    return [
        name for name, path in pages.items() if path.suffix == ".md" and FENCE.search(path.read_text(encoding="utf-8"))
    ]


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    from sitegen import mathml

    mathml.setup(app)
    app.connect("source-read", _read)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "version": "1"}
