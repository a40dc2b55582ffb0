"""DistilBERT: BERT's block under other names, no segment."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import SMALL_TEXT, Family, Places, activation, described


class DistilBert(Family):
    """DistilBERT."""

    name = "distilbert"
    types = ("distilbert",)
    stack = "transformer.layer"
    parts: ClassVar[Places] = {
        "attention.query": "attention.q_lin",
        "attention.key": "attention.k_lin",
        "attention.value": "attention.v_lin",
        "attention.output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "mlp.up": "ffn.lin1",
        "mlp.down": "ffn.lin2",
        "mlp_norm": "output_layer_norm",
    }
    embedded: ClassVar[Places] = {
        "words": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
    }

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; its eps is fixed."""
        act = activation(config.activation)
        return described(config, mlp_width=config.hidden_dim, activation=act, norm_eps=1e-12)

    def tiny(self) -> dict[str, Any]:
        """An encoder."""
        from transformers import DistilBertConfig

        return {"encoder": DistilBertConfig(**SMALL_TEXT, hidden_dim=24)}
