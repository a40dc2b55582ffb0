"""Metrics that `watch` and `Monitor` read off scores, without a pattern, against a softmax in float64 written here."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.models.llama import modeling_llama as llama

import rankscope
from rankscope.errors import MetricError, WatchError
from rankscope.lab import Trainable
from rankscope.live import AttentionCall, AttentionScores
from rankscope.live.attention import row_statistics as statistics
from rankscope.live.attention.head_outputs import values_product
from rankscope.live.attention_readings import IN_TURN
from rankscope.metrics import metric
from rankscope.monitor import Monitor
from rankscope.nets import Architecture, Transformer
from tests.live.attention.test_row_statistics import LargestTensor
from tests.live.families import checks, seen
from tests.live.gpt import GPT, HEADS, WIDTH, WORDS, gpt, words
from tests.raising import raises

NAMES = ["entropy", "first_token_mass", "effective_keys", "largest_logit"]


def expected(s: Tensor, valid: Tensor | None = None, sinks: Tensor | None = None) -> dict[str, Tensor]:
    """The four metrics `[batch, head]` of scores `[batch, head, query, key]`, over the rows of valid tokens."""
    s = s.detach().double()
    valid = torch.ones(len(s), s.shape[-1], dtype=torch.bool) if valid is None else valid
    whole = s if sinks is None else torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:-1], 1)], -1)
    P = whole.softmax(-1)
    first = valid.long().argmax(-1)
    rows = {
        "entropy": -torch.special.xlogy(P, P).sum(-1),
        "first_token_mass": torch.stack([P[k, ..., first[k]] for k in range(len(P))]),
        "effective_keys": 1 / P.square().sum(-1),
    }
    numbers = {name: (x * valid[:, None]).sum(-1) / valid.sum(-1)[:, None] for name, x in rows.items()}
    both = valid[:, None, :, None] & valid[:, None, None, :]
    return numbers | {"largest_logit": s.masked_fill(~both, -math.inf).amax((-2, -1))}


def agrees(w: Any, layer: int, numbers: dict[str, Tensor], within: float) -> None:
    """The watch has these numbers at this layer."""
    table = w.profile().table
    for name, value in numbers.items():
        rows = table.filter((table["layer"] == layer) & (table["metric"] == name)).sort("sample", "head")
        found = torch.tensor(rows["value"].to_list(), dtype=torch.float64).view(value.shape)
        torch.testing.assert_close(
            found, value, rtol=within, atol=within, msg=lambda text, name=name: f"{name}: {text}"
        )


def curve(w: Any, name: str) -> Tensor:
    """A metric of attention `[sample, layer, head]`, without layer 0, which has none."""
    return w.profile().curve(name)[:, 1:]


@contextmanager
def no_patterns() -> Iterator[None]:
    """Inside, asking for a pattern is a failure."""

    def refuse(*args: Any, **named: Any) -> Any:
        raise AssertionError("a pattern was made")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankscope.live.attention.kernels.ScaledDotProduct.pattern", refuse)
        patch.setattr("rankscope.live.attention.softmax.WrittenSoftmax.pattern", refuse)
        patch.setattr("rankscope.live.attention.multihead._call_again", refuse)
        patch.setattr("rankscope.live.attention.transformers_interface.InterfaceCall.pattern", refuse)
        yield


def causal(s: Tensor) -> Tensor:
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


Recorded = list[tuple[Tensor, Tensor]]
BIAS = torch.randn(1, HEADS, 6, 6).bfloat16().float()  # the same number in every dtype
SEES = torch.rand(6, 6) > 0.3
SEES.fill_diagonal_(True)


def products(q: Tensor, k: Tensor, scale: float = (WIDTH // HEADS) ** -0.5) -> Tensor:
    return q.double() @ k.double().mT * scale


KERNELS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "causal": (
        lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k: causal(products(q, k)),
    ),
    "a boolean mask": (
        lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, SEES),
        lambda q, k: products(q, k).masked_fill(~SEES, -math.inf),
    ),
    "an added mask and a scale": (
        lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS.to(q), scale=0.9),
        lambda q, k: products(q, k, 0.9) + BIAS.double(),
    ),
    "a causal bias": (
        lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, causal_lower_right(6, 6)),
        lambda q, k: causal(products(q, k)),
    ),
    "groups of heads": (
        lambda self, q, k, v: F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], is_causal=True, enable_gqa=True),
        lambda q, k: causal(products(q, k[:, ::2].repeat_interleave(2, 1))),
    ),
    "five axes": (
        lambda self, *parts: F.scaled_dot_product_attention(
            *(x.unflatten(1, (2, 2)) for x in (*parts, BIAS.to(parts[0])))
        ).flatten(1, 2),
        lambda q, k: products(q, k) + BIAS.double(),
    ),
    "a softmax written out": (
        lambda self, q, k, v: causal(q @ k.mT / 2.0).softmax(-1) @ v,
        lambda q, k: causal(products(q, k, 0.5)),
    ),
    "flex attention": (
        lambda self, q, k, v: flex_attention(q, k, v, score_mod=_alibi, block_mask=create_block_mask(
            lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu")),
        lambda q, k: causal(products(q, k) - 0.3 * (torch.arange(6)[:, None] - torch.arange(6)) * _slopes()),
    ),
}  # fmt: skip


def _alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - 0.3 * (h + 1) * (i - j)


def _slopes() -> Tensor:
    return torch.arange(1, HEADS + 1)[:, None, None]


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_numbers_are_those_of_the_scores_of_the_call(name: str, dtype: torch.dtype) -> None:
    """In one call: queries and keys as the kernel took them, and the numbers beside."""
    taken: Recorded = []
    kernel, score = KERNELS[name]

    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        taken.append((q, k))
        return kernel(self, q, k, v)

    model = gpt(attend).to(dtype)
    with no_patterns():
        w = seen(model, NAMES, words())
    assert len(taken) == 3
    # A written softmax takes scores rounded to the model's dtype; kernels are read off queries and keys as they are.
    narrow = dtype == torch.bfloat16 and name == "a softmax written out"
    within = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 0.1 if narrow else 2e-5)
    for layer, (q, k) in enumerate(taken, start=1):
        agrees(w, layer, expected(score(q, k)), within)
    assert checks(w)["rows_sum_to_one"] is True


def test_other_metrics_beside_them_have_their_pattern() -> None:
    model = GPT().eval()
    alone, beside = seen(model, NAMES, words()), seen(model, [*NAMES, "dobrushin"], words())
    for name in NAMES:
        assert torch.equal(curve(alone, name), curve(beside, name))
    with torch.no_grad(), rankscope.watch(model, NAMES, keep="attention") as kept:
        model(words())
    P = kept.attention[1][0].double()
    torch.testing.assert_close(
        curve(alone, "entropy")[:, 0], -torch.special.xlogy(P, P).sum(-1).mean(-1), rtol=1e-5, atol=1e-5
    )


def test_a_model_under_autocast_is_read_in_the_dtype_of_its_kernel() -> None:
    taken: Recorded = []
    original = F.scaled_dot_product_attention

    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        taken.append((q.bfloat16(), k.bfloat16()))
        return original(q.float(), k.float(), v.float(), is_causal=True)  # autocast rounds them

    model = gpt(attend).float()
    with torch.autocast("cpu", torch.bfloat16):
        w = seen(model, NAMES, words())
    for layer, (q, k) in enumerate(taken, start=1):
        agrees(w, layer, expected(causal(products(q, k))), 2e-5)


def test_dropout_leaves_the_numbers_those_before_it() -> None:
    model = GPT(dropout=0.5)
    plain = seen(model.eval(), NAMES, words())
    w = seen(model.train(), NAMES, words())
    first = [x.profile().table.filter(layer=1)["value"].to_list() for x in (plain, w)]
    assert first[0] == pytest.approx(first[1], rel=1e-5)


class Encoder(nn.Module):
    """Torch's encoder layers, and the scores of each by its own weights."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first, dropout=0.0) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.taken: list[Tensor] = []

    def forward(self, x: Tensor, mask: Tensor | None, src_key_padding_mask: Tensor | None) -> Tensor:
        self.taken = []
        for layer in self.layers:
            self.taken.append(x)
            x = layer(x, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
        return x

    def scores(self, layer: int, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        attention: Any = self.layers[layer].self_attn
        x = self.taken[layer] if attention.batch_first else self.taken[layer].transpose(0, 1)
        y = x.double() @ attention.in_proj_weight.double().mT + attention.in_proj_bias.double()
        q, k, _ = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in y.split(16, -1))
        s = q @ k.mT / 2
        if mask is not None:
            s = s.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else s + mask.double()
        return s if padding is None else s.masked_fill(padding[:, None, None], -math.inf)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, ~SEES, torch.randn(6, 6)], ids=["none", "boolean", "added"])
