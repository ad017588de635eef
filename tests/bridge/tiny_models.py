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
TIED_BF16 = {**DENSE, "tie_word_embeddings": True, "dtype": "bfloat16"}


def train_tokenizer(folder, vocab_size=300):
    tokenizer.train([f"value_{number} = {number} + {number}\n" for number in range(400)], vocab_size, folder)
    return {"kind": "path", "path": str(folder)}


def specification(store, tokenizer, **changes):
    return made.model_spec(**{"name": "tiny", "store": str(store), "config": DENSE, "tokenizer": tokenizer, **changes})
