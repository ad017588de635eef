"""The faster kernels calculate what PyTorch does."""

import pytest
import torch

from megaboa.bridge import kernels


class OneRank:
    def size(self):
        return 1

    def rank(self):
        return 0


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """What Inductor makes of them is Inductor's: here the formulas are tested, without a compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_cross_entropy_and_its_gradient(dtype, tolerance):
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, 2, 11)).to(dtype).requires_grad_()
    target, weight = torch.randint(0, 11, (5, 2)), torch.rand(5, 2)
    loss = kernels.cross_entropy(logits, target, OneRank())
    (loss * weight).sum().backward()

    exact = logits.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact.flatten(0, 1), target.flatten(), reduction="none").view(5, 2)
    (wanted * weight).sum().backward()
    torch.testing.assert_close(loss.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=tolerance, rtol=tolerance)


def test_gradients_of_a_split_are_joined():
    mixed = torch.randn(3, 2, 4, 24, requires_grad=True)
    weight = torch.randn(3, 2, 4, 24)
    parts = kernels._Split.apply(mixed, 3, [8, 8, 8])
    sum((part * piece).sum() for part, piece in zip(parts, weight.split(8, dim=3), strict=True)).backward()
    torch.testing.assert_close(mixed.grad, weight)
