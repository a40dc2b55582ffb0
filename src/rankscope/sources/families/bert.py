"""BERT and its kin: post-norm encoders, words + positions + segment through a norm. ESM and ModernBERT are pre-norm."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import PRE, Family, after_padding
from rankscope.sources.families.parts import Tensors, layout, projections, without
from rankscope.sources.families.rotary import angles, masks, rotary


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
    reads: ClassVar = {"mask": lambda config: "causal" if config.is_decoder else "complete"}
    only: ClassVar = {"add_cross_attention": False}


Roberta = Bert.like(
    "roberta", "RoBERTa, XLM-RoBERTa and CamemBERT: a BERT with other positions.",
    types=("roberta", "xlm-roberta", "camembert"), first_position=after_padding,
)  # fmt: skip
Electra = Bert.like(
    "electra", "ELECTRA, as an encoder or as a decoder.", types=("electra",),
    embedding_parts={**Bert.embedding_parts, "after": "embeddings_project or none"},
)  # fmt: skip


DistilBert = Family.like(
    "distilbert", "DistilBERT: a BERT without segments.", types=("distilbert",), stack="transformer.layer",
    parts=layout(
        "attention", "q_lin k_lin v_lin out_lin", norms="sa_layer_norm output_layer_norm", mlp="ffn.lin1 ffn.lin2",
    ),
    embedding_parts=without(Bert.embedding_parts, "segment"), fixed={"norm_eps": 1e-12},
    reads={"mlp_width": "hidden_dim", "activation": "activation"},
)  # fmt: skip


class Albert(Family):
    """ALBERT; with several groups, each repeats its own layers."""

    name, types = "albert", ("albert",)
    parts: ClassVar = layout(
        "attention", "query key value dense", norms="attention.LayerNorm full_layer_layer_norm", mlp="ffn ffn_output"
    )
    embedding_parts: ClassVar = {**Bert.embedding_parts, "after": "encoder.embedding_hidden_mapping_in"}
    reads: ClassVar = {
        "layers": lambda config: config.num_hidden_layers * config.inner_group_num,
        "shared": lambda config: config.num_hidden_groups == config.inner_group_num == 1,  # one layer to share
    }

    def blocks(self, model: Any) -> list[Any]:
        """Group by group, as `AlbertTransformer` applies them."""
        config, groups = model.config, model.encoder.albert_layer_groups
        per_group = config.num_hidden_layers / config.num_hidden_groups
        order = [groups[int(index / per_group)] for index in range(config.num_hidden_layers)]
        return [block for group in order for block in group.albert_layers]


class MPNet(Family):
    """MPNet: post-norm, with absolute positions, and a bias by distance that all layers share."""

    name, types, stack = "mpnet", ("mpnet",), Bert.stack
    parts: ClassVar = {
        **Bert.parts,
        **projections("attention.attn", "q k v o"),
        "attention_norm": "attention.LayerNorm",
    }
    embedding_parts: ClassVar = without(Bert.embedding_parts, "segment")
    fixed: ClassVar = {"positions": "bias", "bias_buckets": 32, "bias_reach": 128}  # whatever the config says
    only: ClassVar = {"pad_token_id": 1}  # by which ids of padding are told
    first_position = after_padding

    def other_tensors(self, model: Any) -> Tensors:
        """The table of biases, as far as it is read."""
        return {"bias_table": model.encoder.relative_attention_bias.weight[: self.fixed["bias_buckets"]]}


class Esm(Bert):
    """ESM-2 (rotary positions) and ESM-1b (absolute ones)."""

    name, types = "esm", ("esm",)
    final_norm = "encoder.emb_layer_norm_after"
    parts: ClassVar = {**Bert.parts, "attention_norm": "attention.LayerNorm", "mlp_norm": "LayerNorm"}
    embedding_parts: ClassVar = {
        "words": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings or none",
        "norm": "embeddings.layer_norm",
    }
    fixed: ClassVar = {**PRE, "activation": "gelu"}  # its code reads no other
    only: ClassVar = {"add_cross_attention": False, "is_folding_model": False}
    first_position = after_padding

    def architecture(self, config: Any) -> Architecture:
        """The architecture of a config, with rotary positions if the config names them."""
        if config.position_embedding_type != "rotary":
            return self.described(config)
        width = config.hidden_size // config.num_attention_heads
        return self.described(config, positions="rotary", rotary_frequencies=(angles(config.rope_theta, width),))

    def architecture_of(self, model: Any) -> Architecture:
        """Angles are saved with the weights, and may have been rounded to float16 there."""
        arch, turned = super().architecture_of(model), model.rotary_embeddings
        return arch if turned is None else arch.replace(rotary_frequencies=(tuple(turned.inv_freq.double().tolist()),))

    def embedding(self, model: Any) -> TextEmbedding:
        """Words, scaled by how many of a sample are masked; positions and a norm where the model has them."""
        config = model.config
        return self.text(model, mask_id=config.mask_token_id if config.token_dropout else None)


NomicBert = Family.like(
    "nomic_bert", "Nomic BERT (nomic-embed-text): post-norm, without biases outside of norms.", types=("nomic_bert",),
    stack="layers",
    parts=layout(
        "self_attn", "q_proj k_proj v_proj o_proj", norms="post_attention_layernorm post_mlp_layernorm",
        mlp="mlp.gate_proj mlp.up_proj mlp.down_proj",
    ),
    embedding_parts=without(Bert.embedding_parts, "positions"), fixed={"mlp": "gated"},
    reads={"head_width": "head_dim"}, further=(rotary,),
)  # fmt: skip


ModernBert = Family.like(
    "modernbert", "ModernBERT. Wi is what the activation takes, then the other.", types=("modernbert",),
    stack="layers", final_norm="final_norm",
    parts={
        **projections("attn", "Wqkv Wo"), "attention_norm": "attn_norm", "mlp.gate, mlp.up": "mlp.Wi",
        "mlp.down": "mlp.Wo", "mlp_norm": "mlp_norm",
    },
    embedding_parts={"words": "embeddings.tok_embeddings", "norm": "embeddings.norm"},
    fixed={**PRE, "mlp": "gated", "bare_layers": (0,)},  # the first reads the embedding, normed already
    reads={
        "activation": "hidden_activation", "norm_eps": "norm_eps", "mask": lambda config: masks(config, "complete"),
    },
    further=(rotary,),
)  # fmt: skip
