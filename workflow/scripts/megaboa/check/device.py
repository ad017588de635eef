"""Rules about settings that the device doesn't support, whatever the rest of the run."""

from __future__ import annotations

from megaboa import peaks
from megaboa.check import calibration
from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, warning
from megaboa.formats import counted
from megaboa.peaks import Generation

NOT_ON_CPU = ("fp16", "fp8", "fp4")  # formats
FP8_HEAD = 128  # of cuDNN's attention in FP8 on Hopper, backward


def machine_has_the_gpus(f: Facts) -> Broken | None:
    """Where `device: auto` takes this machine's GPUs, a run asks for no more than there are: each rank has its own."""
    has, wants = f.cluster.machine_gpus, f.cluster.gpus_per_node
    if has is None or wants <= has:
        return None
    return Broken("resources.gpus_per_node", f"{wants}, and this machine has {counted(has, 'GPU')}", (has,))


def cpu_calculates_in_the_precision(f: Facts) -> Broken | None:
    """On the CPU, torch has no operations in FP16, FP8 and FP4 that Megatron trains with: bridge/cpu refuses them."""
    precision = f.training.precision or ""
    if f.cluster.device != "cpu" or not any(name in precision for name in NOT_ON_CPU):
        return None
    return Broken("training.precision", f"{precision} with device: cpu", ("fp32", "bf16_mixed"))


def context_ranks_have_attention(f: Facts) -> Broken | None:
    """On GPUs, attention over context parallel ranks is Transformer Engine's fused one, which takes 16 bits or fewer:
    for fp32 it finds no backend, in the first step."""
    if f.cluster.device != "cuda" or f.layout.cp == 1 or f.training.precision != "fp32":
        return None
    return Broken("training.precision", f"fp32 with parallel.cp: {f.layout.cp} on GPUs", ("bf16_mixed",))


def gpu_is_known(f: Facts) -> Broken | None:
    """A GPU has a data sheet in Megaboa, or a calibration: otherwise its step times, hours and costs are unknown."""
    gpu = f.cluster.gpu
    if f.cluster.device != "cuda" or gpu is None or calibration.of(gpu):
        return None
    kind = gpu.split("-")[0]
    known = ", ".join(peaks.KINDS)
    text = f"nothing is known of {kind}, so that its step times and costs can't be predicted; known are {known}"
    file = f"calibrations/{kind}.json, or says what else the GPU is called here"
    return warning("resources.gpu", f"{text}; `megaboa calibrate` on such a GPU writes {file}")


def gpu_calculates_in_the_precision(f: Facts) -> Broken | None:
    """bf16 needs Ampere at least, FP8 Ada or Hopper, MXFP8 and NVFP4 Blackwell: Transformer Engine refuses the latter
    elsewhere (quantization.py)."""
    precision, gpu = f.training.precision or "", peaks.of(f.cluster.gpu)
    if f.cluster.device != "cuda" or gpu is None:
        return None
    lacks = f"{precision} on {gpu.kind}, which has no units for it: it needs"
    if gpu.generation < Generation.BLACKWELL and ("mxfp8" in precision or "fp4" in precision):
        return Broken("training.precision", f"{lacks} Blackwell")
    if gpu.generation < Generation.ADA and "fp8" in precision:
        return Broken("training.precision", f"{lacks} Ada or Hopper")
    if gpu.generation < Generation.AMPERE and "bf16" in precision:
        return Broken("training.precision", f"{lacks} Ampere", ("fp16_mixed", "fp32"))
    return None


def torch_has_kernels_for_the_gpu(f: Facts) -> Broken | None:
    """The locked torch is built with CUDA 13, which has no kernels for GPUs before Turing: the first step fails, unless
    an image has an older CUDA."""
    gpu = peaks.of(f.cluster.gpu)
    if f.cluster.device != "cuda" or gpu is None or gpu.generation >= Generation.TURING:
        return None
    return warning("resources.gpu", f"{f.cluster.gpu}: the locked torch has no kernels for it; only an older image may")


def attention_in_fp8_has_kernels(f: Facts) -> Broken | None:
    """On Hopper, attention in FP8 is trained with delayed scaling and heads of 128 alone: for others Transformer Engine
    finds no backend, in the first step."""
    precision, gpu, scaling = f.training.precision or "", peaks.of(f.cluster.gpu), f.cluster.attention_scaling
    is_hopper = gpu is not None and gpu.generation == Generation.HOPPER
    if not f.has_fp8_attention or not is_hopper:
        return None
    key = "mixed_precision.fp8_dot_product_attention"
    if f.model.head_dim not in (FP8_HEAD, None):
        return Broken(
            key, f"true on {gpu.kind} with heads of {f.model.head_dim}: it has kernels for {FP8_HEAD}", (False,)
        )
    if "fp8_delayed" in precision or ("fp8_current" in precision and scaling == "DelayedScaling"):
        return None
    text = f"true on {gpu.kind} with {precision}: it needs bf16_with_fp8_delayed_scaling_mixed"
    if "fp8_current" in precision:
        text += ", or launch.environment: {NVTE_DPA_FP8_RECIPE: DelayedScaling}"
    return Broken(key, text, (False,))


def gpus_are_those_of_the_recipe(f: Facts) -> Broken | None:
    """Layout, batch and environment of a performance recipe are chosen for one GPU and number of GPUs: on others it
    trains, but its published number is none to compare with."""
    if f.cluster.device != "cuda" or f.cluster.tuned_for is None:
        return None
    kind, number = f.cluster.tuned_for
    have, ranks = (f.cluster.gpu or kind).split("-")[0], f.cluster.nodes * f.cluster.gpus_per_node
    if (have, ranks) == (kind, number):
        return None
    key = "resources.gpu" if have != kind else "resources.nodes"
    return warning(key, f"{ranks} {have}: NVIDIA chose this recipe's layout, batch and environment for {number} {kind}")


RULES = (
    machine_has_the_gpus,
    cpu_calculates_in_the_precision,
    context_ranks_have_attention,
    gpu_calculates_in_the_precision,
    torch_has_kernels_for_the_gpu,
    attention_in_fp8_has_kernels,
    gpus_are_those_of_the_recipe,
    gpu_is_known,
)
