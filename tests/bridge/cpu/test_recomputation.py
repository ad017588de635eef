"""Why a feed-forward part with biases can't be recomputed (the rule recomputed_feed_forward_has_no_bias)."""

from cpu_ranks import on_cpu


def _checkpointed(with_bias: bool) -> bool:
    """Whether all parameters of a feed-forward part still are parameters after the part was checkpointed."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, add_bias_linear=with_bias)
    part = get_gpt_layer_local_spec().submodules.mlp(
        config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups(), is_mtp_layer=False
    )
    tensor_parallel.checkpoint(part, False, torch.ones(2, 1, 8, requires_grad=True))
    return all(parameter.is_leaf for parameter in part.parameters())


def test_a_bias_that_is_given_out_is_taken_for_a_result():
    assert on_cpu(_checkpointed, False) == [True]
    assert on_cpu(_checkpointed, True) == [False]
