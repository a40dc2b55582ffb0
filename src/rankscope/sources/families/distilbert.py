"""DistilBERT."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import Family, architecture_from, layout


class DistilBert(Family):
    """DistilBERT: a BERT without segments."""

    name, types = "distilbert", ("distilbert",)
    stack = "transformer.layer"
    parts: ClassVar = layout(
        "attention", "q_lin k_lin v_lin out_lin", norms="sa_layer_norm output_layer_norm", mlp="ffn.lin1 ffn.lin2"
    )
    embedding_parts: ClassVar = {name: path for name, path in Bert.embedding_parts.items() if name != "segment"}

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; its eps is fixed."""
        fields = {"mlp_width": config.hidden_dim, "activation": config.activation}
        return architecture_from(config, **fields, norm_eps=1e-12)
