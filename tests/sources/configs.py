"""Every field of every config that a family reads: what it may be set to, or why it changes no state.

A field that is in neither table is new: `test_configs.py` names it. Look at what it does, then put it here.
"""

import copy
import dataclasses
from typing import Any

import torch
from transformers import PreTrainedConfig

from rankscope.sources import Family, lifted

ACTIVATIONS = ("relu", "silu", "gelu_new", "relu2")
SCALED: dict[str, Any] = {"rope_theta": 300.0, "factor": 4.0}
ROPE: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", **SCALED},
    {"rope_type": "linear", **SCALED, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", **SCALED},
    {"rope_type": "yarn", **SCALED, "original_max_position_embeddings": 8},
    {"rope_type": "yarn", **SCALED, "original_max_position_embeddings": 8, "attention_factor": 0.7},
    {"rope_type": "yarn", **SCALED, "original_max_position_embeddings": 8, "truncate": False},
    {"rope_type": "yarn", **SCALED, "original_max_position_embeddings": 8, "mscale": 0.7,
     "mscale_all_dim": 0.3},
    {"rope_type": "llama3", **SCALED, "original_max_position_embeddings": 8, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0},
    {"rope_type": "proportional", **SCALED},
    {"rope_type": "longrope", **SCALED, "original_max_position_embeddings": 28, "short_factor": [1.5, 2.0],
     "long_factor": [4.0, 8.0]},
    {"rope_type": "longrope", **SCALED, "original_max_position_embeddings": 28, "short_factor": [1.5] * 4,
     "long_factor": [4.0] * 4},
)  # fmt: skip
RECURRENT = ["linear_attention", "full_attention", "full_attention"]
"""Kinds of layers: those of Qwen3-Next as it ships, of which one has no attention."""
ROPE += tuple({"sliding_attention": ROPE[0], "full_attention": each} for each in (ROPE[2], ROPE[5], ROPE[12]))

