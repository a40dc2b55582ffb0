"""Trained checkpoints as they are published, from packages that carry them: `make weights` brings them.

rxnfp (three BERTs of 12 layers, chemical reactions), rxnmapper (an ALBERT of 12 layers, the same), antiberty
(a BERT of 8 layers, antibodies). All are `.bin` files; two configs do not say their model type.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.profiles import measure
from rankscope.sources import load, locate
from rankscope.sources.checkpoint import read
from rankscope_studies.dong2021.networks import CHEMISTRY

WEIGHTS = Path(os.environ.get("RANKSCOPE_WEIGHTS", Path(__file__).parents[2] / ".weights"))
REACTIONS = [
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "CCO.CC(=O)O>>CC(=O)OCC",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
]
ANTIBODIES = ["EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQER", "DVVMTQTPFSLPVSLGDQASISC"]
MODELS = [
    ("rxnfp/models/transformers/bert_ft", "bert", "vocab.txt", 12),
    ("rxnfp/models/transformers/bert_ft_10k_25s", None, "vocab.txt", 12),
    ("rxnfp/models/transformers/bert_pretrained", "bert", "vocab.txt", 12),
    ("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k", None, "vocab.txt", 12),
    ("antiberty/trained_models/AntiBERTy_md_smooth", None, "../vocab.txt", 8),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WEIGHTS.is_dir(), reason="trained weights are not here: make weights"),
]


def ids_of(folder: Path, vocabulary: str) -> tuple[Tensor, Tensor]:
    """Real inputs of the model's own kind, tokenised by hand with its vocabulary, and their padding."""
    words = {word: index for index, word in enumerate((folder / vocabulary).read_text().split("\n"))}
    if "antiberty" in str(folder):
        lists = [["[CLS]", *sequence, "[SEP]"] for sequence in ANTIBODIES]
    else:
        lists = [["[CLS]", *re.findall(CHEMISTRY, reaction), "[SEP]"] for reaction in REACTIONS]
    ids = [[words[word] for word in each] for each in lists]
    longest = max(map(len, ids))
    padding = torch.tensor([[column >= len(each) for column in range(longest)] for each in ids])
    return torch.tensor([each + [0] * (longest - len(each)) for each in ids]), padding


@pytest.mark.parametrize(("path", "family", "vocabulary", "layers"), MODELS)
@torch.no_grad()
def test_a_trained_checkpoint_is_its_canonical_network(
    path: str, family: str | None, vocabulary: str, layers: int
) -> None:
    folder = WEIGHTS / path
    net = load(folder, family=family)
    origin: Any = net.origin
    assert net.arch.layers == layers and max(origin.parity.states, origin.parity.attention) < 1e-12
    ids, padding = ids_of(folder, vocabulary)
    model = read(locate(str(folder), {}), family).model
    model.set_attn_implementation("eager")  # else it gives no attention
    theirs = model(ids, attention_mask=(~padding).long(), output_hidden_states=True, output_attentions=True)
    X, _ = net.encode(ids, max_length=ids.shape[1], padding=padding)
    run = net.run(X, padding, attention=True)
    for mine, state in zip(run.states, theirs.hidden_states, strict=True):
        assert float((mine - state)[~padding].abs().max() / state[~padding].abs().max()) < 1e-12
    for P, attention in zip(run.attention, theirs.attentions, strict=True):
        assert float(((P - attention) * ~padding[:, None, :, None]).abs().max()) < 1e-12
    # Trained networks keep their tokens apart; without skips and MLPs they do not (Dong et al. 2021).
    whole = measure(net, X, padding, "relative_residual").curve("relative_residual")
    san = measure(net.variant(skip=False, mlp=False), X, padding, "relative_residual")
    assert float(whole[:, -1].min()) > 0.05 > float(san.curve("relative_residual")[:, -1].max())
