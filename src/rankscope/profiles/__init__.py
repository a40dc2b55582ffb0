"""Measuring networks layer by layer, and what comes of it."""

from rankscope.profiles.corpus import measure_corpus
from rankscope.profiles.corpus_rows import CorpusRows
from rankscope.profiles.measure import DEFAULT_METRICS, measure, measure_together
from rankscope.profiles.pass_cost import in_words
from rankscope.profiles.profile import SCHEMA, Profile
from rankscope.profiles.propagation import ARITHMETICS, one_pass
from rankscope.profiles.readers import Reader
from rankscope.profiles.readings import ReadingRow, Readings, read_tensor, readings_table
from rankscope.profiles.summary import Summary
from rankscope.profiles.verdict import disagreement

__all__ = [
    "ARITHMETICS", "CorpusRows", "DEFAULT_METRICS", "Profile", "Reader", "ReadingRow", "Readings", "SCHEMA", "Summary",
    "disagreement", "in_words", "measure", "measure_corpus", "measure_together", "one_pass", "read_tensor",
    "readings_table",
]  # fmt: skip
