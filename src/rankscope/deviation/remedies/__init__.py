"""Rules of the remedies (`nets/remedies/`) on states, a file per family."""

from collections.abc import Callable
from typing import Any

from rankscope.deviation.remedies.differential import differential, head_norm
from rankscope.deviation.remedies.shaping import shaped
from rankscope.nets.remedies.differential import Differential, HeadNorm
from rankscope.nets.remedies.shaping import AttnScale, Centred, Shaped

Rule = Callable[[Any, Any, Any, Any, Any], Any]
"""(remedy, x, block, rules, inside)."""

RULES: dict[type, Rule] = {
    **{Shaped: shaped, AttnScale: shaped, Centred: shaped},
    **{Differential: differential, HeadNorm: head_norm},
}
