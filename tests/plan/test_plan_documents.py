"""megaboa.plan.documents: what a run's documents hold, and which keys may decide what it trains, so that `snakemake
tune` refuses them."""

import re
from pathlib import Path

import pytest
import yaml
from declared import declared

from megaboa.check.fact_sources import FIELDS
from megaboa.plan.documents import is_trained
from megaboa.records import LossSpike, plain

TRAINED = """
    model.moe_expert_capacity_factor model.moe_token_drop_policy model.moe_aux_loss_coeff model.moe_z_loss_coeff
    model.moe_router_bias_update_rate model.moe_router_force_load_balancing model.moe_input_jitter_eps
    model.moe_router_topk model.calculate_per_token_loss model.window_size model.attention_dropout
    model.hidden_dropout model.rotary_base model.init_method_std model.layernorm_epsilon model.softmax_scale
    model.mtp_loss_scaling_factor model.seq_length model.linear_conv_kernel_dim model.num_layers model.not_known_yet
    peft.dim peft.alpha peft.target_modules optimizer.lr optimizer.adam_beta2 optimizer.decoupled_lr
    optimizer.clip_grad optimizer.sgd_momentum scheduler.lr_wsd_decay_style train.rampup_batch_size
    dataset.random_seed tokenizer.tokenizer_model rng.seed
"""
CALCULATED = """
    model.cuda_graph_impl model.cuda_graph_modules model.recompute_num_layers model.bias_activation_fusion
    model.cross_entropy_fusion_impl model.moe_permute_fusion model.moe_router_fusion model.moe_router_dtype
    model.moe_token_dispatcher_type model.moe_flex_dispatcher_backend model.moe_grouped_gemm
    model.fused_single_qkv_rope model.moe_shared_expert_overlap model.attention_backend model.cp_comm_type
    model.batch_p2p_sync model.use_te_activation_func model.use_te_rng_tracker model.use_transformer_engine_op_fuser
    model.gradient_accumulation_fusion model.fine_grained_activation_offloading
    model.microbatch_group_size_per_vp_stage model.pipeline_model_parallel_layout model.fp8_margin
    rng.te_rng_tracker optimizer.use_precision_aware_optimizer optimizer.exp_avg_dtype
    optimizer.optimizer_cpu_offload comm_overlap.tp_comm_overlap ddp.bucket_size ddp.check_for_nan_in_grad
    dist.use_sharp mixed_precision.fp8_recipe mixed_precision.grad_reduce_in_fp32 logger.log_interval
    train.manual_gc
"""


# The other fields of two sections that are taken for calculation, by a fact of the layout or by words in their names.
OTHERS = {
    "model": """
        _cpu_offloading_context account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        activation_func_fp8_input_store activation_offload_fraction apply_rope_fusion attention_softmax_in_fp32
        autocast_dtype batch_p2p_comm bf16 bias_dropout_fusion context_parallel_size cpu_offloading
        cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
        cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights cross_entropy_loss_fusion
        cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_warmup_steps
        defer_embedding_wgrad_compute delay_offload_until_cuda_graph delay_wgrad_compute
        delta_offload_bytes_across_pp_ranks dense_grouped_gemm disable_bf16_reduced_precision_matmul
        dsa_indexer_k_norm_fp32 dsa_kernel_backend enable_cuda_graph ep_overlap_early_attn_memory_release
        expert_model_parallel_size expert_tensor_parallel_size external_cuda_graph
        fine_grained_offloading_max_inflight_offloads first_last_layers_bf16 flash_attention_version fp16
        fp16_lm_cross_entropy fp32_residual_connection fp4 fp4_param fp4_quantizer_factory fp4_recipe fp8
        fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_interval
        fp8_multi_head_attention fp8_output_proj fp8_param fp8_quantizer_factory fp8_recipe fp8_wgrad
        fused_residual_rmsnorm high_priority_a2a_comm_stream inference_cuda_graph_scope
        inference_fuse_tp_communication inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type kitchen_attention_backend mamba_training_ssm_states_dtype
        masked_softmax_fusion min_offloaded_tensor_size mla_down_proj_fusion moe_deepep_num_sms
        moe_enable_deepep moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs moe_layer_recompute moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_pad_experts_for_cuda_graph_inference moe_permute_fusion_into_hybridep moe_router_padding_for_fp8
        num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage offload_modules overlap_dispatch_backward_with_experts_wgrad
        overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush params_dtype
        pipeline_dtype pipeline_model_parallel_comm_backend pipeline_model_parallel_size recompute_granularity
        recompute_method recompute_modules sequence_parallel tensor_model_parallel_size tp_comm_atomic_ag
        tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
        tp_comm_overlap_ag tp_comm_overlap_cfg tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv
        tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs transformer_impl
        use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert
        use_ring_exchange_p2p virtual_pipeline_model_parallel_size wgrad_deferral_limit
    """,
    "optimizer": """
        barrier_with_L1_time bf16 config_logger_dir exp_avg_sq_dtype fp16 fp8_recipe log_num_zeros_in_grad
        main_grads_dtype main_params_dtype muon_fp32_matmul_prec optimizer_cuda_graph optimizer_offload_fraction
        overlap_cpu_optimizer_d2h_h2d overlap_param_gather overlap_param_gather_with_optimizer_step params_dtype
        reuse_grad_buf_for_mxfp8_param_ag store_param_remainders use_distributed_optimizer
        use_torch_optimizer_for_cpu_offload
    """,
}
DECLARED = {
    "model": [
        ("core/transformer/transformer_config.py", "TransformerConfig"),
        ("core/transformer/transformer_config.py", "MLATransformerConfig"),
        ("core/model_parallel_config.py", "ModelParallelConfig"),
        ("bridge/models/gpt_provider.py", "GPTModelProvider"),
    ],
    "optimizer": [("core/optimizer/optimizer_config.py", "OptimizerConfig")],
}


