"""Two routes to one number: `watch` on the original and `measure` on its canonical network."""

from typing import Any

import pytest
import torch

from rankscope.live import watch
from rankscope.metrics import Metric, metric
from rankscope.profiles import measure
from rankscope.sources import FAMILIES, lifted, load
from tests.sources.models import CASES, model_of
from tests.sources.test_families import encoded, inputs_of

TOKENS = ["relative_residual", "residual", "mu", "effective_rank", "mean_cosine", "residual@midrange"]
HEADS = ["dobrushin", "entropy", "first_token_mass", "head_mu", "head_relative_residual"]
MINE = Metric("longest", lambda x, padding: x.X.norm(dim=-1).amax(-1), degree=1, scale=metric("mu").scale)
UNSEEN = dict.fromkeys(("xlnet", "dinov2", "dinov2_with_registers", "dinov3", "qwen3_next"), HEADS[3:]) | {
    "gpt_oss": ["entropy"]
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "label"), CASES)
@torch.no_grad()
def test_watch_equals_measure(name: str, label: str) -> None:
    """1e-9 in float64, padding included; the original's float32 parts lifted, as in the parity check."""
    model: Any = FAMILIES[name].core(model_of(name, label))
    net = load(model)
    inputs, padding = inputs_of(name, model, net)
    X, _ = encoded(name, net, inputs, padding)
    # What heads add: XLNet has no plain projection, the canonical DINOs their scales in it, Qwen3-Next a gate. A
    # pattern does not show the sink of gpt-oss, which `watch` counts as a key: off the pattern there is no entropy.
    names = [each for each in TOKENS + HEADS if each not in UNSEEN.get(name, [])]
    if any(map(net.arch.mixes, range(net.arch.layers))):
        names += ["expert_load", "expert_entropy"]
    metrics: list[str | Metric] = [*names, MINE]
    blocks = FAMILIES[name].blocks(FAMILIES[name].core(model))
    stack = list(dict.fromkeys(blocks)) if label == "groups" else None  # found by itself: the groups
    with lifted(), watch(model, metrics, blocks=stack) as w:
        model(**inputs)
    seen, expected = w.profile(), measure(net, X, padding, metrics, "float64")
    for each in [*names, MINE.name]:
        mine, theirs = seen.curve(each), expected.curve(each)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
    checks: Any = seen.manifest.networks[0].checks
    assert checks["padded_tokens"] == expected.manifest.networks[0].checks["padded_tokens"]
