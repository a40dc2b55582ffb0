"""Figure 4 of the 2024 paper: full rank and its tolerances."""

import polars as pl

from rankscope_studies.wu2024 import fig4


def test_full_rank_is_asked_with_the_tolerance_of_each_arithmetic() -> None:
    values = pl.DataFrame({
        "network": ["a"] * 4, "sample": [0, 0, 1, 1], "layer": [0] * 4, "index": [1, 2] * 2, "size": [10] * 4,
        "singular_value": [1.0, 1e-9, 1.0, 1e-18], "mean_abs_cosine": [0.5] * 4,
    })  # fmt: skip
    ranks = fig4.by_input(values)
    assert ranks["full_rank"].to_list() == [1.0, 0.0] and ranks["full_rank_float32"].to_list() == [0.0, 0.0]
