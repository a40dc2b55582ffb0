"""A watched model computes what it computes unwatched, to the last bit: now, and once more for gradients."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.models.llama import modeling_llama as llama

import rankscope
from rankscope.errors import WatchError
from rankscope.live import row_statistics
from rankscope.live.attention.head_outputs import is_rounding, scores_miss
from rankscope.live.attention.transformers_interface import InterfaceCall, additive_mask
from rankscope.sources import lifted
from tests.live.families import FAMILIES, SIZES, WIDTH, WORDS, seen
from tests.raising import raises
from tests.sources.test_parity import registered

IDS = torch.randint(3, WORDS, (2, 6), generator=torch.Generator().manual_seed(1))


def bert(config: Any) -> Any:
    torch.manual_seed(0)
    return hf.BertModel(config).double()


@pytest.mark.parametrize("first_out", ["first", "second"])
@pytest.mark.parametrize("fails", [False, True])
def test_models_that_share_a_config_may_be_watched_side_by_side(first_out: str, fails: bool) -> None:
    config = hf.BertConfig(**SIZES)
    models = [bert(config).eval(), bert(config).eval()]
    before, implementation = models[0](IDS)[0], config._attn_implementation
    watches = [rankscope.watch(model, "dobrushin") for model in models]
    for each in watches:
        each.__enter__()
    order = watches if first_out == "first" else watches[::-1]
    for model in models:
        model(IDS)
    order[0].__exit__(None, None, None)
    if fails:
        with pytest.raises(IndexError):
            order[1].model(IDS + 1000)
    order[1].model(IDS)
    order[1].__exit__(None, None, None)
    assert config._attn_implementation == implementation
    assert all(torch.equal(model(IDS)[0], before) for model in models)
    assert not hasattr(hf.AttentionInterface.get_interface, "__wrapped__")
    curves = [each.profile().curve("dobrushin")[:2, 1:] for each in watches]
    assert torch.equal(*curves)


class Checkpointed(nn.Module):
    """torch's own layers, each computed again for its gradients."""

    def __init__(self, reentrant: bool, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout, batch_first=True)
        self.layers, self.reentrant = (nn.ModuleList([layer, layer.__class__(WIDTH, 4, 24, dropout)]), reentrant)
        self.layers[1] = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def torchs(reentrant: bool, dropout: float) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    given = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    return Checkpointed(reentrant, dropout).double(), given


def huggingface(reentrant: bool, dropout: float) -> tuple[nn.Module, Tensor]:
    model = bert(hf.BertConfig(**SIZES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model, IDS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [torchs, huggingface])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_a_pass_that_is_computed_again(
    make: Callable[[bool, float], tuple[nn.Module, Tensor]], reentrant: bool, dropout: float
) -> None:
    """Backward after the watch, and inside it: the same bits as without."""

    def gradients(metrics: list[str] | None, inside: bool) -> list[Tensor]:
        model, given = make(reentrant, dropout)
        torch.manual_seed(7)
        with nullcontext() if metrics is None else rankscope.watch(model.train(), metrics):
            found = model(given)
            output = found if isinstance(found, Tensor) else found[0]
            loss = (output * torch.arange(output.numel()).reshape(output.shape).sin()).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    plain = gradients(None, False)
    assert max(float(each.norm()) for each in plain) > 0.1
    for metrics in (["mu"], ["entropy"], ["head_mu"]):
        for inside in (False, True):
            watched = gradients(metrics, inside)
            assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)), (metrics, inside)


def test_weights_beside_a_kernel_are_without_dropout_and_it_is_said() -> None:
    model = FAMILIES["bert"].model("sdpa").train()
    w = seen(model, ["entropy", "head_mu"], IDS)
    assert "Attention ran with sdpa; what is read of it was computed a second time, without dropout." in w.notes
    assert any("rows sum to one" in note for note in w.notes)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "t5", "opt"])
