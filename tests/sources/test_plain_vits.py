"""ViTs that are plain modules, of vit-pytorch and of timm: known by their layout, and compared with themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankscope import Transformer, load, measure, watch
from rankscope.errors import ParityError, SourceError
from rankscope.sources.families import MODULES
from tests.raising import raises
from tests.sources.plain_vits import CHANNELS, PATCH, SIDE, VITS, moved, vit
from tests.timm import timm


def images(channels: int = CHANNELS, side: int = SIDE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, channels, side, side, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("label", VITS)
@torch.no_grad()
def test_a_vit_of_vit_pytorch_is_known_by_its_layout(label: str) -> None:
    """Its class scores, of an image that the check did not see, come out of the network's last tokens."""
    model = vit(label)
    net: Any = load(model)
    assert net.origin.family == "vit_pytorch" and net.origin.parity.states < 1e-13
    out = net.run(*net.encode(images())).output
    last = model.mlp_head(out.mean(1) if label == "simple" else out[:, 0])
    torch.testing.assert_close(last, model(images()), rtol=1e-12, atol=1e-12)
    early = label.startswith("early")
    assert net.arch.final_norm != early and net.arch.activation == ("relu" if label == "early" else "gelu")
    assert net.arch.mlp == ("none" if "alone" in label else "plain")
    assert not hasattr(model.transformer, "norm") if early else True  # the user's own is left as it is


@torch.no_grad()
def test_it_is_measured_saved_and_named(tmp_path: Path) -> None:
    model = vit("late")
    net, named = load(model), load(model, family="vit_pytorch")
    X = net.encode(images()).X
    curves = [measure(net, X, metrics="mu", arithmetic=kind).curve("mu") for kind in ("deviation", "float64")]
    torch.testing.assert_close(*curves, rtol=1e-9, atol=0)
    net.save(tmp_path)
    again: Transformer = load(tmp_path)
    assert again.fingerprint == net.fingerprint == named.fingerprint
    assert torch.equal(again.encode(images()).X, X)
    with raises(SourceError, "source"):
        load(model, family="timm_vit")
    with raises(SourceError, "family"):
        net.to_hf()


@pytest.mark.parametrize("label", ["late", "early", "simple"])
@torch.no_grad()
def test_what_is_watched_is_what_is_measured(label: str) -> None:
    """Its layers are lists of branches, whose skips are outside of any module."""
    model, metrics = vit(label), ["mu", "entropy", "head_mu"]
    with watch(model, metrics) as w:
        model(images())
    net = load(model)
    profile = measure(net, net.encode(images()).X, metrics=metrics, arithmetic="float64")
    for metric in metrics:
        ours, theirs = w.profile().curve(metric), profile.curve(metric)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12, equal_nan=True)


def test_what_only_looks_like_one_is_refused() -> None:
    """Another activation, images that are no squares, and a skip that the layout does not tell."""
    model = vit("late")
    model.transformer.layers[0][1].net[2] = nn.Softplus()  # type: ignore[index]
    with raises(SourceError, "activation"):
        load(model)
    model = vit("late")
    model.pos_embedding = nn.Parameter(model.pos_embedding[:-1].detach())
    with raises(SourceError, "image_size"):
        load(model)
    model = vit("late")
    model.to_patch_embedding[0].axes_lengths["p1"] = 2 * PATCH  # type: ignore[index, operator]
    with raises(SourceError, "family"):
        load(model)
    assert not any(family.fits(nn.TransformerEncoderLayer(8, 2)) for family in MODULES.values())


SIZES: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4}
TIMM: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled, registers": {"init_values": 0.3, "reg_tokens": 2, "no_embed_class": True},
    "clip": {"pre_norm": True},
    "mean": {"global_pool": "avg", "class_token": False, "qkv_bias": False},
}


@pytest.mark.parametrize("label", TIMM)
@torch.no_grad()
def test_a_vit_of_timm_is_known_by_its_layout(label: str) -> None:
    library = timm()
    model = moved(library.models.vision_transformer.VisionTransformer(**SIZES | TIMM[label]))
    net: Any = load(model)
    assert net.origin.family == "timm_vit" and net.origin.parity.states < 1e-13
    out, X = net.run(*net.encode(images(3, 16))).output, images(3, 16)
    torch.testing.assert_close(out, model.forward_features(X), rtol=1e-12, atol=1e-12)


def test_blocks_of_timm_that_are_built_otherwise_are_refused() -> None:
    library = timm()
    model = library.models.vision_transformer.VisionTransformer(**SIZES, qk_norm=True)
    with raises(ParityError, "states"):
        load(moved(model))
    with raises(SourceError, "source"):
        load(library.models.beit.Beit(**SIZES))
