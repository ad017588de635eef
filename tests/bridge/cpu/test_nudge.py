"""Noise of one unit in the last place: its size, and that every copy of a weight gets the same."""

import cpu_backend_active  # noqa: F401 (before Megatron)
import pytest
import torch
from megatron.bridge.training.callbacks import CallbackContext

from megaboa.bridge.nudge import Nudge, nudge

pytestmark = pytest.mark.slow


def model(seed=1, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 40, bias=False)).to(dtype)


def weights(chunk):
    return {name: weight.detach().clone() for name, weight in chunk.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_weight_moves_by_one_unit_in_the_last_place_or_not_at_all(dtype):
    chunk = model(dtype=dtype)
    before = weights(chunk)
    nudge([chunk], 1)
    for name, after in weights(chunk).items():
        old = before[name]
        up, down = (torch.nextafter(old, torch.full_like(old, to)) for to in (torch.inf, -torch.inf))
        moves = [(after == one) for one in (down, old, up)]
        assert torch.stack(moves).any(0).all()
        if after.numel() > 100:
            assert all(0.25 < one.float().mean() < 0.42 for one in moves), "about a third each"


def test_a_number_is_a_noise():
    first, same, other = model(), model(), model()
    for chunk, number in ((first, 1), (same, 1), (other, 2)):
        nudge([chunk], number)
    assert all(torch.equal(weight, weights(same)[name]) for name, weight in weights(first).items())
    assert not any(torch.equal(weight, weights(other)[name]) for name, weight in weights(first).items())


def test_a_tied_head_moves_as_the_embedding():
    """On the last pipeline stage it is a parameter of its own, of another name."""
    first, last = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(8, 16, bias=False)
    last.load_state_dict(first.state_dict())
    stages = [torch.nn.ModuleDict({"word_embeddings": first}), torch.nn.ModuleDict({"output_layer": last})]
    first.weight.shared_embedding = last.weight.shared_embedding = True
    for stage in stages:
        nudge([stage], 1)
    assert torch.equal(first.weight, last.weight)


def test_the_optimizer_reads_the_moved_weights_again():
    """It may have copies of a higher precision, and the first step would undo the noise."""

    class Optimizer:
        read = None

        def reload_model_params(self):
            self.read = weights(chunk)

    chunk, optimizer = model(dtype=torch.bfloat16), Optimizer()
    before = weights(chunk)
    Nudge(1).on_train_start(CallbackContext(state=None, model=[chunk], user_state={}, optimizer=optimizer))
    assert all(torch.equal(weight, optimizer.read[name]) for name, weight in weights(chunk).items())
    assert not any(torch.equal(weight, optimizer.read[name]) for name, weight in before.items())
