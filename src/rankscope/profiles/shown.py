"""What a profile and a summary show of themselves: a card in a notebook, a few lines in a terminal."""

import polars as pl

from rankscope.cards import card, counted, lines
from rankscope.figures import power
from rankscope.profiles.profile import Profile
from rankscope.profiles.summary import Summary

DRAWN = 8
"""Lines of a figure at most: there are as many colours."""


def profile_repr(profile: Profile) -> str:
    """Its size, and the ends of each line."""
    title = f"Profile: {_size(profile)}"
    return title if not len(profile.table) else lines(title, _ends(profile))


def profile_card(profile: Profile) -> str:
    """The first metric: its figure, and the ends of each line."""
    if not len(profile.table):
        return card(f"Profile: {_size(profile)}", None, (), ())
    few = Profile(_first_lines(profile), profile.manifest)
    said = "Geometric mean over samples and heads."
    return card(f"Profile: {_size(profile)}", few.plot(), *_table(profile), _notes(profile, said))


def summary_repr(summary: Summary) -> str:
    """Its size, and the ends of each line."""
    return lines(f"Summary: {_size(summary)}", _ends(summary))


def summary_card(summary: Summary) -> str:
    """The first metric: its figure, and the medians at the ends of each line."""
    few = Summary(_first_lines(summary), summary.manifest)
    said = f"Median of {counted(summary.excerpts, 'excerpt')}."
    return card(f"Summary: {_size(summary)}", few.plot(), *_table(summary), _notes(summary, said))


def _size(measured: Profile | Summary) -> str:
    table = measured.table
    if not len(table):
        return "no rows"
    many = (
        counted(measured.excerpts, "excerpt")
        if isinstance(measured, Summary)
        else counted(table["sample"].n_unique(), "sample")
    )
    layers = counted(int(table["layer"].to_numpy().max()), "layer")
    names = counted(len(measured.variants), "network")
    return f"{names}, {many}, {layers}, {', '.join(measured.arithmetics)}"


def _ends(measured: Profile | Summary) -> list[list[str]]:
    return [[row[0], row[1], f"{row[2]} → {row[4]}"] for row in _rows(measured)]


def _table(measured: Profile | Summary) -> tuple[list[str], list[list[str]]]:
    """Headings and lines; the floor is spoken of only where a line meets it."""
    rows = [[row[0], *row[2:]] for row in _rows(measured)]
    met = any(row[-1] for row in rows)
    headings = ["", "first", "middle", "last", "at floor"]
    return (headings, rows) if met else (headings[:-1], [row[:-1] for row in rows])


def _rows(measured: Profile | Summary) -> list[list[str]]:
    """Name, metric, first, middle, last and from where it is noise, of every line of the first metric."""
    metric = measured.metrics[0]
    several = len(measured.arithmetics) > 1
    rows = []
    for variant, arithmetic in measured.lines(metric):
        curve, noise = middle(measured, metric, variant, arithmetic)
        first = next((k for k, value in enumerate(curve) if value == value), 0)  # attention has no layer 0
        ends = (curve[first], curve[(first + len(curve)) // 2], curve[-1])
        floor = next((f"from layer {layer}" for layer, part in enumerate(noise) if part), "")
        name = f"{variant}, {arithmetic}" if several else variant
        rows.append([name, metric, *map(power, ends), floor])
    return rows


def middle(
    measured: Profile | Summary, metric: str, variant: str, arithmetic: str
) -> tuple[list[float], list[bool]]:
    """By layer: log10 of the geometric mean over samples and heads, or of a corpus the median; and whether
    it is only noise."""
    noise = measured.at_floor(metric, variant=variant, arithmetic=arithmetic).tolist()
    if isinstance(measured, Summary):
        return measured.curve(metric, "log10_q50", variant=variant, arithmetic=arithmetic).tolist(), noise
    curve = measured.curve(metric, "log10", variant=variant, arithmetic=arithmetic)
    return curve.transpose(0, 1).flatten(1).nanmean(1).tolist(), noise


def _first_lines(measured: Profile | Summary) -> pl.DataFrame:
    """The rows of the first metric and of as many lines as there are colours."""
    metric = measured.metrics[0]
    kept = pl.DataFrame(
        measured.lines(metric)[:DRAWN], schema={"variant": pl.String, "arithmetic": pl.String}, orient="row"
    )
    return measured.table.filter(metric=metric).join(
        kept, on=["variant", "arithmetic"], how="semi", maintain_order="left"
    )


def _notes(measured: Profile | Summary, said: str) -> list[str]:
    metric, others = measured.metrics[0], len(measured.metrics) - 1
    also = f" And {counted(others, 'other metric')}: plot(metric), table." if others else ""
    number = len(measured.lines(metric))
    drawn = [f"Drawn: the first {DRAWN} of {number} lines."] if number > DRAWN else []
    return [f"{metric}. {said}{also}", *drawn]
