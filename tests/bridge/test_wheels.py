"""Megatron from wheels: no Makefile, no Apex."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megaboa.bridge import kernels, wheels


@pytest.fixture
def layers(monkeypatch):
    """Stands for megatron.core.tensor_parallel.layers, which only the CPU backend can import without a GPU."""
    module = SimpleNamespace(_grad_accum_fusion_available=False)
    package = ModuleType("megatron.core.tensor_parallel")
    package.layers = module
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel", package)
    return module


def test_without_apex_gradient_accumulation_is_not_fused_and_that_is_said(layers):
    model = SimpleNamespace(gradient_accumulation_fusion=True)
    (change,) = wheels.without_missing_kernels(model)
    assert not model.gradient_accumulation_fusion
    assert "gradient_accumulation_fusion" in change and "Apex" in change


def test_a_run_that_asks_for_it_has_it_by_transformer_engine(layers, monkeypatch):
    """Its product, played by PyTorch's, adds to the gradient that is there."""

    def general_gemm(inputs, gradients, out, layout, accumulate, **_):
        assert layout == "NT" and accumulate
        out += gradients.T.to(out.dtype) @ inputs.to(out.dtype)

    extensions = ModuleType("transformer_engine.pytorch.cpp_extensions")
    extensions.general_gemm = general_gemm
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, extensions.__name__, extensions)
    libraries = ModuleType("transformer_engine_torch")
    libraries.__spec__ = ModuleSpec(libraries.__name__, None)
    monkeypatch.setitem(sys.modules, libraries.__name__, libraries)
    monkeypatch.setattr(kernels, "in_use", set())
    model = SimpleNamespace(gradient_accumulation_fusion=True)
    (said,) = wheels.without_missing_kernels(model, {"model.gradient_accumulation_fusion": True})
    assert model.gradient_accumulation_fusion and "Transformer Engine's products" in said
    inputs, gradients, total = torch.randn(5, 3).bfloat16(), torch.randn(5, 2).bfloat16(), torch.ones(2, 3)
    layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, gradients, total)
    assert torch.allclose(total, 1 + gradients.float().T @ inputs.float())


def test_with_the_kernel_nothing_changes(layers):
    layers._grad_accum_fusion_available = True
    model = SimpleNamespace(gradient_accumulation_fusion=True)
    assert wheels.without_missing_kernels(model) == [] and model.gradient_accumulation_fusion


def test_what_is_off_stays_off(layers):
    assert wheels.without_missing_kernels(SimpleNamespace()) == []


def test_compiled_helpers_are_not_compiled_again(monkeypatch):
    initialize = SimpleNamespace(compile_helpers=lambda: pytest.fail("make was called"))
    monkeypatch.setattr(wheels, "is_installed", lambda module: True)
    wheels.keep_compiled_helpers(initialize)
    initialize.compile_helpers()


def test_where_there_are_none_they_are_compiled(monkeypatch):
    initialize = SimpleNamespace(compile_helpers="make")
    monkeypatch.setattr(wheels, "is_installed", lambda module: False)
    wheels.keep_compiled_helpers(initialize)
    assert initialize.compile_helpers == "make"
