"""Every rule: what it refuses and what it proposes, what is just legal, and what is legal."""

import dataclasses
from typing import Any

import pytest
from facts_of import facts

from megaboa.check import course, table, tensors
from megaboa.check.facts import FIELDS
from megaboa.check.rule import divisors, multiples, sentence
from megaboa.config import keys


@dataclasses.dataclass
class Case:
    illegal: dict[str, Any]
    key: str
    says: str
    nearest: tuple[Any, ...]
    borderline: dict[str, Any]  # differs from the illegal one by as little as possible
    legal: dict[str, Any]
    level: str = "error"


BATCH = {"world_size": 8, "mbs": 2}
INTERLEAVED = {"world_size": 4, "pp": 4, "vpp": 2, "mbs": 1}
MOE = {"layers": 4, "experts": 8, "topk": 2}
STAGES = (("embedding", "decoder"), ("decoder", "decoder"), ("decoder", "loss"))
FLEX = {**MOE, "dispatcher": "flex", "flex_backend": "deepep"}
GRAPHED = {**MOE, "graphs": "transformer_engine"}
OVERLAPPED = {"shared_ffn": 64, "shared_expert_overlap": True}
OVERLAP = {**MOE, "expert_overlap": True, "dispatcher": "alltoall", "ep": 2, "precision": "bf16_mixed"}
FP8 = "bf16_with_fp8_current_scaling_mixed"
DELAYED = "DelayedScaling"
PROFILE = {"profiler": "pytorch", "iters": 10, "world_size": 4}
DEEPSEEK = {"family": "deepseek_v3", "layers": 61}
PRETRAINED = {"pretrained": True, "source_tied": False}

