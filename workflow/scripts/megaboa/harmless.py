"""Which fields of Bridge's configuration can't change a run's losses, each with the reason: Megatron-Bridge 0.6.2.

Every field of Bridge was read for this. A field that isn't listed may change the losses, if only by the order of a
sum, and belongs to the run's identity. A test compares the tables with Bridge's sources, and fails for a field that is
new in Bridge until somebody has decided where it belongs. Standard library only.
"""

from __future__ import annotations

# Parts that do no arithmetic of the model's.
SECTIONS: dict[str, str] = {
    "logger": "writes down what was calculated",
    "profiling": "watches; ranks, steps and files of a profiler",
    "straggler": "measures the speed of ranks",
    "nvrx_straggler": "measures the speed of ranks",
    "ft": "watches for hangs; its simulated faults end a rank",
}

_TIMEOUT = "how long a collective waits before it is given up"
_RECORDER = "what NCCL notes down for a hang's diagnosis"
_GC = "when Python collects its garbage"
_ENDS = "when or on which signal ranks end; the steps are the same"
_READS = "compares or dumps what was calculated, and changes none of it"
_LOADER = "how batches come into memory; which samples, and their order, is not its business"
_FILES = "into how many files and by how many writers a checkpoint is saved"
_BACKGROUND = "how a checkpoint is saved while training goes on"
_KEPT = "how often checkpoints are saved, and how many are kept"
_SAVED_BY = "which ranks write and read which part of a checkpoint; its content is the same"
_HF = "an export next to the checkpoint"
_RAISES = "ends the run where a number is not one; changes none"

FIELDS: dict[str, dict[str, str]] = {
    "dist": {
        "distributed_timeout_minutes": _TIMEOUT,
        "distributed_timeout_seconds_after_init": _TIMEOUT,
        "flight_recorder_dump_path": _RECORDER,
        "flight_recorder_trace_buffer_size": _RECORDER,
        "flight_recorder_dump_on_timeout": _RECORDER,
        "flight_recorder_include_stack_trace": _RECORDER,
        "flight_recorder_include_only_active": _RECORDER,
        "flight_recorder_extra_dump_on_exec": _RECORDER,
        "high_priority_stream_groups": "priority of streams on the GPU: when, not what",
        "external_gpu_device_mapping": "which of a node's GPUs a rank takes",
    },
    "train": {
        "manual_gc": _GC,
        "manual_gc_interval": _GC,
        "manual_gc_eval": _GC,
        "empty_unused_memory_level": "when cached memory is given back",
        "train_sync_interval": "how far the CPU may run ahead of the GPU",
        "check_weight_hash_across_dp_replicas_interval": _READS,
        "exit_interval": _ENDS,
        "exit_duration_in_mins": _ENDS,
        "exit_signal": _ENDS,
        "exit_signal_handler": _ENDS,
        "exit_signal_handler_for_dataloader": _ENDS,
        "exit_signal_handler_for_training": _ENDS,
    },
    "dataset": {
        "num_workers": _LOADER,
        "pin_memory": _LOADER,
        "persistent_workers": _LOADER,
        "mmap_bin_files": _LOADER,
        "object_storage_cache_path": _LOADER,
        "num_dataset_builder_threads": "by how many threads the index is built; the index is the same",
        "fast_cache_load": "skips looking whether the index is there",
        "defer_npy_index_mmap": "when the index is opened",
    },
    "checkpoint": {
        "save_interval": _KEPT,
        "save_retain_interval": _KEPT,
        "most_recent_k": _KEPT,
        "save_params_interval": _READS,
        "save_activations_interval": _READS,
        "save_tokens_per_expert_interval": _READS,
        "save_wgrads_interval": _READS,
        "save_dgrads_interval": _READS,
        "save_tokenizer_assets": "a copy of the tokenizer next to the weights",
        "async_save": _BACKGROUND,
        "async_strategy": _BACKGROUND,
        "async_ckpt_cpu_priority": _BACKGROUND,
        "async_ckpt_io_priority": _BACKGROUND,
        "async_ckpt_use_cpu_shm": _BACKGROUND,
        "async_write_results_mp_mode": _BACKGROUND,
        "use_persistent_ckpt_worker": _BACKGROUND,
        "storage_writers_per_rank": _FILES,
        "dist_ckpt_workers": _FILES,
        "fully_parallel_save": _SAVED_BY,
        "fully_parallel_load": _SAVED_BY,
        "ckpt_fully_parallel_load_exchange_algo": _SAVED_BY,
        "ckpt_fully_parallel_save_process_group": _SAVED_BY,
        "ckpt_fully_parallel_load_process_group": _SAVED_BY,
        "distrib_optim_fully_reshardable_mem_efficient": _SAVED_BY,
        "dist_ckpt_optim_fully_reshardable": "in which layouts a checkpoint can be resumed",
        "ckpt_assume_constant_structure": "a plan of the save is kept for the next one",
        "ckpt_load_validate_sharding_integrity": "a check before a checkpoint is loaded",
        "verify_integrity": "checksums of a checkpoint's files",
        "exit_on_missing_checkpoint": "ends a rank whose checkpoint isn't there",
        "also_save_hf_checkpoint": _HF,
        "hf_distributed_save": _HF,
        "hf_save_every_n_ranks": _HF,
    },
    "ddp": {"check_for_nan_in_grad": _RAISES},
    "optimizer": {
        "log_num_zeros_in_grad": _READS,
        "barrier_with_L1_time": "when ranks wait for each other, for a clock's sake",
        "config_logger_dir": "where a configuration is written to",
    },
    "rerun_state_machine": {"check_for_nan_in_loss": _RAISES},
}


def is_harmless(field: str) -> bool:
    """Whether an override can't change the losses: it goes to launch.json, and changing it retrains nothing."""
    section, _, name = field.partition(".")
    return section in SECTIONS or name.split(".")[0] in FIELDS.get(section, {})


def without_harmless(run: dict) -> dict:
    """A run's own part of its identity, as it would be written today: older ones hold fields that are harmless."""
    overrides = run.get("overrides") or {}
    kept = {field: value for field, value in overrides.items() if not is_harmless(field)}
    return run if kept == overrides else {**run, "overrides": kept}
