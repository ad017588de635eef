"""activate(): once, early, and against the GPUs of the machine."""

import os
import subprocess
import sys
from pathlib import Path

import megaboa


def _python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(megaboa.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": "0"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_activating_twice_changes_nothing_more():
    run = _python(
        """
import os, sys, torch
from megaboa.bridge.cpu import activate
activate()
before = (list(sys.meta_path), torch.distributed.barrier, torch.autograd.graph._engine_run_backward)
activate()
print(before == (list(sys.meta_path), torch.distributed.barrier, torch.autograd.graph._engine_run_backward))
print(repr(os.environ["CUDA_VISIBLE_DEVICES"]), torch.cuda.is_available())
"""
    )
    assert run.stdout == "True\n'' False\n", run.stderr


def test_importing_the_backend_imports_and_changes_nothing():
    run = _python(
        """
import sys, megaboa.bridge.cpu
print([name for name in ("torch", "megatron.core", "megatron.bridge") if name in sys.modules])
"""
    )
    assert run.stdout == "[]\n", run.stderr


def test_activating_after_megatron_is_an_error():
    run = _python(
        """
import megatron.core
from megaboa.bridge.cpu import activate
try:
    activate()
except RuntimeError as error:
    print(error)
"""
    )
    assert run.stdout == (
        "megaboa.bridge.cpu.activate() came too late: megatron.core had been imported already; "
        "call it before the first import of Megatron\n"
    ), run.stderr