CASES = {
    "kind_takes_the_layout": Case(
        {"kind": "t5", "world_size": 2, "pp": 2},
        "parallel.pp",
        "2: encoder-decoder (T5) is split by parallel.tp and data alone",
        (1,),
        {"kind": "bert", "world_size": 2, "pp": 2},
        {"kind": "t5", "world_size": 4, "tp": 2},
    ),
    "adapters_leave_experts_alone": Case(
        {**MOE, "heads": 4, "adapter_targets": ("linear_qkv", "*.linear_fc1")},
        "tuning.targets",
        "*.linear_fc1 would give adapters to experts too",
        ("[linear_qkv, linear_proj]",),
        {**MOE, "heads": 4, "adapter_targets": ("linear_qkv", "linear_proj")},
        {"layers": 4, "heads": 4, "adapter_targets": ("linear_fc1",)},
    ),
    "targets_name_layers": Case(
        {"layers": 4, "heads": 4, "adapter_targets": ("linear_proj", "q_proj")},
        "tuning.targets",
        "'q_proj' ends with the name of no layer that this model has: they are linear_qkv, linear_proj, linear_fc1, "
        "linear_fc2",
        ("linear_qkv",),
        {"layers": 4, "heads": 4, "latent": True, "adapter_targets": ("linear_proj", "linear_q_proj")},
        {"layers": 4, "heads": 4, "adapter_targets": ("*linear_qkv", "*.layers.3.*.linear_fc2")},
    ),
    "numbered_targets_are_of_one_stage": Case(
        {"pp": 2, "world_size": 2, "adapter_targets": ("linear_fc1", "*.layers.0.*.linear_fc1")},
        "tuning.targets",
        "'*.layers.0.*.linear_fc1' would be counted by each of pp = 2 stages on its own",
        ("linear_fc1",),
        {"pp": 1, "world_size": 2, "adapter_targets": ("linear_fc1", "*.layers.0.*.linear_fc1")},
        {"pp": 2, "world_size": 2, "adapter_targets": ("linear_fc1", "*.mlp.linear_fc2")},
    ),
    "magnitudes_are_of_whole_layers": Case(
        {"tp": 2, "world_size": 2, "adapter_targets": ("linear_fc1",), "adapter_magnitudes": True},
        "parallel.tp",
        "task: dora with tp = 2 would train and export another model than with tp = 1",
        (1,),
        {"tp": 1, "world_size": 2, "adapter_targets": ("linear_fc1",), "adapter_magnitudes": True},
        {"tp": 2, "world_size": 2, "adapter_targets": ("linear_fc1",), "adapter_magnitudes": False},
    ),
    "kind_takes_the_sequences": Case(
        {"kind": "bert", "world_size": 2, "tp": 2, "sp": True},
        "parallel.sp",
        "true for encoder (BERT)",
        ("false",),
        {"kind": "gpt", "world_size": 2, "tp": 2, "sp": True},
        {"kind": "bert", "world_size": 2, "tp": 2},
    ),
    "hybrid_layers_have_kernels": Case(
        {"kind": "hybrid", "device": "cpu"},
        "device",
        "cpu: hybrid (Mamba layers among those of attention) needs the package mamba_ssm, whose kernels need a GPU",
        ("cuda",),
        {"kind": "hybrid", "device": "cuda"},
        {"kind": "gpt", "device": "cpu"},
    ),
    "ranks_fill_the_layout": Case(
        {"world_size": 12, "tp": 4, "pp": 2},
        "resources.gpus_per_node",
        "12 is not a multiple of tp * pp * cp = 4 * 2 * 1 = 8",
        (8, 16),
        {"world_size": 16, "tp": 4, "pp": 2},
        {"world_size": 12, "tp": 3, "pp": 2, "cp": 2},
    ),
    "one_copy_of_the_model_at_least": Case(
        {"world_size": 7, "tp": 8},
        "resources.gpus_per_node",
        "7 is less than tp * pp * cp",
        (8,),
        {"world_size": 8, "tp": 8},
        {"world_size": 16, "tp": 8},
    ),
    "ranks_fill_the_expert_layout": Case(
        {**MOE, "world_size": 8, "pp": 2, "ep": 8, "etp": 1},
        "parallel.ep",
        "8 is not a multiple of etp * ep * pp = 1 * 8 * 2",
        (4,),
        {**MOE, "world_size": 8, "pp": 2, "ep": 4, "etp": 1},
        {"world_size": 8, "layers": 4, "tp": 8},
    ),
    "batch_fills_the_ranks": Case(
        {**BATCH, "gbs": 20},
        "training.global_batch_size",
        "20 is not a multiple of micro_batch_size * dp = 2 * 8 = 16",
        (16, 32),
        {**BATCH, "gbs": 16},
        {**BATCH, "gbs": 20, "tp": 4},
    ),
    "batch_has_one_size": Case(
        {**BATCH, "gbs": 16, "rampup": [8, 8, 1000]},
        "train.rampup_batch_size",
        "[8, 8, 1000] would change nothing",
        ("null",),
        {**BATCH, "gbs": 16, "rampup": None},
        {**BATCH, "gbs": 16},
    ),
    "batch_fills_the_optimizer_instances": Case(
        {**BATCH, "gbs": 48, "fsdp": "megatron", "optimizer_instances": 2},
        "training.global_batch_size",
        "48 is not a multiple of micro_batch_size * dp * optimizer instances",
        (32, 64),
        {**BATCH, "gbs": 64, "fsdp": "megatron", "optimizer_instances": 2},
        {**BATCH, "gbs": 48, "fsdp": "megatron"},
        "warning",
    ),
    "evaluation_batch_fills_the_ranks": Case(
        {**BATCH, "eval_gbs": 8},
        "validation.eval_global_batch_size",
        "8 is not a multiple of eval_micro_batch_size * dp = 2 * 8",
        (16,),
        {**BATCH, "eval_gbs": 8, "eval_mbs": 1},
        {**BATCH, "gbs": 16},
    ),
    "optimizer_instances_share_the_ranks": Case(
        {"world_size": 8, "optimizer_instances": 3},
        "ddp.num_distributed_optimizer_instances",
        "can't be divided over 3",
        (2, 4),
        {"world_size": 8, "optimizer_instances": 8},
        {"world_size": 8},
    ),
    "tensor_ranks_stay_in_a_node": Case(
        {"nodes": 2, "gpus_per_node": 8, "tp": 16},
        "parallel.tp",
        "16 spreads over 2 nodes",
        (8,),
        {"nodes": 2, "gpus_per_node": 8, "tp": 8},
        {"nodes": 1, "gpus_per_node": 6, "tp": 4},
        "warning",
    ),
    "tasks_are_ranks": Case(
        {"gpus_per_node": 8, "tasks_per_node": 4},
        "resources.slurm_extra",
        "asks for 4",
        (),
        {"gpus_per_node": 8, "tasks_per_node": 8},
        {"gpus_per_node": 8},
    ),
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
    "interleaving_needs_a_pipeline": Case(
        {"vpp": 2}, "parallel.vpp", "2 needs parallel.pp above 1", (1,), {"vpp": 2, "pp": 2}, {"pp": 2}
    ),
    "layers_fill_the_stages": Case(
        {"layers": 36, "pp": 8},
        "parallel.pp",
        "36 layers can't be divided over pp * vpp = 8 * 1",
        (6, 9),
        {"layers": 36, "pp": 36},
        {"layers": 34, "pp": 4, "vpp": 3, "embedding_counts": True, "loss_counts": True},
    ),
    "uneven_stages_leave_even_ones": Case(
        {"layers": 14, "pp": 4, "first_stage_layers": 3},
        "model.num_layers_in_first_pipeline_stage",
        "11 layers are left, not a multiple of 3 stages",
        (5, 2),
        {"layers": 14, "pp": 4, "first_stage_layers": 2},
        {"layers": 14, "pp": 4, "first_stage_layers": 3, "last_stage_layers": 3},
    ),
    "layers_are_shared_out_in_one_way": Case(
        {"first_stage_layers": 2, "loss_counts": True},
        "model.num_layers_in_first_pipeline_stage",
        "is set together with model.account_for_loss_in_pipeline_split: keep one",
        (),
        {"first_stage_layers": 2, "last_stage_layers": 2},
        {"embedding_counts": True, "loss_counts": True},
    ),
    "pipeline_layout_holds_the_model": Case(
        {"stages": STAGES, "pp": 3, "layers": 5},
        "model.pipeline_model_parallel_layout",
        "has 4 decoder layers, the model 5",
        (5,),
        {"stages": STAGES, "pp": 3, "layers": 4},
        {"pp": 3, "layers": 5},
    ),
    "deepseek_v3_has_a_layout": Case(
        {**DEEPSEEK, "pp": 2},
        "parallel.pp",
        "(pp, vpp) = (2, 1) has no layout",
        ((1, 1), (4, 1), (8, 1)),
        {**DEEPSEEK, "pp": 4, "vpp": 4},
        {"family": "deepseek_v3", "layers": 8, "pp": 2},
    ),
    "interleaved_stages_have_micro_batches": Case(
        {**INTERLEAVED, "gbs": 6},
        "training.global_batch_size",
        "6 makes 6 micro-batches, not a multiple of 4",
        (4, 8),
        {**INTERLEAVED, "gbs": 4},
        {**INTERLEAVED, "gbs": 6, "vpp": None},
    ),
    "micro_batches_fill_the_pipeline": Case(
        {"world_size": 4, "pp": 4, "mbs": 2, "gbs": 6},
        "training.global_batch_size",
        "6 makes 3 micro-batches for 4 stages: each waits 3 of 6 turns",
        (8,),
        {"world_size": 4, "pp": 4, "mbs": 2, "gbs": 8},
        {"world_size": 4, "mbs": 2, "gbs": 8},
        "warning",
    ),
    "pipeline_has_a_type": Case(
        {"pp": 2, "pipeline_dtype": False},
        "model.pipeline_dtype",
        "is null",
        ("bf16_mixed", "fp32"),
        {"pp": 1, "pipeline_dtype": False},
        {"pp": 2},
    ),
    "expert_parallelism_needs_experts": Case(
        {"layers": 4, "ep": 2}, "parallel.ep", "without experts", (1,), {"layers": 4, "ep": 1}, {**MOE, "ep": 2}
    ),
    "experts_divide": Case(
        {**MOE, "ep": 6}, "parallel.ep", "6 doesn't divide 8 experts", (4, 8), {**MOE, "ep": 8}, {**MOE, "ep": 2}
    ),
    "expert_width_divides": Case(
        {**MOE, "moe_ffn": 768, "etp": 5},
        "parallel.etp",
        "5 doesn't divide the experts' width 768",
        (4, 6),
        {**MOE, "moe_ffn": 768, "tp": 5, "ep": 2},
        {**MOE, "moe_ffn": 768, "etp": 4},
    ),
    "expert_tensor_parallelism_needs_experts": Case(
        {"layers": 4, "etp": 2},
        "parallel.etp",
        "without experts",
        ("null",),
        {"layers": 4, "etp": 1},
        {**MOE, "etp": 2},
        "warning",
    ),
    "biased_experts_are_not_cut": Case(
        {**MOE, "bias": True, "tp": 2},
        "parallel.etp",
        "2 for experts with biases",
        (1,),
        {**MOE, "bias": True, "tp": 2, "etp": 1},
        {**MOE, "tp": 2},
    ),
    "experts_with_tensor_parallelism_need_sequence_parallelism": Case(
        {**MOE, "tp": 2},
        "parallel.sp",
        "false with experts and tp = 2",
        (True,),
        {**MOE, "tp": 2, "sp": True},
        {"tp": 2},
    ),
    "tokens_have_enough_experts": Case(
        {"experts": 8, "topk": 9}, "model.moe_router_topk", "9 of 8", (8,), {"experts": 8, "topk": 8}, MOE
    ),
    "every_layer_is_sparse_or_dense": Case(
        {**MOE, "layers": 4, "moe_layers": (False, True)},
        "model.moe_layer_freq",
        "2 entries for 4 layers",
        (),
        {**MOE, "layers": 4, "moe_layers": (False, True, True, True)},
        MOE,
    ),
    "flex_dispatcher_has_a_backend": Case(
        {**FLEX, "flex_backend": None},
        "model.moe_flex_dispatcher_backend",
        "is null",
        ("deepep", "hybridep"),
        FLEX,
        {**MOE, "dispatcher": "alltoall"},
    ),
    "deepep_reaches_all_ranks": Case(
        {**FLEX, "experts": 48, "ep": 12, "gpus_per_node": 8},
        "parallel.ep",
        "etp * ep = 12 on nodes of 8 GPUs",
        (8, 16),
        {**FLEX, "ep": 8, "gpus_per_node": 8},
        {**FLEX, "experts": 64, "ep": 16, "gpus_per_node": 8},
    ),
    "deepep_knows_the_gpu": Case(
        {**FLEX, "gpu": "gb200-192g"},
        "model.moe_flex_dispatcher_backend",
        "deepep on gb200",
        ("hybridep",),
        {**FLEX, "gpu": "b200-180g"},
        {**FLEX, "gpu": None},
    ),
    "shared_expert_overlaps_a_dispatcher": Case(
        {**MOE, **OVERLAPPED, "dispatcher": "allgather"},
        "model.moe_shared_expert_overlap",
        "true with the dispatcher allgather",
        (False,),
        {**MOE, **OVERLAPPED, "dispatcher": "alltoall"},
        {**MOE, "shared_expert_overlap": True, "dispatcher": "allgather"},
    ),
    "expert_overlap_can_work": Case(
        {**OVERLAP, "pp": 2},
        "model.overlap_moe_expert_parallel_comm",
        "true needs parallel.vpp",
        (),
        {**OVERLAP, "pp": 2, "vpp": 2},
        {**MOE, "recompute": "full"},
    ),
    "fsdp_has_no_pipeline": Case(
        {"fsdp": "megatron", "pp": 2},
        "parallel.pp",
        "2 with parallel.fsdp: megatron",
        (1,),
        {"fsdp": "megatron", "tp": 2},
        {"pp": 2},
        "warning",
    ),
    "fsdp_has_no_layer_graphs": Case(
        {"fsdp": "megatron", "graphs": "transformer_engine", "expert_overlap": True},
        "model.cuda_graph_impl",
        "transformer_engine with parallel.fsdp: megatron and overlap",
        ("none",),
        {"fsdp": "megatron", "graphs": "none", "expert_overlap": True},
        {"graphs": "transformer_engine"},
    ),
    "optimizer_instances_need_fsdp": Case(
        {"optimizer_instances": 2},
        "ddp.num_distributed_optimizer_instances",
        "2 without parallel.fsdp",
        (1,),
        {"optimizer_instances": 2, "fsdp": "megatron"},
        {},
        "warning",
    ),
    "fsdp_checkpoints_are_dtensors": Case(
        {"fsdp": "megatron", "checkpoint_format": "torch_dist"},
        "checkpoint.ckpt_format",
        "torch_dist with parallel.fsdp: megatron",
        ("fsdp_dtensor",),
        {"fsdp": "megatron", "checkpoint_format": "torch_dist", "save_interval": 0},
        {"fsdp": "megatron", "checkpoint_format": "fsdp_dtensor"},
    ),
    "fsdp_without_shards_is_not_saved": Case(
        {"fsdp": "megatron", "fsdp_sharding": "no_shard", "checkpoint_format": "fsdp_dtensor"},
        "parallel.fsdp_sharding",
        "no_shard of a model with gated layers can't be saved",
        ("optim", "optim_grads", "optim_grads_params"),
        {"fsdp": "megatron", "fsdp_sharding": "no_shard", "checkpoint_format": "fsdp_dtensor", "save_interval": 0},
        {"fsdp": "megatron", "fsdp_sharding": "no_shard", "checkpoint_format": "fsdp_dtensor", "gated": False},
    ),
    "fsdp_has_several_connections": Case(
        {"fsdp": "torch", "max_connections": "1"},
        "launch.environment",
        "CUDA_DEVICE_MAX_CONNECTIONS is 1",
        (32,),
        {"fsdp": "torch", "max_connections": "2"},
        {"max_connections": "1"},
    ),
    "fsdp_shards_the_optimizer": Case(
        {"fsdp": "megatron", "distributed_optimizer": False},
        "parallel.distributed_optimizer",
        "false is turned to true",
        (True,),
        {"fsdp": "megatron"},
        {"distributed_optimizer": False},
        "warning",
    ),
    "sgd_has_nothing_to_shard": Case(
        {"optimizer": "sgd"},
        "optimizer.name",
        "sgd has no state to distribute",
        ("adam",),
        {"optimizer": "sgd", "distributed_optimizer": False},
        {},
    ),
    "overlapped_gather_needs_overlapped_reduction": Case(
        {"gather_overlap": True, "grad_overlap": False},
        "parallel.overlap_param_gather",
        "true without parallel.overlap_grad_reduce",
        (False,),
        {"gather_overlap": True, "grad_overlap": True},
        {"gather_overlap": True},  # by default gradients are reduced early, too
        "warning",
    ),
    "overlapped_gather_needs_shards": Case(
        {"gather_overlap": True, "distributed_optimizer": False},
        "parallel.overlap_param_gather",
        "true without parallel.distributed_optimizer",
        (False,),
        {"gather_overlap": True, "distributed_optimizer": False, "fsdp": "megatron"},
        {"gather_overlap": True, "distributed_optimizer": False, "optimizer": "dist_muon"},
    ),
    "twins_have_whole_weights": Case(
        {"nudge": 1, "fsdp": "torch"},
        "training.nudge",
        "moves whole weights, and FSDP holds them in pieces: remove twins, or parallel.fsdp",
        (0,),
        {"nudge": 1},
        {"fsdp": "megatron"},
    ),
    "masks_of_documents_have_no_context_parallelism": Case(
        {"document_mask": True, "cp": 2, "world_size": 2},
        "data.reset_attention_mask",
        "set parallel.cp to 1, not 2",
        ("false",),
        {"document_mask": True, "tp": 2, "world_size": 2},
        {"cp": 2, "world_size": 2},
    ),
    "torch_fsdp_has_no_overlap_of_megatrons": Case(
        {"grad_overlap": True, "fsdp": "torch"},
        "parallel.overlap_grad_reduce",
        "true with parallel.fsdp: torch",
        (False,),
        {"grad_overlap": False, "gather_overlap": False, "fsdp": "torch"},
        {"grad_overlap": True, "fsdp": "megatron"},
    ),
    "graph_implementation_is_known": Case(
        {"graphs": "te"},
        "model.cuda_graph_impl",
        "there is no te",
        ("none", "local", "transformer_engine", "full_iteration"),
        {"graphs": "transformer_engine"},
        {},
    ),
    "graph_scope_fits_the_implementation": Case(
        {"graphs": "local", "graph_modules": ("attn",)},
        "model.cuda_graph_impl",
        "local with ['attn']",
        ("full_iteration", "transformer_engine"),
        {"graphs": "local", "graph_modules": ("full_iteration",)},
        {"graphs": "transformer_engine", "graph_modules": ("attn",)},
    ),
    "moe_is_graphed_once": Case(
        {**GRAPHED, "graph_modules": ("moe", "moe_router")},
        "model.cuda_graph_modules",
        "both moe and moe_router",
        (),
        {**GRAPHED, "graph_modules": ("moe_router",)},
        {"graph_modules": ("moe", "moe_router")},
    ),
    "moe_preprocessing_follows_the_router": Case(
        {**GRAPHED, "graph_modules": ("moe_preprocess",)},
        "model.cuda_graph_modules",
        "without moe_router",
        (["moe_preprocess", "moe_router"],),
        {**GRAPHED, "graph_modules": ("moe_preprocess", "moe_router")},
        {**GRAPHED, "graph_modules": ("attn",)},
    ),
    "graphed_parts_are_there": Case(
        {**GRAPHED, "graph_modules": ("attn", "mlp")},
        "model.cuda_graph_modules",
        "has ['mlp']",
        (["attn"],),
        {**GRAPHED, "graph_modules": ("attn", "mlp"), "moe_layers": (False, True, True, True)},
        {"layers": 4, "graphs": "transformer_engine", "graph_modules": ("attn", "mlp")},
    ),
    "graphed_experts_have_fixed_sizes": Case(
        {**GRAPHED, "graph_modules": ("moe",)},
        "model.cuda_graph_modules",
        "has moe, and experts drop no tokens",
        ("moe_router",),
        {**GRAPHED, "graph_modules": ("moe",), "expert_capacity": 1.0, "pad_to_capacity": True},
        {**GRAPHED, "graph_modules": ("attn",)},
    ),
    "graphed_preprocessing_has_no_shared_expert_overlap": Case(
        {**GRAPHED, **OVERLAPPED, "dispatcher": "alltoall", "graph_modules": ("moe_router", "moe_preprocess")},
        "model.moe_shared_expert_overlap",
        "true with a graph of moe_preprocess",
        (False,),
        {**FLEX, **GRAPHED, **OVERLAPPED, "graph_modules": ("moe_router", "moe_preprocess")},
        {**GRAPHED, "dispatcher": "alltoall", "graph_modules": ("moe_router", "moe_preprocess")},
    ),
    "recomputation_is_outside_graphs": Case(
        {
            **GRAPHED,
            "graph_modules": ("moe_router",),
            "recompute": "selective",
            "recompute_modules": ("moe", "layernorm"),
        },
        "model.recompute_modules",
        "recomputes moe with the graph of moe_router",
        (["layernorm"],),
        {**GRAPHED, "graph_modules": ("moe_router",), "recompute": "selective", "recompute_modules": ("layernorm",)},
        {**GRAPHED, "graph_modules": ("moe_router",), "recompute_modules": ("moe",)},
    ),
    "full_recomputation_needs_a_full_graph": Case(
        {"recompute": "full", "graphs": "transformer_engine"},
        "model.cuda_graph_impl",
        "transformer_engine with full recomputation",
        ("none", "full_iteration"),
        {"recompute": "full", "graphs": "full_iteration"},
        {"recompute": "full"},
    ),
    "full_graph_has_no_nan_check": Case(
        {"graphs": "full_iteration"},
        "rerun_state_machine.check_for_nan_in_loss",
        "true with a graph of the full iteration",
        (False,),
        {"graphs": "full_iteration", "nan_check": False},
        {"graphs": "transformer_engine"},
    ),
    "full_graph_waits_for_no_message": Case(
        {"graphs": "full_iteration", "nan_check": False, "pp": 2},
        "model.batch_p2p_sync",
        "true with a graph of the full iteration and pp: 2",
        (False,),
        {"graphs": "full_iteration", "nan_check": False, "pp": 2, "waits_for_messages": False},
        {"graphs": "full_iteration", "nan_check": False, "pp": 2, "vpp": 2},
    ),
    "full_graph_has_whole_blocks_of_attention": Case(
        {"graphs": "full_iteration", "nan_check": False, "seq_length": 1152, "cp": 2, "world_size": 2},
        "training.seq_length",
        "1152 with a graph of the full iteration needs cuDNN 9.15.1 or later",
        (1024, 1536),
        {"graphs": "full_iteration", "nan_check": False, "seq_length": 1152, "cp": 2, "cp_comm": "a2a"},
        {"graphs": "full_iteration", "nan_check": False, "seq_length": 64, "attention": "unfused"},
        "warning",
    ),
    "full_graph_has_no_straggler_detector": Case(
        {"graphs": "full_iteration", "nan_check": False, "stragglers": True},
        "straggler.log_straggler",
        "true with a graph of the full iteration",
        (False,),
        {"graphs": "full_iteration", "nan_check": False},
        {"stragglers": True},
    ),
    "graphs_leave_expert_overlap_alone": Case(
        {**OVERLAP, "graphs": "transformer_engine", "graph_modules": ("mlp",)},
        "model.cuda_graph_modules",
        "transformer_engine ['mlp']",
        ("attn",),
        {**OVERLAP, "graphs": "none", "graph_modules": ("mlp",)},
        {"graphs": "transformer_engine", "graph_modules": ("mlp",)},
    ),
    "recomputation_is_complete": Case(
        {"recompute": "full", "recompute_method": "uniform"},
        "model.recompute_num_layers",
        "is null",
        (1,),
        {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1},
        {"recompute": "selective"},
    ),
    "recomputed_predictions_are_one_by_one": Case(
        {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2, "mtp_layers": 1},
        "model.recompute_num_layers",
        "2 with layers for multi-token prediction",
        (1,),
        {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1, "mtp_layers": 1},
        {"recompute": "full", "recompute_method": "block", "recompute_layers": 2, "mtp_layers": 1},
    ),
    "recomputed_parts_are_there": Case(
        {"recompute": "selective", "recompute_modules": ("mla_up_proj",)},
        "model.recompute_modules",
        "mla_up_proj without latent attention",
        (),
        {"recompute": "selective", "recompute_modules": ("mla_up_proj",), "latent": True},
        {"recompute": "selective", "recompute_modules": ("core_attn",)},
    ),
    "recomputed_feed_forward_has_no_bias": Case(
        {"recompute": "selective", "recompute_modules": ("core_attn", "mlp"), "bias": True},
        "model.recompute_modules",
        "mlp, with model.add_bias_linear: true",
        (["core_attn"],),
        {"recompute": "selective", "recompute_modules": ("mlp",), "bias": False},
        {"recompute": "selective", "recompute_modules": ("mlp",), "bias": True, "experts": 8},
    ),
    "offloading_has_no_pipeline": Case(
        {"cpu_offloading": True, "pp": 2},
        "model.cpu_offloading",
        "true with parallel.pp: 2",
        (False,),
        {"cpu_offloading": True, "layers": 4, "offloaded_layers": 3},
        {"pp": 2},
    ),
    "offloading_has_no_graphs": Case(
        {"cpu_offloading": True, "graphs": "transformer_engine"},
        "model.cuda_graph_impl",
        "transformer_engine with model.cpu_offloading",
        ("none",),
        {"cpu_offloading": True, "graphs": "none"},
        {"graphs": "transformer_engine"},
    ),
    "warmup_ends_before_the_decay": Case(
        {"iters": 100, "warmup_iters": 100},
        "schedule.warmup_iters",
        "100 steps of warm-up, and the decay ends at step 100",
        (99,),
        {"iters": 100, "warmup_iters": 99},
        {"iters": 100, "warmup_iters": 100, "decay_iters": 200},
    ),
    "weight_decay_keeps_to_its_style": Case(
        {"first_weight_decay": 0.01, "last_weight_decay": 0.2},
        "scheduler.weight_decay_incr_style",
        "constant, and weight decay begins with 0.01 and ends with 0.2",
        ("linear", "cosine"),
        {"first_weight_decay": 0.01, "last_weight_decay": 0.2, "weight_decay_style": "linear"},
        {"first_weight_decay": 0.1, "last_weight_decay": 0.1},
    ),
    "checkpoints_come_before_the_end": Case(
        {"iters": 100, "save_interval": 101},
        "checkpoint.save_interval",
        "101 in a run of 100 steps",
        (50,),
        {"iters": 100, "save_interval": 100},
        {"iters": 100, "save_interval": 0},
        "warning",
    ),
    "copies_on_nodes_can_be_resumed": Case(
        {"copied_every": 5, "copied_to_partner": True, "nodes": 1},
        "checkpoint.local.partner",
        "true with one node, which has no partner",
        ("false",),
        {"copied_every": 5, "copied_to_partner": True, "nodes": 2},
        {"copied_every": 5, "save_interval": 10},
    ),
    "profiled_steps_are_in_the_run": Case(
        {**PROFILE, "profile_steps": (9, 12)},
        "profile.steps",
        "[9, 12] in a run of 10 steps",
        ([8, 11],),
        {**PROFILE, "profile_steps": (8, 11)},
        {"iters": 10, "profile_steps": (9, 11)},
    ),
    "profiled_ranks_are_in_the_run": Case(
        {**PROFILE, "profile_ranks": (0, 4)},
        "profile.ranks",
        "[4] of 4 ranks",
        ([0],),
        {**PROFILE, "profile_ranks": (0, 3)},
        {"world_size": 4, "profile_ranks": (0, 4)},
    ),
    "machine_has_the_gpus": Case(
        {"machine_gpus": 1, "gpus_per_node": 2},
        "resources.gpus_per_node",
        "2, and this machine has 1 GPU",
        (1,),
        {"machine_gpus": 2, "gpus_per_node": 2},
        {"gpus_per_node": 2},
    ),
    "cpu_calculates_in_the_precision": Case(
        {"precision": "fp16_mixed", "device": "cpu"},
        "training.precision",
        "fp16_mixed with device: cpu",
        ("fp32", "bf16_mixed"),
        {"precision": "bf16_mixed", "device": "cpu"},
        {"precision": "fp16_mixed", "device": "cuda"},
    ),
    "gpu_calculates_in_the_precision": Case(
        {"precision": "bf16_with_nvfp4_mixed", "gpu": "h100-80g"},
        "training.precision",
        "bf16_with_nvfp4_mixed on h100, which has no units for it: it needs Blackwell",
        (),
        {"precision": "bf16_with_nvfp4_mixed", "gpu": "b200-180g"},
        {"precision": FP8, "gpu": "h100-80g"},
    ),
    "torch_has_kernels_for_the_gpu": Case(
        {"precision": "fp16_mixed", "gpu": "v100-32g"},
        "resources.gpu",
        "v100-32g: the locked torch has no kernels for it; only an older image may",
        (),
        {"precision": "fp16_mixed", "gpu": "a100-80g"},
        {"precision": "fp16_mixed", "gpu": None},
        level="warning",
    ),
    "attention_in_fp8_has_kernels": Case(
        {"precision": FP8, "gpu": "h200-141g", "fp8_attention": True, "head_dim": 128},
        "mixed_precision.fp8_dot_product_attention",
        "true on h200 with bf16_with_fp8_current_scaling_mixed: it needs bf16_with_fp8_delayed_scaling_mixed, or "
        "launch.environment: {NVTE_DPA_FP8_RECIPE: DelayedScaling}",
        (False,),
        {"precision": FP8, "gpu": "h200-141g", "fp8_attention": True, "head_dim": 128, "attention_scaling": DELAYED},
        {"precision": FP8, "gpu": "b200-180g", "fp8_attention": True, "head_dim": 64},
    ),
    "gpu_is_known": Case(
        {"gpu": "mi300-192g"},
        "resources.gpu",
        "nothing is known of mi300, so that its step times and costs can't be predicted",
        (),
        {"gpu": "h100-80g"},
        {"gpu": "mi300-192g", "device": "cpu"},
        level="warning",
    ),
    "gpus_are_those_of_the_recipe": Case(
        {"tuned_for": ("gb200", 8), "gpu": "b200-180g", "gpus_per_node": 8},
        "resources.gpu",
        "8 b200: NVIDIA chose this recipe's layout, batch and environment for 8 gb200",
        (),
        {"tuned_for": ("gb200", 8), "gpu": "gb200-186g", "gpus_per_node": 8},
        {"gpu": "b200-180g", "gpus_per_node": 8},
        level="warning",
    ),
    "context_ranks_have_attention": Case(
        {"cp": 2, "precision": "fp32", "seq_length": 128},
        "training.precision",
        "fp32 with parallel.cp: 2 on GPUs",
        ("bf16_mixed",),
        {"cp": 2, "precision": "fp32", "seq_length": 128, "device": "cpu"},
        {"precision": "fp32"},
    ),
    "profiler_has_a_gpu": Case(
        {"profiler": "memory", "device": "cpu"},
        "profile.tool",
        "memory has nothing to record with device: cpu: snapshots are of CUDA's allocator",
        ("pytorch", "viztracer"),
        {"profiler": "memory"},
        {"profiler": "viztracer", "device": "cpu"},
    ),
    "nsys_is_at_hand": Case(
        {"profiler": "nsys", "has_nsys": False},
        "profile.tool",
        "there is no nsys on the PATH here",
        ("pytorch",),
        {"profiler": "nsys", "has_nsys": True},
        {"profiler": "nsys"},
        "warning",
    ),
    "profiled_steps_begin_with_the_first": Case(
        {**PROFILE, "profile_steps": (0, 4)},
        "profile.steps",
        "there is no step 0",
        ([1, 4],),
        {**PROFILE, "profile_steps": (1, 4)},
        {"profile_steps": (0, 4)},
    ),
    "nsys_is_around_the_ranks": Case(
        {"nsys": True},
        "profiling.use_nsys_profiler",
        "set profile.tool: nsys instead",
        (False,),
        {"profiler": "nsys"},
        {"pytorch": True},
        "warning",
    ),
    "one_profiler_at_a_time": Case(
        {"nsys": True, "pytorch": True},
        "profiling.use_pytorch_profiler",
        "true together with profiling.use_nsys_profiler: true",
        (False,),
        {"pytorch": True},
        {"pytorch": True, "viztracer": True},
    ),
    "profiler_is_started_and_stopped": Case(
        {"viztracer": True, "start": 4, "end": 8, "iters": 7},
        "profiling.profile_step_end",
        "8 in a run of 7 steps",
        (7,),
        {"viztracer": True, "start": 4, "end": 7, "iters": 7},
        {"start": 4, "end": 4, "iters": 7},
        "warning",
    ),
    "profiler_is_on_a_rank": Case(
        {"pytorch": True, "ranks": (4, 5), "world_size": 4},
        "profiling.profile_ranks",
        "[4, 5] of 4 ranks",
        ([0],),
        {"pytorch": True, "ranks": (3, 4), "world_size": 4},
        {"pytorch": True, "ranks": (), "world_size": 4},
        "warning",
    ),
    "nsys_goes_without_fault_tolerance": Case(
        {"profiler": "nsys", "fault_tolerance": True},
        "ft.enable_ft_package",
        "true with the nsys profiler",
        (False,),
        {"profiler": "pytorch", "fault_tolerance": True},
        {"profiler": "nsys"},
        "warning",
    ),
    "tokens_are_in_the_vocabulary": Case(
        {"tokenizer_vocab": 50258, "vocab_size": 50257},
        "model.vocab_size",
        "the tokenizer has 50258 tokens",
        (50258,),
        {"tokenizer_vocab": 50257, "vocab_size": 50257},
        {"vocab_size": 50257},
    ),
    "embeddings_are_tied_as_in_the_checkpoint": Case(
        {**PRETRAINED, "tied": True},
        "model.share_embeddings_and_output_weights",
        "true, and the checkpoint's tie_word_embeddings is false",
        ("false",),
        {**PRETRAINED, "tied": False},
        {"source_tied": False, "tied": True},
    ),
}

