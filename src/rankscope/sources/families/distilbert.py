"""DistilBERT: BERT's block under other names, no segment."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import SMALL_TEXT, Family, ModulePaths, activation, architecture_from


class DistilBert(Family):
    """DistilBERT: a BERT without segments."""

    name = "distilbert"
    types = ("distilbert",)
    stack = "transformer.layer"
    parts: ClassVar[ModulePaths] = {
        "attention.query": "attention.q_lin",
        "attention.key": "attention.k_lin",
        "attention.value": "attention.v_lin",
        "attention.output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "mlp.up": "ffn.lin1",
        "mlp.down": "ffn.lin2",
        "mlp_norm": "output_layer_norm",
    }
    embedding_parts: ClassVar[ModulePaths] = {
        "words": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
    }

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; its eps is fixed."""
        act = activation(config.activation)
        return architecture_from(config, mlp_width=config.hidden_dim, activation=act, norm_eps=1e-12)

    def tiny_configs(self) -> dict[str, Any]:
        """One config of an encoder."""
        from transformers import DistilBertConfig

        return {"encoder": DistilBertConfig(**SMALL_TEXT, hidden_dim=24)}