VALUES: dict[str, tuple[Any, ...]] = {
    # sizes
    **dict.fromkeys(("hidden_size", "dim", "d_model", "n_embd"), (32,)),
    **dict.fromkeys(
        ("intermediate_size", "hidden_dim", "d_inner", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), (20,)
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), (28,)),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers"), (1, 2)),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), (1, 2)),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), (2, 8)),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), (1, 8)),
    "num_mel_bins": (3, 12),
    "max_length": (9,),
    **dict.fromkeys(("frequency_stride", "time_stride"), (1, 4)),
    "max_source_positions": (14,),
    **dict.fromkeys(("head_dim", "d_head", "d_kv"), (6, 16)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (1, 4)),
    "multi_query": (True, False),
    "kv_lora_rank": (8, 1),
    "q_lora_rank": (4, None, 1),
    "qk_rope_head_dim": (2, 6),
    "qk_nope_head_dim": (2,),
    "v_head_dim": (8,),
    "vocab_size": (47,),
    "type_vocab_size": (3,),
    "embedding_size": (16, 5),
    "word_embed_proj_dim": (8,),
    "num_hidden_groups": (2,),
    "inner_group_num": (2,),
    "mlp_ratio": (2,),
    "image_size": (16,),
    "patch_size": (3, 6, 5),
    "num_channels": (1,),
    "decoder_vocab_size": (64,),
    "share_encoder_decoder_embeddings": (True, False),
    # sound
    "conv_dim": ([4, 4, 4],),
    "conv_stride": ([2, 1, 3],),
    "conv_kernel": ([3, 4, 2],),
    "num_conv_pos_embeddings": (5, 6),
    "num_conv_pos_embedding_groups": (4,),
    "feat_extract_norm": ("group", "layer"),
    "feat_extract_activation": ACTIVATIONS,
    "feat_proj_layer_norm": (True, False),
    "conv_pos_batch_norm": (True,),
    "add_adapter": (True,),
    "adapter_attn_dim": (3,),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (2, 6)),
    "n_shared_experts": (1, 3),
    "first_k_dense_replace": (0, 2, 5),
    "routed_scaling_factor": (0.3,),
    "topk_method": ("group_limited_greedy",),
    "n_group": (1, 2),
    "topk_group": (1, 2),
    "rope_interleave": (True, False),
    "num_experts_per_tok": (1, 3),
    "moe_intermediate_size": (7,),
    "shared_expert_intermediate_size": (9,),
    "norm_topk_prob": (True, False),
    "swiglu_alpha": (1.5,),
    "swiglu_limit": (0.7, 7.0),
    "decoder_sparse_step": (1, 2, 4),
    "mlp_only_layers": ([], [0, 2]),
    # positions
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), (26, 40)),
    "original_max_position_embeddings": (29,),
    "sinusoidal_pos_embds": (True,),
    "relative_attention": (True, False),
    "max_relative_positions": (5, -1),
    "pos_att_type": (["p2c"], ["c2p", "p2c"], None),
    "position_biased_input": (True, False),
    "position_embedding_type": ("rotary", "absolute"),
    "rope_theta": (300.0,),
    "rope_parameters": ROPE,
    "rotary_dim": (8, 2),
    "no_rope_layers": ([0, 0, 1],),
    "no_rope_layer_interval": (3,),
    "alibi": (True,),
    "relative_attention_num_buckets": (12,),
    "relative_attention_max_distance": (30,),
    "clamp_len": (3,),
    # who sees whom
    "is_decoder": (True,),
    "add_cross_attention": (True,),
    "attn_type": ("uni",),
    "bi_data": (True,),
    "same_length": (True,),
    "sliding_window": (None, 1, 6),
    **dict.fromkeys(("local_attention", "window_size"), (2, 8)),
    "attention_types": ([[["global"], 3]],),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 2),
    "layer_types": (
        ["sliding_attention"] * 3,
        ["full_attention", "full_attention", "sliding_attention"],
        ["full_attention", "chunked_attention", "full_attention"],
        ["full_attention"] * 4,
        RECURRENT,
    ),
    "use_bidirectional_attention": (True, False),
    # what is computed
    **dict.fromkeys(
        ("hidden_act", "activation", "activation_function", "ff_activation", "hidden_activation"), ACTIVATIONS
    ),
    "feed_forward_proj": ("silu", "gated-gelu", "gated-relu"),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "norm_eps"), (0.03,)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "qkv_bias", "enable_bias", "bias"), (True, False)),
    **dict.fromkeys(("query_bias", "key_bias", "value_bias", "proj_bias", "conv_bias"), (True, False)),
    "layer_norm_elementwise_affine": (False,),
    "_remove_final_layer_norm": (True,),
    "do_layer_norm_before": (False,),
    **dict.fromkeys(("use_parallel_residual", "parallel_attn", "new_decoder_architecture"), (True, False)),
    "num_ln_in_parallel_attn": (1, 2),
    "apply_residual_connection_post_layernorm": (True,),
    "use_swiglu_ffn": (True,),
    "scale_embedding": (True, False),
    "emb_layer_norm_before": (True, False),
    "token_dropout": (True, False),
    "mask_token_id": (17,),
    "is_folding_model": (True,),
    "qk_layernorm": (True,),
    "use_gated_mlp": (True, False),
    "num_register_tokens": (0, 3),
    "do_stable_layer_norm": (True, False),
    "scale_attn_weights": (False,),
    "scale_attn_by_inverse_layer_idx": (True,),
    "reorder_and_upcast_attn": (True,),
    "query_pre_attn_scalar": (3,),
    "attn_logit_softcapping": (None, 0.4, 20.0),
    "pretraining_tp": (2,),
    "slow_but_exact": (True,),
    "chunk_size_feed_forward": (1,),
    "is_encoder_decoder": (True,),
    # what is remembered of earlier calls
    "mem_len": (None, 4),
    "reuse_len": (3,),
    "use_mems_eval": (False,),
}
"""By the field's name; values that a config has already are passed over."""

