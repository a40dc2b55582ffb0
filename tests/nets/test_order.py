"""The halves of a block and the names of its norms, for each place that norms can have."""

from typing import Any

from rankscope.nets import Architecture
from rankscope.nets.order import norms, order

CROSS: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "cross_attention": True}


def test_the_third_half_has_norms_of_its_own_kind() -> None:
    for place, expected in (
        ("post", ["attention_norm", "cross_norm", "mlp_norm"]),
        ("pre", ["attention_norm", "cross_norm", "mlp_norm"]),
        ("output", ["attention_after", "cross_after", "mlp_after"]),
        ("sandwich", [f"{part}_{end}" for part in ("attention", "cross", "mlp") for end in ("norm", "after")]),
    ):
        assert norms(Architecture(**{**CROSS, "norm_place": place})) == expected
    bare = Architecture(**CROSS, mlp="none", attention_skip=0.5)
    assert [(half.skip, half.branches[0].part) for half in order(bare)] == [(0.5, "attention"), (0.5, "cross")]
