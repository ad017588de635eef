"""Bytes that an activation moves without fusion, compared with what PyTorch's operations read and write."""

import pytest
import torch
from facts_of import facts
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaboa.check import work

ROWS, WIDTH = 64, 1024


class Moved(TorchDispatchMode):
    """Counts bytes that operations read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        if not operation.is_view and "detach" not in str(operation):
            tensors = [one for one in tree_leaves((args, kwargs, found)) if isinstance(one, torch.Tensor)]
            self.bytes += sum(one.nbytes for one in tensors)
        return found


@pytest.mark.parametrize("router", [None, "bf16", "fp32"])
def test_a_gated_activation_moves_what_its_operations_move(router):
    """As megatron-core has them in transformer/mlp.py and, weighted by the router, in transformer/moe/experts.py."""
    given = torch.randn(ROWS, 2 * WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(ROWS, 1, dtype=torch.float32 if router == "fp32" else torch.bfloat16, requires_grad=True)
    with Moved() as forward:
        gate, linear = torch.chunk(given, 2, dim=-1)
        done = silu(gate) * (linear + 0.0)
        done = (done * weights).to(torch.bfloat16) if router else done
    gradient = torch.ones_like(done)
    with Moved() as backward:
        done.backward(gradient)
    kernels = {"gated": True, "router_dtype": "fp32" if router == "fp32" else None}
    unfused = work.activation(facts(**kernels, fused_activation=False), ROWS * WIDTH, bool(router))
    assert unfused == pytest.approx((forward.bytes, backward.bytes), rel=0.01)
    assert sum(work.activation(facts(**kernels), ROWS * WIDTH, bool(router))) < sum(unfused) / 2
