import torch

from megaboa.bridge import random_weights
from megaboa.bridge.random_weights import PIECE, drawn_in_pieces


def drawn(seed, threads, monkeypatch):
    monkeypatch.setattr(random_weights.os, "sched_getaffinity", lambda _: range(threads))
    with drawn_in_pieces(seed):
        layer = torch.nn.Linear(PIECE // 1024 + 3, 1100, dtype=torch.bfloat16)
        torch.nn.init.normal_(layer.weight, std=0.02)
        small = torch.empty(4, 4).normal_()
    return layer.weight, small


def test_weights_depend_on_the_seed_and_not_on_the_number_of_threads(monkeypatch):
    one, small = drawn(1, 1, monkeypatch)
    assert torch.equal(one, drawn(1, 7, monkeypatch)[0])
    assert not torch.equal(one, drawn(2, 7, monkeypatch)[0])
    assert one.requires_grad and one.is_leaf
    values = one.detach().float()
    assert abs(values.mean()) < 1e-4 and abs(values.std() - 0.02) < 1e-4
    assert not torch.equal(values.view(-1)[:1024], values.view(-1)[PIECE : PIECE + 1024])
    assert small.std() > 0.1
