"""One form of result: tables, a manifest, notes and sections, saved, read, drawn and shown in one place.

`result.py` has the base of every kind, with its JSON, `section.py` what one is shown as, `cards.py` the card of a
notebook and the lines of a terminal, and `kinds.py` the kinds by name.
"""

from rankscope.results.cards import card, lines
from rankscope.results.kinds import KINDS, class_of, read, results_of
from rankscope.results.result import Result, TableResult, plain_value
from rankscope.results.section import SENTENCES, Plot, Section, Table, Views, sentence

__all__ = [
    "KINDS", "Plot", "Result", "SENTENCES", "Section", "Table", "TableResult", "Views", "card", "class_of", "lines",
    "plain_value", "read", "results_of", "sentence",
]  # fmt: skip
