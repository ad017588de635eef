"""Snapshots of memory, made as PyTorch writes them."""

import pickle
import subprocess
import sys

import memory_peak
import pytest


def event(action, addr, size, *names):
    if not names:
        return {"action": action, "addr": addr, "size": size}
    frames = [{"filename": f"/site/{name}.py", "line": 7, "name": "forward"} for name in names]
    frames.insert(0, {"filename": "/site/torch/nn/linear.py", "line": 1, "name": "linear"})
    frames.insert(0, {"filename": "??", "line": 0, "name": "at::empty"})
    return {"action": action, "addr": addr, "size": size, "frames": frames}


TRACE = [
    event("alloc", 1, 100, "mlp", "layer"),
    event("alloc", 2, 50, "mlp", "layer"),
    event("free_requested", 2, 50),
    event("free_completed", 2, 50),
    event("alloc", 2, 300, "loss"),  # the most
    event("free_completed", 9, 1000),  # from before the first captured step
    event("free_completed", 2, 300),
    event("alloc", 3, 500, "late"),  # more than before, but for the old tensor
]


def test_what_was_kept_when_most_was():
    assert memory_peak.at_peak(TRACE) == [
        memory_peak.Kept("loss.py:7 forward", 300, 1),
        memory_peak.Kept("mlp.py:7 forward < layer.py:7 forward", 100, 1),
    ]


def test_without_python_it_says_so():
    assert memory_peak.place([{"filename": "??", "line": 0, "name": "at::empty"}]) == "(no Python)"


def test_a_snapshot_is_printed(tmp_path):
    path = tmp_path / "rank-0.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [TRACE, []]}))
    words = [sys.executable, memory_peak.__file__, path, "--least", "0"]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "GPU 0: 0.00 GiB" in printed and "| 0.00 | 1 | loss.py:7 forward |" in printed and "GPU 1" not in printed


def test_a_pickle_that_would_call_something_is_refused(tmp_path):
    path = tmp_path / "rank-0.pickle"
    path.write_bytes(pickle.dumps(print))
    with path.open("rb") as stream, pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        memory_peak.Plain(stream).load()
