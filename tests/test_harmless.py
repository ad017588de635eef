"""The table of harmless fields against the sources of Bridge and Megatron-Core: every field is judged.

Where this fails after an update of Bridge: read what the new field does, and put it here (it may change the losses) or
into megaboa.harmless, with the reason why it can't.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
from declared import declared

from megaboa import harmless
from megaboa.harmless import is_harmless, without_harmless

BRIDGE = "bridge/training/config.py"
TRAINING = "training/config/training_config.py"
COMMON = "training/config/common_config.py"
# The parts of which some fields are harmless, with the classes that declare them.
SOURCES = {
    "dist": [(COMMON, "DistributedInitConfig"), (BRIDGE, "DistributedInitConfig")],
    "train": [(TRAINING, "TrainingConfig"), (BRIDGE, "TrainingConfig")],
    "dataset": [
        ("core/datasets/blended_megatron_dataset_config.py", "BlendedMegatronDatasetConfig"),
        ("core/datasets/gpt_dataset.py", "GPTDatasetConfig"),
        (BRIDGE, "GPTDatasetConfig"),
        ("bridge/data/base.py", "DataloaderConfig"),
    ],
    "checkpoint": [(TRAINING, "CheckpointConfig"), (BRIDGE, "CheckpointConfig")],
    "ddp": [
        ("core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
        (BRIDGE, "DistributedDataParallelConfig"),
    ],
    "optimizer": [("core/optimizer/optimizer_config.py", "OptimizerConfig"), (BRIDGE, "OptimizerConfig")],
    "rerun_state_machine": [
        ("training/config/resilience_config.py", "RerunStateMachineConfig"),
        (BRIDGE, "RerunStateMachineConfig"),
    ],
}
# Those that may change them, if only by the order of a sum, by what a checkpoint gives back, or by injected faults.
MAY_CHANGE = {
    "rerun_state_machine": """
        error_injection_rate error_injection_type rerun_mode check_for_spiky_loss spiky_loss_factor
    """,
    "train": """
        micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule
        decrease_batch_size_if_needed gpu_sniff_test_interval train_iters train_samples iterations_to_skip
        num_epochs _train_iters_from_num_epochs check_optimizer_step_success skip_sync_grad_norm_across_mp
        eval_iters eval_interval skip_train
    """,
    "dist": """
        distributed_backend align_grad_reduce local_rank lazy_mpu_init use_megatron_fsdp use_torch_fsdp2
        nccl_communicator_config_path use_tp_pp_dp_mapping use_gloo_process_groups use_sharp sharp_enabled_group
        disable_jit_fuser enable_megatron_core_experimental use_decentralized_pg eval_context_parallel_size
    """,
    "dataset": """
        random_seed sequence_length blend blend_per_split multiple_validation_sets full_validation split
        split_matrix path_to_cache mock tokenizer mid_level_dataset_surplus allow_ambiguous_pad_tokens
        reset_position_ids reset_attention_mask eod_mask_loss create_attention_mask
        drop_last_partial_validation_sequence add_extra_token_to_sequence data_parallel_size
        sequence_parallel_size hybrid_context_parallel sequences_per_dataset token_dtype_code
        context_parallel_size inter_document_masking seq_length data_path per_dataset_sequences_path
        dataloader_type data_sharding drop_last trust_remote_code dataloader_save dataloader_load
    """,
    "checkpoint": """
        save save_optim save_rng load load_optim load_main_params_from_ckpt load_rng non_persistent_save_interval
        non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir
        non_persistent_local_ckpt_algo finetune pretrained_checkpoint ckpt_step use_checkpoint_args
        use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args ckpt_format
        auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format
        strict_fsdp_dtensor_load dist_ckpt_strictness dist_ckpt_save_pre_mcore_014 replication replication_jump
        replication_factor stream_ckpt_dequant custom_manager_class hf_source_path hf_trust_remote_code
    """,
    "ddp": """
        grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer
        num_distributed_optimizer_instances check_for_large_grads bucket_size num_buckets
        pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation
        param_name_patterns_for_fp32_local_accumulation average_in_collective fp8_param_gather fp4_param_gather
        reuse_grad_buf_for_mxfp8_param_ag use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy
        gradient_reduce_div_fusion suggested_communication_unit_size keep_fp8_transpose_cache nccl_ub
        fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync
        outer_dp_sharding_strategy disable_symmetric_registration fsdp_manual_registration delay_wgrad_compute
        megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
        megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
    """,
    "optimizer": """
        lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm fp8_recipe fp16 bf16
        reuse_grad_buf_for_mxfp8_param_ag params_dtype use_precision_aware_optimizer store_param_remainders
        main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype optimizer loss_scale initial_loss_scale
        min_loss_scale loss_scale_window hysteresis adam_beta1 adam_beta2 adam_eps decoupled_weight_decay
        sgd_momentum muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec
        muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer
        lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo
        adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps use_distributed_optimizer
        use_layer_wise_distributed_optimizer overlap_param_gather overlap_param_gather_with_optimizer_step
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params clip_grad grad_norm_skip_threshold timers
        optimizer_cuda_graph
    """,
}
# The parts that are harmless as a whole: their fields, as somebody has read them.
READ = {
    "logger": ([("training/config/training_config.py", "LoggerConfig"), (BRIDGE, "LoggerConfig")], 52),
    "profiling": ([(COMMON, "ProfilingConfig"), (BRIDGE, "ProfilingConfig")], 12),
    "straggler": (
        [
            ("training/config/resilience_config.py", "StragglerDetectionConfig"),
            (BRIDGE, "StragglerDetectionConfig"),
        ],
        5,
    ),
    "nvrx_straggler": ([(BRIDGE, "NVRxStragglerDetectionConfig")], 11),
    "ft": ([(BRIDGE, "FaultToleranceConfig")], 6),
}
# Of these every field counts: what the model is, what it reads, how it is updated.
COUNT = {
    *("env_vars", "rng", "model", "optimizer_config_override_provider", "validation", "scheduler", "tokenizer", "peft"),
    *("comm_overlap", "mixed_precision", "tensor_inspect", "inprocess_restart", "_checkpoint_load_required"),
}


def fields_of(sources: list[tuple[str, str]]) -> set[str]:
    return set().union(*(declared(*source) for source in sources))


def test_the_table_is_of_the_bridge_that_is_installed():
    version = importlib.metadata.version("megatron-bridge")
    assert f"Megatron-Bridge {version}" in (harmless.__doc__ or "")


@pytest.mark.parametrize("part", SOURCES)
def test_every_field_of_a_part_is_judged(part):
    may, not_at_all = set(MAY_CHANGE[part].split()), set(harmless.FIELDS[part])
    assert may & not_at_all == set()
    assert may | not_at_all == fields_of(SOURCES[part])


@pytest.mark.parametrize("part", READ)
def test_parts_that_are_harmless_as_a_whole_have_the_fields_that_were_read(part):
    sources, count = READ[part]
    assert len(fields_of(sources)) == count


def test_every_part_of_the_container_is_judged():
    assert declared(BRIDGE, "ConfigContainer") == COUNT | set(SOURCES) | set(READ)
    assert set(harmless.FIELDS) == set(SOURCES) and set(harmless.SECTIONS) == set(READ)


def test_every_reason_is_given():
    assert all(reason for reasons in [harmless.SECTIONS, *harmless.FIELDS.values()] for reason in reasons.values())


def test_overrides():
    assert is_harmless("dist.distributed_timeout_minutes") and is_harmless("logger.log_interval")
    assert is_harmless("dataset.pin_memory") and is_harmless("checkpoint.storage_writers_per_rank")
    assert not is_harmless("checkpoint.finetune") and not is_harmless("model.moe_permute_fusion")
    assert not is_harmless("dataset") and not is_harmless("ddp.bucket_size")


def test_an_older_run_json_as_it_would_be_written_today():
    kept = {"model.moe_permute_fusion": True}
    assert without_harmless({"overrides": {**kept, "train.manual_gc": True}, "x": 1}) == {"overrides": kept, "x": 1}
    assert without_harmless({"x": 1}) == {"x": 1}