@pytest.mark.parametrize("padded", [False, True])
def test_multihead_attention(batch_first: bool, mask: Tensor | None, padded: bool) -> None:
    model = Encoder(batch_first).eval()
    x = torch.randn(2, 6, 16)
    padding = torch.tensor([[False] * 6, [True] + [False] * 3 + [True] * 2]) if padded else None
    if padded and mask is not None:
        mask = mask.clone()
        mask[:, 1] = False if mask.dtype == torch.bool else 0.0  # every row sees a token
    given = padding
    if padding is not None and mask is not None and mask.is_floating_point():  # torch asks for masks of one kind
        given = torch.zeros(2, 6).masked_fill(padding, -math.inf)
    with no_patterns():
        w = seen(model, NAMES, x if batch_first else x.transpose(0, 1), mask, given)
    valid = None if padding is None else ~padding
    for layer in range(2):
        agrees(w, layer + 1, expected(model.scores(layer, mask, padding), valid), 2e-5)


@pytest.mark.parametrize("cap", [0.0, 0.7])
def test_networks_of_the_lab(cap: float) -> None:
    arch = Architecture(layers=2, width=8, heads=2, mask="causal", score_cap=cap, norm="none", mlp="none")
    net, X = Transformer.random(arch, seed=1), torch.randn(2, 5, 8, dtype=torch.float64)
    w = seen(Trainable(net), NAMES, X)
    states = net.run(X).states
    for layer, weights in enumerate(net.weights.layers, start=1):
        parts = (weights.attention.query, weights.attention.key)
        biases = (0.0 if part.bias is None else part.bias[:, None] for part in parts)
        tokens = states[layer - 1]
        q, k = (torch.einsum("btw,whd->bhtd", tokens, part.weight) + b for part, b in zip(parts, biases, strict=True))
        s = q @ k.mT / math.sqrt(4)
        agrees(w, layer, expected(causal(cap * torch.tanh(s / cap) if cap else s)), 1e-9)


