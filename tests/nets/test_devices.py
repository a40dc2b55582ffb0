"""Devices and dtypes that a network may have on this machine."""

import pytest
import torch

from rankscope import fresh
from rankscope.errors import ArchitectureError
from rankscope.nets.devices import check_device
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
