"""ALBERT: layers that share their weights."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import Family, architecture_from, layout, linear_weights


class Albert(Family):
    """ALBERT; with several groups, each repeats its own layers."""

    name, types = "albert", ("albert",)
    parts: ClassVar = layout(
        "attention", "query key value dense", norms="attention.LayerNorm full_layer_layer_norm", mlp="ffn ffn_output"
    )
    embedding_parts = Bert.embedding_parts

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; shared where there is but one layer to share."""
        layers = config.num_hidden_layers * config.inner_group_num
        shared = config.num_hidden_groups == config.inner_group_num == 1
        return architecture_from(config, layers=layers, norm_eps=config.layer_norm_eps, shared=shared)

    def blocks(self, model: Any) -> list[Any]:
        """Group by group, as `AlbertTransformer` applies them."""
        config, groups = model.config, model.encoder.albert_layer_groups
        per_group = config.num_hidden_layers / config.num_hidden_groups
        order = [groups[int(index / per_group)] for index in range(config.num_hidden_layers)]
        return [block for group in order for block in group.albert_layers]

    def embedding(self, model: Any) -> TextEmbedding:
        """The narrow embedding is normalised, then widened."""
        return self.text(model, after=linear_weights(model.encoder.embedding_hidden_mapping_in))
