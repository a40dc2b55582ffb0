"""The depth card, held against every path one by one, networks without a part, and transformers' own models."""

import copy
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope import Architecture, DepthCard, Transformer, depth, fresh, load
from rankscope.depths import passes
from rankscope.depths.criteria import Sample, set_shares
from rankscope.depths.tables import caption
from rankscope.errors import ArchitectureError, FileError
from rankscope.figures.page import page_figure
from rankscope.paths import decompose
from rankscope.sources import FAMILIES, lifted
from tests.builders import awake, normal
from tests.depths.every_term import terms_of, total
from tests.depths.test_two_passes import KINDS, SIZE
from tests.sources.models import FIRST, model_of

TINY: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "mlp_width": 6}


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_shares_are_sums_over_single_paths(place: str, norm: str) -> None:
    net = awake(Architecture(**TINY | {"norm_place": place}, norm=norm, final_norm=place == "pre"))
    X = normal(5, 8)
    terms, output = terms_of(net, X), net.run(X[None]).output[0].numpy()
    np.testing.assert_allclose(total(terms), output, rtol=1e-10, atol=1e-12)
    residual = output - output.mean(0)

    def share(chosen: list[Any], target: Any = output) -> float:
        return float((total(chosen) * target).sum() / (target**2).sum()) if chosen else 0.0

    card = depth(net, X[None])
    for row in card.layers.iter_rows(named=True):
        through = [term for term in terms if row["layer"] in term.layers]
        assert row["share"] == pytest.approx(share(through), abs=1e-12)
        assert row["residual_share"] == pytest.approx(share(through, residual), abs=1e-12)
        for start in ("embedding", "bias"):
            some = [term for term in through if term.start == start]
            assert row[f"share_{start}"] == pytest.approx(share(some), abs=1e-12)
        attends = [term for term in terms if any(layer == row["layer"] for layer, _ in term.heads)]
        assert row["share_attention"] == pytest.approx(share(attends), abs=1e-12)
        assert row["share_mlp"] == pytest.approx(share([t for t in terms if row["layer"] in t.mlps]), abs=1e-12)
    for row in card.heads.iter_rows(named=True):
        through = [term for term in terms if (row["layer"], row["head"]) in term.heads]
        assert row["share"] == pytest.approx(share(through), abs=1e-12)
        assert row["residual_share"] == pytest.approx(share(through, residual), abs=1e-12)
        some = [term for term in through if term.start == "embedding"]
        assert row["share_embedding"] == pytest.approx(share(some), abs=1e-12)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_shares_are_those_that_layers_are_cut_by(place: str) -> None:
    net, X = awake(Architecture(**SIZE | {"norm_place": place})), normal(1, 6, 16)
    card, sets = depth(net, X, heads=False), [{layer} for layer in (1, 2, 3)]
    for column, residual in (("share", False), ("residual_share", True)):
        expected = set_shares(net, Sample(X), sets, residual)
        assert card.layers[column].abs().to_list() == pytest.approx(expected, rel=1e-9)


def lost(net: Transformer, cut: Transformer, X: Tensor, padding: Tensor | None) -> tuple[float, float, float]:
    """By how much the output of a cut network is off, in the three ways of a card, means over samples."""
    found = []
    for sample in range(len(X)):
        keep = slice(None) if padding is None else ~padding[sample]
        pad = None if padding is None else padding[sample : sample + 1]
        one, other = (each.run(X[sample : sample + 1], pad).output[0][keep] for each in (net, cut))
        gap = 1 - float((one * other).sum() / (one.norm() * other.norm()))
        centred = [each - each.mean(0) for each in (one, other)]
        found.append((float((other - one).norm() / one.norm()), gap,
                      float((centred[1] - centred[0]).norm() / centred[0].norm())))  # fmt: skip
    return tuple(np.mean(found, 0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "some heads"])
