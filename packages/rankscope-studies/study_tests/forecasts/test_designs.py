"""Designs are drawn alike everywhere, and those of the shipped table are still what was trained."""

import pytest
import torch

from rankscope.errors import LabError
from rankscope.forecasts import trainings
from rankscope.lab import with_gains
from rankscope.nets import Architecture, Transformer
from rankscope_studies.forecasts.designs import Design, draw_design


def test_designs_of_the_table_are_those_that_were_trained() -> None:
    rows = trainings().sample(25, seed=1)
    assert [draw_design(number).key for number in rows["number"]] == rows["key"].to_list()


def test_the_space_is_wide() -> None:
    designs = [draw_design(number) for number in range(60)]
    assert {design.task for design in designs} == {"next-character", "induction"}
    assert {design.fields["norm_place"] for design in designs} == {"pre", "post"}
    assert min(design.layers for design in designs) <= 4
    assert max(design.layers for design in designs) >= 36
    assert any(design.remedy for design in designs)


def test_gains_scale_queries_keys_and_values_alone() -> None:
    plain = Design("induction", 2, {})
    louder = Design("induction", 2, {}, query_gain=2.0, value_gain=0.5)
    before, after = (design.training(3).networks()[0].state_dict() for design in (plain, louder))
    for name, tensor in before.items():
        factor = 2.0 if ("query.weight" in name or "key.weight" in name) else 0.5 if "value.weight" in name else 1.0
        assert torch.equal(after[name], factor * tensor), name


def test_a_gain_of_no_weight_is_refused() -> None:
    net = Transformer.random(Architecture(layers=1, width=4, heads=2))
    with pytest.raises(LabError) as refused:
        with_gains(net, [("attention.querry.weight", 2.0)])
    assert refused.value.subject == "gains"
