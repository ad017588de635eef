"""The attention of the CPU backend against a plain softmax(QK^T)V, and over two ranks against one."""

import pytest
from cpu_ranks import on_cpu

LENGTH, BATCH, HEADS, GROUPS, CHANNELS, V_CHANNELS = 8, 2, 4, 2, 6, 4


def _attend() -> tuple[list, list, list]:
    """Output of this rank's queries, gradients of its keys and values, and its positions."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megaboa.bridge.cpu.attention import GatheredAttention, positions

    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        context_parallel_size=ranks,
        attention_dropout=0.0,
    )
    attention = GatheredAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    mine = positions(torch.distributed.get_rank(), ranks, LENGTH // ranks)
    q, k, v = (tensor[mine].requires_grad_() for tensor in _inputs())
    out = attention(q, k, v, None)
    (out * out).sum().backward()
    return out.tolist(), k.grad.tolist(), v.grad.tolist(), mine.tolist()


def _inputs():
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, V_CHANNELS))
    return [torch.randn(LENGTH, BATCH, *shape, generator=generator) for shape in shapes]


def _plain():
    import torch

    q, k, v = (tensor.requires_grad_() for tensor in _inputs())
    repeated = [tensor.repeat_interleave(HEADS // GROUPS, dim=2) for tensor in (k, v)]
    scores = torch.einsum("qbhc,kbhc->bhqk", q, repeated[0]) / CHANNELS**0.5
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf"))
    out = torch.einsum("bhqk,kbhc->qbhc", scores.softmax(-1), repeated[1]).flatten(2)
    (out * out).sum().backward()
    return out, k.grad, v.grad


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equals_plain_attention(ranks):
    import torch

    expected = _plain()
    for *results, positions in on_cpu(_attend, world_size=ranks):
        for result, whole in zip(results, expected, strict=True):
            torch.testing.assert_close(torch.tensor(result), whole[positions])


def _positions():
    from megaboa.bridge.cpu.attention import positions

    return [positions(rank, 2, 4).tolist() for rank in range(2)], positions(0, 1, 3).tolist()


def test_chunks_are_dealt_in_a_zigzag():
    assert on_cpu(_positions) == [([[0, 1, 6, 7], [2, 3, 4, 5]], [0, 1, 2])]
