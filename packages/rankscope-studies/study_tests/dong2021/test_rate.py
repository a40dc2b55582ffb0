"""The law of 3^L, and where Thm 2.3 proves it."""

import math
from itertools import pairwise

import pytest

from rankscope_studies.dong2021 import rate


@pytest.mark.slow
def test_the_rate_is_three_and_small_tokens_prove_it() -> None:
    law = rate._law("bert-tiny", 8)
    usual = law.filter(size="usual", theorem="dobrushin").sort("layer")["log10_measured"].to_list()
    assert rate.slopes(usual)[-1] == pytest.approx(3.0, abs=1e-3)
    small = law.filter(size="small", theorem="dong2021-2.3").sort("layer")
    assert small["met"].all() and not small["vacuous"][-1]
    # base r^2 = 0.1: the bound's log is 3^l (log r + log base / 2) - log base / 2.
    logs = small["log10_bound"].to_list()
    assert all(after < 3 * before + 2 * math.log10(1e3) for before, after in pairwise(logs))
    assert rate.slopes(logs)[-1] == pytest.approx(3.0, abs=1e-2)