OTHER_WARNINGS = {  # rules that refuse some and warn of others
    "profiler_is_started_and_stopped": {"memory": True, "start": 4, "end": 4},
    "profiler_is_on_a_rank": {"memory": True, "ranks": ()},
    "sequence_fits_the_positions": {"seq_length": 4096, "max_length": 2048},
    "fsdp_has_no_layer_graphs": {"fsdp": "torch", "graphs": "full_iteration"},
    "recomputation_is_outside_graphs": {
        "layers": 4,
        "graphs": "transformer_engine",
        "graph_modules": ("attn",),
        "recompute": "selective",
        "recompute_modules": ("core_attn",),
    },
    "graphs_leave_expert_overlap_alone": {**OVERLAP, "graphs": "transformer_engine", "graph_modules": ("attn",)},
    "offloading_has_no_graphs": {"cpu_offloading": True, "graphs": "full_iteration"},
}
RECOMPUTED_IN_A_GRAPH = {
    "layers": 4,
    "graphs": "full_iteration",
    "recompute": "selective",
    "recompute_modules": ("core_attn",),
}
OTHER_ERRORS = [
    (
        "recomputation_is_outside_graphs",
        {**OTHER_WARNINGS["recomputation_is_outside_graphs"], "attention_dropout": 0.1},
    ),
    ("recomputation_is_outside_graphs", {**RECOMPUTED_IN_A_GRAPH, "attention_dropout": 0.1}),
    (
        "recomputation_is_outside_graphs",
        {**RECOMPUTED_IN_A_GRAPH, "graph_modules": (), "recompute_modules": ("mlp", "layernorm"), "dropout": 0.1},
    ),
    ("layers_fill_the_stages", {"layers": 36, "pp": 4, "vpp": 2}),
    ("layers_fill_the_stages", {"layers": 36, "pp": 4, "loss_counts": True}),
    ("uneven_stages_leave_even_ones", {"layers": 8, "pp": 2, "first_stage_layers": 8}),
    ("uneven_stages_leave_even_ones", {"layers": 12, "pp": 2, "vpp": 2, "first_stage_layers": 5}),
    (
        "uneven_stages_leave_even_ones",
        {"layers": 6, "pp": 2, "vpp": 2, "first_stage_layers": 2, "last_stage_layers": 4},
    ),
    ("pipeline_layout_holds_the_model", {"stages": STAGES, "pp": 2, "layers": 4}),
    ("pipeline_layout_holds_the_model", {"stages": STAGES[::-1], "pp": 3, "layers": 4}),
    ("pipeline_layout_holds_the_model", {"stages": STAGES, "pp": 3, "layers": 4, "mtp_layers": 1}),
    ("graph_scope_fits_the_implementation", {"graphs": "transformer_engine", "graph_modules": ("full_iteration",)}),
    ("graph_scope_fits_the_implementation", {"graphs": "full_iteration", "graph_modules": ("attn",)}),
    ("interleaved_stages_have_micro_batches", {**INTERLEAVED, "gbs": 8, "group": 6}),
    ("low_precision_is_aligned", {"precision": "bf16_with_mxfp8_mixed", "seq_length": 1000, "mbs": 1}),
    ("rotary_positions_turn_pairs", {"latent": True, "head_dim": 16, "qk_position_dim": 7, "rotary": 1.0}),
    ("recomputation_is_complete", {"recompute": "full"}),
    ("recomputation_is_complete", {"recompute": "some"}),
    ("recomputation_is_complete", {"recompute": "selective", "recompute_layers": 2}),
    ("recomputed_parts_are_there", {"recompute": "selective", "recompute_modules": ("everything",)}),
    ("recomputed_parts_are_there", {"recompute": "selective", "recompute_modules": ("moe_act",)}),
    ("offloading_has_no_pipeline", {"cpu_offloading": True, "recompute": "selective"}),
    ("offloading_has_no_pipeline", {"cpu_offloading": True, "layers": 4, "offloaded_layers": 4}),
    ("deepep_reaches_all_ranks", {**FLEX, "gpus_per_node": 8}),
    ("flex_dispatcher_has_a_backend", {**FLEX, "dispatcher": "alltoall", "flex_backend": "ncclep"}),
    ("fsdp_checkpoints_are_dtensors", {"checkpoint_format": "fsdp_dtensor"}),
    *(
        ("targets_name_layers", {"layers": 4, "heads": 4, "adapter_targets": (target,)})
        for target in ("linear_*", "*", "linear_kv_up_proj", "*.layers.4.*.linear_qkv", "self_attention.linear_qkv")
    ),
    ("targets_name_layers", {"adapter_targets": ("linear_qvk",)}),  # nothing is known of the model
    ("targets_name_layers", {"layers": 4, "heads": 4, "latent": True, "adapter_targets": ("linear_qkv",)}),
    (
        "targets_name_layers",
        {"layers": 4, "heads": 4, "latent": True, "q_rank": 8, "adapter_targets": ("linear_q_proj",)},
    ),
]

