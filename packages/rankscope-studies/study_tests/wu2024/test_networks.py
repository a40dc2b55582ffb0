"""What the figures of the 2024 paper are run on."""

import polars as pl
import pytest

from rankscope.nets import Architecture
from rankscope.sources import bundled_excerpts, fresh
from rankscope_studies.wu2024 import fig8, networks


def test_layer_norm_plateaus_only_with_dropout() -> None:
    net = fresh(Architecture(layers=6, width=64, heads=2), name="small")
    X = net.encode(bundled_excerpts(128)[:1], 24).X
    off, on = (
        networks.last(networks.collapse(net, X, "SAN + LN", "complete", dropout=dropout), "relative_mu")
        for dropout in (False, True)
    )
    assert off < -50 and on > -1


def test_singular_values_are_all_there() -> None:
    net = fresh(Architecture(layers=2, width=16, heads=2), name="small")
    X = net.encode(bundled_excerpts(128)[:5], 12).X
    spectra = networks.spectrum(net, X, batch=2)
    assert len(spectra) == 5 * 3 * 12
    total = spectra.filter(sample=4, layer=0)["singular_value"].pow(2).sum()
    assert total == pytest.approx(float(X[4].square().sum()))
    mean = spectra.group_by("layer", "index").agg(pl.col("singular_value").log10().mean().alias("log10"))
    share = fig8.first_share(fig8.curves(mean))
    assert share.shape == (3,) and ((share > 0) & (share <= 1)).all()


def test_excerpts_are_spread_and_no_more_than_there_are() -> None:
    some, more = networks.excerpts(4), networks.excerpts(10_000)
    assert len(set(some)) == 4 and len(more) == len(bundled_excerpts(128))
    assert networks.file_name("google-bert/bert", "SAN + LN", "window ±1") == "google-bert_bert_SAN_+_LN_window_1"
