"""The tour of docs/notebook.ipynb: every cell runs in a real kernel, and shows what the saved one shows."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

PLACE = Path(__file__).parent.parent / "docs" / "notebook.ipynb"
FIGURE = "measure(net, texts).plot()"
"""One more cell: pyplot was never imported, and the figure shows itself all the same."""


@pytest.fixture(scope="module")
def saved() -> Any:
    return nbformat.read(PLACE, 4)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The notebook, run anew, as `make docs` does too; kernels leave their files in a folder of their own."""
    book = nbformat.read(PLACE, 4)
    book.cells.append(nbformat.v4.new_code_cell(FIGURE))
    place = str(tmp_path_factory.mktemp("kernel"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
            patch.setenv(name, place)
        patch.setenv("OMP_NUM_THREADS", "1")
        NotebookClient(book, timeout=300, kernel_name="python3").execute()
    yield book


def codes(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[set[str]]:
    """What each output offers to be shown as."""
    return [set(output.data) for output in cell.outputs if output.output_type == "execute_result"]


def said(cell: Any) -> str:
    """The words of all outputs; a number is #, as its last digits may differ from machine to machine."""
    texts = [output.text if "text" in output else output.data["text/plain"] for output in cell.outputs]
    return re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", " ".join("".join(texts).split()))


def test_the_saved_notebook_is_small_and_sound(saved: Any) -> None:
    nbformat.validate(saved)
    assert PLACE.stat().st_size < 400_000
    text = PLACE.read_text(encoding="utf-8")
    assert "<script" not in text and "/site-packages/" not in text and "/home/" not in text
    assert [cell.execution_count for cell in codes(saved)] == list(range(1, len(codes(saved)) + 1))


@pytest.mark.slow
def test_every_cell_says_what_the_saved_one_says(saved: Any, live: Any) -> None:
    for old, new in zip(codes(saved), codes(live)[:-1], strict=True):
        assert old.source == new.source
        assert kinds(old) == kinds(new) and said(old) == said(new)


@pytest.mark.slow
def test_nothing_goes_to_stderr(live: Any) -> None:
    for cell in codes(live):
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", output


@pytest.mark.slow
def test_what_stands_last_in_a_cell_is_shown(live: Any) -> None:
    for cell in codes(live):
        last = ast.parse(cell.source).body[-1]
        assert len(kinds(cell)) == isinstance(last, ast.Expr)
    cards = [output for cell in codes(live) for output in cell.outputs if "text/html" in output.get("data", {})]
    assert len(cards) >= 7 and all("data:image/png;base64," in card.data["text/html"] for card in cards)


@pytest.mark.slow
def test_a_figure_shows_itself_without_pyplot(live: Any) -> None:
    (offered,) = kinds(codes(live)[-1])
    assert "image/png" in offered
