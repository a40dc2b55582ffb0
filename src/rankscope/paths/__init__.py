"""Paths: a network as the exact sum of one term per way through its heads.

`frozen.py` holds a network as measured on its tokens; sums by length (`lengths.py`), by layer, head
and source token (`by_part.py`), single paths (`single_paths.py`) and the heaviest (`heaviest.py`) are traversals
of it, and `Decomposition` asks them. The axes of tensors, by name:

| axis         | what it counts                                                                                 |
|--------------|------------------------------------------------------------------------------------------------|
| `part`       | terms that go through the network side by side; what they are depends on the rules             |
| `length`     | the heads in a path, from 0 to the number of layers; of polynomials, the power of z            |
| `start`      | where paths start: 0 at the embedding, 1 at a bias                                             |
| `batch`      | samples                                                                                        |
| `token`      | tokens of a sample, valid ones first, padding after them                                       |
| `head`       | heads of a layer, from 0; `key_head` where several share keys and values                       |
| `width`      | entries of hidden states; `head_width` of one head's output, `mlp_width` inside the MLP        |
"""

from rankscope.paths.by_part import ByPosition
from rankscope.paths.counts import (
    Path,
    Ways,
    all_paths,
    counts_along,
    length_of,
    path_counts,
    path_shares,
    paths_along,
    sampled_paths,
)
from rankscope.paths.decomposition import Decomposition, PathTerm, decompose
from rankscope.paths.figures import (
    LABELLED,
    carried,
    heads_chart,
    heads_section,
    heads_table,
    length_views,
    lengths_chart,
    lengths_section,
    single_paths_chart,
)
from rankscope.paths.frozen import (
    FreezingRules,
    Frozen,
    FrozenLayer,
    FrozenNorm,
    FrozenRules,
    HeadTerms,
    Parts,
    Terms,
    WholeNetwork,
    centred_tokens,
    closure_of,
    freeze,
    frozen_pass,
    require_linear,
    share,
    size_of,
    uniform,
)
from rankscope.paths.heaviest import Heaviest
from rankscope.paths.lengths import ByLength, by_length, length_terms
from rankscope.paths.single_paths import AfterLayer, OwnAttention, PathRules, path_terms, rate

__all__ = [
    "ByLength", "ByPosition", "Decomposition", "FreezingRules", "Frozen", "FrozenLayer", "FrozenNorm",
    "FrozenRules", "HeadTerms", "Heaviest", "LABELLED", "OwnAttention", "Parts", "Path", "PathRules", "AfterLayer",
    "PathTerm", "Terms", "Ways", "WholeNetwork", "all_paths", "by_length", "carried", "centred_tokens",
    "closure_of", "counts_along", "decompose", "freeze", "frozen_pass", "heads_chart", "heads_section",
    "heads_table", "length_of", "length_terms", "length_views", "lengths_chart", "lengths_section", "path_counts",
    "path_shares", "path_terms", "paths_along", "rate", "require_linear", "sampled_paths", "share",
    "single_paths_chart", "size_of", "uniform",
]  # fmt: skip
