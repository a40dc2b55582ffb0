"""`cut`: what is chosen, and models written without it."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.depths import cut, fidelity
from rankscope.errors import ArchitectureError, FileError, SourceError
from rankscope.nets import Architecture, Transformer
from rankscope.sources import FAMILIES, load
from rankscope.sources.shortened import write_shortened
from tests.builders import awake, normal
from tests.raising import raises
from tests.sources.models import model_of

X = normal(2, 6, 8)


def made(layers: int = 5, **fields: Any) -> Transformer:
    return awake(Architecture(layers=layers, width=8, heads=4, norm_place="pre", **fields), size=0.05)


def error(net: Transformer, layers: Any) -> float:
    """What the output loses, written out."""
    Y, Z = (
        net.run(X).output,
        net.variant(layers=[k for k in range(1, net.arch.layers + 1) if k not in layers]).run(X).output,
    )
    return sum(float((z - y).norm() / y.norm()) for y, z in zip(Y, Z, strict=True)) / len(Y)


def test_one_shot_takes_the_layers_with_the_lowest_scores() -> None:
    net = made()
    found = cut(net, X, keep=0.6, by="magnitude", search="one_shot")
    sizes = [
        sum(
            float((t**2).sum())
            for name, t in net.state_dict().items()
            if name.startswith(f"layers.{k}.") and "weight" in name
        )
        for k in range(5)
    ]
    lowest = sorted(range(1, 6), key=lambda layer: sizes[layer - 1])[:2]
    assert found.layers == tuple(lowest) and found.net.arch.layers == 3
    assert found.net.fingerprint == net.without(layers=lowest).fingerprint
    assert found.fidelity.relative_error == pytest.approx(error(net, lowest), rel=1e-12)


def test_an_exact_search_finds_the_best_of_all_sets() -> None:
    net = made()
    best = min(combinations(range(1, 6), 2), key=lambda layers: error(net, layers))
    found = cut(net, X, keep=0.6, by="error", search="exact")
    assert found.layers == best and found.scores.height == 10
    assert found.scores["score"].min() == pytest.approx(error(net, best), rel=1e-12)


def test_greedy_scores_what_is_left_anew() -> None:
    net = made()
    found = cut(net, X, keep=0.4, by="error", search="greedy")
    out: list[int] = []
    for _ in range(3):
        out.append(min((k for k in range(1, 6) if k not in out), key=lambda layer: error(net, [*out, layer])))
    assert found.layers == tuple(out)
    influence = cut(net, X, keep=0.4, by="influence", search="greedy")
    last = net.without(layers=influence.layers[:2])
    left = [k for k in range(1, 6) if k not in influence.layers[:2]]
    again = cut(last, X, keep=0.67, by="influence", search="one_shot")
    assert influence.layers[2] == left[again.layers[0] - 1]
    assert influence.scores.filter(round=3)["score"].to_list() == pytest.approx(again.scores["score"].to_list())


@pytest.mark.parametrize("by", ["path_share", "residual_share"])
def test_exact_shares_choose_sets_and_not_sums(by: str) -> None:
    net = made()
    found = cut(net, X, keep=0.6, by=by, search="exact")
    assert found.scores.height == 10 and len(found.layers) == 2
    one = {row["layer"]: row["score"] for row in cut(net, X, 0.6, by, "one_shot").scores.iter_rows(named=True)}
    first = found.scores.row(0, named=True)
    layers = [int(layer) for layer in first["layers"].split(", ")]
    assert first["score"] != pytest.approx(sum(one[layer] for layer in layers), rel=1e-3)


def test_heads_go_in_equal_numbers_and_by_groups() -> None:
    found = cut(made(), X, keep=0.5, by="magnitude", of="heads")
    assert found.net.arch.heads == 2 and len(found.heads) == 10 and "removed" in found.sentence
    for layer in range(1, 6):
        rows = found.scores.filter(layer=layer).sort("score")["head"].to_list()
        assert {head for at, head in found.heads if at == layer} == set(rows[:2])
    grouped = cut(made(key_heads=2), X, keep=0.5, by="path_share", of="heads")
    assert (grouped.net.arch.heads, grouped.net.arch.key_heads) == (2, 1)
    silent = cut(made(positions="alibi"), X, keep=0.5, by="random", of="heads")
    assert silent.net.arch.kept_heads is not None and "silenced" in silent.sentence


def test_how_many_stay() -> None:
    net = made(6)
    assert [cut(net, X, keep, "random").net.arch.layers for keep in (1.0, 0.75, 0.5, 0.01)] == [6, 5, 3, 1]
    whole = cut(net, X, 1.0)
    assert whole.layers == () and whole.fidelity == fidelity(net, net, X)


@pytest.mark.parametrize(
    ("wrong", "subject"),
    [
        ({"keep": 0}, "keep"),
        ({"keep": 1.5}, "keep"),
        ({"keep": float("nan")}, "keep"),
        ({"keep": "0.5"}, "keep"),
        ({"by": "importance"}, "by"),
        ({"search": "beam"}, "search"),
        ({"of": "neurons"}, "of"),
        ({"batch": 4}, "batch"),
        ({"by": "influence", "search": "exact"}, "search"),
        ({"by": "influence", "of": "heads"}, "by"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(wrong: dict[str, Any], subject: str) -> None:
    with raises(ArchitectureError, subject):
        cut(made(), X, **{"keep": 0.5, **wrong})


def test_too_many_sets_are_refused() -> None:
    with raises(ArchitectureError, "search"):
        cut(made(30), X, 0.5, "error", "exact")


def test_a_network_that_breaks_down_is_refused() -> None:
    net = made()
    broken = {
        name: tensor * (float("inf") if name == "layers.2.mlp.up.weight" else 1)
        for name, tensor in net.state_dict().items()
    }
    with raises(ArchitectureError, "by"):
        cut(Transformer.from_weights(net.arch, broken), X, by="influence", search="one_shot")


# ---- models of transformers ----

HEADED = [
    ("gpt2", "decoder", "GPT2LMHeadModel"), ("llama", "mistral", "MistralForCausalLM"), ("gemma", None, None),
    ("bert", "encoder", "BertForMaskedLM"), ("gpt_neox", None, "GPTNeoXForCausalLM"), ("opt", None, "OPTForCausalLM"),
    ("albert", "shared", "AlbertForMaskedLM"),
]  # fmt: skip


def headed(family: str, label: str | None, kind: str | None) -> Any:
    """A small model with a head for a task, in float32."""
    import transformers

    configs = FAMILIES[family].tiny_configs()
    config = configs[label] if label in configs else next(iter(configs.values()))
    torch.manual_seed(1)
    maker = getattr(transformers, kind) if kind else None
    model = maker(config) if maker else transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "label", "kind"), HEADED)
def test_a_model_with_its_head_loses_layers_and_transformers_loads_the_rest(
    family: str, label: str | None, kind: str | None, tmp_path: Path
) -> None:
    """The whole model with hooks that pass the layers by gives the same logits as what was written."""
    model = headed(family, label, kind)
    net, core = load(model), FAMILIES[family].core(model)
    layers = [2, 3]
    written = write_shortened(model, net, layers, tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small").eval()
    assert again.num_parameters() == written.num_parameters()
    assert family == "albert" or again.num_parameters() < model.num_parameters()
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    calls: list[Any] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(args[0] if args else kwargs["hidden_states"])

    def after(module: Any, args: Any, output: Any) -> Any:
        if len(calls) not in layers:
            return None
        return (calls[-1], *output[1:]) if isinstance(output, tuple) else calls[-1]

    for block in dict.fromkeys(FAMILIES[family].blocks(core)):
        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after)
    options = {} if family in ("bert", "albert") else {"use_cache": False}
    with torch.no_grad():
        expected = model(input_ids=ids, **options).logits
        got = again(input_ids=ids, **options).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert load(tmp_path / "small").arch.layers == net.arch.layers - 2


def test_the_first_layer_leaves_what_it_keeps_for_all(tmp_path: Path) -> None:
    """T5 keeps its table of position biases in its first block."""
    model = model_of("t5", "plain")
    net = load(model)
    short = load(write_shortened(model, net, [1], tmp_path))
    cut_net = net.without(layers=[1])
    assert short.state_dict().keys() == cut_net.state_dict().keys()
    for name, tensor in short.state_dict().items():
        assert torch.equal(tensor, cut_net.state_dict()[name])
    assert load(model).fingerprint == net.fingerprint  # the model itself is as it was


def test_a_config_that_would_rebuild_other_layers_is_refused(tmp_path: Path) -> None:
    """ModernBERT's first layer has no norm of its own, whichever layer stands there."""
    model = model_of("modernbert", next(iter(FAMILIES["modernbert"].tiny_configs())))
    with raises(SourceError, "layers"):
        write_shortened(model, load(model), [1], tmp_path / "small")
    assert not list((tmp_path / "small").iterdir())