ONLY_INSIDE = {"model.pipeline_dtype"}  # a fact that only Bridge's configuration has
BY_NAME = {rule.__name__: rule for rule in table.RULES}


def test_every_rule_has_a_case_and_a_sentence():
    assert set(CASES) == set(BY_NAME)
    for rule in table.RULES:
        assert len(sentence(rule)) > 40, rule.__name__


@pytest.mark.parametrize("name", CASES)
def test_what_is_illegal_is_named_with_the_nearest_legal_values(name):
    case, rule = CASES[name], BY_NAME[name]
    broken = rule(facts(**case.illegal))
    assert broken is not None
    assert (broken.key, broken.level, broken.nearest) == (case.key, case.level, case.nearest)
    assert case.says in broken.message


@pytest.mark.parametrize("name", CASES)
def test_the_key_is_ours_or_a_field_of_bridge(name):
    """Errors name the line of a key of ours, and take everything else for an override."""
    assert keys.is_own(CASES[name].key) or CASES[name].key in {*FIELDS.values(), *ONLY_INSIDE}


@pytest.mark.parametrize("name", CASES)
def test_what_is_just_legal_is_accepted(name):
    assert BY_NAME[name](facts(**CASES[name].borderline)) is None


@pytest.mark.parametrize("name", CASES)
def test_what_is_legal_is_accepted(name):
    assert BY_NAME[name](facts(**CASES[name].legal)) is None


