"""Transformer Engine's activations and joined operations, where Bridge 0.6.2 and megatron-core 0.19.2 leave a gap."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch

from megaboa.bridge import wheels


def complete(model: Any) -> None:
    """Make both work in this process, if the model asks for them. Must be called before it is built."""
    if not wheels.is_installed("transformer_engine_torch"):
        return
    if getattr(model, "use_te_activation_func", False):
        _pass_on_the_activation()
        _keep_no_state_of_it()
    if getattr(model, "use_transformer_engine_op_fuser", False):
        _wait_for_gathered_weights()


def _pass_on_the_activation() -> None:
    """Bridge doesn't tell the layers to use Transformer Engine's activation.

    They would use PyTorch's, which lacks the gates: `GEMM not possible` in the first step, or an activation that is
    slower than Megatron's own.
    """
    from megatron.bridge.models import gpt_provider

    made = gpt_provider.get_gpt_layer_with_transformer_engine_spec
    passed_on = functools.partial(made, use_te_activation_func=True)
    gpt_provider.get_gpt_layer_with_transformer_engine_spec = functools.wraps(made)(passed_on)


def _keep_no_state_of_it() -> None:
    """The activation's operation would save an empty state, and look for it in every checkpoint that it loads.

    Imported models and runs without it have none: pretrained weights could not be loaded.
    """
    from megatron.core.extensions.transformer_engine import TEActivationOp

    made = TEActivationOp.__new__

    def stateless(cls: type, config: Any) -> Any:
        layer = made(cls, config)
        layer.__class__ = _without_state(type(layer))
        return layer

    TEActivationOp.__new__ = stateless


@functools.cache
def _without_state(kind: type) -> type:
    plain = {name: getattr(torch.nn.Module, name) for name in ("get_extra_state", "set_extra_state")}
    return type(kind.__name__, (kind,), plain)


def _wait_for_gathered_weights() -> None:
    """The joined operations have the hooks that their layers had in the first forward pass.

    Those that wait for gathered weights are attached after the first step. So nothing would wait: the second step
    would calculate with weights of the first, or fail with an AssertionError. Here every pass calls the hooks of the
    moment.
    """
    from megatron.core.extensions.transformer_engine import TEFusedMLP

    joined, register = TEFusedMLP.forward, TEFusedMLP._register_hooks_on_fused_impl

    @functools.wraps(joined)
    def forward(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        for layer in self.children():
            for number, hook in list(layer._forward_pre_hooks.items()):
                hook(layer, (), *([{}] if number in layer._forward_pre_hooks_with_kwargs else []))
        return joined(self, hidden_states, **kwargs)

    def register_others(self: Any, fused_impl: Any) -> None:
        hidden = {layer: layer._forward_pre_hooks for layer in self.children()}
        for layer in hidden:
            layer._forward_pre_hooks = OrderedDict()
        try:
            register(self, fused_impl)
        finally:
            for layer, hooks in hidden.items():
                layer._forward_pre_hooks = hooks

    TEFusedMLP.forward, TEFusedMLP._register_hooks_on_fused_impl = forward, register_others
