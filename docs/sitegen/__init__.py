"""What Sphinx needs to make a site of docs/: pages that are written from the code, formulas, pictures.

A page says where something is put in that is written from the code:

    ```{generated} metrics
    ```

Each module here writes one such part, as plain Markdown, and knows nothing of Sphinx.
"""

import re
from collections.abc import Callable
from os.path import relpath
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent
STUDIES = DOCS.parent / "packages" / "rankscope-studies" / "docs"
"""Pages of the studies, which docs/studies includes, and what was reproduced: part of the site like those of docs/."""
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


def file_of(path: str) -> Path:
    """The file that is `path` on the site: one of docs/, or of those of the studies."""
    return (STUDIES if (STUDIES / path).exists() else DOCS) / path


def picture(path: str) -> str:
    """How a page names a picture that is `path` on the site."""
    return f"/{relpath(file_of(path), DOCS)}"


def links(text: str) -> str:
    """A page, or a file of the repository that it includes, with links to files as the site has them."""
    return re.sub(r"\]\((?:\.\./)*(?:packages/rankscope-studies/)?docs/", "](/", text).replace(
        "](../benchmarks/RESULTS.md", "](/benchmarks.md"
    )


def filled(text: str) -> str:
    """A page with its generated parts."""
    return FENCE.sub(lambda fence: parts()[fence[1]](*filter(None, [fence[2]])), text)


def _read(app: Any, name: str, source: list[str]) -> None:
    if app.env.doc2path(name).suffix != ".md":
        return
    if name in FORMULAS:
        from sitegen.markdown import page_formulas

        source[0] = page_formulas(source[0])
    source[0] = filled(links(source[0]))


def _include(app: Any, path: Any, name: str, content: list[str]) -> None:
    content[0] = links(content[0])


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
    app.connect("include-read", _include)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "version": "1"}