@pytest.mark.parametrize("name", CASES)
def test_what_nobody_knows_breaks_no_rule(name):
    assert BY_NAME[name](facts()) is None


@pytest.mark.parametrize("name", OTHER_WARNINGS)
def test_what_bridge_accepts_is_only_warned_of(name):
    assert BY_NAME[name](facts(**OTHER_WARNINGS[name])).level == "warning"


@pytest.mark.parametrize(("name", "values"), OTHER_ERRORS)
def test_further_errors(name, values):
    assert BY_NAME[name](facts(**values)).level == "error"


@pytest.mark.parametrize("other", [{"precision": "fp32"}, {"bf16": False, "fp16": False}, {"device": "cpu"}])
def test_only_cudnns_attention_goes_astray_in_a_graph(other):
    rule = BY_NAME["full_graph_has_whole_blocks_of_attention"]
    graphed = {"graphs": "full_iteration", "seq_length": 64}
    assert rule(facts(**graphed, bf16=True, fp16=False)) and rule(facts(**graphed, **other)) is None
    assert rule(facts(**graphed, precision="bf16_mixed", bf16=False, fp16=False))  # before Bridge's validation


def test_a_graph_of_everything_holds_what_is_recomputed():
    assert BY_NAME["recomputation_is_outside_graphs"](facts(**RECOMPUTED_IN_A_GRAPH)) is None


