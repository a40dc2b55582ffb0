"""The reference of the attack is right: against float64 where that resolves, and against papers in torch.

The torch functions here know nothing of the package but the names of tensors: each is a paper's formula on the
weights of a network of two layers, complete mask, no MLP."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mpmath as mp
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.nets import Architecture, Experts, Transformer
from rankscope.remedies import REMEDY_FILES
from tests.attack.exact import readings
from tests.attack.networks import FEATURES, KINDS, drawn
from tests.attack.remedies import RemediedNetwork
from tests.builders import awake, normal, one_head
from tests.deviation.reference import Rows

FEW = ("ordinary", "any", "saturated", "zero tokens", "no eps", "width one", "bigbird, padded", "olmo")


def as_tensor(X: Rows) -> Tensor:
    return torch.tensor([[float(u) for u in row] for row in X], dtype=torch.float64)


def reference_states(net: Transformer, X: Tensor, padded: int = 0) -> list[Tensor]:
    with mp.workdps(50):
        reference = RemediedNetwork(net)
        reference.padded = padded
        return [as_tensor(state) for state in reference.states(X)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("feature", FEATURES)
def test_states_are_those_of_float64_where_it_resolves(feature: str) -> None:
    for number, kind in enumerate(FEW):
        for seed in (40 + number, 100 + number):
            case = drawn(seed, kind, feature)
            real = ~case.padding[0]
            states = reference_states(case.net, case.X[0, real], int(case.padding.sum()))
            for step, true in zip(case.net.steps(case.X, case.padding), states, strict=True):
                scale = float(true.abs().max()) or 1.0
                assert torch.allclose(step.state[0, real] / scale, true / scale, rtol=0, atol=1e-6), (kind, seed)


# ---- papers --------------------

Weights = dict[str, Tensor]
Paper = Callable[[Tensor, int, Weights, dict[str, Any]], Tensor]
"""(tokens, layer from 0, its weights, what layers before left) to what the layer gives."""
LAYERS = 3


def heads(X: Tensor, W: Tensor) -> Tensor:
    """[head, token, head_width]."""
    return torch.stack([X @ W[:, h] for h in range(W.shape[1])])


def softmax_attention(X: Tensor, w: Weights, scores: Callable[[Tensor], Tensor] = lambda s: s) -> Tensor:
    q, k = heads(X, w["attention.query.weight"]), heads(X, w["attention.key.weight"])
    return torch.softmax(scores(q @ k.mT / math.sqrt(q.shape[-1])), -1)


def projected(P: Tensor, V: Tensor, w: Weights) -> Tensor:
    return sum((P @ V)[h] @ W for h, W in enumerate(w["attention.output.weight"]))


def attended(X: Tensor, w: Weights, change: Callable[[Tensor], Tensor] = lambda P: P) -> Tensor:
    """Attention with a changed pattern."""
    return projected(change(softmax_attention(X, w)), heads(X, w["attention.value.weight"]), w)


def uniform(X: Tensor) -> Tensor:
    return torch.full((len(X), len(X)), 1 / len(X), dtype=X.dtype)


def per_head(numbers: Tensor) -> Tensor:
    return numbers[:, None, None]


def shaped(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    alpha, beta, gamma = (per_head(w[f"parts.shaped.{name}"]) for name in ("alpha", "beta", "gamma"))
    eye = torch.eye(len(X), dtype=X.dtype)
    return X + attended(X, w, lambda P: alpha * eye + beta * P - gamma * uniform(X))


def attnscale(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    low = uniform(X)
    return X + attended(X, w, lambda P: low + (1 + per_head(w["parts.attnscale.w"])) * (P - low))


def centred(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    return X + attended(X, w, lambda P: P - uniform(X))


def sinkhorn(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    """Two rounds beyond the softmax: `K_0 = exp(scores)`, rows and columns in turn, ending with rows."""

    def balanced(P: Tensor) -> Tensor:
        for _ in range(2):
            P = P / P.sum(-2, keepdim=True)
            P = P / P.sum(-1, keepdim=True)
        return P

    return X + attended(X, w, balanced)


def logn(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    P = softmax_attention(X, w, lambda scores: 0.7 * math.log(len(X)) * scores)
    return X + projected(P, heads(X, w["attention.value.weight"]), w)


def second_attention(X: Tensor, w: Weights, name: str) -> Tensor:
    other = {f"attention.{part}.weight": w.get(f"parts.{name}.{part}", w[f"attention.{part}.weight"])
             for part in ("query", "key")}  # fmt: skip
    return softmax_attention(X, w | other)


def differential(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    """Ye et al. 2024, equations 1 to 4: heads go through an RMSNorm each, times `1 - lambda_init`."""
    a, b, c, d = (w[f"parts.differential.lambda_{name}"] for name in ("query_1", "key_1", "query_2", "key_2"))
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    P = softmax_attention(X, w) - (torch.exp(a @ b) - torch.exp(c @ d) + start) * second_attention(X, w, "differential")
    out = P @ heads(X, w["attention.value.weight"])
    normed = F.rms_norm(out, out.shape[-1:], w["parts.head_norm.gain"], eps=1e-5) * (1 - start)
    return X + sum(each @ W for each, W in zip(normed, w["attention.output.weight"], strict=True))


def differential2(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    share = torch.sigmoid(X @ w["parts.differential2.share"]).T[..., None]
    P = softmax_attention(X, w) - share * second_attention(X, w, "differential2")
    return X + projected(P, heads(X, w["attention.value.weight"]), w)


def rezero(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    return X + w["parts.rezero.weight"] * attended(X, w)


def skipinit(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    return X + w["parts.skipinit.attention"] * attended(X, w)


def sqrtl(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    return X + attended(X, w) / math.sqrt(LAYERS)


def normed(X: Tensor, w: Weights) -> Tensor:
    return F.layer_norm(X, X.shape[-1:], w["attention_norm.gain"], w["attention_norm.bias"], eps=1e-6)


def lnscale(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    return X + attended(normed(X, w) / math.sqrt(layer + 1), w)


def deepnorm(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    return normed((2 * LAYERS) ** 0.25 * X + attended(X, w), w)


def heavier_skip(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    return 2.0 * X + attended(X, w)


def valueresidual(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    V = heads(X, w["attention.value.weight"])
    first = kept.setdefault("first", V)
    V = V if layer == 0 else w["parts.valueresidual.a"] * V + w["parts.valueresidual.b"] * first
    return X + projected(softmax_attention(X, w), V, w)


def neutreno(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    V = heads(X, w["attention.value.weight"])
    out = softmax_attention(X, w) @ V + 0.6 * (kept.setdefault("first", V) - V)
    return X + sum(each @ W for each, W in zip(out, w["attention.output.weight"], strict=True))


def featscale(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    A = attended(X, w)
    mean = A.mean(0, keepdim=True)
    return X + A + w["parts.featscale.s"] * mean + w["parts.featscale.t"] * (A - mean)


def contranorm(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    """The post-norm network, without a norm: on the sum of attention and its skip."""
    X = X + attended(X, w)
    unit = F.normalize(X, dim=-1)
    return 1.1 * X - 0.1 * torch.softmax(unit @ unit.T, -1) @ X


def gate(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    out = softmax_attention(X, w) @ heads(X, w["attention.value.weight"])
    out = out * torch.sigmoid(heads(X, w["attention.gate.weight"]))
    return X + sum(each @ W for each, W in zip(out, w["attention.output.weight"], strict=True))


def headgate(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    gates = torch.sigmoid(X @ w["parts.headgate.weight"]).T[..., None]
    return X + projected(gates * softmax_attention(X, w), heads(X, w["attention.value.weight"]), w)


PAPERS: dict[str, tuple[Paper, dict[str, Any], dict[str, Any]]] = {
    "shaped": (shaped, {}, {}),
    "attnscale": (attnscale, {"w": 0.5}, {}),
    "centred": (centred, {}, {}),
    "sinkhorn": (sinkhorn, {"rounds": 2}, {}),
    "logn": (logn, {"gamma": 0.7}, {}),
    "differential": (differential, {}, {}),
    "differential2": (differential2, {}, {}),
    "rezero": (rezero, {}, {}),
    "skipinit": (skipinit, {}, {}),
    "sqrtl": (sqrtl, {}, {}),
    "lnscale": (lnscale, {}, {"norm": "layer", "norm_place": "pre", "biases": ("norm",)}),
    "deepnorm": (deepnorm, {}, {"norm": "layer", "norm_place": "post", "biases": ("norm",)}),
    "lambda": (heavier_skip, {}, {}),
    "valueresidual": (valueresidual, {}, {}),
    "neutreno": (neutreno, {}, {}),
    "featscale": (featscale, {}, {}),
    "contranorm": (contranorm, {}, {}),
    "gate": (gate, {}, {}),
    "headgate": (headgate, {}, {}),
}
"""By remedy: its paper in torch, the numbers it is given, and the fields of a network that it needs."""


def in_torch(net: Transformer, X: Tensor, paper: Paper) -> list[Tensor]:
    states, kept, state = [X], dict[str, Any](), net.state_dict()
    for layer in range(net.arch.layers):
        prefix = f"layers.{layer}."
        weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        states.append(paper(states[-1], layer, weights, kept))
    return states


def stirred(net: Transformer) -> Transformer:
    """The numbers that remedies train, off their start."""
    state = {name: tensor + 0.5 * normal(*tensor.shape, seed=place) if "parts." in name or "gate." in name else tensor
             for place, (name, tensor) in enumerate(net.state_dict().items())}  # fmt: skip
    return Transformer.from_weights(net.arch, state)


def test_every_remedy_has_its_paper() -> None:
    assert set(PAPERS) == set(REMEDY_FILES)


@pytest.mark.parametrize("name", PAPERS)
def test_remedies_are_their_papers(name: str) -> None:
    paper, numbers, fields = PAPERS[name]
    plain: dict[str, Any] = {"norm": "none", "biases": False, "norm_eps": 1e-6, **fields}
    net = awake(Architecture(layers=LAYERS, width=4, heads=2, mlp="none", **plain), seed=3).with_remedy(name, **numbers)
    net, X = stirred(net), normal(5, 4, seed=8)
    for true, mine in zip(in_torch(net, X, paper), reference_states(net, X), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-12)


def capped(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    """Gemma 2: `cap tanh(scores / cap)`."""
    P = softmax_attention(X, w, lambda scores: 0.4 * torch.tanh(scores / 0.4))
    return X + projected(P, heads(X, w["attention.value.weight"]), w)


def latent(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    """DeepSeek-V2, section 2.1: queries, keys and values of normed latents, c = RMSNorm(X W_down)."""
    q, k = (F.rms_norm(X @ w[f"attention.{name}_latent.weight"], (3,), w[f"attention.{name}_latent.norm.gain"], 1e-6)
            for name in ("query", "key"))  # fmt: skip
    Q, K, V = (heads(c, w[f"attention.{name}.weight"]) for c, name in ((q, "query"), (k, "key"), (k, "value")))
    return X + projected(torch.softmax(Q @ K.mT / math.sqrt(2), -1), V, w)


def mixtral(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    """Mixtral: softmax over the two largest logits of the router, each expert a SwiGLU."""
    X, rows = X + attended(X, w), []
    for x in X:
        logits, best = (x @ w["experts.router.weight"]).topk(2)
        swiglu = [
            (F.silu(x @ w["experts.gate.weight"][:, e]) * (x @ w["experts.up.weight"][:, e]))
            @ w["experts.down.weight"][e]
            for e in best
        ]
        rows.append(x + sum(p * y for p, y in zip(torch.softmax(logits, -1), swiglu, strict=True)))
    return torch.stack(rows)


def deepseek(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    """DeepSeek-V3, section 2.1.2: sigmoids, experts of the better of two groups by corrected scores, weights not
    corrected."""
    X, rows = X + attended(X, w), []
    for x in X:
        s = torch.sigmoid(x @ w["experts.router.weight"])
        corrected = s + w["experts.correction"]
        first = corrected[:2].sum() > corrected[2:].sum()
        hidden = corrected.masked_fill(torch.tensor([not first, not first, first, first]), -torch.inf)
        best = hidden.topk(2).indices
        swiglu = [
            (F.silu(x @ w["experts.gate.weight"][:, e]) * (x @ w["experts.up.weight"][:, e]))
            @ w["experts.down.weight"][e]
            for e in best
        ]
        rows.append(x + sum(s[e] / s[best].sum() * y for e, y in zip(best, swiglu, strict=True)))
    return torch.stack(rows)


def gpt_oss(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    """Biases everywhere, gates at most 0.5, values within it and one more; the gate is `g sigmoid(1.702 g)`."""
    X, rows = X + attended(X, w), []
    for x in X:
        logits, best = (x @ w["experts.router.weight"] + w["experts.router.bias"]).topk(2)
        out = []
        for e in best:
            gate, up = (x @ w[f"experts.{n}.weight"][:, e] + w[f"experts.{n}.bias"][e] for n in ("gate", "up"))
            gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
            out.append((gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ w["experts.down.weight"][e])
            out[-1] = out[-1] + w["experts.down.bias"][e]
        rows.append(x + sum(p * y for p, y in zip(torch.softmax(logits, -1), out, strict=True)))
    return torch.stack(rows)


def crossed(X: Tensor, layer: int, w: Weights, kept: dict[str, Any]) -> Tensor:
    """Vaswani et al. 2017: queries of the decoder, keys and values of the encoder's output."""
    X, M = X + attended(X, w), kept.setdefault("memory", normal(1, 5, 4, seed=9)[0])
    cross = {name.removeprefix("cross"): tensor for name, tensor in w.items() if name.startswith("cross")}
    q, k, v = (heads(x, cross[f".{name}.weight"]) for x, name in ((X, "query"), (M, "key"), (M, "value")))
    out = torch.softmax(q @ k.mT / math.sqrt(2), -1) @ v
    return X + sum(each @ W for each, W in zip(out, cross[".output.weight"], strict=True))


