"""BERT and its kin: post-norm, words + positions + segment through a norm; and ModernBERT, which is pre-norm."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import Family, architecture_from, layout, linear_weights, require
from rankscope.sources.families.rotary import masks, rotary


class Bert(Family):
    """BERT, as an encoder or as a decoder."""

    name = "bert"
    types: ClassVar[tuple[str, ...]] = ("bert",)
    stack = "encoder.layer"
    parts: ClassVar = layout(
        "attention", "self.query self.key self.value output.dense",
        norms="attention.output.LayerNorm output.LayerNorm", mlp="intermediate.dense output.dense",
    )  # fmt: skip
    embedding_parts: ClassVar = {
        "words": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "segment": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    }

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; causal where the config says decoder."""
        require(config, add_cross_attention=False)
        mask = "causal" if config.is_decoder else "complete"
        return architecture_from(config, norm_eps=config.layer_norm_eps, mask=mask)


class Roberta(Bert):
    """RoBERTa, XLM-RoBERTa and CamemBERT: a BERT with other positions."""

    name, types = "roberta", ("roberta", "xlm-roberta", "camembert")

    def first_position(self, model: Any) -> int:
        """fairseq's habit: rows up to the padding id are not used."""
        return int(model.config.pad_token_id) + 1


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


class ModernBert(Family):
    """ModernBERT. Wi is what the activation takes, then the other."""

    name, types = "modernbert", ("modernbert",)
    stack, final_norm = "layers", "final_norm"
    parts: ClassVar = {
        "attention.query, attention.key, attention.value": "attn.Wqkv",
        "attention.output": "attn.Wo",
        "attention_norm": "attn_norm",
        "mlp.gate, mlp.up": "mlp.Wi",
        "mlp.down": "mlp.Wo",
        "mlp_norm": "mlp_norm",
    }
    embedding_parts: ClassVar = {"words": "embeddings.tok_embeddings", "norm": "embeddings.norm"}

    def architecture(self, config: Any) -> Architecture:
        """The first attention reads the embedding, which is normed already."""
        return architecture_from(
            config, mask=masks(config, "complete"), **rotary(config), mlp="gated", norm_place="pre",
            activation=config.hidden_activation, norm_eps=config.norm_eps, final_norm=True,
            bare_layers=(0,),
        )  # fmt: skip