def test_groups_and_alignments_that_are_legal():
    assert BY_NAME["interleaved_stages_have_micro_batches"](facts(**INTERLEAVED, gbs=12, group=6)) is None
    assert BY_NAME["interleaved_stages_have_micro_batches"](facts(**INTERLEAVED, gbs=10, group=6)) is None
    assert BY_NAME["low_precision_is_aligned"](facts(precision=FP8, seq_length=1000, mbs=1)) is None


def test_errors_come_before_warnings_and_say_which_rule_was_broken():
    found = table.check(facts(world_size=6, tp=4, nodes=2, gpus_per_node=3, seq_length=10, max_length=5))
    assert [one.level for one in found] == ["error", "warning", "warning"]
    assert str(found[0]).endswith("nearest: 4 or 8 [ranks_fill_the_layout]")
    assert found[0].sentence.startswith("The number of ranks is a multiple of tp * pp * cp")


def test_nothing_is_proposed_that_fits_a_refused_size():
    found = {one.rule: str(one) for one in table.check(facts(world_size=1, tp=3, heads=4, vocab_rows=512))}
    assert "; nearest: 2 or 4 [" in found["heads_divide"]
    assert "nearest" not in found["one_copy_of_the_model_at_least"] + found["vocabulary_divides"]
    found = {one.rule: str(one) for one in table.check(facts(world_size=1, tp=3, vocab_rows=512))}
    assert "; nearest: 3 [" in found["one_copy_of_the_model_at_least"]
    assert "; nearest: 510 or 513 [" in found["vocabulary_divides"]


