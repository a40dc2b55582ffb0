"""Remedies on values, branches and the stream go onto every network that they do not refuse, are measured,
and are refused by theorems."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope import certify, load, measure
from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer
from tests.builders import normal
from tests.raising import raises
from tests.remedies.small_networks import PADDING, small, stirred

PARTS = [
    *("rezero", "skipinit", "sqrtl", "lnscale", "valueresidual", "neutreno", "featscale", "contranorm"),
    *("gate", "headgate"),
]
NETWORKS: dict[str, dict[str, Any]] = {
    "pre": {"norm_place": "pre", "final_norm": True, "mask": "causal", "positions": "rotary"},
    "post": {"norm_place": "post", "key_heads": 1, "positions": "absolute", "length": 8},
    "sandwich": {"norm_place": "sandwich", "mlp": "gated"},
    "parallel": {"norm_place": "pre", "parallel": True, "norm": "rms"},
    "shared": {"norm_place": "pre", "shared": True},
    "decoder": {"norm_place": "pre", "cross_attention": True},
}
REFUSED = {"post": {"lnscale"}, "sandwich": {"sqrtl", "deepnorm"}} | {
    kind: {"deepnorm"} for kind in ("pre", "parallel", "shared", "decoder")
}


def network(kind: str) -> Transformer:
    net = small(**NETWORKS[kind])
    return net.with_memory(normal(1, 3, 4, seed=9)) if kind == "decoder" else net


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in REFUSED.items() for name in sorted(names)])
def test_networks_that_it_means_nothing_on(name: str, kind: str) -> None:
    with raises(ArchitectureError, subject="norm_place"):
        network(kind).with_remedy(name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in [*PARTS, "deepnorm", "lambda"] for kind in NETWORKS if name not in REFUSED[kind]],
)
def test_on_every_network(name: str, kind: str) -> None:
    net, X = network(kind), normal(2, 5, 4, seed=7)
    net = stirred_keeping(net.with_remedy(name))
    found, alone = net.run(X, PADDING).output, net.run(X[1:, 1:4]).output
    torch.testing.assert_close(found[1:, 1:4], alone, rtol=1e-11, atol=1e-12)
    if kind in ("pre", "post"):
        assert bool(net.variant(layers=4).run(X, PADDING).output.isfinite().all())
        narrow = net.to(torch.float32).run(X.float(), PADDING).output
        torch.testing.assert_close(narrow.double(), found, rtol=1e-3, atol=1e-3)
    if kind == "pre":
        marks = measure(net, X, metrics="residual", padding=PADDING).curve("residual", "below_floor")
        assert not marks.any()


def stirred_keeping(net: Transformer) -> Transformer:
    """With the memory that it reads."""
    moved = stirred(net)
    return moved if net.memory is None else moved.with_memory(net.memory.tokens)


def test_theorems_refuse_what_they_do_not_know() -> None:
    """Without norms and MLP the plain network meets some; each remedy that is more than a weight of a skip is
    named among the reasons."""
    net, X = small(norm_place="pre", mlp="none", norm="none", attention_skip=0.0), normal(1, 5, 4)
    assert certify(net, X).table["met"].any()
    for name in PARTS:
        net = net.with_remedy(name)
    found = certify(net, X).table
    assert not found["met"].any()
    for name in PARTS:
        assert all(("gates on heads" if name == "gate" else name) in why for why in found["why"])


@pytest.mark.parametrize("name", ["skipinit", "neutreno", "contranorm", "headgate"])
def test_written_and_read(name: str, tmp_path: Path) -> None:
    net, X = stirred(small(norm_place="pre").with_remedy(name)), normal(1, 5, 4)
    again = load(str(net.save(tmp_path / "net")))
    assert again.arch == net.arch and again.fingerprint == net.fingerprint
    assert torch.equal(again.run(X).output, net.run(X).output)


def test_numbers_are_drawn_last() -> None:
    """A random network of an architecture with a remedy has the weights of the one without."""
    plain = Architecture(layers=2, width=8, heads=2)
    arch = small(norm_place="pre").with_remedy("headgate").arch
    with_it = Transformer.random(plain.replace(parts=arch.parts), seed=3).state_dict()
    for name, tensor in Transformer.random(plain, seed=3).state_dict().items():
        assert torch.equal(with_it[name], tensor)