MIXTRAL = Experts(number=4, chosen=2, width=3, renormalised=True)
DEEPSEEK = replace(MIXTRAL, sigmoid=True, correction=True, groups=2, group_best=2)
GPT_OSS = replace(MIXTRAL, biases=True, limit=0.5)
FEATURED: dict[str, tuple[Paper, dict[str, Any]]] = {
    "caps": (capped, {"score_cap": 0.4}),
    "latents": (latent, {"query_latent": 3, "key_latent": 3}),
    "experts": (mixtral, {"mlp": "experts", "experts": MIXTRAL, "activation": "silu"}),
    "experts in groups": (deepseek, {"mlp": "experts", "experts": DEEPSEEK, "activation": "silu"}),
    "experts within limits": (gpt_oss, {"mlp": "experts", "experts": GPT_OSS, "activation": "quick_gelu"}),
    "gates": (gate, {"head_gate": True}),
    "cross": (crossed, {"cross_attention": True}),
}


@pytest.mark.parametrize("name", FEATURED)
def test_features_are_their_papers(name: str) -> None:
    paper, fields = FEATURED[name]
    plain: dict[str, Any] = {"norm": "none", "biases": False, "mlp": "none", **fields}
    net, X = awake(Architecture(layers=2, width=4, heads=2, **plain), seed=3), normal(5, 4, seed=8)
    net = net.with_memory(normal(1, 5, 4, seed=9)) if name == "cross" else net
    state = {
        key: tensor + normal(*tensor.shape, seed=4) if "correction" in key else tensor
        for key, tensor in net.state_dict().items()
    }
    net = replace(net, weights=Transformer.from_weights(net.arch, state).weights)
    for true, mine in zip(in_torch(net, X, paper), reference_states(net, X), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-12)