def recording(store: list[tuple[Tensor, Tensor | None]]) -> Callable[..., Any]:
    """An attention function for transformers, in float64: it records the scores that the softmax takes, and sinks."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
        dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        s = query @ key.mT * scaling
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        if attention_mask is not None:
            s = s + attention_mask
        s = s.masked_fill(s < -1e30, -math.inf)
        s = s.masked_fill((s == -math.inf).all(-1, keepdim=True), 0.0)  # rows of padding
        store.append((s, s_aux))
        whole = s if s_aux is None else torch.cat([s, s_aux[:, None, None].expand(len(s), -1, s.shape[2], 1)], -1)
        P = whole.softmax(-1)[..., : s.shape[-1]]
        return (P @ value).transpose(1, 2).contiguous(), P

    return attend


GROUPED = {"num_key_value_heads": 2}
LARGE = {"initializer_range": 0.3}  # scores of some size
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "gpt2": (hf.GPT2Config, {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 16}, ["sdpa", "eager"]),
    "llama": (hf.LlamaConfig, GROUPED, ["sdpa", "eager"]),
    "bert": (hf.BertConfig, {}, ["sdpa", "eager"]),
    "gemma2": (
        hf.Gemma2Config, GROUPED | {"head_dim": 4, "sliding_window": 3, "attn_logit_softcapping": 2.0}, ["eager"]
    ),
    "gpt-oss": (
        hf.GptOssConfig,
        GROUPED | {"head_dim": 4, "sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1}, ["eager"],
    ),
    "mistral": (hf.MistralConfig, GROUPED | {"sliding_window": 3}, ["sdpa", "eager"]),
}  # fmt: skip
RUNS = [(name, implementation) for name, (_, _, several) in MODELS.items() for implementation in several]


def model_of(name: str, **fields: Any) -> Any:
    kind, sizes, _ = MODELS[name]
    usual = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    usual = {} if name == "gpt2" else usual | {"max_position_embeddings": 16}
    torch.manual_seed(0)
    config = kind(vocab_size=WORDS, pad_token_id=0, **usual | sizes | LARGE | fields)
    model = hf.AutoModel.from_config(config).eval()
    for part in model.modules():
        if hasattr(part, "sinks"):
            nn.init.normal_(part.sinks)
    return model


def reference(model: Any, **inputs: Any) -> list[tuple[Tensor, Tensor | None]]:
    """The scores of every layer of the model, in float64 throughout."""
    store: list[tuple[Tensor, Tensor | None]] = []
    eager_mask: Any = hf.AttentionMaskInterface._global_mapping["eager"]
    hf.AttentionInterface.register("recording", recording(store))
    hf.AttentionMaskInterface.register("recording", eager_mask)
    double = deepcopy(model).double()
    double.set_attn_implementation("recording")
    if hasattr(double.config, "num_local_experts"):
        double.set_experts_implementation("eager")  # others have no float64
    with torch.no_grad():
        double(**inputs)
    return store


@pytest.mark.sampled(5)
@pytest.mark.parametrize("padded", ["none", "left", "right"])
@pytest.mark.parametrize(("name", "implementation"), RUNS)
def test_models_of_transformers(name: str, implementation: str, padded: str) -> None:
    model = model_of(name)
    model.set_attn_implementation(implementation)
    ids = torch.randint(1, WORDS, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 9, dtype=torch.long)
    if padded != "none":
        mask[1, slice(0, 3) if padded == "left" else slice(6, 9)] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    with no_patterns():
        w = seen(model, NAMES, **inputs)
    scores = reference(model, **inputs)
    assert len(scores) == 3
    for layer, (s, sinks) in enumerate(scores, start=1):
        agrees(w, layer, expected(s, mask.bool(), sinks), 1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt-oss"])
def test_they_agree_with_the_patterns_that_the_model_returns(name: str) -> None:
    model = model_of(name).double()
    model.set_attn_implementation("eager")
    ids = torch.randint(1, WORDS, (2, 9), generator=torch.Generator().manual_seed(2))
    agrees_with_patterns(seen(model, NAMES, input_ids=ids), model, ids, 1e-5)


def agrees_with_patterns(w: Any, model: Any, ids: Tensor, within: float) -> None:
    """All but the largest logit is that of the patterns that the model returns."""
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions
    for layer, P in enumerate(attentions, start=1):
        numbers = expected(P.double().log())
        numbers.pop("largest_logit")
        agrees(w, layer, numbers, within)


def test_a_sink_is_no_key_of_rows_that_sum_to_one() -> None:
    w = seen(model_of("gpt-oss"), NAMES, input_ids=torch.arange(1, 10)[None])
    assert checks(w)["rows_sum_to_one"] is False


def test_a_packed_batch_is_block_diagonal() -> None:
    """Two sequences in one sample, as position_ids that begin again say: neither sees the other."""
    model = model_of("llama")
    ids = torch.randint(1, WORDS, (1, 9), generator=torch.Generator().manual_seed(2))
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    w = seen(model, ["entropy", "largest_logit"], input_ids=ids, position_ids=places, use_cache=False)
    parts = [seen(model, ["entropy", "largest_logit"], input_ids=part) for part in ids.split([4, 5], 1)]
    means = [curve(part, "entropy") * share for part, share in zip(parts, (4 / 9, 5 / 9), strict=True)]
    torch.testing.assert_close(curve(w, "entropy"), sum(means), rtol=1e-4, atol=1e-4)
    both = torch.maximum(*(curve(part, "largest_logit") for part in parts))
    torch.testing.assert_close(curve(w, "largest_logit"), both, rtol=1e-4, atol=1e-4)


class Reporting(nn.Module):
    """A block that reports its attention: uniform over all tokens, with scores and outputs as given."""

    def __init__(self, scores: Any, products: Any, by_kernel: bool = False) -> None:
        super().__init__()
        self.by_kernel = by_kernel
        self.attention_listeners: list[Any] = []
        self.line = nn.Linear(8, 8)
        self.scores, self.products = scores, products

    def forward(self, x: Tensor) -> Tensor:
        P = torch.full((len(x), 2, x.shape[1], x.shape[1]), 1 / x.shape[1])
        for listener in self.attention_listeners:
            products = (lambda rows, p: (p.transpose(1, 2), P[:, :, rows].transpose(1, 2))) if self.products else None
            listener(AttentionCall(pattern=lambda: P, scores=self.scores, products=products, by_kernel=self.by_kernel))
        return x + self.line(x)


def wrong() -> AttentionScores:
    return AttentionScores(query=torch.randn(1, 2, 5, 4), key=torch.randn(1, 2, 5, 4))


def right() -> AttentionScores:
    return AttentionScores(query=torch.zeros(1, 2, 5, 4), key=torch.randn(1, 2, 5, 4))


def test_scores_that_do_not_give_the_output_are_not_believed() -> None:
    model, X = nn.Sequential(*(Reporting(wrong, True) for _ in range(2))), torch.randn(1, 5, 8)
    w = seen(model, ["entropy", "effective_keys"], X)
    torch.testing.assert_close(curve(w, "entropy").exp(), torch.full((1, 2, 2), 5.0).double())
    torch.testing.assert_close(curve(w, "effective_keys"), torch.full((1, 2, 2), 5.0).double())
    with raises(WatchError, subject="scores"):
        seen(model, ["entropy", "largest_logit"], X)
    fine = nn.Sequential(*(Reporting(right, True) for _ in range(2)))
    assert curve(seen(fine, NAMES, X), "largest_logit").abs().max() == 0


def test_a_model_whose_eager_function_does_more_than_its_arguments_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores are twice what the arguments say: the pattern that it returns has the entropy."""
    model, ids = model_of("llama"), torch.arange(1, 10)[None]
    model.set_attn_implementation("eager")
    original: Any = llama.eager_attention_forward

    @wraps(original)
    def doubled(*args: Any, scaling: float, **named: Any) -> Any:
        return original(*args, scaling=2 * scaling, **named)

    monkeypatch.setattr(llama, "eager_attention_forward", doubled)
    agrees_with_patterns(seen(model, NAMES[:3], input_ids=ids), model, ids, 1e-4)
    with raises(WatchError, subject="scores"):
        seen(model, NAMES, input_ids=ids)


