"""Measuring networks layer by layer, and what comes of it."""

from rankscope.metrics import Readings
from rankscope.profiles.cloud import CLOUD, SPECTRUM, ShapeReader, SpectrumReader, cloud_rows, cloud_table
from rankscope.profiles.corpus import BatchMeasurement, BatchRunner, corpus_steps, measure_corpus
from rankscope.profiles.figures import (
    VARIANTS,
    arithmetics_chart,
    cloud_chart,
    curves_chart,
    metric_title,
    spectrum_chart,
)
from rankscope.profiles.measuring import (
    ARITHMETICS,
    DEFAULT_METRICS,
    PassOptions,
    Progress,
    expected_seconds,
    measure,
    measure_together,
    one_pass,
)
from rankscope.profiles.pass_cost import check_memory, in_words, seconds
from rankscope.profiles.profile import SCHEMA, Bounds, Profile, by_variant, compared_arithmetics, ends_table
from rankscope.profiles.readers import (
    MetricReader,
    Reader,
    ReadingRow,
    ResidualShape,
    nan_where_broken,
    read_tensor,
    readings_table,
    row_sum_defect,
)
from rankscope.profiles.summary import CorpusRows, Summary
from rankscope.profiles.verdict import Ending, disagreement, ending, ends_of, listing, sentence, undecided
from rankscope.profiles.views import CurveView, geometric, zeros_note

__all__ = [
    "ARITHMETICS", "BatchMeasurement", "BatchRunner", "Bounds", "CLOUD", "CorpusRows", "CurveView", "DEFAULT_METRICS",
    "Ending", "MetricReader", "PassOptions", "Profile", "Progress", "Reader", "ReadingRow", "Readings", "ResidualShape",
    "SCHEMA", "SPECTRUM", "ShapeReader", "SpectrumReader", "Summary", "VARIANTS", "arithmetics_chart", "by_variant",
    "check_memory", "cloud_chart", "cloud_rows", "cloud_table", "compared_arithmetics", "corpus_steps", "curves_chart",
    "disagreement", "ending", "ends_of", "ends_table", "expected_seconds", "geometric", "in_words", "listing",
    "measure", "measure_corpus", "measure_together", "metric_title", "nan_where_broken", "one_pass", "read_tensor",
    "readings_table", "row_sum_defect", "seconds", "sentence", "spectrum_chart", "undecided", "zeros_note",
]  # fmt: skip
