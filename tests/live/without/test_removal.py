"""Layers, branches and norms that are left out, against models that were changed by hand; and that nothing stays."""

from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from rankscope.errors import WatchError
from rankscope.live import watch
from tests.live.gpt import GPT, METRICS, Block, same, words
from tests.live.without.parts import BLOCKS, edited, footprint, random_gpt, without, zeroed
from tests.raising import raises

PARTS: list[dict[str, Any]] = [
    {"layers": [2]},
    {"heads": {1: [1], 3: [0, 2]}},
    {"branches": f"{BLOCKS}.mlp"},
    {"skips": ["transformer.h.0.attn"]},
    {"norms": ["transformer.h.2.ln_2"]},
]


def test_a_layer_gives_what_it_takes() -> None:
    model = random_gpt()
    output, w = without(model, METRICS, layers=[2])
    other = edited(model, lambda copy: copy.transformer["h"].pop(1))
    expected, v = without(other, METRICS)
    assert torch.equal(output, expected)
    for name in METRICS:
        curve = w.profile().curve(name)
        torch.testing.assert_close(curve[:, [0, 1, 3]], v.profile().curve(name), rtol=0, atol=0, equal_nan=True)
    mu, entropy = w.profile().curve("mu"), w.profile().curve("entropy")
    assert torch.equal(mu[:, 1], mu[:, 2]) and bool(entropy[:, 2].isnan().all()), "its attention goes nowhere"


@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_a_branch_adds_nothing(part: str) -> None:
    model = random_gpt()
    metrics = METRICS if part == "mlp" else METRICS[:1]
    output, w = without(model, metrics, branches=f"{BLOCKS}.{part}")
    other = edited(model, lambda copy: [zeroed(getattr(block, part).c_proj) for block in copy.transformer["h"]])
    expected, v = without(other, metrics)
    assert torch.equal(output, expected)
    same(w, v, metrics, within=0.0)


def test_attention_in_a_branch_that_is_left_out_is_not_measured() -> None:
    _, w = without(random_gpt(), ["mu", "entropy"], branches="transformer.h.1.attn")
    entropy = w.profile().curve("entropy")
    assert bool(entropy[:, 2].isnan().all()) and bool(entropy[:, [1, 3]].isfinite().all())


