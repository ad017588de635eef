"""Checkpoints read by several threads: the same tensors, and the same errors."""

import resource
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, filesystem

from megaboa.bridge import parallel_reads

STATE = {f"layer.{number}": torch.randn(100 + number, 7) for number in range(20)} | {"step": 12, "name": "a run"}


class Watched(DefaultLoadPlanner):
    """Which tensors were copied, and by whom."""

    def __init__(self):
        super().__init__()
        self.copied, self.threads = [], set()

    def commit_tensor(self, read_item, tensor):
        self.copied.append(read_item.dest_index.fqn)
        self.threads.add(threading.current_thread())
        super().commit_tensor(read_item, tensor)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    dcp.save(STATE, checkpoint_id=tmp_path / "saved", no_dist=True)
    monkeypatch.setattr(filesystem.FileSystemReader, "read_data", None)  # as it was, afterwards
    parallel_reads.install()
    return tmp_path / "saved"


def load(checkpoint, planner=None):
    into = {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for name, value in STATE.items()}
    dcp.load(into, checkpoint_id=checkpoint, planner=planner, no_dist=True)
    return into


@pytest.mark.parametrize("ahead", [1, 5000, parallel_reads.AHEAD_BYTES])
def test_what_was_saved_comes_back(checkpoint, monkeypatch, ahead):
    monkeypatch.setattr(parallel_reads, "AHEAD_BYTES", ahead)
    planner = Watched()
    found = load(checkpoint, planner)
    assert (found["step"], found["name"]) == (12, "a run")
    assert all(torch.equal(found[name], value) for name, value in STATE.items() if isinstance(value, torch.Tensor))
    assert sorted(planner.copied) == sorted(name for name in STATE if name.startswith("layer"))
    assert planner.threads == {threading.main_thread()}


def test_a_checkpoint_may_have_more_files_than_may_be_open(tmp_path, checkpoint):
    """As many as its ranks had writers."""
    many = {f"layer.{number}": torch.full((3,), float(number)) for number in range(120)}
    dcp.save(many, storage_writer=dcp.FileSystemWriter(tmp_path / "many", single_file_per_rank=False), no_dist=True)
    assert len(list((tmp_path / "many").glob("*.distcp"))) == len(many)
    into = {name: torch.zeros(3) for name in many}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 40, before[1]))
    try:
        dcp.load(into, checkpoint_id=tmp_path / "many", no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert all(torch.equal(into[name], value) for name, value in many.items())


def test_a_part_of_a_tensor_is_read(checkpoint):
    """As ranks do that load in another layout."""
    reader = dcp.FileSystemReader(checkpoint)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    (index,) = [index for index in reader.storage_data if index.fqn == "layer.3"]
    part = torch.zeros(5, 7)

    class Part(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return part

        def commit_tensor(self, read_item, tensor):
            pass

    item = dcp.planner.ReadItem(
        type=dcp.planner.LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size([0, 0]),
        storage_index=index,
        storage_offsets=torch.Size([10, 0]),
        lengths=torch.Size([5, 7]),
    )
    reader.read_data(dcp.planner.LoadPlan([item]), Part()).wait()
    assert torch.equal(part, STATE["layer.3"][10:15])


def test_a_file_that_was_cut_short_is_an_error(checkpoint):
    (file,) = checkpoint.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:9000])
    with pytest.raises(CheckpointException):
        load(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointException, match="No such file"):
        load(checkpoint)
