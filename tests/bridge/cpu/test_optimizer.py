import copy

import pytest
import torch

from megaboa.bridge.cpu.megatron import Adam

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]


def _train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def _equal(left: list[torch.nn.Parameter], right: list[torch.nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("adam_w_mode", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_equals_torch_bit_for_bit(adam_w_mode, reference):
    ours, theirs = _parameters(), _parameters()
    _train(Adam(ours, adam_w_mode=adam_w_mode, **SETTINGS), ours, range(6))
    _train(reference(theirs, foreach=False, **SETTINGS), theirs, range(6))
    assert _equal(ours, theirs)
    assert not _equal(ours, _parameters())


def test_counts_steps_in_the_group_and_resumes_bit_for_bit():
    params = _parameters()
    optimizer = Adam(params, **SETTINGS)
    _train(optimizer, params, range(3))
    assert optimizer.param_groups[0]["step"] == 3
    assert {name for state in optimizer.state.values() for name in state} == {"exp_avg", "exp_avg_sq"}

    resumed = copy.deepcopy(params)
    other = Adam(resumed, **SETTINGS)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _train(optimizer, params, range(3, 6))
    _train(other, resumed, range(3, 6))
    assert _equal(params, resumed)


def test_leaves_parameters_without_gradient_alone():
    params = _parameters()
    optimizer = Adam(params, **SETTINGS)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert torch.equal(params[1], _parameters()[1])
    assert params[1] not in optimizer.state


def test_refuses_cuda_graphs():
    with pytest.raises(ValueError, match=r"optimizer\.optimizer_cuda_graph"):
        Adam(_parameters(), capturable=True)
