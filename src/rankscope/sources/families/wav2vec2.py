"""wav2vec 2.0 and HuBERT: BERT's or ViT's blocks on features of sound."""

from typing import Any, ClassVar

from rankscope.sources.embedding import Embedding, WaveEmbedding
from rankscope.sources.families.family import Family, activation
from rankscope.sources.families.parts import Tensors, convolution, layout, linear_weights, norm, norm_weights


class Wav2Vec2(Family):
    """wav2vec 2.0 and HuBERT, post-norm or (the large ones) pre-norm, on samples of sound without padding."""

    name, types = "wav2vec2", ("wav2vec2", "hubert")
    continuous_inputs, input_name, stack = True, "input_values", "encoder.layers"
    parts: ClassVar = layout(
        "attention", "q_proj k_proj v_proj out_proj", norms="layer_norm final_layer_norm",
        mlp="feed_forward.intermediate_dense feed_forward.output_dense",
    )  # fmt: skip
    reads: ClassVar = {
        "norm_place": lambda config: "pre" if config.do_stable_layer_norm else "post",
        "final_norm": "do_stable_layer_norm",
    }
    only: ClassVar = {"adapter_attn_dim": None, "conv_pos_batch_norm": False}

    def other_tensors(self, model: Any) -> Tensors:
        """The encoder's norm, where it comes last."""
        return norm("final_norm", model.encoder.layer_norm) if model.config.do_stable_layer_norm else {}

    def embedding(self, model: Any) -> Embedding:
        """All before the first block; the encoder's norm too, where it comes first."""
        config, layers, project = model.config, model.feature_extractor.conv_layers, model.feature_projection
        into: Any = linear_weights(project.projection)
        return WaveEmbedding(
            convolutions=tuple(convolution(layer.conv) for layer in layers),
            norms=tuple(norm_weights(getattr(layer, "layer_norm", None)) for layer in layers),
            by_channel=config.feat_extract_norm == "group",
            activation=activation(config.feat_extract_activation),
            into_norm=norm_weights(getattr(project, "layer_norm", None)),
            into=into,
            position_convolution=convolution(model.encoder.pos_conv_embed.conv),
            norm=None if config.do_stable_layer_norm else norm_weights(model.encoder.layer_norm),
            norm_eps=config.layer_norm_eps,
        )

    def output(self, model: Any) -> bool:
        """An adapter may shorten what comes out."""
        return getattr(model, "adapter", None) is None
