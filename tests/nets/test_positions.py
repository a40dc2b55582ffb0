"""Numbers that positions add to scores; whole schemes are held against other libraries in `test_parity.py`."""

import pytest

from rankscope.nets.positions import alibi_slopes


@pytest.mark.parametrize(("heads", "first"), [(8, 0.5), (4, 0.25), (6, 0.25)])
def test_alibi_slopes_are_the_papers(heads: int, first: float) -> None:
    """Press et al. 2022: for 8 heads 1/2, 1/4, ..., 1/256; else the lower power of two's, then between."""
    slopes = alibi_slopes(heads).tolist()
    assert slopes[0] == first and len(set(slopes)) == heads
    if heads == 8:
        assert slopes == [2.0**-k for k in range(1, 9)]
    if heads == 6:
        assert slopes == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
