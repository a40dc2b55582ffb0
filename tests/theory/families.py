"""Networks and tokens that meet the hypotheses of each theorem, drawn to strain its bound."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rankscope.nets import Architecture, Transformer
from tests.builders import normal
from tests.strategies import architectures

Case = tuple[Transformer, Tensor]
SAN: dict[str, Any] = {"mlp": "none", "norm": "none", "attention_skip": 0.0}
SPHERE: dict[str, Any] = {**SAN, "heads": 1, "norm": "scale", "norm_eps": 0.0, "biases": False}
DEPTHS = st.sampled_from([1, 1, 2, 3, 4, 7])
GAINS = (-2.0, 0.1, 1.0)
EVERY_MASK = [
    "complete", "causal", "window:1", "window:2", "unidirectional", "prefix:2", "dilated:1:2", "strided:2",
    "longformer:1:1", "bigbird:1:1:1", "causal&window:2",
]  # fmt: skip


def net_of(init: str = "xavier", seed: int = 0, times: float = 1.0, **fields: Any) -> Transformer:
    """A small network of these fields, every tensor so many times its usual size."""
    arch = Architecture(**{"layers": 3, "width": 4, "heads": 2, **fields})
    tensors = Transformer.random(arch, seed, init).state_dict()
    return Transformer.from_weights(arch, {name: times * W for name, W in tensors.items()})


@st.composite
def tokens(draw: st.DrawFn, width: int, most: int = 9, fewest: int = 1) -> Tensor:
    """`[1, token, width]`, 1e-6 to 1e6: generic, nearly or exactly equal, one outlier, one token zero."""
    n, seed = draw(st.integers(fewest, most)), draw(st.integers(0, 2**31))
    kind = draw(st.sampled_from(["generic", "generic", "near", "equal", "outlier", "zero token", "integers"]))
    X = normal(1, n, width, seed=seed)
    if kind == "near":
        X = X[:, :1] + 10.0 ** -draw(st.integers(1, 12)) * X
    elif kind == "equal":
        X = X[:, :1].expand_as(X).clone()
    elif kind == "outlier":
        X[:, 1:] = X[:, :1] + 1e-9 * X[:, 1:]
        X[:, -1] = -3.0 * X[:, -1]
    elif kind == "zero token":
        X[:, draw(st.integers(0, n - 1))] = 0.0
    elif kind == "integers":
        X = X.mul(2).round()
    return X * 10.0 ** draw(st.integers(-6, 6))


@st.composite
def weighted(draw: st.DrawFn, arch: Architecture, spread: tuple[int, int] = (-3, 3)) -> Transformer:
    """Every tensor at a scale of its own, biases and gains not at their usual 0 and 1."""
    seed = draw(st.integers(0, 2**31))
    tensors = Transformer.random(arch, seed, draw(st.sampled_from(["bert", "xavier", "orthogonal"]))).state_dict()
    scales = {part: 10.0 ** draw(st.integers(*spread)) for part in ("query", "key", "value", "output", "mlp")}
    for place, (name, tensor) in enumerate(tensors.items()):
        scale = next((scales[part] for part in scales if f".{part}." in name), 1.0)
        if name.endswith("bias"):
            tensor = normal(*tensor.shape, seed=seed + place)
        elif name.endswith("gain"):
            tensor = tensor + 0.5 * normal(*tensor.shape, seed=seed + place)
        tensors[name] = tensor * scale
    return Transformer.from_weights(arch, tensors)


@st.composite
def attention_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Heads, kernels and positions of attention that scores tokens alone."""
    heads = draw(st.sampled_from([1, 2, 4]))
    layers = draw(DEPTHS)
    kept = st.lists(st.integers(0, heads - 1), min_size=1, max_size=heads, unique=True).map(tuple)
    return {
        "layers": layers,
        "width": draw(st.sampled_from([2, 4, 6])),
        "heads": heads,
        "head_width": draw(st.sampled_from([1, 3])),
        "key_heads": draw(st.sampled_from([k for k in (1, 2, 4) if heads % k == 0])),
        "kernel": draw(st.sampled_from(["softmax", "softmax", "gaussian", "uniform"])),
        "divisor": draw(st.sampled_from([0.0, 0.25, 8.0])),
        "positions": draw(st.sampled_from(["none", "absolute"])),
        "kept_heads": draw(st.none() | st.tuples(*[kept] * layers)),
        "shared": draw(st.booleans()),
        "biases": draw(st.sampled_from([True, False])),
        "mlp": "none",
        "norm": "none",
        "attention_skip": 0.0,
    }


def _of(fields: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Case]:
    """Networks of these fields with tokens."""

    def case(given: dict[str, Any]) -> st.SearchStrategy[Case]:
        arch = Architecture(**given)
        return st.tuples(weighted(arch), tokens(arch.width))

    return fields.flatmap(case)