def test_rotated_keys_beside_a_latent_are_those_of_deepseek() -> None:
    """k = [k_C, RoPE(W_KR x)]: the rotated half of every head's key is one and the same, read off x itself."""
    arch = Architecture(layers=1, width=4, heads=2, head_width=4, key_latent=3, norm="none", mlp="none", biases=False,
                        positions="rotary", rotary_share=0.5, rotary_pairs="adjacent")  # fmt: skip
    state, X = awake(arch, seed=3).state_dict(), normal(5, 4, seed=8)
    key = state["layers.0.attention.key.weight"]  # [latent and beside it, head, head_width]
    key[:3, :, :2] = 0.0
    key[3:] = torch.eye(2, 4, dtype=torch.float64)[:, None]
    w = {name.removeprefix("layers.0.attention."): tensor for name, tensor in state.items()}
    down = X @ w["key_latent.weight"]
    c = F.rms_norm(down[:, :3], (3,), w["key_latent.norm.gain"], 1e-6)

    def turned(u: Tensor) -> Tensor:
        """Two entries as one complex number, times e^{i t} at position t: the first frequency is 1."""
        angle = torch.arange(len(X), dtype=torch.float64)
        return torch.view_as_real(torch.view_as_complex(u.contiguous()) * torch.polar(torch.ones_like(angle), angle))

    q, V = heads(X, w["query.weight"]), heads(c, w["value.weight"])
    K = torch.stack([torch.cat([turned(down[:, 3:]), c @ key[:3, h, 2:]], -1) for h in range(2)])
    q = torch.stack([torch.cat([turned(each[:, :2]), each[:, 2:]], -1) for each in q])
    P = torch.softmax(q @ K.mT / 2, -1)
    true = X + sum((P @ V)[h] @ W for h, W in enumerate(w["output.weight"]))
    torch.testing.assert_close(reference_states(Transformer.from_weights(arch, state), X)[1], true)


