"""megaboa.check.fact_sources: what Bridge's configuration says, and which of its sections decides."""

import pytest

from megaboa.check.fact_sources import overlay, with_overrides
from megaboa.check.facts import Facts


def kernels(fields):
    return overlay(Facts(), fields.__getitem__, fields.__contains__).kernels


@pytest.mark.parametrize(
    ("fields", "grad", "gather"),
    [
        ({}, False, True),
        ({"comm_overlap.overlap_grad_reduce": None, "comm_overlap.overlap_param_gather": False}, None, False),
        ({"comm_overlap.overlap_grad_reduce": True, "ddp.use_distributed_optimizer": False}, False, True),
    ],
)
def test_bridges_comm_overlap_decides_over_ddp_where_the_optimizer_is_distributed(fields, grad, gather):
    found = kernels({"ddp.overlap_grad_reduce": False, "ddp.overlap_param_gather": True, **fields})
    assert (found.grad_overlap, found.gather_overlap) == (grad, gather)


@pytest.mark.parametrize(
    ("overrides", "overlaps"),
    [
        ({}, False),
        ({"model.overlap_moe_expert_parallel_comm": True}, True),
        ({"comm_overlap.overlap_moe_expert_parallel_comm": True}, True),
        ({"model.overlap_moe_expert_parallel_comm": True, "comm_overlap.tp_comm_overlap": False}, False),
    ],
)
def test_bridges_comm_overlap_decides_over_the_models_own_field(overrides, overlaps):
    assert with_overrides(Facts(), overrides).kernels.expert_overlap is overlaps


def test_layers_may_exchange_with_other_context_ranks_in_different_ways():
    for given, known in ((["p2p", "a2a"], ("p2p", "a2a")), ("a2a", "a2a"), (None, None)):
        assert with_overrides(Facts(), {"model.cp_comm_type": given}).layout.cp_comm == known
