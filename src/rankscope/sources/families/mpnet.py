"""MPNet: BERT's blocks with T5's bias on scores."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import Tensors, architecture_from, projections, require

BUCKETS, REACH = 32, 128  # What its code takes, whatever the config says


class MPNet(Bert):
    """MPNet: post-norm, with absolute positions, and a bias by distance that all layers share."""

    name, types = "mpnet", ("mpnet",)
    parts: ClassVar = {
        **Bert.parts,
        **projections("attention.attn", "q k v o"),
        "attention_norm": "attention.LayerNorm",
    }
    embedding_parts: ClassVar = {name: path for name, path in Bert.embedding_parts.items() if name != "segment"}

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; ids of padding are told by the number 1."""
        require(config, pad_token_id=1)
        return architecture_from(
            config, positions="bias", bias_buckets=BUCKETS, bias_reach=REACH, norm_eps=config.layer_norm_eps
        )

    def other_tensors(self, model: Any) -> Tensors:
        """The table of biases, as far as it is read."""
        return {"bias_table": model.encoder.relative_attention_bias.weight[:BUCKETS]}

    def first_position(self, model: Any) -> int:
        """Rows of the table up to the padding id are not used."""
        return int(model.embeddings.padding_idx) + 1