def test_windows_by_layer_go_with_their_layers(tmp_path: Path) -> None:
    names = [(name, label) for name, family in FAMILIES.items() for label, config in family.tiny_configs().items()
             if len(set(getattr(config, "layer_types", None) or ())) > 1 and not family.side]  # fmt: skip
    assert names, "some family has kinds of layers"
    name, label = names[0]
    model = model_of(name, label)
    net = load(model)
    write_shortened(model, net, [2], tmp_path)
    again = load(tmp_path)
    kept = [layer for layer in range(net.arch.layers) if layer != 1]
    assert [again.arch.mask_of(k) for k in range(len(kept))] == [net.arch.mask_of(layer) for layer in kept]


@pytest.mark.slow
def test_minilm_is_written_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    net = load("minilm")
    found = cut(net, ["Call me Ishmael.", "The sea is calm."], keep=0.5, by="influence")
    found.save_model(tmp_path / "small")
    model, tokenizer = AutoModel.from_pretrained(tmp_path / "small"), AutoTokenizer.from_pretrained(tmp_path / "small")
    with torch.no_grad():
        theirs = model(**tokenizer("Call me Ishmael.", return_tensors="pt")).last_hidden_state
    mine = found.net.run(found.net.encode("Call me Ishmael.").X).output
    torch.testing.assert_close(theirs.double(), mine, rtol=1e-4, atol=1e-5)
    with raises(FileError):
        found.save_model(tmp_path / "small")


def test_what_no_model_of_transformers_holds_is_a_sentence(tmp_path: Path) -> None:
    with raises(SourceError, "model"):
        cut(made(), X, 0.5, "random").save_model(tmp_path)
    net = load(model_of("gpt2", "decoder"))
    ids = torch.randint(3, 60, (1, 6))
    with raises(SourceError, "model"):
        cut(net, ids, 0.5, "random").save_model(tmp_path)  # of a model in memory
    with raises(SourceError, "model"):
        cut(net, ids, 0.5, "random", of="heads").save_model(tmp_path, model_of("gpt2", "decoder"))