def test_a_norm_gives_what_it_takes() -> None:
    model = random_gpt()
    output, w = without(model, METRICS, norms=f"{BLOCKS}.ln_1")
    other = edited(
        model, lambda copy: [block.register_module("ln_1", nn.Identity()) for block in copy.transformer["h"]]
    )
    expected, v = without(other, METRICS)
    assert torch.equal(output, expected)
    same(w, v, within=0.0)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_encoders_lose_layers_and_branches(norm_first: bool, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double().eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for parts, edit in (
        ({"layers": [2]}, lambda copy: copy.layers.__delitem__(1)),
        ({"branches": "layers.*.linear2"}, lambda copy: [zeroed(block.linear2) for block in copy.layers]),
        ({"branches": "layers.*.self_attn"}, lambda copy: [zeroed(block.self_attn.out_proj) for block in copy.layers]),
    ):
        output, w = without(model, ["mu", "head_mu"], x, **parts)
        expected, _ = without(edited(model, edit), ["mu"], x)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(w.profile().curve("mu")[:, 0], without(model, "mu", x)[1].profile().curve("mu")[:, 0])


def test_without_anything_nothing_changes() -> None:
    model = random_gpt()
    output, w = without(model, METRICS)
    with torch.no_grad(), watch(model, METRICS) as v:
        plain = model(words())
    assert torch.equal(output, plain)
    assert w.profile().table.equals(v.profile().table) and w.notes == v.notes


@settings(max_examples=8, deadline=None)
@given(st.permutations(PARTS))
def test_the_order_does_not_matter(parts: list[dict[str, Any]]) -> None:
    model, merged = random_gpt(), {name: value for part in PARTS for name, value in part.items()}
    expected, _ = without(model, **merged)
    w = watch(model, "mu")
    for part in parts:
        w = w.without(**part)
    with torch.no_grad(), w:
        assert torch.equal(model(words()), expected)
    names = w.profile().table["variant"].unique().to_list()
    assert len(names) == 1 and all(word in names[0] for word in ("layer 2", "heads 0, 2 of layer 3", f"{BLOCKS}.mlp"))


def test_the_same_part_named_twice_is_left_out_once() -> None:
    model = random_gpt()
    for a, b in permutations(("transformer.h.0.mlp", f"{BLOCKS}.mlp")):
        with torch.no_grad(), watch(model, "mu").without(branches=a).without(branches=b) as w:
            output = model(words())
        assert torch.equal(output, without(model, branches=f"{BLOCKS}.mlp")[0])
        assert w.profile().manifest.networks[0].checks["left_out"] == [
            f"branch transformer.h.{k}.mlp" for k in range(3)
        ]


def test_gradients_are_those_of_the_model_without_the_parts() -> None:
    model = random_gpt().train()
    other = edited(model, lambda copy: (zeroed(copy.transformer["h"][0].mlp.c_proj), copy.transformer["h"].pop(1)))
    with watch(model, "mu").without(layers=[2], branches="transformer.h.0.mlp"):
        model(words()).square().sum().backward()
    other(words()).square().sum().backward()
    for name, theirs in ((f"transformer.h.{k}.attn.c_attn.weight", j) for k, j in ((0, 0), (2, 1))):
        mine = model.get_parameter(name).grad
        assert mine is not None
        torch.testing.assert_close(mine, other.transformer["h"][theirs].attn.c_attn.weight.grad, rtol=1e-12, atol=1e-12)
    assert model.get_parameter("transformer.h.1.mlp.c_fc.weight").grad is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_model_is_as_it_was_also_after_an_error(error: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise error

    model: Any = random_gpt().train()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder: Any = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for network, x, inside, parts in (
        (model, words(), model.transformer["h"][2].attn.c_proj, {key: part[key] for part in PARTS for key in part}),
        (encoder, torch.randn(1, 4, 8), encoder.layers[0].self_attn, {"heads": [(1, 0)], "branches": "*.1.linear2"}),
    ):
        before, outputs = footprint(network), network.eval()(x)
        network.train()
        handle = inside.register_forward_hook(fail)
        with pytest.raises(error), watch(network, "mu").without(**parts):
            network(x)
        handle.remove()
        assert footprint(network) == before and torch.equal(network.eval()(x), outputs)
        assert not _get_current_function_mode_stack()


@pytest.mark.slow
def test_a_compiled_model_runs_as_it_was_written() -> None:
    model = random_gpt()
    compiled: Any = torch.compile(model, backend="eager")
    plain = compiled(words())
    output, _ = without(compiled, layers=[2], branches=f"{BLOCKS}.mlp", skips="transformer.h.0.attn")
    assert torch.equal(output, without(model, layers=[2], branches=f"{BLOCKS}.mlp", skips="transformer.h.0.attn")[0])
    assert torch.equal(compiled(words()), plain)


def test_results_say_what_was_left_out() -> None:
    _, w = without(random_gpt(), layers=[2], branches="transformer.h.0.mlp")
    profile = w.profile()
    assert set(profile.table["variant"]) == {"without layer 2, branch transformer.h.0.mlp"}
    (network,) = profile.manifest.networks
    assert network.variant == "without layer 2, branch transformer.h.0.mlp"
    assert network.checks["left_out"] == ["layer 2", "branch transformer.h.0.mlp"]
    assert "It ran without layer 2, branch transformer.h.0.mlp." in w.notes
    named = watch(random_gpt(), "mu", variant="mine").without(layers=[1])
    with torch.no_grad(), named:
        named.model(words())
    assert set(named.profile().table["variant"]) == {"mine without layer 1"}


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Checkpointing(GPT):
    """Calls its blocks inside checkpoints, as Hugging Face does, so that hooks of blocks run there too."""

    def forward(self, idx: Tensor) -> Tensor:
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = checkpoint(block, x, use_reentrant=True)
        return x


def test_checkpoints_are_refused() -> None:
    for model, parts in (
        (random_gpt(Checkpointed), {"branches": f"{BLOCKS}.mlp"}),
        (random_gpt(Checkpointed), {"skips": f"{BLOCKS}.mlp"}),
        (Checkpointing(), {"layers": [1]}),
        (Checkpointing(), {"heads": [(1, 0)]}),
    ):
        with raises(WatchError, "without"), watch(model, "mu").without(**parts):
            model(words())


def test_no_other_watch_reads_a_model_without_its_parts() -> None:
    model, x = random_gpt(), words()
    whole, part = watch(model, "mu"), watch(model, "mu").without(layers=[2])
    inner = watch(model.transformer["h"][0], "mu", blocks=[model.transformer["h"][0].mlp])  # type: ignore[index]
    with torch.no_grad():
        for outside, inside in ((whole, part), (part, whole), (part, inner), (inner, part)):
            with outside, raises(WatchError, "without"), inside:
                model(x)
        with whole, watch(random_gpt(), "mu").without(layers=[2]) as another:
            model(x)
            another.model(x)
    assert torch.equal(whole.profile().curve("mu"), watched(model, x)), "it was whole when it was read"


def watched(model: nn.Module, x: Tensor) -> Tensor:
    """The curve of a watch that is alone."""
    with torch.no_grad(), watch(model, "mu") as w:
        model(x)
    return w.profile().curve("mu")


def test_what_never_runs_is_refused_when_the_watch_is_left() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with raises(WatchError, "without"):
        without(model, x=torch.randn(1, 4, 8), branches="layers.0.self_attn.out_proj")


class Twice(GPT):
    """Calls every block twice."""

    def forward(self, idx: Tensor) -> Tensor:
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(block(x))
        return x


def test_a_block_that_is_several_layers_is_refused() -> None:
    for parts in ({"layers": [1]}, {"layers": [3]}, {"heads": {1: [0]}}, {"heads": {3: [0]}}):
        with raises(WatchError, "layers"):
            without(Twice(), **parts)


def test_a_norm_that_gives_another_shape_or_more_than_a_tensor_is_refused() -> None:
    class Last(nn.LayerNorm):
        """Gives the last token alone."""

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)[:, -1:]

    class Both(nn.LayerNorm):
        """Gives what it takes as well."""

        def forward(self, input: Tensor) -> Any:
            return super().forward(input), input

    for kind in (Last, Both):
        model = random_gpt()
        model.transformer["h"][1].ln_1 = kind(16).double()  # type: ignore[index]
        with raises(WatchError, "norms"):
            without(model, norms="transformer.h.1.ln_1")
