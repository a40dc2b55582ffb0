"""DistilBERT: BERT's block under other names, no segment."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, activation, architecture_from, projections


class DistilBert(Family):
    """DistilBERT: a BERT without segments."""

    name, types = "distilbert", ("distilbert",)
    stack = "transformer.layer"
    parts: ClassVar = {
        **projections("attention", "q_lin k_lin v_lin out_lin"),
        "attention_norm": "sa_layer_norm",
        "mlp.up": "ffn.lin1",
        "mlp.down": "ffn.lin2",
        "mlp_norm": "output_layer_norm",
    }
    embedding_parts: ClassVar = {
        "words": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
    }

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; its eps is fixed."""
        act = activation(config.activation)
        return architecture_from(config, mlp_width=config.hidden_dim, activation=act, norm_eps=1e-12)