@pytest.mark.parametrize("field", TRAINED.split())
def test_a_field_that_changes_the_model_or_its_losses_decides_what_is_trained(field):
    assert is_trained(f"overrides.{field}")


@pytest.mark.parametrize("field", CALCULATED.split())
def test_a_field_of_how_it_is_calculated_does_not(field):
    assert not is_trained(f"overrides.{field}")


def test_no_size_of_a_model_is_among_them():
    sizes = [field for fact, field in FIELDS.items() if fact.startswith("model.")]
    assert sizes and all(is_trained(f"overrides.{field}") for field in sizes)


@pytest.mark.parametrize(
    "key", ["model", "models.a.config.x", "data.blend", "training.seq_length", "tuning.rank", "task"]
)
def test_keys_of_the_experiment_by_their_sections(key):
    assert is_trained(key)


@pytest.mark.parametrize(
    "key", ["parallel.tp", "parallel.overlap_grad_reduce", "training.precision", "data.num_workers", "resources.nodes"]
)
def test_keys_of_how_it_runs_do_not(key):
    assert not is_trained(key)


def fields(section):
    return set().union(*(declared(*part) for part in DECLARED[section]))


def test_every_field_named_here_is_one_of_megatrons_transformer():
    named = {field.removeprefix("model.") for field in (TRAINED + CALCULATED).split() if field.startswith("model.")}
    assert named - fields("model") == {"not_known_yet"}


@pytest.mark.parametrize("section", DECLARED)
def test_no_field_is_taken_for_calculation_by_chance(section):
    """The words that are looked for may be in the names of Bridge's next fields, too: look at each that this lists
    whether it changes what is trained; if so, change the words, otherwise add it to OTHERS."""
    known = {field.partition(".")[2] for field in CALCULATED.split() if field.startswith(f"{section}.")}
    found = {field for field in fields(section) if not is_trained(f"overrides.{section}.{field}")}
    assert found == known | set(OTHERS[section].split())


def test_further_keys_of_the_shipped_experiments_and_of_the_docs_do_not():
    pages = re.findall(r"```yaml\n(tune:.*?)```", Path("docs/how-to/tune.md").read_text(encoding="utf-8"), re.DOTALL)
    shipped = [path.read_text(encoding="utf-8") for path in Path("config/experiments").glob("*.yaml")]
    tunes = [yaml.safe_load(text).get("tune") or {} for text in (*pages, *shipped)]
    further = [key for tune in tunes for key in tune.get("also", ())]
    assert pages and len(further) >= 6 and not any(map(is_trained, further))


def test_launch_and_profile_hold_the_rest(plan_of):
    run = plan_of("resources: {nodes: 2, partition: gpu}\noverrides: {logger.log_interval: 5}\nstore: there").runs[0]
    assert run.run.world_size == 2
    assert {
        key: getattr(run.launch, key) for key in ("nodes", "gpus_per_node", "partition", "store", "num_workers")
    } == {
        "nodes": 2,
        "gpus_per_node": 1,
        "partition": "gpu",
        "store": "there",
        "num_workers": 2,
    }
    assert run.launch.overrides == {"logger.log_interval": 5}
    assert plain(run.profile) == {
        "tool": "none",
        "steps": [2, 8],
        "ranks": [0],
        "domains": ["cuda", "nvtx"],
        "arguments": [],
    }


def test_how_ranks_start_and_what_is_done_when_they_fail_is_launched(plan_of):
    settings = "launch: {network: efa, environment: {A: b, C: null}}\n"
    settings += "recovery: {actions: {hang: requeue}, loss_spike: {patience: 7}}\n"
    launch = plan_of(settings).runs[0].launch
    assert launch.start.network == "efa" and launch.start.environment == {"A": "b", "C": None}
    assert (launch.start.starter, launch.start.srun, launch.start.health_check) == (
        "auto",
        "srun",
        False,
    )
    assert launch.recovery.actions == {"hang": "requeue"} and launch.recovery.budget == 5
    assert launch.recovery.loss_spike == LossSpike(factor=2.0, window=50, patience=7, limit=3)
    assert plan_of().runs[0].launch.recovery.loss_spike is None


@pytest.mark.parametrize(
    ("more", "layers", "reshardable"),
    [
        ("", 2, True),  # 142 million parameters
        ("", 3, False),  # 210 million
        ("resources: {gpus_per_node: 2}\nparallel: {tp: 2}\n", 3, True),
        ("resources: {gpus_per_node: 2}\n", 3, False),
        ("checkpoint: {reshardable: true}\n", 3, True),
        ("checkpoint: {reshardable: false}\n", 2, False),
        ("parallel: {distributed_optimizer: false}\n", 3, True),
        ("device: cuda\nparallel: {fsdp: megatron}\n", 3, True),
    ],
)
def test_large_models_are_saved_as_the_ranks_are_cut(plan_of, more, layers, reshardable):
    sizes = f"models.dense.config.num_hidden_layers: [{layers}]"
    plan = plan_of(f"{more}sweep: {{grid: {{{sizes}}}}}\n")
    assert plan.runs[0].launch.checkpoint["reshardable"] is reshardable
