"""The site: what is written from the code has an entry for everything, and formulas are what they say."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import rankscope
from rankscope import errors
from rankscope.lab import Digits
from rankscope.metrics import METRICS
from rankscope.remedies import REMEDIES
from rankscope.theory import THEOREMS
from sitegen import (
    DOCS,
    FENCE,
    STUDIES,
    api,
    commands,
    file_of,
    filled,
    gallery,
    links,
    metrics,
    parts,
    picture,
    remedies,
    tables,
    theorems,
)  # fmt: skip
from sitegen.formulas import tex
from sitegen.markdown import formulas, page_formulas
from sitegen.markdown import table as markdown_table
from tests.cli.documented import section, shapes

ROOT = Path(__file__).parent.parent
PAGES = [page for page in sorted([*DOCS.glob("**/*.md"), *STUDIES.glob("**/*.md")]) if "_build" not in page.parts]


def on_site(path: Path) -> str:
    """Where a file stands on the site."""
    return path.relative_to(STUDIES if STUDIES in path.parents else DOCS).as_posix()


def test_every_public_name_is_described() -> None:
    described = {page.stem for page in (DOCS / "reference" / "api").glob("*.md")} - {"index"}
    assert described == {*api.rooms(), *api.DEEPER}
    for room in ["", *described - set(api.LOOPS)]:  # those are imported where the site is built
        shown = api.page(room)
        entries = set(re.findall(r"^:{5,6}\{py:(?:class|function|data|exception)\} (\w+)", shown, re.MULTILINE))
        named = set(re.findall(r"\{py:obj\}`rankscope\.(\w+)`", shown))
        assert entries | named == set(api.public(room)), room
    assert set(rankscope.__all__) == set(api.public(""))


def test_what_a_class_says_is_there_with_its_fields_and_methods() -> None:
    shown = api.page("")
    assert "| `layers` | `int` |" in shown and ":::::{py:method} variant(" in shown
    assert "heads: int=4" in api.signature(Digits.architecture)  # other classes in its file have 2
    assert re.search(r"\{py:function\} measure\(net: NetworkLike, X: .*\) -> rankscope\.Profile", shown)


@pytest.mark.parametrize(
    ("known", "page", "heading"),
    [
        (METRICS, metrics.page, "### "),
        (THEOREMS, theorems.page, "## "),
        (commands.commands(), commands.page, "## "),
        (tables.schemas(), tables.page, "### "),
    ],
)
def test_everything_that_is_known_has_its_section(known: dict[str, Any], page: Any, heading: str) -> None:
    found = re.findall(rf"^{heading}(\S+)$", page(), re.MULTILINE)
    assert found == list(known)


def test_every_option_remedy_and_column_has_its_row() -> None:
    for name, command in commands.commands().items():
        shown = commands.section(name, command)
        options = [each for each in command.params if each.opts[0].startswith("-")]
        assert all(f"`{each.opts[0]}`" in shown for each in options if not each.hidden)
    assert [line.split("`")[1].split(":")[0] for line in remedies.page().splitlines()[2:]] == list(REMEDIES)
    assert all(tables.meaning(column) for columns in tables.schemas().values() for column in columns)


def test_the_page_of_the_command_line_has_every_command_option_and_shape() -> None:
    """Options that several commands have, with these commands; `tests/cli/running.py` holds answers to their shapes."""
    known = commands.commands()
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert [name for name in known if f"| `rankscope {name}" not in page.partition("\n## ")[0]] == []
    has: dict[str, set[str]] = {}
    for name, command in known.items():
        for each in command.params:
            for option in (*each.opts, *each.secondary_opts):
                if option.startswith("-"):
                    has.setdefault(option, set()).add(name)
    shown: dict[str, set[str]] = {}
    for _, options, _, of in section("Options, the same everywhere"):
        named = set(re.findall(r"[\w]+", of.removeprefix("all but")))
        named = set(known) if of == "all" else set(known) - named if of.startswith("all but") else named
        shown |= dict.fromkeys(re.findall(r"`(--?[\w-]+)`", options), named)
    assert {name: of for name, of in shown.items() if has.get(name) != of} == {}
    assert {name for name, of in has.items() if len(of) > 1} <= set(shown)
    assert set(shapes()) == {name for name in known if name in has["--json"]} and all(shapes().values())


def test_every_error_has_a_cause_and_a_cure() -> None:
    known = [name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)]
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert [name for name in known if f"`{name}`" not in page and f".{name}`" not in page] == []


def test_every_picture_is_in_the_gallery_with_a_command_that_there_is() -> None:
    shown = gallery.pictures()
    there = {on_site(path) for docs in (DOCS, STUDIES) for path in docs.glob("**/*.png") if "_build" not in path.parts}
    assert {each.path for each in shown} == there
    for each in shown:
        program, name, *rest = each.command.split()
        known = find_spec(rest[0]) is not None if program == "python" else name in commands.commands()
        assert known and file_of(each.page).is_file()


def test_what_pages_ask_for_is_written() -> None:
    asked = [fence for page in PAGES for fence in FENCE.findall(page.read_text(encoding="utf-8"))]
    assert {name for name, _ in asked} == set(parts())
    assert "```{generated}" not in filled("```{generated} remedies\n```")


def test_pages_of_the_studies_are_linked_to_as_files_and_stand_on_the_site() -> None:
    text = "[a](../packages/rankscope-studies/docs/studies/a.md), [b](../../../../docs/b.md#c), [d](d.md)"
    assert links(text) == "[a](/studies/a.md), [b](/b.md#c), [d](d.md)"
    assert picture("images/depth.png") == "/images/depth.png"
    assert (DOCS / picture("studies/images/layernorm.png")[1:]).resolve().parent == STUDIES / "studies" / "images"
    here, there = ({path.name: path for path in (docs / "studies").glob("*.md")} for docs in (DOCS, STUDIES))
    assert here.keys() == there.keys() and len(there) > 12
    assert all(f"docs/studies/{name}\n" in page.read_text(encoding="utf-8") for name, page in here.items())


def test_every_page_can_be_reached() -> None:
    """From a table of contents; the front page has none above it."""
    listed = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {on_site((page.parent / name).resolve()) for name in names}
    pages = {on_site(page.with_suffix("")) for page in PAGES if "reproduction" not in page.parts}
    assert pages | {"notebook"} == listed | {"index"}


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ("||X||_F^2", r"\|X\|_{F}^{2}"),
        ("sqrt(n) <= 1", r"\sqrt{n} \le 1"),
        ("W_QK,h = 1", r"W_{QK,h} = 1"),
        ("X = 1 xᵀ + eˢ R", r"X = 1 x^{\mathsf{T}} + e^{s} R"),
        ("Σ_j |P_ij - P_i'j| > 0", r"\sum _{j} |P_{ij} - P_{i'j}| > 0"),
        ("½ max_ij |x| = 1,    y = 2", r"\tfrac{1}{2} \max_{ij} |x| = 1, \quad y = 2"),
        ("(1 - eps^r)^⌊t/r⌋", r"(1 - \varepsilon^{r})^{\lfloor t/r\rfloor}"),
        ("|w + a| mu <= e^Dᵢⱼ", r"|w + a| \mu \le e^{D_{ij}}"),
    ],
)
def test_formulas_are_read(plain: str, expected: str) -> None:
    found = tex(plain)
    assert found is not None and re.sub(r"\s+", " ", found) == expected


@pytest.mark.parametrize(
    "code",
    ["measure(net, X)", "relative_mu", "sigma_min", "X", "mu", "k=3", "[batch, token, width]", "x.X", "-o",
     "'a' / 'b'", "runs/demo", "padding == 0", "a for a in b", "net.variant(skip=0.5)"],
)  # fmt: skip
def test_code_stays_code(code: str) -> None:
    assert tex(code) is None and formulas(f"`{code}`") == f"`{code}`"


def test_formulas_of_a_page_leave_its_code_alone() -> None:
    page = "Let `a + b`.\n\n    X = 1 xᵀ + R\n\n```python\nx = `a + b`\n```\n\n    rankscope demo\n\n"
    shown = page_formulas(page)
    assert "{math}`a + b`" in shown and "```{math}\nX = 1 x^{\\mathsf{T}} + R\n```" in shown
    assert "```python\nx = `a + b`\n```" in shown and "    rankscope demo\n" in shown


def test_a_table_keeps_its_cells() -> None:
    assert markdown_table(["a"], [["x | y\nz"]]).splitlines()[2] == r"| x \| y z |"


def test_every_formula_can_be_drawn() -> None:
    drawn = pytest.importorskip("sitegen.mathml").drawn
    half = "".join(drawn(str(tex("½ max_ij |x| = 1"))).split())
    assert re.search(r"<mfrac[^>]*><mn>1</mn><mn>2</mn></mfrac>", half)
    shown = [metrics.page(), theorems.page(), api.page("metrics"), api.page("theory")]
    shown += [page_formulas((DOCS / f"{name}.md").read_text(encoding="utf-8")) for name in ("deviation", "theory")]
    found = [each for page in shown for each in re.findall(r"\{math\}`([^`]+)`|```\{math\}\n(.*?)\n```", page)]
    assert len(found) > 200 and all(drawn(inline or block).startswith("<math") for inline, block in found)


class Links(HTMLParser):
    """What a page links to and loads."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {each for each in (given.get("id"), given.get("name")) if each}
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in ("script", "img", "source"):
            self.loaded += [str(given["src"])] if given.get("src") else []
        if tag == "link" and given.get("rel") in ("stylesheet", "preload"):
            self.loaded.append(str(given["href"]))


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    pages = {path: Links() for path in tmp_path.glob("**/*.html") if "_static" not in path.parts}
    for path, found in pages.items():
        found.feed(path.read_text(encoding="utf-8"))
    for path, found in pages.items():
        assert not [each for each in found.loaded if urlsplit(each).netloc], path
        for each in found.links:
            to = urlsplit(each)
            if to.scheme or to.netloc:
                continue
            target = path if not to.path else (path.parent / unquote(to.path)).resolve()
            assert target.exists(), f"{path.name} links to {each}"
            if to.fragment and target in pages:
                assert unquote(to.fragment) in pages[target].ids | {""}, f"{path.name} links to {each}"


def test_the_page_about_the_code_names_files_that_exist() -> None:
    text = (DOCS / "code.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.py)?)`", text))
    assert len(named) > 60
    homes = (ROOT / "src" / "rankscope", ROOT / "packages" / "rankscope-studies" / "src", ROOT)
    assert not [path for path in named if not any((home / path).exists() for home in homes)]