def test_weights_beside_a_kernel_that_is_given_no_mask(name: str) -> None:
    """Without padding sdpa is told nothing, or that it is causal."""
    eager, model = (FAMILIES[name].model(how) for how in ("eager", "sdpa"))
    with torch.no_grad(), lifted():
        native = eager(IDS, output_attentions=True).attentions
    with torch.no_grad(), rankscope.watch(model, "entropy", keep="attention") as w:
        model(IDS)
    for layer, P in enumerate(native, start=1):
        torch.testing.assert_close(w.attention[layer][0], P, rtol=1e-5, atol=1e-6)


def test_an_attention_function_of_ones_own_is_watched_as_it_is() -> None:
    from transformers.models.bert.modeling_bert import eager_attention_forward

    def sharper(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return eager_attention_forward(module, 3.0 * query, *args, **kwargs)

    def silent(*args: Any, **kwargs: Any) -> Any:
        return sharper(*args, **kwargs)[0], None

    def weights(how: str) -> Tensor:
        model = FAMILIES["bert"].model(how)
        with torch.no_grad(), rankscope.watch(model, "entropy", keep="attention") as w:
            model(IDS)
        return w.attention[1][0]

    with registered("mine", sharper):
        mine = weights("mine")
    # Softmax of three times the scores: the cube of the weights, made to sum to one again.
    cube = weights("eager") ** 3
    torch.testing.assert_close(mine, cube / cube.sum(-1, keepdim=True), rtol=1e-9, atol=1e-12)
    with registered("mine", silent), raises(WatchError, subject="attention"):
        weights("mine")


@pytest.mark.parametrize("name", ["llama", "gemma3", "modernbert", "bert"])
def test_the_mask_of_a_kernel_without_a_matrix(name: str) -> None:
    """Flash attention is told of padding, causality and windows apart: put together, they are the mask that
    the model itself makes for eager attention."""
    family = FAMILIES[name]
    model, batch = family.model("eager"), family.batch()
    taken: list[tuple[Any, Tensor, dict[str, Any]]] = []
    interface: Any = hf.AttentionInterface
    usual = interface.get_interface

    def noting(self: Any, *names: Any) -> Any:
        function = usual(self, *names)

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *a: Any, **kw: Any) -> Any:
            taken.append((module, mask, kw))
            return function(module, q, k, v, mask, *a, **kw)

        return attend

    interface.get_interface = noting
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        interface.get_interface = usual
    real = batch["attention_mask"].bool()
    assert taken
    for module, mask, kwargs in taken:
        like = torch.zeros(1, dtype=torch.float64)
        found = additive_mask(batch["attention_mask"], (2, 6, 6), like, module.is_causal, kwargs.get("sliding_window"))
        assert found is not None
        rows = real[:, None, :, None].expand(2, 1, 6, 6)
        assert torch.equal((found == 0)[rows], (mask == 0).expand(2, 1, 6, 6)[rows])


