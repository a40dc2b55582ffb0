"""What objects show of themselves: well-formed, escaped, bounded, with the object's own numbers."""

import io
import re
from html.parser import HTMLParser

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from rankscope import Profile, certify, decompose, fresh, load, measure
from rankscope.figures import panels, power, rendered
from rankscope.paths import path_counts
from rankscope.profiles import Summary, measure_corpus
from rankscope.results import card, lines
from rankscope.results.cards import ROWS, TEXT_LINES, _columns
from rankscope.theory import Certificates, critical_skip
from rankscope.theory.depth import depth_of

EVIL = "<script>alert('x')</script>&\"quoted\""
VOID = {"img", "br"}
NET = fresh("bert-tiny")
ENCODED = NET.encode(["Call me Ishmael. Some years ago", "never mind how long precisely"], 8)


class Page(HTMLParser):
    """Tags that open and close in order; cells, images and text as read."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.rows: list[list[str]] = []
        self.images: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "img":
            self.images.append(dict(attrs)["src"] or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def shown(thing: object) -> Page:
    html = thing._repr_html_()  # type: ignore[attr-defined]
    assert len(html) < 200_000
    page = Page(html)
    known = {"div", "img", "table", "thead", "tbody", "tr", "th", "td"}  # no sanitiser minds these
    assert page.tags <= known
    assert page.attributes <= {"style", "src", "alt", "width", "colspan"} and "url(" not in html
    assert all(source.startswith("data:image/png;base64,") for source in page.images)
    assert all("background:#fff" in each for each in re.findall("<img[^>]*", html))  # figures have dark ink
    assert not re.search(r"(?<!-)color:(?!inherit)", re.sub("<img[^>]*", "", html))  # text has the page's
    return page


def test_a_profile_shows_the_ends_of_its_curves() -> None:
    profile = Profile.join(
        [measure(NET.variant("san"), *ENCODED, variant=EVIL), measure(NET, *ENCODED, variant="whole")]
    )
    page = shown(profile)
    assert len(page.images) == 1 and page.rows[0][1:] == ["first", "middle", "last"]
    assert [row[0] for row in page.rows[1:]] == [EVIL, "whole"]
    for row, variant in zip(page.rows[1:], profile.variants, strict=True):
        mean = profile.curve("relative_residual", "log10", variant=variant).mean(0)
        assert [row[1], row[-1]] == [power(float(mean[0])), power(float(mean[-1]))]
        (line,) = (line for line in repr(profile).splitlines() if line.startswith(f"  {row[0]}"))
        assert line.split()[-3:] == row[1:]
    assert len(repr(profile).splitlines()) == 5  # a title, a sentence, headings and both lines


@pytest.mark.slow
def test_a_large_profile_stays_small() -> None:
    one = measure(NET, *ENCODED, ["relative_residual"], variant="v")
    many = [pl.col("variant").replace({"v": f"variant {k}"}) for k in range(60)]
    tables = [one.table.with_columns(name) for name in many]
    profile = Profile(pl.concat(tables), one.manifest)
    page = shown(profile)
    assert len(page.rows) == ROWS + 2 and page.rows[-1] == [f"… and {60 - ROWS} more"]
    assert "Drawn: the first 8 of 60 lines." in page.text
    assert len(repr(profile).splitlines()) == TEXT_LINES and repr(profile).endswith("more")


@pytest.mark.slow
def test_metrics_of_attention_and_noise() -> None:
    attention = measure(NET, *ENCODED, ["dobrushin"])
    mean = attention.curve("dobrushin", "log10")[:, 1].mean()
    assert shown(attention).rows[1][1] == power(float(mean))
    deep = NET.variant("san").variant(layers=6)
    noise = shown(measure(deep, *ENCODED, arithmetic="float32"))
    assert noise.rows[0][-1] == "at floor" and noise.rows[1][-1].startswith("from layer")


def test_a_profile_of_nothing() -> None:
    empty = measure(NET, torch.zeros(0, 4, NET.arch.width))
    assert repr(empty) == "Profile: no rows" and shown(empty).rows == []


def test_a_summary_shows_its_medians() -> None:
    texts = ["Call me Ishmael.", "Some years ago, never mind how long", "having little or no money"]
    found = measure_corpus({EVIL: NET}, texts)
    assert isinstance(found, Summary)
    page = shown(found)
    median = found.curve("relative_residual", "log10_q50")
    assert page.rows[1][0] == EVIL and page.rows[1][3] == power(float(median[-1]))
    assert "Median of 3 excerpts" in page.text and "3 excerpts" in repr(found)


@pytest.mark.slow
def test_a_decomposition_shows_its_lengths() -> None:
    d = decompose(NET, *ENCODED)
    found = d.by_length()
    counts = [str(count) for count in path_counts(2, 2)]
    for thing in (d, found):
        page = shown(thing)
        assert [row[1] for row in page.rows[1:]] == counts
        shares = found.table.filter(start="embedding").group_by("length").agg(pl.col("share").mean())
        for length, share in shares.iter_rows():
            assert page.rows[1 + length][2] == f"{share:+z.3f}"
    assert repr(d) == "Decomposition: 2 layers, 2 heads, 2 samples of up to 7 tokens, 9 paths"
    assert repr(found).splitlines()[-1].split()[:2] == ["2", "4"] and len(repr(found).splitlines()) == 5


@pytest.mark.slow
def test_certificates_show_bounds_next_to_measurements() -> None:
    found = certify(NET.variant("san"), *ENCODED)
    page = shown(found)
    met = found.summary().filter(pl.col("met_to") > 0)
    assert [row[0] for row in page.rows[1:]] == met["theorem"].to_list()
    for row, expected in zip(page.rows[1:], met.iter_rows(named=True), strict=True):
        assert row[4] == power(expected["log10_measured"])
        assert row[6] == ("vacuous" if expected["says_at"] is None else power(expected["log10_bound"]))
        written = [line for line in repr(found).splitlines() if line.split()[0] == row[0]]
        assert all(row[4] in line and row[6] in line for line in written)
        assert all(cell in str(found) for cell in (row[0], row[4], row[6]))
    assert sum(line.split()[0] in met["theorem"].to_list() for line in repr(found).splitlines()) > 3
    drawn = met.filter(pl.col("quantity") != "affine_rank")["quantity"].n_unique()
    assert "Hypotheses not met: " in page.text and len(page.images) == drawn + 1 > 2  # and one legend of all
    ranks = certify(NET, *ENCODED, theorems="norm-rank")
    assert shown(ranks).images == []  # there is no figure of ranks


@pytest.mark.slow
def test_a_collapse_depth_shows_what_is_measured_and_proved() -> None:
    found: Certificates = certify(NET.variant("san").variant(layers=4), *ENCODED)
    depth = depth_of(found, 1e-6)
    page = shown(depth)
    layer = max(depth.measured["layer"].to_list())
    assert f"uniform by layer {layer}" in page.text and f"uniform by layer {layer}" in repr(depth)
    for name, _, said in page.rows[1:]:
        layers = depth.guaranteed.filter(theorem=name)["layer"].to_list()
        assert int(re.findall(r"\d+", said)[0]) in layers
    apart = depth_of(certify(NET, *ENCODED, theorems="dobrushin"), 1e-6)
    assert "no sample of 2 is uniform at any layer" in repr(apart)
    assert "No theorem proves or excludes it" in shown(apart).text


def test_a_card_escapes_everything() -> None:
    figure, _ = panels()
    page = Page(card(EVIL, lambda: figure, [EVIL, "b"], [[EVIL, "1"]], [EVIL]))
    assert page.rows == [[EVIL, "b"], [EVIL, "1"]] and page.text.count(EVIL) == 4
    assert not page.tags & {"script"}


@pytest.mark.slow
def test_panels_are_images_of_their_own_that_leave_out_nothing_but_white() -> None:
    for number in (1, 3):
        figure, axes = panels(number)
        for place, each in enumerate(axes):
            each.plot([1, 2, 3], label=f"line {place}")
            each.set(title="a title", xlabel="layer", ylabel="residual")
            each.legend()
        image = rendered(figure)
        columns = _columns(figure, image.width)
        assert len(columns) == number == len(Page(card("", lambda shown=figure: shown, (), ())).images)
        left_out = np.asarray(image).min(axis=(0, 2)) == 255
        for left, right in columns:
            left_out[left:right] = True
        assert left_out.all()


@pytest.mark.slow
def test_panels_above_each_other_stay_together() -> None:
    figure, _ = panels(2, rows=2)
    assert len(Page(card("", lambda: figure, (), ())).images) == 1


def test_a_figure_shows_itself() -> None:
    figure, _ = panels(2, width=5.0, height=3.0)
    data, size = figure._repr_png_()  # type: ignore[attr-defined]
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "PNG" and image.size == (2 * 720, 2 * 216)
    assert size == {"width": 720, "height": 216}  # ten inches by three, of 72 pixels


@pytest.mark.slow
def test_nothing_fills_the_screen() -> None:
    d = decompose(NET, *ENCODED)
    path = d.path((0, None))
    things = [NET, NET.arch, NET.origin, NET.weights, NET.run(ENCODED[0]), d, d.frozen, path, d.top(3)]
    loaded = load("minilm")
    for thing in [*things, loaded, loaded.origin, loaded.weights]:
        assert len(repr(thing)) < 400 and "tensor(" not in repr(thing)
    assert "minilm" in repr(loaded) and "minilm" in repr(loaded.origin)
    assert f"{sum(w.numel() for w in NET.state_dict().values()):,} numbers" in repr(NET.weights)
    assert repr(path) == f"PathTerm(0, None): length 1, term {tuple(d.output.shape)}"
    best = d.top(3)
    shown_lines = repr(best).splitlines()[1:]
    assert all(f"{w:.4g}" in line for w, line in zip(best.weights, shown_lines, strict=True))


@pytest.mark.slow
def test_a_critical_skip_says_both_weights_and_why() -> None:
    found = critical_skip(NET, *ENCODED, high=1.0, tolerance=0.1)
    first, second = repr(found).splitlines()[1:]
    assert first.endswith(found.why) and second.endswith(found.theory_why)


def test_lines_are_aligned_and_counted() -> None:
    text = lines("title", ["", "n"], [["a", "1"], ["long", "2"]], ["A sentence."])
    assert text.splitlines() == ["title", "  A sentence.", "        n", "  a     1", "  long  2"]
    many = lines("title", [], [["x"]] * 20).splitlines()
    assert len(many) == TEXT_LINES and many[-1] == f"  ... and {20 - (TEXT_LINES - 2)} more"
