"""The networks of figure 2: BERT, ALBERT and XLNet of base size, at random, and what is trained at hand.

Random ones are made by transformers as the paper made them, so that the embedding (its positions, its norm)
is theirs too. They have no vocabulary; words of the text become ids by a checksum, so that a word that comes
twice is one token twice, as it is for a trained vocabulary.
"""

import re
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rankscope.extras import need
from rankscope.nets import PUBLISHED, Transformer
from rankscope.sources import bundled_excerpts, load, split

FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "bert": ("Bert", {"vocab_size": 28996}),
    "albert": ("Albert", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "xlnet": ("XLNet", {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
}
"""transformers' name of each, and where its base size is not what transformers takes unless told."""
CHEMISTRY = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%\d\d|\d"
"""The usual tokens of SMILES strings (Schwaller et al. 2018)."""
REACTIONS = (
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "Brc1ccccc1.OB(O)c1ccccc1.O=C([O-])[O-].[Na+].[Na+].COCCOC>>c1ccc(-c2ccccc2)cc1",
    "CCOC(=O)c1ccc(N)cc1.CC(=O)Cl.CCN(CC)CC.ClCCl>>CCOC(=O)c1ccc(NC(C)=O)cc1",
)
PACKAGES = {
    "rxnfp": ("models/transformers/bert_ft", "bert"),
    "rxnmapper": ("models/transformers/albert_heads_8_uspto_all_1310k", None),
}
"""Packages that carry trained weights of 12 layers, a BERT's and an ALBERT's, which read reactions."""
ANTIBERTY = "trained_models/AntiBERTy_md_smooth"  # In the package antiberty: a BERT of 8 layers, which reads antibodies
ANTIBODIES = (
    "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAA",
    "QVQLVESGGGVVQPGRSLRLSCAASGFTFSSYGMHWVRQAPGKGLEWVAVIWYDGSNKYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAR",
    "DIQMTQSPSSLSASVGDRVTITCRASQSISSYLNWYQQKPGKAPKLLIYAASSLQSGVPSRFSGSGSGTDFTLTISSLQPEDFATYYCQQSYSTP",
)


@dataclass(frozen=True)
class Subject:
    """A network and what it reads."""

    name: str
    family: str
    trained: bool
    net: Transformer
    X: Tensor
    padding: Tensor
    reads: str


def random_subject(family: str, seed: int, texts: int, tokens: int, device: str = "cpu") -> Subject:
    """A network of base size as transformers draws it."""
    need("a random network as the paper drew it", "transformers")
    import transformers

    name, sizes = FAMILIES[family]
    config, make = getattr(transformers, f"{name}Config")(**sizes), getattr(transformers, f"{name}Model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = load(make(config).eval()).to(device=device)
    X, padding = net.encode(hashed(bundled_excerpts(tokens)[:texts], config.vocab_size, tokens), tokens)
    return Subject(f"{family}-base", family, False, net, X, padding, "Moby Dick, words as ids by checksum")


def hashed(texts: list[str], vocabulary: int, tokens: int) -> Tensor:
    """Ids of the first words of each text between two marks."""
    words = [[zlib.crc32(word.encode()) for word in split(text)[: tokens - 2]] for text in texts]
    return torch.tensor([[101, *(1000 + checksum % (vocabulary - 1000) for checksum in row), 102] for row in words])


def trained_subjects(models: tuple[str, ...], texts: int, tokens: int, device: str = "cpu") -> list[Subject]:
    """Trained networks asked for by name, or those at hand: MiniLM, and packages with chemistry."""
    subjects = [_reader(name, texts, tokens, device) for name in models or ("minilm",)]
    packaged = (packaged_subject(package, device) for package in ({} if models else PACKAGES))
    return subjects + [subject for subject in packaged if subject is not None]


def subject_at_hand(name: str, texts: int, tokens: int) -> Subject | None:
    """One trained network by its name (minilm, rxnfp, rxnmapper, antiberty); None if its package is not installed.

    Args:
        name: The name of the network.
        texts: Excerpts that MiniLM reads; the others read three reactions or antibodies.
        tokens: The length of an excerpt.

    Raises:
        MissingExtraError: transformers, or the package of MiniLM, is not installed.
    """
    return _reader(name, texts, tokens, "cpu") if name == "minilm" else packaged_subject(name, "cpu")


def _reader(name: str, texts: int, tokens: int, device: str) -> Subject:
    """A network that reads Moby Dick."""
    net = load(name, device=device)
    X, padding = net.encode(bundled_excerpts(tokens)[:texts], tokens)
    return Subject(Path(name).name, _kind(net), True, net, X, padding, "Moby Dick")


def packaged_subject(package: str, device: str) -> Subject | None:
    """The trained network of a package, and what it reads; None if the package or its weights are not there."""
    inside, family = (ANTIBERTY, None) if package == "antiberty" else PACKAGES[package]
    spec = find_spec(package)
    folder = next((Path(location) / inside for location in (spec and spec.submodule_search_locations) or ()), None)
    if folder is None or not folder.is_dir():
        return None
    net = load(folder, family=family, device=device)
    if package == "antiberty":
        words, vocabulary = [[*antibody] for antibody in ANTIBODIES], folder.parent / "vocab.txt"
    else:
        words, vocabulary = [re.findall(CHEMISTRY, reaction) for reaction in REACTIONS], folder / "vocab.txt"
    X, padding = _encoded(net, words, vocabulary.read_text().split("\n"))
    reads = f"{len(words)} {'antibodies' if package == 'antiberty' else 'chemical reactions'}"
    return Subject(package, _kind(net), True, net, X, padding, reads)


def _kind(net: Transformer) -> str:
    return "albert" if net.arch.shared else "bert"


def _encoded(net: Transformer, words: list[list[str]], vocabulary: list[str]) -> tuple[Tensor, Tensor]:
    """Lists of words between two marks as a network encodes them, and their padding."""
    index = {word: k for k, word in enumerate(vocabulary)}
    rows = [torch.tensor([index[word] for word in ("[CLS]", *row, "[SEP]")]) for row in words]
    ids, ends = pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
    return net.encode(ids, ids.shape[1], torch.arange(ids.shape[1]) >= ends[:, None])


def published_variant(subject: Subject, curve: str) -> Transformer:
    """A curve as the published code computes it. 'No MLP' in ALBERT puts the identity for both of the MLP's
    matrices, which leaves `norm(act(a) + a)`."""
    named = PUBLISHED[curve]
    if subject.family != "albert" or "mlp" in named or named == "transformer":
        return subject.net.variant(named)
    net = without_matrices(subject.net)
    return net if "skip" in named else net.variant(attention_skip=0.0)


def without_matrices(net: Transformer) -> Transformer:
    """A copy of the network whose MLPs are their activation alone."""
    arch = net.arch.replace(mlp_width=net.arch.width)
    eye = torch.eye(arch.width, dtype=net.dtype, device=net.device)
    identity = {"weight": eye, "bias": torch.zeros_like(eye[0])}
    tensors = net.state_dict()
    tensors |= {name: identity[name.rpartition(".")[2]] for name in tensors if ".mlp." in name}
    return Transformer.from_weights(arch, tensors)
