"""What each layer, head and path of a model contributes to its output, and smaller models made from that.

`card.py` has `depth` and what it returns. It asks `sources` for a network and tokens, `passes.py` for what one pass
shows of each layer, the exact shares, and what is lost without each layer and head, makes tables of all that and asks
`tables.py` what they come to, in cells of text and a figure. `cut.py` makes smaller models, by the scores of
`criteria.py`.
"""

from rankscope.depths.card import DepthCard, depth
from rankscope.depths.criteria import Sample, next_token_loss
from rankscope.depths.cut import Cut, Fidelity, ScoringOptions, cut, fidelity, fidelity_of
from rankscope.depths.passes import layers_applied
from rankscope.depths.tables import MARKS, norms_sentence, printed

__all__ = [
    "Cut", "DepthCard", "Fidelity", "MARKS", "Sample", "ScoringOptions", "cut", "depth", "fidelity", "fidelity_of",
    "layers_applied", "next_token_loss", "norms_sentence", "printed",
]  # fmt: skip
