"""DeepNorm: its skip weight, and the weights that it divides."""

from typing import Any

import torch

from rankscope.errors import ArchitectureError
from rankscope.nets import Transformer
from tests.builders import normal
from tests.deviation.reference import Network
from tests.raising import raises
from tests.remedies.small_networks import check, small


def test_deepnorm_is_its_skip_weight() -> None:
    """On the weights as it divides them, a post-norm network of that skip weight, and nothing else."""
    plain, X = small(norm_place="post", mlp="gated"), normal(2, 5, 4)
    net = plain.with_remedy("deepnorm")
    assert net.arch == plain.arch.replace(attention_skip=6**0.25, mlp_skip=6**0.25)
    divided = (".value.", ".output.", ".mlp.gate.", ".down.")  # the gate goes through the activation
    for name, tensor in net.state_dict().items():
        expected = plain.state_dict()[name] / (24**0.25 if any(part in name for part in divided) else 1)
        assert torch.allclose(tensor, expected, rtol=1e-15, atol=0)
    skipping = Transformer.from_weights(plain.arch, net.state_dict()).variant(skip=6**0.25)
    assert torch.equal(net.run(X).output, skipping.run(X).output)
    check(net, Network(net))
    assert net.with_remedy("lambda", weight=0.7).arch.attention_skip == 0.7


def test_deepnorm_on_a_decoder_has_its_own_numbers_and_goes_on_once() -> None:
    plain = small(norm_place="post", cross_attention=True)
    net = plain.with_remedy("deepnorm")
    assert net.arch.attention_skip == net.arch.mlp_skip == 9**0.25
    for name in ("attention.value", "cross.value", "cross.output", "mlp.up", "mlp.down"):
        before, after = (each.state_dict()[f"layers.1.{name}.weight"] for each in (plain, net))
        assert torch.allclose(after, before / 36**0.25, rtol=1e-15, atol=0)
    with raises(ArchitectureError, subject="remedy"):
        net.with_remedy("deepnorm")
    repeated: Any = plain.variant(layers=[1, 1, 2]).with_remedy("deepnorm").weights.layers
    assert repeated[0].mlp.up.weight is repeated[1].mlp.up.weight  # what was shared stays shared
