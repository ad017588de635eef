"""Stand-ins for packages that Megatron-Bridge imports but doesn't need on the CPU.

A stand-in is put in place only where the real package is not installed. None of them is Transformer Engine for all:
Megatron takes a mere `import transformer_engine` that succeeds as proof that its kernels are there. So where it is
installed, it is hidden, and with it what else has kernels for GPUs alone.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace

from megaboa.bridge.hooks import on_import

KERNELS_FOR_GPUS = ("transformer_engine", "transformer_engine_torch", "apex", "flash_attn", "flash_attn_interface")


def is_missing(name: str) -> bool:
    """Whether a module can't be imported. Folders of a namespace package alone don't count as a module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return True
    return spec is None or (spec.origin is None and not spec.submodule_search_locations)


def _nothing(*args, **kwargs) -> None:
    return None


def _empty_class(name: str) -> type:
    return type(name, (), {})


# Names that Bridge's training loop imports from packages that only optional features use.
NAMES = {
    "modelopt.torch.opt": {
        "ModeloptStateManager": type("ModeloptStateManager", (), {"is_converted": staticmethod(lambda model: False)}),
        "restore_from_modelopt_state": _nothing,
    },
    "modelopt.torch.opt.plugins": dict.fromkeys(
        ("restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state"), _nothing
    ),
    "modelopt.torch.opt.plugins.mcore_dist_checkpointing": {"_load_extra_state_from_sharded_checkpoint": _nothing},
    "modelopt.torch.quantization.utils": {"is_quantized": lambda model: False},
    "modelopt.torch.distill": {"DistillationModel": _empty_class("DistillationModel")},
    "modelopt.torch.distill.plugins.megatron": {
        "get_tensor_shapes_adjust_fn_for_distillation": _nothing,
        "DistillationConfig": _empty_class("DistillationConfig"),
    },
    "nvidia_resiliency_ext.inprocess": {"CallWrapper": _empty_class("CallWrapper")},
}

# Packages whose classes may be imported to derive from: multimodal data, and the diffusion recipes that
# `megatron.bridge.recipes` imports along with all others. The value is the package that is really missing.
TREES = {
    "megatron.energon": "megatron.energon",
    "megatron.bridge.recipes.flux": "diffusers",
    "megatron.bridge.recipes.wan": "diffusers",
}


def _install_names(module: str, names: Mapping[str, object]) -> None:
    """Put a module with these names, and the packages above it, into sys.modules."""
    parent = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if name not in sys.modules:
            package = ModuleType(name, "Stand-in of the CPU backend.")
            package.__path__ = []  # no submodules, so that other imports fail as without the stand-in
            package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = package
            if parent is not None:
                setattr(parent, parts[depth - 1], package)
        parent = sys.modules[name]
    vars(parent).update(names)


class _Placeholder(abc.ABCMeta):
    """A class to derive from, to subscript and to build; using what it builds fails."""

    def __getitem__(cls, item):
        return cls

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _placeholder(module: str, name: str) -> type:
    def refuse(self, attribute):
        raise AttributeError(f"{module}.{name} is a stand-in of the CPU backend: install {module} to use {attribute}")

    return _Placeholder(name, (), {"__init__": _nothing, "__getattr__": refuse})


class _TreeFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module below the given packages; any name in it is a placeholder class."""

    def __init__(self, trees: set[str]) -> None:
        self.trees = trees

    def find_spec(self, name, path=None, target=None):
        if any(name == tree or name.startswith(f"{tree}.") for tree in self.trees):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = ModuleType(spec.name)

        def placeholder_for(name):
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "stateless":  # energon's decorator
                return lambda function=None, **kwargs: function or (lambda f: f)
            placeholder = _placeholder(spec.name, name)
            setattr(module, name, placeholder)
            return placeholder

        module.__getattr__ = placeholder_for
        return module

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def _visible(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Make modules importable inside the block; for everyone else the package stays "not installed"."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def _transformer_engine_visible() -> contextlib.AbstractContextManager:
    """Make Transformer Engine's names importable that Bridge's LoRA layers use in annotations and isinstance tests."""
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.__path__, package.pytorch = [], pytorch
    pytorch.Linear, pytorch.LayerNormLinear = _empty_class("Linear"), _empty_class("LayerNormLinear")
    pytorch.ops = SimpleNamespace(Sequential=_empty_class("Sequential"))
    return _visible({"transformer_engine": package, "transformer_engine.pytorch": pytorch})


class _Triton(ModuleType):
    """Stands for triton and triton.language in decorators, annotations and constants of kernels that are never
    launched."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, function=None, *args, **kwargs):
        return function if callable(function) else self


def _triton_visible() -> contextlib.AbstractContextManager:
    return _visible(dict.fromkeys(("triton", "triton.language"), _Triton("triton")))


def stand_in(package: str) -> None:
    """Install the stand-ins of a package's names, if the package is missing."""
    if is_missing(package):
        for module, names in NAMES.items():
            if module.split(".")[0] == package:
                _install_names(module, names)


def install() -> None:
    """Hide kernels for GPUs, and install the stand-ins of all missing packages."""
    sys.modules.update(dict.fromkeys(KERNELS_FOR_GPUS))  # None: "not installed"
    trees = {tree for tree, package in TREES.items() if is_missing(package)}
    if trees:
        sys.meta_path.insert(0, _TreeFinder(trees))
    for package in {module.split(".")[0] for module in NAMES}:
        stand_in(package)
    on_import("megatron.bridge.peft.lora_layers", during=_transformer_engine_visible)
    if is_missing("triton"):  # CPU builds of torch don't depend on it
        for module in ("megatron.core.transformer.moe.ops.paged_stash", "emerging_optimizers.triton_kernels.syrk"):
            on_import(module, during=_triton_visible)