@pytest.mark.parametrize("scores", [None, lambda: None])
def test_without_scores_there_is_no_largest_logit(scores: Any) -> None:
    model, X = nn.Sequential(*(Reporting(scores, False) for _ in range(2))), torch.randn(1, 5, 8)
    assert curve(seen(model, ["entropy"], X), "entropy").exp().allclose(torch.tensor(5.0).double())
    with raises(WatchError, subject="scores"):
        seen(model, ["largest_logit"], X)


def test_attention_to_padding_is_read_as_of_its_pattern() -> None:
    """A model that does not hide what it is told is padding: rows of tokens do not sum to one over tokens."""
    model, padding = GPT().eval(), torch.tensor([[True, True, False, False, False, False]] * 2)
    with torch.no_grad(), rankscope.watch(model, NAMES, padding=padding, keep="attention") as w:
        model(words())
    P = w.attention[1][0]
    table = w.profile().table.filter(layer=1)
    for name in ("entropy", "first_token_mass", "effective_keys"):
        found = torch.tensor(table.filter(metric=name).sort("sample", "head")["value"].to_list()).view(2, -1)
        torch.testing.assert_close(
            found.double(), metric(name).compute(P, padding), rtol=1e-5, atol=1e-5, equal_nan=True
        )
    assert table.filter(metric="largest_logit")["value"].is_finite().all()


