"""Transformer Engine's parts of an MLP, as far as they can be looked at without it: tests/e2e/gpus trains with them."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megaboa.bridge import te_mlp, wheels

TOLD = """
import inspect
from types import SimpleNamespace
from megaboa.bridge import process, te_mlp, wheels
process.make_fit("cpu")
from megatron.bridge.models import gpt_provider
wheels.is_installed, te_mlp._keep_no_state_of_it = (lambda module: True), (lambda: None)
before = gpt_provider.get_gpt_layer_with_transformer_engine_spec
te_mlp.complete(SimpleNamespace(use_te_activation_func=False))
assert gpt_provider.get_gpt_layer_with_transformer_engine_spec is before
te_mlp.complete(SimpleNamespace(use_te_activation_func=True))
told = gpt_provider.get_gpt_layer_with_transformer_engine_spec
assert told.keywords == {"use_te_activation_func": True} and told.func is before
assert inspect.signature(told) == inspect.signature(before), "Bridge looks up what it takes"
assert "use_te_activation_func" in inspect.signature(before).parameters
"""


@pytest.mark.slow
def test_bridge_tells_the_layers_to_use_its_activation():
    subprocess.run([sys.executable, "-c", TOLD], check=True)


class Activation(torch.nn.Module):
    """As an operation of Transformer Engine, which has a state even if there is nothing in it."""

    def get_extra_state(self):
        return torch.empty(0)

    def set_extra_state(self, state):
        pass


class Op:
    def __new__(cls, config):
        return Activation()


def test_its_activation_is_loaded_from_checkpoints_without_it(monkeypatch):
    extension = ModuleType("megatron.core.extensions.transformer_engine")
    extension.TEActivationOp = Op
    monkeypatch.setitem(sys.modules, extension.__name__, extension)
    assert list(Op(None).state_dict()) == ["_extra_state"]
    te_mlp._keep_no_state_of_it()
    mlp = torch.nn.Sequential(torch.nn.Linear(2, 2), Op(None))
    assert list(mlp.state_dict()) == ["0.weight", "0.bias"] and isinstance(mlp[1], Activation)
    mlp.load_state_dict(mlp.state_dict(), strict=True)


class Joined(torch.nn.Module):
    """As megatron-core's TEFusedMLP, which isn't there without Transformer Engine: one operation, with the hooks that
    its layers have when it is first called."""

    def __init__(self):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.joined = None

    def forward(self, hidden_states):
        if self.joined is None:
            self.joined = []
            self._register_hooks_on_fused_impl(self.joined)
        for hook in self.joined:
            hook()
        return hidden_states

    def _register_hooks_on_fused_impl(self, fused_impl):
        for layer in self.children():
            fused_impl += [lambda hook=hook, layer=layer: hook(layer, ()) for hook in layer._forward_pre_hooks.values()]


def test_joined_operations_wait_for_weights_by_hooks_that_were_attached_later(monkeypatch):
    extension = ModuleType("megatron.core.extensions.transformer_engine")
    extension.TEFusedMLP = Joined
    monkeypatch.setitem(sys.modules, extension.__name__, extension)
    monkeypatch.setattr(wheels, "is_installed", lambda module: True)
    te_mlp.complete(SimpleNamespace(use_transformer_engine_op_fuser=True))
    waited, mlp = [], Joined()
    mlp(torch.zeros(1))
    handles = [layer.register_forward_pre_hook(lambda one, *_: waited.append(one)) for layer in mlp.children()]
    mlp(torch.zeros(1))
    assert waited == [mlp.linear_fc1, mlp.linear_fc2]
    for handle in handles:
        handle.remove()
    mlp(torch.zeros(1))
    assert len(waited) == 2