def _with(**fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(attention_fields(), st.fixed_dictionaries(fixed)).map(lambda two: {**two[0], **two[1]})


SKIPS = st.sampled_from([1.0, -1.0, 0.5, 2.0])
PURE = _of(_with(mask=st.sampled_from(["complete", "prefix:16"])))
MASKED = _of(_with(mask=st.sampled_from(EVERY_MASK), positions=st.sampled_from(["none", "bias", "alibi"])))
WITH_MLP = _of(
    _with(
        mlp=st.just("plain"),
        mlp_width=st.just(5),
        mlp_skip=st.sampled_from([0.0, 1.0, -0.5]),
        activation=st.sampled_from(["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "identity"]),
    )
)
WITH_SKIP = _of(_with(attention_skip=SKIPS))
SKIPPED = _of(
    _with(
        attention_skip=SKIPS,
        mask=st.sampled_from(EVERY_MASK),
        mlp=st.sampled_from(["none", "plain", "gated"]),
        mlp_width=st.just(5),
        norm=st.sampled_from(["none", "layer", "rms", "scale"]),
        norm_place=st.sampled_from(["pre", "sandwich"]),
        norm_eps=st.sampled_from([0.0, 1e-12, 1e-5]),
    )
)


@st.composite
def anything(draw: st.DrawFn) -> Case:
    """Over everything a block can be."""
    arch = draw(architectures(norm_eps=draw(st.sampled_from([0.0, 1e-12, 1e-5]))))
    net = draw(weighted(arch, (-1, 1)))
    return net, draw(tokens(arch.width))


def orthogonal(width: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(width, width, seed=seed)).Q


@st.composite
def spheres(draw: st.DrawFn, cone: bool | None = None) -> Case:
    """One head, orthogonal values, a norm that scales to one length; tokens in a cone about one direction."""
    width, layers = draw(st.sampled_from([2, 3, 6])), draw(DEPTHS)
    arch = Architecture(
        layers=layers, width=width, heads=1, mask=draw(st.sampled_from(EVERY_MASK)), mlp="none",
        norm=draw(st.sampled_from(["scale", "rms"])), norm_eps=0.0, attention_skip=0.0,
        biases=draw(st.sampled_from([(), ("query", "key")])), shared=draw(st.booleans()),
    )  # fmt: skip
    net, seed = draw(weighted(arch, (-2, 1))), draw(st.integers(0, 2**31))
    tensors = net.state_dict()
    for place, name in enumerate(tensors):
        if ".value." in name or ".output." in name:
            turn = orthogonal(width, seed + place) * 10.0 ** ((seed + place) % 7 - 3)
            tensors[name] = turn[:, None] if ".value." in name else turn[None]
        elif name.endswith("gain"):
            tensors[name] = torch.full_like(tensors[name], GAINS[(seed + place) % 3])
    X = draw(tokens(width))
    if cone if cone is not None else draw(st.booleans()):
        X = X.abs()
    return Transformer.from_weights(arch, tensors), X


@st.composite
def lambda_skips(draw: st.DrawFn) -> Case:
    """Post-norm attention with a skip that outweighs the branch; gains that change from layer to layer."""
    width, layers = draw(st.sampled_from([3, 6])), draw(DEPTHS)
    arch = Architecture(
        layers=layers, width=width, heads=draw(st.sampled_from([1, 3])), mlp="none", norm_eps=0.0,
        mask=draw(st.sampled_from(EVERY_MASK)), norm=draw(st.sampled_from(["layer", "rms", "scale"])),
        attention_skip=draw(st.sampled_from([1.0, -1.0, 4.0])),
        biases=draw(st.sampled_from([(), ("query",)])),
    )  # fmt: skip
    net, seed = draw(weighted(arch, (-2, 0))), draw(st.integers(0, 2))
    tensors = {
        name: torch.full_like(tensor, GAINS[(seed + place) % 3]) if name.endswith("gain") else tensor
        for place, (name, tensor) in enumerate(net.state_dict().items())
    }
    return Transformer.from_weights(arch, tensors), draw(tokens(width))


@st.composite
def low_rank(draw: st.DrawFn) -> Case:
    """Branches that write to few directions only, of any size and not along the axes."""
    net, X = draw(SKIPPED.filter(lambda case: case[0].arch.norm_place != "sandwich"))
    arch, width = net.arch, net.arch.width
    rank = draw(st.integers(0, width - 1))
    turn = orthogonal(width, draw(st.integers(0, 2**31)))
    project: Callable[[Tensor], Tensor] = lambda W: W @ turn[:rank].mT @ turn[:rank]  # noqa: E731
    written = (".output.weight", "mlp.down.weight")
    tensors = {name: project(W) if name.endswith(written) else W for name, W in net.state_dict().items()}
    return Transformer.from_weights(arch, tensors), X


FAMILIES: dict[str, tuple[st.SearchStrategy[Case], tuple[str, ...]]] = {
    "pure": (PURE, ("dong2021-2.2", "dong2021-2.3", "dong2021-2.3-gamma1", "oscillation",
                    "attention-factors", "exact-factors", "dobrushin", "wu2024-1")),
    "masked": (MASKED, ("attention-factors", "exact-factors", "dobrushin", "wu2024-1")),
    "with MLP": (WITH_MLP, ("dong2021-3.2", "dobrushin")),
    "with skip": (WITH_SKIP, ("dong2021-skip", "elementary-skip", "aligned-skip", "dobrushin")),
    "skips": (SKIPPED, ("elementary-skip", "aligned-skip")),
    "sphere": (spheres(), ("wu2024-2", "wu2024-cor1", "hemisphere")),
    "lambda": (lambda_skips(), ("lambda-skip",)),
    "low rank": (low_rank(), ("untouched",)),
    "anything": (anything(), ("norm-rank",)),
}  # fmt: skip
"""Who strains which theorem."""