def test_the_eight_commonest_mistakes_of_megatron_lm_5768():
    mistakes = {
        "ranks_fill_the_layout": {"world_size": 6, "tp": 2, "pp": 2},
        "interleaving_needs_a_pipeline": {"world_size": 2, "tp": 2, "vpp": 2},
        "sequence_parallelism_needs_tensor_parallelism": {"world_size": 1, "sp": True},
        "pipeline_has_a_type": {"world_size": 2, "pp": 2, "pipeline_dtype": False},
        "heads_divide": {"world_size": 3, "tp": 3, "heads": 16},
        "expert_parallelism_needs_experts": {"world_size": 2, "ep": 2, "layers": 2},
        "one_kind_of_half_precision": {"world_size": 1, "bf16": True, "fp16": True},
        "ranks_fill_the_expert_layout": {**MOE, "world_size": 6, "ep": 4, "etp": 1},
    }
    for name, values in mistakes.items():
        [found] = [one for one in table.check(facts(**values)) if one.rule != "heads_divide" or name == "heads_divide"]
        accepted_by_bridge = name == "sequence_parallelism_needs_tensor_parallelism"
        assert (found.rule, found.level) == (name, "warning" if accepted_by_bridge else "error")


def test_the_recipe_of_megatron_bridge_6024_whose_batch_fills_no_ranks():
    """NemotronH 56B on 256 B200: batch 192, tp 2 (mended by pull request 6091, which proposes 768)."""
    [found] = table.check(facts(world_size=256, nodes=32, gpus_per_node=8, tp=2, sp=True, gbs=192, mbs=1))
    assert found.rule == "batch_fills_the_ranks" and "128 or 256" in found.message
    assert not table.check(facts(world_size=256, nodes=32, gpus_per_node=8, tp=2, sp=True, gbs=768, mbs=1))