def test_losses_are_those_of_the_network_without_the_part(kind: str) -> None:
    net = awake(Architecture(**SIZE, **KINDS[kind]))
    X, padding = normal(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[1, :2] = padding[2, 4:] = True
    card = depth(net, X, padding, batch_size=4)
    for row in [*card.layers.iter_rows(named=True), *card.heads.iter_rows(named=True)]:
        place = {"heads": [(row["layer"], row["head"])]} if "head" in row else {"layers": [row["layer"]]}
        expected = lost(net, net.without(**place), X, padding)
        assert (row["lost"], row["lost_residual"]) == pytest.approx((expected[0], expected[2]), rel=1e-9)
        assert row["lost_cosine"] == pytest.approx(expected[1], rel=1e-6, abs=1e-12)


def test_copies_that_do_not_fit_together_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    net, X = awake(Architecture(**SIZE)), normal(2, 6, 16)
    whole = depth(net, X)
    room = passes.SHARE * 2 * 5 * X.numel() * X.element_size()  # copies of two layers of four heads
    monkeypatch.setattr(passes, "free_memory", lambda device: room)
    parts = depth(net, X, batch_size=2)
    for name in ("layers", "heads"):
        one, other = (getattr(card, name)["lost"].to_numpy() for card in (whole, parts))
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_cross_attention_keeps_its_heads_and_has_no_shares() -> None:
    net = awake(Architecture(**SIZE, cross_attention=True)).with_memory(normal(2, 4, 16, seed=1))
    X = normal(2, 6, 16)
    card = depth(net, X)
    assert card.layers["share"].is_null().all() and "no shares of paths" in card.notes[0]
    assert card.effective_depths[2].value is None and "not known" in card.effective_depths[2].sentence

    def changed(cut: Transformer) -> float:
        pairs = zip(net.run(X).output, cut.run(X).output, strict=True)
        return float(np.mean([float((other - one).norm() / one.norm()) for one, other in pairs]))

    for layer, head in ((1, 2), (3, 0)):
        row = card.heads.filter(layer=layer, head=head).row(0, named=True)
        assert row["lost"] == pytest.approx(changed(net.without(heads=[(layer, head)])), rel=1e-9)


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=4, n_head=4)
    return GPT2Model(config).double().eval().requires_grad_(False)


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = LlamaModel(config).double().eval().requires_grad_(False)
    FAMILIES["llama"].prepare_for_float64(model)
    return model


def tiny_bert() -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
                        num_attention_heads=4)  # fmt: skip
    return BertModel(config, add_pooling_layer=False).double().eval().requires_grad_(False)


MODELS = {"gpt2": tiny_gpt2, "llama": tiny_llama, "bert": tiny_bert}
BLOCKS = {"gpt2": "h", "llama": "layers", "bert": "encoder.layer"}


def blocks_of(model: nn.Module, name: str) -> nn.ModuleList:
    found = model.get_submodule(BLOCKS[name])
    assert isinstance(found, nn.ModuleList)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_the_original_model_with_the_layer_deleted(name: str) -> None:
    model, ids = MODELS[name](), torch.randint(0, 50, (2, 9))
    card = depth(model, ids)
    with lifted():
        whole = model(ids).last_hidden_state
    for layer in range(1, 5):
        cut = copy.deepcopy(model)
        del blocks_of(cut, name)[layer - 1]
        with lifted():
            changed = cut(ids, **({} if name == "bert" else {"use_cache": False})).last_hidden_state
        gaps = [float((other - one).norm() / one.norm()) for one, other in zip(whole, changed, strict=True)]
        assert card.layers["lost"][layer - 1] == pytest.approx(np.mean(gaps), rel=1e-8)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_influence_and_cosines_are_those_of_hooks_on_the_original_model(name: str) -> None:
    model, ids = MODELS[name](), torch.randint(0, 50, (2, 9))
    card = depth(model, ids, heads=False)
    branches = {"gpt2": ("attn", "mlp"), "llama": ("self_attn", "mlp")}[name]
    seen: dict[Any, list[Tensor]] = {}

    def note(key: Any) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            seen[key] = [given, output[0] if isinstance(output, tuple) else output]

        return hook

    for index, block in enumerate(blocks_of(model, name)):
        block.register_forward_hook(note((index, "block")), with_kwargs=True)
        for branch in branches:
            block.get_submodule(branch).register_forward_hook(note((index, branch)), with_kwargs=True)
    with lifted():
        model(ids, use_cache=False)
    cosine = nn.functional.cosine_similarity
    for index in range(4):
        (into, out), (_, attention), (_, mlp) = (seen[index, part] for part in ("block", *branches))
        row = card.layers.row(index, named=True)
        assert row["influence"] == pytest.approx(float((1 - cosine(into, out, -1)).mean()), rel=1e-6, abs=1e-12)
        assert row["cosine_attention"] == pytest.approx(float(cosine(attention, into, -1).mean()), abs=1e-9)
        assert row["cosine_mlp"] == pytest.approx(float(cosine(mlp, into + attention, -1).mean()), abs=1e-9)
        assert row["cosine"] == pytest.approx(float(cosine(out - into, into, -1).mean()), abs=1e-9)


