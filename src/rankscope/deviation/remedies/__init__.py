"""Rules of the remedies (`nets/remedies/`) on states, a file per family."""

from collections.abc import Callable
from typing import Any

from rankscope.deviation.remedies.branches import weighted
from rankscope.deviation.remedies.differential import differential, differential2, head_norm
from rankscope.deviation.remedies.gates import head_gated
from rankscope.deviation.remedies.shaping import shaped
from rankscope.deviation.remedies.tokens import contrasted, featscaled
from rankscope.deviation.remedies.values import drawn, value_residual
from rankscope.nets.remedies.branches import ByDepth, ByLayer, Trained
from rankscope.nets.remedies.contranorm import Contrast
from rankscope.nets.remedies.differential import Differential, Differential2, HeadNorm
from rankscope.nets.remedies.featscale import FeatScale
from rankscope.nets.remedies.gates import HeadGate
from rankscope.nets.remedies.shaping import AttnScale, Centred, Shaped
from rankscope.nets.remedies.values import Drawn, ValueResidual

Rule = Callable[[Any, Any, Any, Any, Any], Any]
"""(remedy, x, block, rules, inside)."""

RULES: dict[type, Rule] = {
    **dict.fromkeys((Shaped, AttnScale, Centred), shaped),
    **dict.fromkeys((Trained, ByDepth, ByLayer), weighted),
    **{Differential: differential, Differential2: differential2, HeadNorm: head_norm, HeadGate: head_gated},
    **{ValueResidual: value_residual, Drawn: drawn, FeatScale: featscaled, Contrast: contrasted},
}