def test_fp8_needs_ada_and_bf16_ampere_and_a_recipe_says_how_many_gpus():
    [found] = table.check(facts(precision=FP8, gpu="a100-80g"))
    assert "on a100, which has no units for it: it needs Ada or Hopper" in str(found)
    [found] = [one for one in table.check(facts(precision="bf16_mixed", gpu="v100-32g")) if one.level == "error"]
    assert "bf16_mixed on v100, which has no units for it: it needs Ampere; nearest: fp16_mixed or fp32" in str(found)
    [found] = table.check(facts(tuned_for=("h100", 8), gpus_per_node=2))
    assert str(found).startswith("resources.nodes: 2 h100: NVIDIA chose")


def test_nearest_values():
    assert multiples(5, 8) == (8,)
    assert multiples(20, 16) == (16, 32)
    assert divisors(12, 5) == (4, 6)
    assert divisors(12, 24) == (12,)
    assert divisors(36, 8, also=20) == (4,)


@pytest.mark.parametrize(
    ("asked", "key", "says", "nearest"),
    [
        ({"task": "lora"}, "checkpoint.local", "set with task: lora, which resumes from checkpoints alone", "null"),
        ({"fsdp": "megatron"}, "checkpoint.local", "set with parallel.fsdp: megatron", "null"),
        ({"optimizer": "muon"}, "checkpoint.local", "set with the optimizer muon", "null"),
        ({"save_interval": 0}, "checkpoint.save_interval", "copies need a checkpoint to fall back on", 6),
        ({"save_interval": 5}, "checkpoint.local.every", "5, and every 5 steps a checkpoint is saved anyway", 2),
        ({"save_interval": 1}, "checkpoint.local.every", "5, and every 1 steps a checkpoint is saved anyway", "null"),
    ],
)
def test_copies_on_nodes_are_refused_where_they_could_not_be_resumed(asked, key, says, nearest):
    broken = course.copies_on_nodes_can_be_resumed(facts(copied_every=5, **asked))
    assert broken.key == key and says in broken.message and broken.nearest == (nearest,)
    assert course.copies_on_nodes_can_be_resumed(facts(**asked)) is None


@pytest.mark.parametrize(
    ("sizes", "key", "nearest"),
    [
        ({"hidden": 1000}, "model.hidden_size", (992, 1008)),
        ({"seq_length": 1002, "mbs": 2, "cp": 2}, "training.seq_length", (1000, 1008)),
        ({"ffn": 1000}, "parallel.tp", ()),  # in no layout
        ({"moe_ffn": 768, "etp": 32}, "parallel.etp", (24, 48)),
    ],
)
def test_what_low_precision_would_take(sizes, key, nearest):
    broken = tensors.low_precision_is_aligned(facts(precision=FP8, **sizes))
    assert (broken.key, broken.nearest) == (key, nearest)
    legal = {"model.hidden_size": "hidden", "training.seq_length": "seq_length", "parallel.etp": "etp"}
    for value in nearest:
        assert tensors.low_precision_is_aligned(facts(precision=FP8, **{**sizes, legal[key]: value})) is None


def test_attention_in_fp8_on_hopper_needs_heads_of_128():
    rule = BY_NAME["attention_in_fp8_has_kernels"]
    asked = {"precision": "bf16_with_fp8_delayed_scaling_mixed", "gpu": "h100-80g", "fp8_attention": True}
    assert "h100 with heads of 64" in rule(facts(**asked, head_dim=64)).message
    assert rule(facts(**asked, head_dim=128)) is rule(facts(**asked)) is None
    blocks = {**asked, "precision": "bf16_with_fp8_subchannel_scaling_mixed"}
    assert rule(facts(**blocks, head_dim=128)).message.endswith("it needs bf16_with_fp8_delayed_scaling_mixed")


@pytest.mark.parametrize(
    ("given", "level", "says"),
    [
        ((0.3, 0.3, "linear"), "warning", "linear, and weight decay is 0.3 from beginning to end: set"),
        ((0.2, 0.01, "cosine"), "error", "0.01, less than at the start (0.2); nearest: 0.2"),
    ],
)
def test_a_ramp_of_weight_decay_rises(given, level, says):
    first, last, style = given
    [found] = table.check(facts(first_weight_decay=first, last_weight_decay=last, weight_decay_style=style))
    assert (found.rule, found.level) == ("weight_decay_keeps_to_its_style", level) and says in str(found)
