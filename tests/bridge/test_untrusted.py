"""Checkpoints of strangers: PyTorch's own loads and Bridge's execute nothing of them, and take what is data."""

import io
import os
import pickle
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, filesystem

from megaboa.bridge import process
from megaboa.run.failures import classify
from megaboa.scheduler.ranks import Ended

process.make_fit("cpu")  # hides packages: the marker below gives the file a process of its own
from megatron.bridge.utils.instantiate_utils import instantiate  # noqa: E402
from megatron.core.rerun_state_machine import RerunMode  # noqa: E402
from megatron.training.config import instantiate_utils  # noqa: E402

from megaboa.bridge import untrusted  # noqa: E402
from megaboa.bridge.checkpoint_tensors import Checkpoint  # noqa: E402
from megaboa.bridge.untrusted import UnsafeCheckpointError  # noqa: E402

pytestmark = pytest.mark.slow

OBJECT = {"rng_state": [np.random.get_state(), np.float64(3), np.int32(2)], "mode": RerunMode.DISABLED, "at": Path("a")}
OBJECT |= {"args": Namespace(lr=1e-3), "sizes": torch.Size([1, 2]), "set": {1, 2}, "dtype": torch.bfloat16}


class Runs:
    """Something that a pickle can hold and that runs a command when it is read."""

    def __init__(self, function, *arguments):
        self.told = function, arguments

    def __reduce__(self):
        return self.told


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(filesystem, "pickle", pickle)  # as they were, afterwards
    monkeypatch.setattr(DefaultLoadPlanner, "load_bytes", DefaultLoadPlanner.load_bytes)
    monkeypatch.setattr(instantiate_utils, "_call_target", instantiate_utils._call_target)
    untrusted.install()


def saved(folder, **more):
    dcp.save({"weight": torch.arange(6.0).reshape(2, 3), **more}, checkpoint_id=folder, no_dist=True)
    return folder


def load(folder, **more):
    into = {"weight": torch.zeros(2, 3), **more}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    return into


def test_data_of_all_kinds_come_back(tmp_path):
    found = load(saved(tmp_path / "saved", state=OBJECT, step=12), state=OBJECT, step=None)
    assert torch.equal(found["weight"], torch.arange(6.0).reshape(2, 3)) and found["step"] == 12
    state = found["state"]
    assert str(state) == str(OBJECT) and type(state["rng_state"][1]) is np.float64


@pytest.mark.parametrize("name", sorted(untrusted.OF_AN_INDEX))
def test_an_index_may_name_no_function_of_torch_and_nothing_that_torch_has_imported(name):
    for there in ("os.system", "os", "pickle", "FileSystemReader", "Any", "tensor", "missing"):
        with pytest.raises(UnsafeCheckpointError, match=f"asks for {name}.{there}, which"):
            untrusted.load_index(io.BytesIO(f"c{name}\n{there}\n.".encode()))


@pytest.mark.parametrize("runs", [(os.mkdir,), (exec,), (eval,), (__import__,), (torch.load,), (np.load,)])
def test_an_index_executes_nothing(tmp_path, runs):
    folder = saved(tmp_path / "saved")
    made = tmp_path / "made"
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(*runs, str(made))))
    with pytest.raises(CheckpointException, match=r"saved/\.metadata: asks for \w+\.\w+.*, which isn't data"):
        load(folder)
    with pytest.raises(UnsafeCheckpointError, match=r"saved/\.metadata: asks for "), untrusted.told(folder):
        load(folder)
    with pytest.raises(UnsafeCheckpointError):
        Checkpoint(folder).tensors  # noqa: B018
    assert not made.exists()


@pytest.mark.parametrize("runs", [(os.mkdir,), (exec,), (io.open,)])
def test_an_entry_executes_nothing(tmp_path, runs):
    made = tmp_path / "made"
    folder = saved(tmp_path / "saved", common_state=Runs(*runs, str(made)))
    with (
        pytest.raises(UnsafeCheckpointError, match=r"saved/__0_0.distcp, entry common_state: asks for \S+, which"),
        untrusted.told(folder),
    ):
        load(folder, common_state=None)
    with pytest.raises(UnsafeCheckpointError):
        Checkpoint(folder).objects("common_state")
    assert not made.exists()


def test_a_damaged_entry_is_called_damaged(tmp_path):
    folder = saved(tmp_path / "saved", common_state={"iteration": 3})
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(b"iteration", b"\xff" * 9))
    with pytest.raises(CheckpointException) as caught, untrusted.told(folder):
        load(folder, common_state=None)
    assert "Unsafe" not in str(caught.value)


@pytest.mark.parametrize(
    "target", ["torch.os.system", "torch.serialization.os.mkdir", "torch.serialization.load", "torch.PyTorchFileReader"]
)
def test_a_configuration_calls_no_function(tmp_path, target):
    made = tmp_path / "made"
    with (
        pytest.raises(UnsafeCheckpointError, match=f"^{tmp_path}: run_config.yaml, model: asks for "),
        untrusted.told(tmp_path),
    ):
        instantiate({"model": {"_target_": target, "_args_": [str(made)]}})
    assert not made.exists()


def test_a_configuration_is_made():
    initial = {"_target_": "torch.nn.init.normal_", "_partial_": True, "std": 0.5}
    backend = {"_target_": "megatron.core.transformer.enums.AttnBackend", "_call_": True, "_args_": [1]}
    act = {"_target_": "torch.nn.functional.silu", "_call_": False}
    name = "transformers.generation.configuration_utils.GenerationConfig.from_dict"
    words = {"_target_": name, "_call_": True, "config_dict": {"top_k": 3}}
    found = instantiate({"initial": initial, "backend": backend, "act": act, "words": words})
    assert found["initial"].func is torch.nn.init.normal_ and found["act"] is torch.nn.functional.silu
    assert found["words"].top_k == 3 and found["backend"].value == 1


def test_such_a_checkpoint_stops_the_run(tmp_path):
    """It isn't damaged: nothing is set aside, and nothing tried again."""
    folder = saved(tmp_path / "saved")
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(os.mkdir, "made")))
    with pytest.raises(CheckpointException) as caught:
        load(folder)
    log = "Traceback (most recent call last):\n" + '  File "/a.py", line 3, in load_checkpoint\n    x()\n'
    log += f"torch.distributed.checkpoint.api.CheckpointException: {caught.value}"
    failure = classify(Ended(0, 1), {0: log}, steps=0, resumed_from=10)
    assert failure.cause == "unsafe_checkpoint"
    assert f"{folder}/.metadata: asks for posix.mkdir" in failure.evidence