def test_entropy_and_sinks_are_those_of_the_attention_of_the_original() -> None:
    model, ids = tiny_gpt2(), torch.randint(0, 50, (2, 9))
    card = depth(model, ids, heads=False)
    model.set_attn_implementation("eager")
    for layer, P in enumerate(model(ids, output_attentions=True).attentions, 1):
        rows = card.heads.filter(layer=layer)
        entropy = -(P * P.clamp(min=1e-300).log()).sum(-1).mean((0, 2))
        np.testing.assert_allclose(rows["entropy"], entropy.detach(), rtol=1e-8)
        sink = P[..., 0].mean(-1)  # [sample, head]
        np.testing.assert_allclose(rows["sink"], sink.mean(0).detach(), rtol=1e-8)
        assert card.layers["sink_heads"][layer - 1] == pytest.approx(float((sink > 0.3).double().mean()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["vit", "t5", "gpt_neox", "gemma", "mixtral", "albert"])
def test_every_kind_of_model_has_a_card(name: str) -> None:
    """Images, relative position biases, parallel blocks, sandwiches, experts, shared layers: shares add up, and losses
    are those of `without`."""
    net = load(model_of(name, FIRST[name]), family=name)
    X = 0.5 * normal(2, 6, net.arch.width)
    card = depth(net, X)
    assert card.closure is not None and card.closure < 1e-9
    assert card.layers["lost"][1] == pytest.approx(lost(net, net.without(layers=[2]), X, None)[0], rel=1e-9)
    assert card.layers.null_count().sum_horizontal()[0] == 0


def test_streamed_layers_give_the_same_card(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    ids = torch.randint(0, 50, (2, 9))
    streamed = load(tmp_path, stream=True)
    assert streamed.streamed
    one, other = depth(streamed, ids), depth(load(tmp_path, stream=False), ids)
    for name in ("layers", "heads", "norms"):
        assert getattr(one, name).equals(getattr(other, name)), name


def test_what_rounding_may_change_as_much_is_marked() -> None:
    net = awake(Architecture(**SIZE))
    state = net.state_dict()
    state["layers.1.attention.output.weight"][2] = 0  # this head adds nothing
    state["layers.2.attention.output.weight"][0] *= 1e-15  # and this one less than can be seen
    card = depth(Transformer.from_weights(net.arch, state), normal(2, 6, 16))
    marked = card.heads.filter("lost_below_floor").select("layer", "head").rows()
    assert marked == [(2, 2), (3, 0)] and not card.layers["lost_below_floor"].any()
    assert "2 of 12 heads change it by less than 1%" in card.sentence


def test_single_precision_has_its_own_floor() -> None:
    net = awake(Architecture(**SIZE))
    state = net.state_dict()
    state["layers.0.attention.output.weight"][1] *= 1e-9
    net, X = Transformer.from_weights(net.arch, state), normal(2, 6, 16)
    double, single = depth(net, X), depth(net.to(torch.float32), X)
    place = {"layer": 1, "head": 1}
    assert (
        not double.heads.filter(**place)["lost_below_floor"][0] and single.heads.filter(**place)["lost_below_floor"][0]
    )


def test_equal_tokens_have_nothing_at_the_residual() -> None:
    net = awake(Architecture(**SIZE))
    card = depth(net, normal(1, 1, 16).expand(2, 6, 16).clone())
    assert card.layers["residual_share"].is_null().all() and card.layers["lost_residual"].is_null().all()
    assert card.layers["lost_residual_below_floor"].is_null().all() and (card.layers["rank"] == 0).all()


def test_ranks_before_and_after_norms_are_those_of_the_centred_tokens() -> None:
    net = awake(Architecture(layers=2, width=16, heads=2, norm="rms", norm_place="pre", mlp="none"))
    X = normal(7, 2) @ normal(2, 16, seed=1) + normal(1, 16, seed=2)  # a plane that misses the origin
    card = depth(net, X[None])
    after = X / (X.square().mean(-1, keepdim=True) + net.arch.norm_eps).sqrt()
    after = after * net.state_dict()["layers.0.attention_norm.gain"]
    expected = [int(torch.linalg.matrix_rank(Z - Z.mean(0), rtol=1e-10)) for Z in (X, after)]
    row = card.norms.row(0, named=True)
    assert [row["rank_before"], row["rank_after"]] == expected == [2, 3] and not row["rank_doubtful"]
    faint = X + 1e-14 * normal(7, 16, seed=3)
    assert depth(net, faint[None]).norms["rank_doubtful"][0]


def test_effective_depths_can_be_computed_again_from_the_table() -> None:
    net, X = awake(Architecture(**SIZE)), normal(2, 6, 16)
    card = depth(net, X, heads=False)
    found = {each.name: each.value for each in card.effective_depths}
    lost = card.layers["lost"].to_numpy()
    p = lost / lost.sum()
    assert found["layers_that_count"] == pytest.approx(math.prod(q**-q for q in p))
    counts = [k for k in range(1, 4) if np.sort(p)[::-1][:k].sum() >= 0.95]
    assert found["layers_for_most"] == counts[0]
    lengths = decompose(net, X).by_length().table.filter(pl.col("start") == "all")
    mean = float((lengths["length"] * lengths["share"]).sum()) / 2
    assert found["mean_path_length"] == pytest.approx(mean, rel=1e-9)
    below = [layer for layer, cosine in enumerate(card.layers["cosine"], 1) if cosine <= 0]
    assert found["last_opposing_layer"] == max(below, default=0)


def test_a_network_of_equal_layers_counts_all_of_them() -> None:
    """Without norms, attention over one token: every layer adds the same multiple of the token."""
    arch = Architecture(layers=4, width=8, heads=1, norm="none", mlp="none", biases=False)
    eye = torch.eye(8, dtype=torch.float64)
    state = {name: torch.zeros_like(tensor) for name, tensor in Transformer.random(arch).state_dict().items()}
    for layer in range(4):
        state[f"layers.{layer}.attention.value.weight"] = 0.5 * eye[:, None]
        state[f"layers.{layer}.attention.output.weight"] = eye[None]
    card = depth(Transformer.from_weights(arch, state), normal(1, 1, 8))
    assert card.layers["lost"].to_list() == pytest.approx([1 / 3] * 4)  # 1.5^3 instead of 1.5^4
    assert card.layers["share"].to_list() == pytest.approx([1 / 3] * 4)
    assert card.effective_depths[0].value == pytest.approx(4)
    assert card.effective_depths[2].value == pytest.approx(4 / 3)  # the mean of a binomial of 4 at 1 / 3
    assert card.layers["cosine"].to_list() == pytest.approx([1.0] * 4) and card.effective_depths[3].value == 0


def test_a_part_that_later_layers_need_is_refused() -> None:
    net = fresh(Architecture(**SIZE)).with_remedy("neutreno")
    with pytest.raises(ArchitectureError, match="leaves .* to later layers"):
        depth(net, normal(1, 6, 16))


def test_a_card_is_saved_and_read(tmp_path: Path) -> None:
    card = depth(fresh("bert-tiny"), ["Call me Ishmael. Some years ago", "never mind how long"], heads=False)
    again = DepthCard.read(card.save(tmp_path / "card"))
    assert again.layers.equals(card.layers) and again.norms.equals(card.norms) and again.notes == card.notes
    assert repr(again) == repr(card) and again.sentence.startswith("bert-tiny: 2 layers")
    assert rankscope.read(tmp_path / "card").tables["depth_layers"].height == 4
    (tmp_path / "none").mkdir()
    with pytest.raises(FileError, match="must hold a depth card"):
        DepthCard.read(tmp_path / "none")


@pytest.mark.slow
def test_a_card_is_a_picture_and_a_card_of_a_notebook() -> None:
    card = depth(fresh("bert-tiny"), ["Call me Ishmael. Some years ago"])
    picture = ElementTree.fromstring(card.svg())
    assert picture.tag.endswith("svg")
    assert len(card.plot().axes) == 5  # four panels and a bar of colours
    html = card._repr_html_()
    assert "DepthCard: bert-tiny, 2 layers" in html and "layers that count" in html


def test_progress_ends_where_it_said_it_would() -> None:
    told: list[tuple[int, int]] = []
    depth(fresh(Architecture(**SIZE)), normal(1, 6, 16), progress=lambda done, all: told.append((done, all)))
    assert told[-1][0] == told[-1][1] and [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("heads", [True, False])
def test_the_figure_says_what_is_in_it_and_no_more(heads: bool) -> None:
    """A caption for each panel that is there; one colour for one name; numbers where squares have room for them."""
    for arch, numbered in ((Architecture(**SIZE), True), (Architecture(layers=6, width=48, heads=12), False)):
        card = depth(fresh(arch), normal(1, 6, arch.width), heads=heads)
        said = caption(card.chart)
        assert ("without each head" in said) == heads and ("through each head" in said) != heads
        names: dict[str, set[str]] = {}
        for panel in card.chart.panels:
            marks: Any = panel.marks
            for mark in marks:
                if getattr(mark, "name", None):
                    names.setdefault(mark.colour, set()).add(mark.name)
        assert len(names) == 5 and all(len(same) == 1 for same in names.values())
        cells: Any = card.chart.panels[-1].marks[0]
        assert cells.numbers == numbered


def test_a_page_has_one_entry_of_its_legend_for_each_colour() -> None:
    drawn = page_figure(depth(fresh(Architecture(**SIZE)), normal(1, 6, 16), heads=False).chart)["data"]
    entries = [trace["name"] for trace in drawn if trace.get("showlegend") and trace.get("name")]
    assert sorted(entries) == ["MLP", "attention", "the layer", "the output", "what tells tokens apart"]
