"""Which weights belong to which group; `test_weight_gradients.py` compares the groups with autograd."""

import torch
import transformers as hf

from rankscope.live.monitor.parameter_groups import parameter_groups
from tests.live.families import SIZES, WIDTH


def test_a_fused_matrix_in_another_order_is_left_out() -> None:
    codegen = hf.CodeGenModel(
        hf.CodeGenConfig(vocab_size=20, n_embd=32, n_layer=1, n_head=4, n_positions=8, rotary_dim=4)
    )
    groups, left_out = parameter_groups(list(codegen.h))
    assert left_out == ["attn.qkv_proj.weight"] and (1, "query_key") not in groups


def test_fewer_keys_than_queries_in_one_matrix() -> None:
    phi = hf.Phi3Model(hf.Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0))
    groups, left_out = parameter_groups(list(phi.layers))
    (queries_keys,) = groups[1, "query_key"]
    assert not left_out and queries_keys.choose is not None
    assert queries_keys.choose(torch.arange(2 * WIDTH)).tolist() == list(range(WIDTH + WIDTH // 2))
