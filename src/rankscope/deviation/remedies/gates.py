"""The rule of gates on heads (`nets/remedies/gates.py`) on states; those of each entry are in `gates.py`."""

from typing import Any

from rankscope.deviation.attention import HeadOutputs
from rankscope.deviation.gates import gated
from rankscope.deviation.mlp import affine
from rankscope.deviation.state import State
from rankscope.nets.remedies.gates import HeadGate
from rankscope.nets.weights import Linear


def head_gated(remedy: HeadGate, said: HeadOutputs, block: Any, rules: Any, inside: State) -> HeadOutputs:
    """Of one entry a head."""
    w = block.weights.parts[remedy.name]
    z = rules.perturb(affine(inside.x, Linear(w["weight"], w.get("bias"))))  # [batch, head]
    d = rules.perturb(inside.R.mapped(lambda v: v @ w["weight"]))  # [batch, token, head]
    return gated(said, z.mapped(lambda v: v[..., None]), d.mapped(lambda v: v.mT[..., None]))
