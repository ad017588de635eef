"""Changes Megatron's modules so that they run without a GPU. Each change is applied when its module is imported."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional
from torch.optim.adam import adam

from megaboa.bridge import wheels
from megaboa.bridge.hooks import on_import

# Switches of TransformerConfig that select a faster kernel for the same result, and their values on the CPU.
KERNELS = {
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "cross_entropy_fusion_impl": "native",
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
}


@functools.cache
def _say(text: str) -> None:
    """Print a message once per process, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def _random(module: ModuleType) -> None:
    """Let one generator serve as both the CPU's and the GPU's."""
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # The tracker warns if a block meant for the GPU's generator has advanced the CPU's, which here is always the case.
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _transformer_config(module: ModuleType) -> None:
    for config_class in (module.TransformerConfig, module.MLATransformerConfig):
        _without_kernels(config_class)


def _without_kernels(config_class: type) -> None:
    post_init = config_class.__post_init__

    @functools.wraps(post_init)
    def prepare(self):
        changed = {name: value for name, value in KERNELS.items() if getattr(self, name, value) != value}
        for name, value in changed.items():
            setattr(self, name, value)
        if changed:
            _say("device cpu: kernels of the GPU are off: " + ", ".join(f"model.{n}={v}" for n, v in changed.items()))
        post_init(self)

    config_class.__post_init__ = prepare


def _torch_norm(module: ModuleType) -> None:
    """Allow sequence parallelism and zero-centered weights, as in Gemma.

    With sequence parallelism, the mark on the weights makes Megatron sum their gradients over the ranks.
    """
    new = module.WrappedTorchNorm.__new__

    def build(cls, config, hidden_size, eps=1e-5, **kwargs):
        with _set(config, sequence_parallel=False, layernorm_zero_centered_gamma=False):
            norm = new(cls, config, hidden_size, eps, **kwargs)
        if config.layernorm_zero_centered_gamma:
            norm = zero_centered(norm)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = staticmethod(build)


def zero_centered(norm: torch.nn.Module) -> torch.nn.Module:
    """Change a norm to have weights around 0, which are added to 1.

    Transformer Engine has such norms; torch's own multiply by the weight as it is.
    """
    norm.__class__ = ZeroCenteredRMSNorm if isinstance(norm, torch.nn.RMSNorm) else ZeroCenteredLayerNorm
    torch.nn.init.zeros_(norm.weight)
    return norm


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """Computes in fp32, as Transformer Engine and `transformers` do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(x.float(), self.normalized_shape, None, self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.normalized_shape, 1.0 + self.weight, self.bias, self.eps)


@contextlib.contextmanager
def _set(target: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def _backends(module: ModuleType) -> None:
    from megaboa.bridge.cpu.attention import CoreAttention

    module.LocalSpecProvider.core_attention = lambda self: CoreAttention


def _mappings(module: ModuleType) -> None:
    """Skip the reduction over a single rank.

    The original returns its input itself, which experts with biases then change in place, and autograd forbids that.
    With grouped matrix products, as on a GPU, these lines are not reached.
    """
    reduce = module.reduce_from_tensor_model_parallel_region

    def reduce_from_tensor_model_parallel_region(input_, group=None):
        group = module.get_tensor_model_parallel_group_if_none(group)
        return input_ if group.size() == 1 else reduce(input_, group=group)

    module.reduce_from_tensor_model_parallel_region = reduce_from_tensor_model_parallel_region


def _moe_utils(module: ModuleType) -> None:
    """Convert to NumPy on the CPU. The original does so only for tensors on a GPU."""

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _optimizer(module: ModuleType) -> None:
    module.Adam, module.USING_PYTORCH_OPTIMIZER = Adam, False


def _distributed_optimizer(module: ModuleType) -> None:
    module.Adam, module.HAVE_APEX_OR_TE, module.USING_APEX_OPTIMIZER = Adam, True, True


class Adam(torch.optim.Optimizer):
    """Adam with the interface of Transformer Engine's FusedAdam, computed by torch.

    It is AdamW (or Adam with L2 regularisation) with the step count in the parameter group, as in FusedAdam.

    Megatron's distributed optimizer can also train with torch's AdamW, which counts steps per parameter, but can't
    resume it in another layout.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("optimizer.optimizer_cuda_graph: true needs a GPU; set it to false")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            steps_done = int(group.get("step", 0))
            group["step"] = steps_done + 1
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            adam(
                params,
                [param.grad.to(param.dtype) for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                max_exp_avg_sqs=[],
                state_steps=[torch.tensor(float(steps_done)) for _ in params],
                foreach=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )


def _initialize(module: ModuleType) -> None:
    module.initialize_megatron = functools.partial(module.initialize_megatron, allow_no_cuda=True)
    module._warmup_jit_function = lambda *args, **kwargs: None
    wheels.keep_compiled_helpers(module)


def _gpt_provider(module: ModuleType) -> None:
    module.transformer_engine_layer_spec = module.local_layer_spec


def _layer_specs(module: ModuleType) -> None:
    """For multi-token prediction, and for all layers of some families, Bridge asks for Transformer Engine's."""
    for name in ("get_gpt_mtp_block_spec", "get_gpt_decoder_layer_specs", "get_gpt_decoder_block_spec"):
        setattr(module, name, _local(getattr(module, name)))


def _local(specs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(specs)
    def local(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(specs).bind(*arguments, **named)
        given.arguments["use_transformer_engine"] = False
        return specs(*given.args, **given.kwargs)

    return local


def _mapping_registry(module: ModuleType) -> None:
    """Let heads for multi-token prediction have norms of their own, as Bridge lets all other layers."""
    registry = module.MegatronMappingRegistry
    add = registry._add_separate_layernorm_mappings

    def added(self: Any) -> None:
        add(self)
        names = {mapping.megatron_param for mapping in self.mappings}
        for fused, separate in registry._SEPARATE_LAYERNORM_REWRITES:
            for mapping in [one for one in self.mappings if one.megatron_param.endswith(f".mtp_model_layer.{fused}")]:
                name = mapping.megatron_param.removesuffix(fused) + separate
                if name not in names and isinstance(mapping, module.AutoMapping):
                    self.mappings.append(module.AutoMapping(name, mapping.hf_param, mapping.permute_dims))

    registry._add_separate_layernorm_mappings = added


def _adapters(module: ModuleType) -> None:
    """Clear Bridge's flags for Transformer Engine: empty stand-ins of its layers, being importable, have set them."""
    for name in vars(module):
        if name.startswith("HAVE_TE"):
            setattr(module, name, False)


def install() -> None:
    """Register all changes for the imports of their modules."""
    for name, change in {
        "megatron.core.tensor_parallel.random": _random,
        "megatron.core.tensor_parallel.mappings": _mappings,
        "megatron.core.transformer.transformer_config": _transformer_config,
        "megatron.core.transformer.torch_norm": _torch_norm,
        "megatron.core.transformer.moe.moe_utils": _moe_utils,
        "megatron.core.models.backends": _backends,
        "megatron.core.models.gpt.gpt_layer_specs": _layer_specs,
        "megatron.core.optimizer": _optimizer,
        "megatron.core.optimizer.distrib_optimizer": _distributed_optimizer,
        "megatron.bridge.training.initialize": _initialize,
        "megatron.bridge.models.conversion.mapping_registry": _mapping_registry,
        "megatron.bridge.models.gpt_provider": _gpt_provider,
        "megatron.bridge.peft.module_matcher": _adapters,
        "megatron.bridge.peft.utils": _adapters,
    }.items():
        on_import(name, after=change)
