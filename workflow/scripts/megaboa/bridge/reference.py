"""transformers' model of a folder, computed in fp32: held whole or, if it is too large for any host, layer by layer.

Needs torch and transformers, but no Megatron.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel

from megaboa import files, store
from megaboa.bridge.source import class_of
from megaboa.conversion import HELD_WHOLE
from megaboa.errors import InputError

BYTES = 4  # of a weight in fp32
SHARE = 0.7  # share of the free memory for a model that is held whole
LOGITS_BOUND = 1e-5
HALF_ULP = 2.0**-24  # relative, for fp32
WAITS = "waits for "
CGROUP = Path("/sys/fs/cgroup")


class Reference(NamedTuple):
    model: PreTrainedModel
    how: str  # how it is computed, in words for a proof


def load(folder: str, params: int) -> Reference:
    """The model of a folder. `params`: its number of weights, which decides how it is held."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with deciding(params) as whole:
        # In its own type the model stays in mapped files, whose pages the system can reclaim when it needs memory.
        dtype = torch.float32 if whole else "auto"
        model = class_of(config).from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    if not whole:
        widen_by_layers(model)
    return Reference(_with_scaled_softmax(model), "held whole" if whole else "read layer by layer")


@contextlib.contextmanager
def deciding(params: int) -> Iterator[bool]:
    """Decide whether to hold a model whole, and keep a lock while it is loaded: another process of this user would
    count memory as free that this one is about to take."""
    with store.locked(_own_folder() / "reference.lock", _waits):
        yield fits(params)


def _own_folder() -> Path:
    """A folder that nobody else can open, because whoever can open a file can lock it."""
    own = Path(tempfile.gettempdir(), f"megaboa-{os.getuid()}")
    if not files.is_ours_alone(own):
        raise InputError(
            f"{own} on host {socket.gethostname()} can't be written, or belongs to another user: set TMPDIR to a "
            "folder of your own"
        )
    own.chmod(0o700)
    return own


def _waits(holder: str) -> None:
    print(f"{WAITS}{holder}, which loads a model", file=sys.__stderr__, flush=True)


def fits(params: int) -> bool:
    """Whether a model can be held in fp32."""
    return params <= HELD_WHOLE and BYTES * params <= SHARE * free_bytes()


def logits_bound(layers: int, hidden: int) -> float:
    """Largest difference of two fp32 logits due to rounding alone, in units of the largest logit (at least 1).

    Rounding errors add up like a random walk, over the layers and over the terms of each product; the bound is twice
    that walk's length. A mistake shows in the second or third digit.
    """
    return max(LOGITS_BOUND, 2 * HALF_ULP * math.sqrt(layers * hidden))


def free_bytes() -> float:
    """Memory that this process may still allocate: the host's, or that of its job."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = float(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024
    try:
        mine = Path("/proc/self/cgroup").read_text(encoding="utf-8").split("::", 1)[1].split("\n")[0]
        group = CGROUP / mine.lstrip("/")
        limit, used = ((group / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        return min(free, float(limit) - float(used))
    except (OSError, ValueError, IndexError):  # no limit, or an older version of cgroups
        return free


def widen_by_layers(model: torch.nn.Module) -> None:
    """Make every part of a model compute in fp32, with fp32 weights only during its computation."""
    for part in _parts(model):
        widen(part, list(part.parameters()))


def widen(part: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
    """Keep these weights in fp32 while a part computes: its own, or another part's that it receives."""
    part.register_forward_pre_hook(partial(_widen, weights))
    part.register_forward_hook(_restore, always_call=True)


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers, each as a whole, and other parts that have weights."""
    if next(module.parameters(recurse=False), None) is not None:
        yield module
        return
    for child in module.children():
        if isinstance(module, torch.nn.ModuleList):
            yield child
        else:
            yield from _parts(child)


def _widen(weights: Sequence[torch.Tensor], part: torch.nn.Module, _: Any) -> None:
    part.narrow = [(weight, weight.data) for weight in weights]
    for weight in weights:
        weight.data = weight.data.float()


def _restore(part: torch.nn.Module, *_: Any) -> None:
    for weight, data in part.narrow:
        weight.data = data
    del part.narrow


def _with_scaled_softmax(model: PreTrainedModel) -> PreTrainedModel:
    """Correct DeepSeek-V2's softmax scale: the published model, like Megatron, scales it by YaRN's `mscale_all_dim`,
    which transformers omits before its pull request 47435."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if model.config.model_type == "deepseek_v2" and rope.get("mscale_all_dim") and rope.get("factor", 1) > 1:
        factor = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        for layer in model.model.layers:
            attention = layer.self_attn
            if attention.scaling == attention.qk_head_dim**-0.5:
                attention.scaling *= factor * factor
    return model
