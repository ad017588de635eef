"""Specifications of models of a few thousand weights, as the plan writes them, and a tokenizer for them."""

import made

from megaboa.data import tokenizer

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
DENSE = {"model_type": "qwen3", **COMMON}
MOE = {
    "model_type": "qwen3_moe",
    **COMMON,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
LATENT = {  # as in DeepSeek-V2-Lite: queries aren't compressed, and the softmax is scaled
    **{"model_type": "deepseek_v2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16},
    **{"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"max_position_embeddings": 5120, "tie_word_embeddings": False},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1},
        **{"mscale": 0.707, "mscale_all_dim": 0.707},
    },
}
TIED_BF16 = {**DENSE, "tie_word_embeddings": True, "dtype": "bfloat16"}


def train_tokenizer(folder, vocab_size=300):
    tokenizer.train([f"value_{number} = {number} + {number}\n" for number in range(400)], vocab_size, folder)
    return {"kind": "path", "path": str(folder)}


def specification(store, tokenizer, **changes):
    return made.model_spec(**{"name": "tiny", "store": str(store), "config": DENSE, "tokenizer": tokenizer, **changes})
