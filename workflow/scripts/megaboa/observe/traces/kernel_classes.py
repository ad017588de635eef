"""Classifies kernels by their names, which follow the libraries' conventions.

A kernel that matches no pattern is called `other`; a large one of these is a finding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

COMMUNICATION = "communication"
OTHER = "other"
# Patterns in order of precedence. The name before `<` (`flash_fwd_kernel` of `flash_fwd_kernel<cutlass::...>`) is
# matched first, then the whole name.
_PATTERNS = {
    COMMUNICATION: r"nccl|rccl|^gloo:|nvshmem|deep_?ep|hybrid_?ep|rdma|userbuffers|all_?reduce_kernel",
    "optimizer": r"multi_?tensor|adam|lamb|l2_?norm|_foreach_|muon|newton_?schulz|lpnorm|lerp|addcdiv|addcmul",
    "MoE": r"moe|_(un)?permute_|router|expert|sort_chunks",
    "attention": r"flash|fmha|sdpa|attention|attn|(masked|scaled)_?\w*softmax",
    "norm": r"(layer|batch)_?norm|rms_?norm|ln_(fwd|bwd)|bn_(fw|bw)|norm_(fwd|bwd|forward|backward)|rsqrt",
    # including convolutions, which are matrix products, or transforms to such
    "GEMM": (
        r"gemm|conv|[dw]grad|winograd|scudnn|cutlass|cublas|nvjet|xmma|mma_|matmul|split_?k|"
        r"^aten::(mm|addmm|bmm|baddbmm|addbmm)$"
    ),
    "elementwise": (
        r"elementwise|vectorized|reduce_kernel|^triton_|copy|cast|fill|dropout|gelu|glu|silu|softmax|cross_?entropy|"
        r"embedding|index|nchw|gather|scatter|transpose|bias|(^|[_:])(add|mul|div|sub|cat|sum|mean|pow|exp|sqrt)|^aten::"
    ),
}
NAMES = (*_PATTERNS, OTHER)
# Generic wrappers: the kernel that they run is named in the template arguments.
_WRAPPERS = ("cutlass::device_kernel", "cutlass::Kernel", "cutlass::Kernel2")
_CLASSES = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _PATTERNS.items()]

_OPERATIONS = {
    "AllReduce": r"all_?reduce",
    "AllGather": r"all_?gather",
    "ReduceScatter": r"reduce_?scatter",
    "AllToAll": r"all_?to_?all",
    "SendRecv": r"send_?recv|^gloo:(send|recv)|\bsend\b|\brecv\b",
    "Broadcast": r"broadcast",
    "Reduce": r"reduce",
    "Barrier": r"barrier",
    "MoE dispatch": r"dispatch",
    "MoE combine": r"combine",
}
_OPERATION = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _OPERATIONS.items()]


def class_of(name: str) -> str:
    base = name.removeprefix("void ").split("<", 1)[0]
    for text in (name,) if base in _WRAPPERS else (base, name):
        for label, pattern in _CLASSES:
            if pattern.search(text):
                return label
    return OTHER


def operation_of(name: str) -> str:
    """The collective operation of a communication kernel."""
    base = name.split("(", 1)[0]
    return next((label for label, pattern in _OPERATION if pattern.search(base)), OTHER)


def class_numbers(names: Sequence[str], used: np.ndarray) -> np.ndarray:
    """The number of the class in NAMES for every row, given the number of each row's name."""
    different, inverse = np.unique(used, return_inverse=True)
    numbers = [NAMES.index(class_of(names[number])) for number in different]
    return np.array(numbers, dtype=np.int8)[inverse] if len(different) else np.empty(0, dtype=np.int8)