def test_huge_scores_leave_the_entropy_to_the_pattern() -> None:
    """In float32 the difference of numbers of 1e6 has no digits left; the pattern has."""

    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(1e4 * q, 1e4 * k, v, is_causal=True)

    model = gpt(attend).float()
    w = seen(model, NAMES, words())
    assert 0 <= float(curve(w, "entropy").min()) <= float(curve(w, "entropy").max()) < math.log(6)
    assert float(curve(w, "largest_logit").max()) > 1e6


@pytest.mark.parametrize(("share", "believed"), [(1.0, True), (1 + 2e-7, True), (-1.0, False)])
def test_large_scores_that_rounding_alone_explains_are_read(share: float, believed: bool) -> None:
    """Of two keys with scores near 1e5 a rounding decides which takes how much; other scores it does not explain."""
    torch.manual_seed(0)
    key = torch.randn(1, 2, 5, 4)
    key[:, :, 1] = (1 + 1e-7) * key[:, :, 0]
    key[:, :, 4] = (1 + 1e-7) * key[:, :, 3]
    query = 1e5 * torch.randn(1, 2, 5, 4)
    s = (share * query.double() @ key.double().mT / 2).float()
    P, X = s.softmax(-1), torch.randn(1, 5, 8)
    values = torch.randn(1, 2, 5, 3)

    class Attending(Reporting):
        def forward(self, x: Tensor) -> Tensor:
            for listener in self.attention_listeners:
                products = values_product(values, (P @ values).transpose(1, 2))
                listener(AttentionCall(pattern=lambda: P, scores=self.scores, products=products))
            return x + self.line(x)

    model = nn.Sequential(*(Attending(lambda: AttentionScores(query=query, key=key), True) for _ in range(2)))
    if not believed:
        with raises(WatchError, subject="scores"):
            seen(model, NAMES, X)
        return
    w = seen(model, NAMES, X)
    assert curve(w, "largest_logit")[0, 0].allclose(s.amax((-2, -1))[0].double(), rtol=1e-6)
    torch.testing.assert_close(curve(w, "entropy")[0, 0], expected(s)["entropy"][0], rtol=1e-4, atol=1e-4)


