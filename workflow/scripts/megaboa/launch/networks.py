"""Environment variables for a kind of network (networks.toml has them, with reasons), and for a layout."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMMON = "all"
# NCCL's name for a preset's network: built in, or a plugin's. A single node needs none, so `nvlink` isn't here.
_CALLED = {
    "infiniband": re.compile(r"IB"),
    "ethernet": re.compile(r"Socket$"),
    "efa": re.compile(r"(AWS )?Libfabric|OFI"),
    "slingshot": re.compile(r"(AWS )?Libfabric|OFI"),
}
_USING = re.compile(r"NCCL INFO Using network (.+)")
# Makes NCCL log the name. Not in all attempts, because each communicator of each rank would fill a page.
NAMING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
CONNECTIONS, SEVERAL = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# The products of all experts as one kernel, forward and for the gradients of their inputs, where Transformer Engine has
# one: on Hopper, in 16 bits. A product of cuBLAS for each expert costs the host 75 to 100 us more whenever the expert's
# number of tokens is new (docs/benchmarks/slices.md).
GROUPED_PRODUCTS = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
_PINNED = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
# Includes Rubin, its successor.
_BLACKWELL = re.compile(
    r"(?<![a-z0-9])(G?B(100|200|300)|GB10|V?R[12]00)(?![0-9])|Blackwell|RTX[ _-]*50[5-9]0", re.IGNORECASE
)
_PRESETS = Path(__file__).with_name("networks.toml")


def names() -> tuple[str, ...]:
    return tuple(name for name in _presets() if name != COMMON)


def environment(network: str | None) -> dict[str, str]:
    """Variables for all networks, then this network's."""
    if network is not None and network not in names():
        raise ValueError(f"there are no settings for a network {network!r}; there are {', '.join(names())}")
    tables = [_presets().get(table, {}) for table in (COMMON, network)]
    return {name: entry["value"] for table in tables for name, entry in table.items()}


def can_check(network: str | None) -> bool:
    return network in _CALLED


def taken(log: str) -> str | None:
    """The network that NCCL chose between nodes, from a rank's log."""
    found = _USING.search(log)
    return found[1].strip() if found else None


def silenced_by(environment: Mapping[str, str | None]) -> list[str]:
    """Variables that prevent ranks' logs from naming the network."""
    said = {name: (value or "").upper() for name, value in {**NAMING, **environment}.items()}
    systems = {*said["NCCL_DEBUG_SUBSYS"].split(",")}
    silent = {
        "NCCL_DEBUG": said["NCCL_DEBUG"] not in ("INFO", "TRACE"),
        "NCCL_DEBUG_SUBSYS": "ALL" not in systems and not systems >= {"INIT", "NET"},
        "NCCL_DEBUG_FILE": bool(said.get("NCCL_DEBUG_FILE")),
    }
    return [name for name, hides in silent.items() if hides]


def fits(network: str, name: str) -> bool:
    """Whether the network that NCCL chose is the preset's."""
    return _CALLED[network].match(name) is not None


def connections(parallel: Mapping[str, Any], *, expert_overlap: bool = False, blackwell: bool = False) -> str | None:
    """CUDA_DEVICE_MAX_CONNECTIONS for a layout; None leaves it to the recipe, and then to the driver (8).

    What megatron-core 0.19.2 and Megatron-Bridge 0.6.2 ask for:
    - FSDP: not 1 (asserted in bridge/training/config.py for Megatron's, in megatron/training/arguments.py for both);
      Bridge's recipes with FSDP set 32. So it is set, in case an image says 1; over one that is exported it wins, too
      (run/command.py).
    - tensor, sequence or context parallelism before Blackwell: 1, so that kernels run in the order in which they were
      queued and communication starts before the computation that hides it (core/tensor_parallel/layers.py warns,
      megatron/training/arguments.py asserts). It decides the speed, never the result.
    - Blackwell: that need is gone (arguments.py), and all of Bridge's recipes for it set 32.
    - experts: 32, so that all-to-all and computation don't wait for each other (arguments.py for
      `overlap_moe_expert_parallel_comm`, where 1 and 32 exclude each other; that flag decides). Expert with tensor
      parallelism without that overlap stays at 1, as in Bridge's recipes for the H100.
    """
    if expert_overlap:
        return SEVERAL
    fsdp = parallel.get("fsdp")
    if fsdp is None:
        return None  # a recipe may turn on FSDP, which 1 would break; Bridge's recipes carry a value of their own
    if fsdp != "none" or blackwell:
        return SEVERAL
    if _size(parallel, "tp") > 1 or _size(parallel, "cp") > 1:
        return "1"
    if _size(parallel, "ep") > 1:
        return SEVERAL
    return None


def allocator(overrides: Mapping[str, Any], recipe: str | None = None) -> str:
    """PYTORCH_CUDA_ALLOC_CONF. `recipe`: what a recipe has.

    - Segments that grow leave no holes where batches or experts have changing sizes; all of Bridge's recipes have them
      (recipes/utils/environment_utils.py, 0.6.2). Not with buffers that NCCL registers (`nccl_ub`), which megatron-core
      refuses with them before torch 2.11. CUDA graphs need NCCL_GRAPH_REGISTER=0 with them, which every network's
      preset says.
    - Eight threads touch the host's memory that a background save copies to, where one thread of the driver would: a
      run's first save waits for that (docs/benchmarks/saves.md).
    """
    segments = recipe or ("" if overrides.get("ddp.nccl_ub") else "expandable_segments:True")
    return segments if "pinned_" in segments else ",".join(filter(None, (segments, _PINNED)))


def is_blackwell(gpu: str | None) -> bool:
    """Whether a GPU is Blackwell or newer, by its name in `resources.gpu` or from its driver."""
    return bool(gpu and _BLACKWELL.search(gpu))


def _size(parallel: Mapping[str, Any], key: str) -> int:
    return parallel.get(key) or 1


@functools.cache
def _presets() -> dict[str, dict[str, dict[str, str]]]:
    return tomllib.loads(_PRESETS.read_text(encoding="utf-8"))
