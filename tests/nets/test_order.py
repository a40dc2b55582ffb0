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


def test_a_bare_layer_attends_to_what_enters_it_and_keeps_its_other_norms() -> None:
    for place, expected in (
        ("pre", ["cross_norm", "mlp_norm"]),
        ("sandwich", ["attention_after", "cross_norm", "cross_after", "mlp_norm", "mlp_after"]),
    ):
        arch = Architecture(**{**CROSS, "norm_place": place, "bare_layers": (1,)})
        assert norms(arch, 1) == expected
        assert len(norms(arch, 0)) == len(expected) + 1 and "attention_norm" in norms(arch, 0)
