"""Makes "cuda" mean the CPU in torch, for the life of the process."""

from __future__ import annotations

import functools
import resource
from collections import defaultdict

import torch
import torch.distributed
import torch.utils.data
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def is_cuda(device: object) -> bool:
    """Whether a `device` argument of torch means a GPU. A bare number does."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class CudaOnCpu(TorchFunctionMode):
    """device="cuda", .cuda() and .to("cuda") give CPU tensors; Tensor.type() answers as on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class Immediate:
    """A stream or an event of a device that executes everything immediately."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __enter__(self) -> Immediate:
        return self

    def __exit__(self, *exc_info) -> None:
        return None

    def elapsed_time(self, end: Immediate) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def _nothing(self, *args, **kwargs) -> None:
        return None

    record = wait = synchronize = wait_event = wait_stream = _nothing

    def record_event(self, event: Immediate | None = None) -> Immediate:
        return event or Immediate()


def resident_bytes(device: object = None) -> int:
    """Peak resident memory of this process, used in place of GPU memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(device: object = None) -> dict[str, int]:
    used = resident_bytes()
    return defaultdict(int, {"allocated_bytes.all.current": used, "allocated_bytes.all.peak": used})


def _nothing(*args, **kwargs) -> None:
    return None


def _uncompiled(model=None, **kwargs):
    """torch.compile that doesn't compile: Megatron fuses with it, which would cost a C++ compiler's time here."""
    return model if model is not None else lambda function: function


def _redirect_runtime() -> None:
    runtime = {
        "is_available": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: CPU,  # Megatron passes it as device=...
        "current_stream": lambda device=None: Immediate(),
        "default_stream": lambda device=None: Immediate(),
        "stream": lambda stream: Immediate(),
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "memory_stats": _memory_stats,
        **dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), resident_bytes
        ),
        **dict.fromkeys(
            ("set_device", "set_stream", "synchronize", "empty_cache", "manual_seed_all", "reset_peak_memory_stats"),
            _nothing,
        ),
    }
    for name, function in runtime.items():
        # A new object for each, because tables of torch._dynamo require that no two names of torch.cuda share one.
        setattr(torch.cuda, name, functools.partial(function))
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.Stream = torch.cuda.Event = Immediate
    torch.cuda.nvtx.range_push = functools.partial(_nothing)
    torch.cuda.nvtx.range_pop = functools.partial(_nothing)


def _redirect_backward(mode: TorchFunctionMode) -> None:
    """Enable the mode in the backward pass.

    torch runs a mode's handler, and hence Tensor.backward(), with the mode off, but custom backward() code needs it.
    """
    run = torch.autograd.graph._engine_run_backward

    def run_backward(*args, **kwargs):
        with mode:
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = run_backward


def _redirect_distributed() -> None:
    """Make process groups use gloo instead of NCCL, and barriers ignore devices."""
    init_process_group, barrier = torch.distributed.init_process_group, torch.distributed.barrier

    @functools.wraps(init_process_group)
    def init_gloo(backend=None, *args, **kwargs):
        return init_process_group("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)

    @functools.wraps(barrier)
    def barrier_without_devices(group=None, async_op=False, device_ids=None):
        return barrier(group, async_op)

    torch.distributed.init_process_group = init_gloo
    torch.distributed.barrier = barrier_without_devices


def _redirect_data_loaders() -> None:
    """Start data loaders without advancing the random number generator.

    A starting loader draws a seed from the CPU's generator, which here also stands for the GPU's and draws dropout. A
    resumed run starts its loaders after it has restored the generator, so without this its dropout would differ.
    """
    start = torch.utils.data.DataLoader.__iter__

    @functools.wraps(start)
    def start_aside(self):
        with torch.random.fork_rng(devices=[]):
            return start(self)

    torch.utils.data.DataLoader.__iter__ = start_aside


def redirect() -> None:
    """Redirect everything, once. The mode is per thread: it covers the caller's, in which CPU autograd also runs."""
    mode = CudaOnCpu()
    mode.__enter__()
    _redirect_backward(mode)
    _redirect_runtime()
    _redirect_distributed()
    _redirect_data_loaders()
    torch.compile = _uncompiled
