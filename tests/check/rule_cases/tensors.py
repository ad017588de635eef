"""Cases of the rules of check/tensors.py."""

from rule_cases.case import FP8, Case

CASES = {
    "sizes_are_set": Case(
        {"layers": 0, "hidden": 64, "heads": 0},
        "model.num_layers",
        "0: the model's sizes are open: set model.num_layers and model.num_attention_heads by overrides",
        (),
        {"layers": 1, "hidden": 64, "heads": 4},
        {},
    ),
    "heads_divide_the_hidden_size": Case(
        {"family": "llama", "hidden": 33, "heads": 4},
        "model.hidden_size",
        "4 attention heads don't divide 33",
        (32, 36),
        {"family": "qwen3", "hidden": 33, "heads": 4},
        {"family": "llama", "hidden": 32, "heads": 4},
    ),
    "heads_divide": Case(
        {"heads": 20, "tp": 8},
        "parallel.tp",
        "8 doesn't divide 20 attention heads",
        (5, 10),
        {"heads": 20, "tp": 20},
        {"heads": 20, "tp": 4},
    ),
    "key_value_groups_divide": Case(
        {"heads": 24, "kv_groups": 8, "tp": 6},
        "parallel.tp",
        "6 is neither divisor nor multiple of 8",
        (4, 8),
        {"heads": 32, "kv_groups": 8, "tp": 16},
        {"heads": 32, "kv_groups": 8, "tp": 4},
    ),
    "feed_forward_divides": Case(
        {"ffn": 5120, "heads": 24, "tp": 3},
        "parallel.tp",
        "3 doesn't divide the feed-forward width 5120",
        (2, 4),
        {"ffn": 5121, "tp": 3},
        {"ffn": 5120, "tp": 4},
    ),
    "vocabulary_divides": Case(
        {"vocab_rows": 50257, "tp": 2},
        "model.vocab_size",
        "50257 rows",
        (50256, 50258),
        {"vocab_rows": 50258, "tp": 2},
        {"vocab_rows": 50304, "tp": 8},
    ),
    "sequence_parallelism_needs_tensor_parallelism": Case(
        {"sp": True},
        "parallel.sp",
        "true does nothing with parallel.tp: 1",
        (False,),
        {"sp": True, "tp": 2},
        {"tp": 2},
        "warning",
    ),
    "sequence_divides_over_context": Case(
        {"seq_length": 1028, "cp": 4},
        "training.seq_length",
        "1028 is not a multiple of 2 * cp = 8",
        (1024, 1032),
        {"seq_length": 1032, "cp": 4},
        {"seq_length": 1027},
    ),
    "sequence_divides_over_tensor_ranks": Case(
        {"seq_length": 1028, "cp": 2, "tp": 4, "sp": True},
        "training.seq_length",
        "1028 is not a multiple of cp * tp = 8",
        (1024, 1032),
        {"seq_length": 1032, "cp": 2, "tp": 4, "sp": True},
        {"seq_length": 1028, "cp": 2, "tp": 4},
    ),
    "sequence_fits_the_positions": Case(
        {"seq_length": 1025, "max_length": 1024, "learned_positions": True, "pretrained": True},
        "training.seq_length",
        "1025 is longer than the model's max_position_embeddings, 1024, and its positions are learned",
        (1024,),
        {"seq_length": 1024, "max_length": 1024, "learned_positions": True, "pretrained": True},
        {"seq_length": 512, "max_length": 1024},
    ),
    "sequence_keeps_its_positions": Case(
        {"seq_length": 1025, "longest_plain": 1024},
        "training.seq_length",
        "1025: transformers stretches the positions of sequences longer than 1024",
        (1024,),
        {"seq_length": 1024, "longest_plain": 1024},
        {"seq_length": 4096},
    ),
    "rotary_positions_turn_pairs": Case(
        {"head_dim": 15, "rotary": 1.0},
        "model.kv_channels",
        "rotary positions turn a head's numbers in pairs, and 15 is odd",
        (14, 16),
        {"head_dim": 15, "rotary": 0.5},  # 7 of them, and room for an eighth
        {"head_dim": 15},
    ),
    "low_precision_is_aligned": Case(
        {"precision": FP8, "ffn": 2064, "tp": 2},
        "parallel.tp",
        "feed-forward width / tp = 1032 is not a multiple of 16",
        (1, 3),
        {"precision": FP8, "ffn": 2080, "tp": 2},
        {"precision": "bf16_mixed", "ffn": 1032, "tp": 2},
    ),
    "one_kind_of_half_precision": Case(
        {"bf16": True, "fp16": True}, "model.fp16", "together with model.bf16", (False,), {"bf16": True}, {}
    ),
    "tensor_overlap_is_not_switched_off": Case(
        {"tp_comm_overlap": True, "tp": 2},
        "comm_overlap.tp_comm_overlap",
        "switched off",
        (False,),
        {"tp_comm_overlap": True, "tp": 2, "sp": True},
        {"tp": 1},
        "warning",
    ),
    "context_ranks_exchange_in_a_known_way": Case(
        {"heads": 40, "tp": 2, "cp": 8, "cp_comm": "a2a"},
        "model.cp_comm_type",
        "a2a can't divide a tensor rank's 20 attention heads over parallel.cp: 8",
        ("p2p", "all_gather"),
        {"heads": 40, "tp": 2, "cp": 4, "cp_comm": "a2a"},
        {"heads": 40, "tp": 2, "cp": 8, "cp_comm": ("p2p", "a2a+p2p")},
    ),
    "masks_of_documents_have_no_context_parallelism": Case(
        {"document_mask": True, "cp": 2, "world_size": 2},
        "data.reset_attention_mask",
        "set parallel.cp to 1, not 2",
        ("false",),
        {"document_mask": True, "tp": 2, "world_size": 2},
        {"cp": 2, "world_size": 2},
    ),
    "heads_learn_within_examples": Case(
        {"packed": True, "mtp_layers": 1, "cp": 2, "world_size": 2, "task": "sft"},
        "tuning.pack",
        "set parallel.cp to 1, or model.mtp_num_layers to null",
        ("false",),
        {"packed": True, "mtp_layers": 1, "tp": 2, "world_size": 2, "task": "sft"},
        {"packed": True, "cp": 2, "world_size": 2, "task": "sft"},
    ),
}

OTHER_WARNINGS = {  # rules that refuse some and warn of others
    "sequence_fits_the_positions": {"seq_length": 4096, "max_length": 2048},
}

OTHER_ERRORS = [
    ("context_ranks_exchange_in_a_known_way", {"cp": 2, "cp_comm": "foo"}),
    ("context_ranks_exchange_in_a_known_way", {"cp": 2, "cp_comm": ("a2a", "foo")}),
    ("context_ranks_exchange_in_a_known_way", {"layers": 3, "cp": 2, "cp_comm": ("p2p", "p2p"), "device": "cpu"}),
    ("context_ranks_exchange_in_a_known_way", {"heads": 32, "kv_groups": 4, "cp": 8, "cp_comm": ("p2p", "a2a")}),
    ("context_ranks_exchange_in_a_known_way", {"heads": 32, "kv_groups": 4, "tp": 8, "cp": 4, "cp_comm": "a2a"}),
    ("low_precision_is_aligned", {"precision": "bf16_with_mxfp8_mixed", "seq_length": 1000, "mbs": 1}),
    ("rotary_positions_turn_pairs", {"latent": True, "head_dim": 16, "qk_position_dim": 7, "rotary": 1.0}),
]