INERT = {
    "while training": (
        "attention_probs_dropout_prob", "hidden_dropout_prob", "attention_dropout", "dropout", "attn_pdrop",
        "embd_pdrop", "resid_pdrop", "hidden_dropout", "dropout_rate", "embedding_dropout", "mlp_dropout",
        "drop_path_rate", "layerdrop", "use_mems_train", "router_jitter_noise", "router_aux_loss_coef",
        "encoder_layerdrop", "decoder_layerdrop", "activation_dropout", "apply_spec_augment",
        "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob",
        "mask_feature_length", "mask_feature_min_masks", "feat_proj_dropout", "feat_quantizer_dropout",
        "final_dropout", "embed_dropout", "resid_dropout", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale",
    ),
    "when weights are drawn": (
        "initializer_range", "initializer_factor", "init_std", "initializer_cutoff_factor",
        "layerscale_value",
    ),
    "in a head for a task": (
        "classifier_dropout", "classifier_dropout_prob", "classifier_activation", "classifier_bias",
        "classifier_pooling", "qa_dropout", "seq_classif_dropout", "summary_activation",
        "summary_last_dropout", "summary_first_dropout", "summary_type", "summary_use_proj",
        "summary_proj_to_labels", "start_n_top", "end_n_top", "pooler_act", "pooler_output_size",
        "encoder_stride", "decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "projection_dim",
        "projection_size", "final_logit_softcapping", "tie_word_embeddings", "id2label", "label2id",
        "problem_type", "use_mask_token", "use_weighted_layer_sum", "classifier_proj_size",
        "median_filter_width", "num_codevectors_per_group", "num_codevector_groups", "num_negatives",
        "contrastive_logits_temperature", "codevector_dim", "proj_codevector_dim", "diversity_loss_weight",
        "ctc_loss_reduction", "ctc_zero_infinity", "tdnn_dim", "tdnn_kernel", "tdnn_dilation", "xvector_output_dim",
        "esmfold_config", "vocab_list", "pooler_dropout", "pooler_hidden_act", "legacy",
        "vision_use_head",
    ),
    "in an adapter after the last block": (
        "adapter_kernel_size", "adapter_stride", "num_adapter_layers", "output_hidden_size",
    ),
    "in a backbone": ("_out_features", "_out_indices", "apply_layernorm", "reshape_hidden_states"),
    "while text is generated": (
        "decoder_start_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    ),
    "in what is given back": ("output_hidden_states", "return_dict", "use_cache", "output_router_logits"),
    "in recurrent layers, which are refused": (
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads",
    ),
    "in heads that predict more tokens": ("num_mtp_layers",),
    "in how it is run": ("deterministic_flash_attn", "dtype"),
    "in words": ("architectures", "transformers_version"),
    "in which ids are special": (
        "bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id",
    ),
}  # fmt: skip
"""Where a field matters that changes no state."""

REFUSED = {
    "add_cross_attention": "cross-attention is no part of the network",
    "attn_type": "XLNet is mapped as it ships, bi",
    "bi_data": "positions by halves of the batch",
    "clamp_len": "distances that are cut off",
    "same_length": "a mask of XLNet's own",
    "layer_norm_elementwise_affine": "norms without a gain",
    "use_bidirectional_attention": "Gemma as an encoder",
    "is_decoder": "T5's decoder",
    "attn_logit_softcapping": "which Gemma 3 does not read",
    "d_head": "transformers itself ties it to the width",
    "is_folding_model": "ESMFold",
    "qk_layernorm": "LayerNorms of queries and keys",
    "conv_pos_batch_norm": "a batch norm before positions",
    "adapter_attn_dim": "adapters in blocks",
    "alibi": "Falcon's biases by distance, which are divided as its scores are",
    "apply_residual_connection_post_layernorm": "a skip from behind a norm",
    "swiglu_alpha": "gates of another slope than quick_gelu's",
}
"""Fields that may be refused, beside values that no network here has."""


def fields(config: Any) -> dict[str, Any]:
    """What a config can be made of, by name."""
    names = [field.name for kind in (PreTrainedConfig, type(config)) for field in dataclasses.fields(kind)]
    return {name: getattr(config, name, None) for name in dict.fromkeys(names)}


FOLLOWING = {
    "num_hidden_layers": ("layer_types", "no_rope_layers"),
    "no_rope_layer_interval": ("layer_types", "no_rope_layers"),
    "use_sliding_window": ("layer_types",),
    "max_window_layers": ("layer_types",),
    "hidden_size": ("pooler_output_size", "projection_size", "head_dim"),
    "num_attention_heads": ("head_dim",),
    "d_model": ("d_head",),
    "n_head": ("d_head",),
}
"""Fields that another follows unless it is set."""


def altered(config: Any, name: str, value: Any) -> Any:
    """The config with one field changed, and what follows from it left open."""
    own = {field.name for field in dataclasses.fields(type(config))}
    left = {"dtype", "transformers_version", "architectures", *FOLLOWING.get(name, ())}
    set_to_none = tuple(key for key in own if key.endswith("_token_id"))
    kept = {
        key: part
        for key, part in fields(config).items()
        if key in own - left and (part is not None or key in set_to_none)
    }
    return type(config)(**copy.deepcopy(kept | {name: value}))


def runs(family: Family, model: Any) -> bool:
    """Whether transformers can run it at all; its usual experts have no float64."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    core, ids = family.core(model), torch.full((1, 12), 7)
    memory = torch.zeros(1, 5, core.config.hidden_size, dtype=torch.float64)
    try:
        with lifted():
            if family.continuous_inputs:
                core(torch.zeros(1, *family.embedding(core).shape, dtype=torch.float64))  # type: ignore[attr-defined]
            else:
                core(ids, **({"encoder_hidden_states": memory} if family.side == "decoder" else {}))
    except Exception:
        return False
    return True