def test_later_calls_are_read_together_and_are_the_same() -> None:
    """After the first call what scores give is checked when the call ends, for all layers at once."""
    model, ids = GPT().eval().float(), words()
    with torch.no_grad(), rankscope.watch(model, NAMES) as w:
        model(ids)
        with no_patterns():
            model(ids)
    table = w.profile().table.filter(pl.col("layer") > 0).sort("metric", "layer", "head", "sample")
    first, second = (table.filter(pl.col("sample").is_between(*ends)) for ends in ((0, 1), (2, 3)))
    assert len(first) == len(second) > 0
    assert first["value"].equals(second["value"]) and first["floor"].equals(second["floor"])


@pytest.mark.parametrize("at", [0, 1])
def test_scores_that_are_no_longer_right_are_found_in_turn(at: int) -> None:
    made, X = [right, right], torch.randn(1, 5, 8)
    model = nn.Sequential(*(Reporting(lambda k=k: made[k](), True, by_kernel=True) for k in range(2)))
    with torch.no_grad(), rankscope.watch(model, ["entropy"]) as w:
        model(X)
        made[at] = wrong
        with raises(WatchError, subject="scores"):
            for _ in range(IN_TURN):
                model(X)
        model(X)  # and now the pattern is read
    torch.testing.assert_close(curve(w, "entropy")[-1].exp(), torch.full((2, 2), 5.0).double())