def _kernel_calls() -> dict[str, tuple[Any, Any, dict[str, Any], Callable[[Tensor], Tensor]]]:
    """Calls as transformers makes them, of kernels that need a GPU: the function, its mask, its options, and what the
    mask and the options do to scores `q k' scale`."""
    at = torch.arange(7)
    back = at[:, None] - at
    padding = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    packed = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    flash, flex = flash_attention_forward, flex_attention_forward
    bias = torch.randn(2, 4, 7, 7)

    def hide(s: Tensor, hidden: Tensor) -> Tensor:
        return s.masked_fill(hidden, -math.inf)

    def in_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < 3)

    return {
        "flash": (flash, None, {}, lambda s: hide(s, back < 0)),
        "flash, not causal": (flash, None, {"is_causal": False}, lambda s: s),
        "flash, window": (flash, None, {"sliding_window": 3}, lambda s: hide(s, (back < 0) | (back >= 3))),
        "flash, capped": (flash, None, {"softcap": 0.5}, lambda s: hide(0.5 * torch.tanh(s / 0.5), back < 0)),
        "flash, padded": (flash, padding, {}, lambda s: hide(s, (back < 0) | (padding == 0)[:, None, None])),
        "flash, sinks": (flash, None, {"s_aux": torch.randn(4)}, lambda s: hide(s, back < 0)),
        "flash, packed": (
            flash, None, {"cu_seq_lens_q": torch.tensor([0, 3, 7])},
            lambda s: hide(s, (back < 0) | (packed[:, None] != packed)),
        ),
        "flex": (
            flex, create_block_mask(in_window, 2, None, 7, 7, device="cpu"), {"softcap": 0.5},
            lambda s: hide(0.5 * torch.tanh(s / 0.5), (back < 0) | (back >= 3)),
        ),
        "flex, biased": (
            flex, create_block_mask(in_window, 2, None, 7, 7, device="cpu"), {"softcap": 0.5, "position_bias": bias},
            lambda s: hide(0.5 * torch.tanh(s / 0.5) + bias, (back < 0) | (back >= 3)),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", _kernel_calls())
def test_scores_of_kernels_that_need_a_gpu_are_as_their_arguments_say(name: str) -> None:
    """The output is made here, in float64; what is read off the arguments must give it, and rows like those here."""
    function, mask, options, score = _kernel_calls()[name]
    batch = 1 if "packed" in name else 2
    q, k, v = (torch.randn(batch, heads, 7, 8, dtype=torch.float64) for heads in (4, 2, 2))
    module = nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    s = score(q @ k.repeat_interleave(2, 1).mT * 0.7)
    sinks = options.get("s_aux")
    whole = s if sinks is None else torch.cat([s, sinks.double()[:, None, None].expand(batch, 4, 7, 1)], -1)
    P = whole.softmax(-1)
    output = (P[..., :7] @ v.repeat_interleave(2, 1)).transpose(1, 2)
    call = InterfaceCall(function, (output, None), module, (q, k, v, mask), {"scaling": 0.7, "dropout": 0.0, **options})
    scores = call.scores()
    assert scores is not None and call.products is not None
    valid = torch.ones(batch, 7, dtype=torch.bool) if not isinstance(mask, Tensor) else mask.bool()
    assert float(scores_miss(scores, call.products, valid)[0][0]) < 1e-12
    found = row_statistics(scores)
    torch.testing.assert_close(found.largest, s.amax(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.entropy, -torch.special.xlogy(P, P).sum(-1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.effective_keys, 1 / P.square().sum(-1), rtol=1e-10, atol=1e-10)
    wrong = InterfaceCall(function, (output, None), module, (q, k, v, mask), {"scaling": 0.5, **options}).scores()
    assert wrong is not None and not is_rounding(float(scores_miss(wrong, call.products, valid)[0][0]), torch.float64)


def test_functions_of_others_have_no_scores() -> None:
    """What they do with their arguments is not known; nor, under dropout, what an eager function of a model does."""
    q = torch.randn(1, 2, 5, 4)
    args, output = (q, q, q, None), q.transpose(1, 2)
    own = {"scaling": 0.5, "dropout": 0.1}
    assert InterfaceCall(lambda *args: None, (output, None), nn.Module(), args, own).scores() is None
    eager = llama.eager_attention_forward
    assert InterfaceCall(eager, (output, None), nn.Module(), args, own).scores() is None
    assert InterfaceCall(eager, (output, q @ q.mT), nn.Module(), args, own).scores() is not None
    assert InterfaceCall(flash_attention_forward, (output, None), nn.Module(), args, own).scores() is not None


@pytest.mark.parametrize("outer_first", [True, False])
def test_attention_of_a_module_and_of_a_part_of_it_has_one_watch(outer_first: bool) -> None:
    layers = 2
    model = hf.BertModel(hf.BertConfig(**SIZES | {"num_hidden_layers": layers})).eval()
    inner = model.encoder.layer[0]
    watches = [rankscope.watch(model, "entropy"), rankscope.watch(inner, "entropy", blocks=[inner.attention])]
    first, second = watches if outer_first else watches[::-1]
    before = hf.AttentionInterface.get_interface
    with torch.no_grad(), first:
        with raises(WatchError, subject="attention"), second:
            pass
        model(IDS)
    assert hf.AttentionInterface.get_interface == before
    with torch.no_grad(), second:
        model(IDS)
    for w, count in zip(watches, (layers, 1), strict=True):
        entropy = w.profile().curve("entropy")
        assert entropy.shape[1] == count + 1 and entropy[:, 1:].isfinite().all()
