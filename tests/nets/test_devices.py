"""Devices and dtypes that a network may have on this machine."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope import Architecture, Transformer, certify, decompose, depth, forecast, fresh, load, measure
from rankscope.errors import ArchitectureError, RankscopeError
from rankscope.forecasts import Design, ModuleInputs, Recipe
from rankscope.nets import check_device
from tests.forecasts.test_live_module import batches, cross_entropy, own_gpt
from tests.raising import raises


@pytest.mark.parametrize("device", ["mps", "mps:0", torch.device("mps"), "no such device", "meta"])
def test_a_device_without_float64_or_none_at_all_is_refused(device: torch.device | str) -> None:
    with raises(ArchitectureError, subject="device"):
        check_device(device)


def test_a_network_in_float64_cannot_go_to_mps_and_the_sentence_offers_float32() -> None:
    with raises(ArchitectureError, subject="device") as caught:
        fresh("bert-tiny").to(device="mps")
    assert "mps has none" in str(caught.value) and "float32" in str(caught.value)


def test_the_cpu_is_always_there() -> None:
    check_device("cpu")
    check_device("cpu", torch.float32)


ARCH = Architecture(layers=2, width=16, heads=2, mask="causal")
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}


def tokens() -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


def everything(X: Tensor) -> list[Any]:
    """Tables of what each function computes of one network and tokens."""
    net = Transformer.random(ARCH, dtype=torch.float32)
    profile, card = measure(net, X, metrics=["relative_residual", "entropy"]), depth(net, X)
    columns = ("theorem", "layer", "sample", "met", "log10_bound", "log10_measured")
    certified = certify(net, X).table
    told = [profile.table, card.layers, card.heads, certified.select(*(c for c in columns if c in certified.columns))]
    paths = decompose(net, X)
    return [*told, paths.by_length().table, paths.by_layer(), paths.by_head(), paths.residuals(count=3)]


@pytest.mark.parametrize("mode", MODES)
def test_networks_are_measured_the_same(mode: str) -> None:
    X = tokens()
    expected = everything(X)
    with MODES[mode]():
        found = everything(X)
    assert all(a.equals(b, null_equal=True) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_models_are_loaded_the_same(mode: str) -> None:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=50))
    expected = [load(model).state_dict(), fresh("bert-tiny", seed=3).state_dict()]
    with MODES[mode]():
        found = [load(model).state_dict(), fresh("bert-tiny", seed=3).state_dict()]
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
def test_networks_and_modules_are_forecast_the_same(mode: str) -> None:
    def told(found: Any) -> Any:
        return {name: part for name, part in found.to_dict().items() if name != "manifest"}  # which has the time

    def design() -> Any:
        return told(forecast(ARCH, design=Design(tokens=12), recipe=Recipe(steps=60)))

    def module() -> Any:
        return told(forecast(own, module=ModuleInputs(drawn, cross_entropy), recipe=Recipe(steps=60)))

    own, drawn = own_gpt(), batches()
    expected = [str(design()), str(module())]
    with MODES[mode]():
        assert [str(design()), str(module())] == expected


def test_tensors_of_another_mode_are_taken_or_refused_in_a_sentence() -> None:
    with torch.inference_mode():
        X, drawn, own = tokens(), batches(), own_gpt()
    assert all(a.equals(b) for a, b in zip(everything(X)[1:3], everything(tokens())[1:3], strict=True))
    forecast(own, module=ModuleInputs(batches(), cross_entropy))
    meta = [{name: ids.to("meta") for name, ids in batch.items()} for batch in batches()]
    net = Transformer.random(ARCH)
    refused: list[Callable[[], Any]] = [
        lambda: forecast(own_gpt(), module=ModuleInputs(drawn, cross_entropy)),
        lambda: forecast(own_gpt(), module=ModuleInputs(meta, cross_entropy)),
        *(lambda of=of: of(net, tokens().to("meta")) for of in (measure, depth, certify, decompose)),
    ]
    for ask in refused:
        with pytest.raises(RankscopeError, match="in memory") as caught:
            ask()
        assert "\n" not in str(caught.value)
