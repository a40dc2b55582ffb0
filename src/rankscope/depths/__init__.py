"""What each layer, head and path of a model contributes to its output, and what the output loses without it.

`card.py` has `depth` and what it returns. It asks `readings.py` for what one pass shows of each layer, `paths` for the
exact shares, `removals.py` for what is lost without each layer and head, `tables.py` for tables of all that and
`summary.py` for what they come to. `views.py` and `figures.py` show it.
"""

from rankscope.depths.card import DepthCard, depth

__all__ = ["DepthCard", "depth"]
