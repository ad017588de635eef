"""activate(): once, early, and against the GPUs of the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_ranks import on_cpu

import megaboa


def _python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(megaboa.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def _again():
    import torch

    from megaboa.bridge.cpu import activate

    def state():
        return list(sys.meta_path), torch.distributed.barrier, torch.autograd.graph._engine_run_backward

    before = state()
    activate()
    return before == state(), os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_available()


def test_activating_twice_changes_nothing_more():
    assert on_cpu(_again) == [(True, "", False)]


def test_importing_the_backend_imports_and_changes_nothing():
    run = _python(
        """
import sys, megaboa.bridge.cpu
print([name for name in ("torch", "megatron.core", "megatron.bridge") if name in sys.modules])
"""
    )
    assert run.stdout == "[]\n", run.stderr


def _too_late():
    from megaboa.bridge import cpu

    cpu._active = False  # as in a process that has imported Megatron by itself
    del sys.modules["megatron.bridge"]
    with pytest.raises(RuntimeError) as error:
        cpu.activate()
    return str(error.value)


def test_activating_after_megatron_is_an_error():
    assert on_cpu(_too_late) == [
        "megaboa.bridge.cpu.activate() came too late: megatron.core had been imported already; "
        "call it before the first import of Megatron"
    ]