# ---- zero, and not a number --------------------


def test_a_zero_token_under_a_norm_without_eps_stays_zero_and_any_other_has_length_one() -> None:
    """Gaussian scores: the zero token looks at itself but for e^-500000, and that is what the norm sees."""
    arch = Architecture(layers=1, width=2, heads=1, norm="scale", norm_eps=0.0, norm_place="post", mlp="none",
                        attention_skip=0.0, biases=False, kernel="gaussian", divisor=1e-6)  # fmt: skip
    X = torch.tensor([[0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    (_, after), (_, zeros) = (reference_states(one_head(arch), tokens) for tokens in (X, 0 * X))
    torch.testing.assert_close(after, X[1].expand(2, 2))
    assert not zeros.any()


def test_what_depends_on_a_nan_is_none_and_the_rest_is_read() -> None:
    arch = Architecture(layers=2, width=4, heads=2, norm="none", mlp="none", biases=False, mask="causal")
    state = awake(arch, seed=1).state_dict()
    state["layers.0.attention.query.weight"][0, 1, 0] = torch.nan
    with mp.workdps(40):
        found = readings(Transformer.from_weights(arch, state), normal(3, 4, seed=2))
    numbers = {key for key, value in found.items() if not mp.isnan(value.log)}
    assert {key for key in found if key[0] == 0} < numbers
    assert {(1, 0, name) for name in ("entropy", "dobrushin", "head_mu")} < numbers
    assert not any(key[0] == 2 or key[1] == 1 for key in numbers)


def test_tokens_that_do_not_see_a_nan_do_not_depend_on_it() -> None:
    arch = Architecture(layers=1, width=4, heads=2, norm="none", mlp="none", biases=False, mask="causal")
    X = normal(3, 4, seed=2)
    X[2, 0] = torch.nan
    after = reference_states(awake(arch, seed=1), X)[1]
    assert after[:2].isfinite().all() and after[2].isnan().all()


def test_bigbirds_mask_is_of_all_positions() -> None:
    """Random edges of five tokens are others than those of three."""
    arch = Architecture(layers=1, width=4, heads=1, mask="bigbird:0:0:1:2", attention_skip=0.0)
    X, padding = normal(1, 5, 4, seed=3), torch.tensor([[False, False, False, True, True]])
    net = awake(arch)
    true = net.run(X, padding).output[0, :3]
    torch.testing.assert_close(reference_states(net, X[0, :3], padded=2)[1], true)
    assert not torch.allclose(reference_states(net, X[0, :3])[1], true)


def test_an_entropy_below_the_last_digit_keeps_all_of_its_terms() -> None:
    """Weights 1 - s and s: s - s log s, of which 1 part in log s is the large weight's."""
    arch = Architecture(layers=1, width=2, heads=1, norm="none", mlp="none", biases=False, divisor=1.0)
    X = torch.tensor([[30.0, 0.0], [0.0, 30.0]], dtype=torch.float64)
    with mp.workdps(60):
        found = readings(one_head(arch), X)[1, 0, "entropy"].log
        assert abs(found - mp.log10(mp.exp(-900) * 901)) < mp.mpf(10) ** -50


@pytest.mark.slow
def test_every_kind_is_drawn_with_every_feature() -> None:
    for feature in FEATURES:
        for seed, kind in enumerate(KINDS):
            case = drawn(seed, kind, feature)
            assert case.broken == kind.startswith("broken")