def test_what_no_kernel_of_torch_gave_is_checked_in_every_call() -> None:
    """A module may change its pattern after a training step: the pattern is read from then on."""
    made, X = [right, right], torch.randn(1, 5, 8)
    model = nn.Sequential(*(Reporting(lambda k=k: made[k](), True) for k in range(2)))
    with torch.no_grad(), rankscope.watch(model, ["entropy"]) as w:
        model(X)
        made[1] = wrong
        model(X)
    torch.testing.assert_close(curve(w, "entropy").exp(), torch.full((2, 2, 2), 5.0).double())


def test_scores_that_are_made_in_another_way_are_checked_at_once() -> None:
    """With a scale of zero scores give the uniform pattern, with another they do not."""
    scales, X = [0.0, 0.0], torch.randn(1, 5, 8)
    model = nn.Sequential(*(Reporting(lambda k=k: replace(wrong(), scale=scales[k]), True, True) for k in range(2)))
    with torch.no_grad(), rankscope.watch(model, NAMES):
        model(X)
        scales[1] = 1.0
        with raises(WatchError, subject="scores"):
            model(X)


def test_nan_marks_its_sample_alone() -> None:
    model = GPT().eval()
    hidden = torch.randn(2, 6, WIDTH)
    hidden[1, 2] = math.nan
    blocks = nn.Sequential(*model.transformer["h"])
    w = seen(blocks, NAMES, hidden)
    for name in NAMES:
        assert curve(w, name)[0].isfinite().all() and curve(w, name)[1].isnan().all()


class Long(nn.Module):
    """A block with attention over many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).split(16, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_a_watch_makes_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "HELD", 1 << 15)
    model, X = nn.Sequential(Long(), Long()), torch.randn(1, 500, 16)

    def largest(names: list[str]) -> int:
        with LargestTensor() as record:
            seen(model, names, X)
        return record.entries

    assert largest(NAMES) <= 1 << 16
    assert largest(["dobrushin"]) >= 4 * 500 * 500


@pytest.mark.sampled(2)
@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, probe: bool, dropout: float) -> None:
    def trained(monitored: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(5)
        model = GPT(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = None
        if monitored:
            run = tmp_path / f"{probe} {dropout}"
            given: dict[str, Any] = {"probe": words()} if probe else {}
            monitor = Monitor(model, [*NAMES, "relative_mu"], every=2, run=run, optimizer=optimizer, **given)
        for step in range(6):
            ids = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(step))
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step()
        if monitor is not None:
            monitor.close()
        return [weight.detach().clone() for weight in model.parameters()], monitor

    (plain, _), (weights, _) = trained(False), trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    table = rankscope.read(tmp_path / f"{probe} {dropout}").tables["training"]
    for name in NAMES:
        rows = table.filter(metric=name)
        assert set(rows["layer"]) == {1, 2, 3} and len(set(rows["step"])) >= 3
        assert rows["value"].is_finite().all()


def test_measure_says_who_reads_scores() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    with raises(MetricError, subject="metrics"):
        rankscope.measure(net, torch.randn(1, 4, 8, dtype=torch.float64), metrics=["mu", "largest_logit"])
