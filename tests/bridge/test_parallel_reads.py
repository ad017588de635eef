"""Checkpoints read by several threads: the same tensors, and the same errors."""

import resource
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, filesystem

from megaboa.bridge import parallel_reads

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
SIZES = {f"layer.{number}": (100 + number, 7) for number in range(20)}
LARGE = {"large.odd": (30011, 101), "large.row": (3_000_017,), "large.half": (40000, 33)}
STATE = {name: torch.randn(size) for name, size in (SIZES | LARGE).items()} | {"step": 12, "name": "a run"}
STATE["large.half"] = STATE["large.half"].bfloat16()


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


def load(checkpoint, planner=None, device="cpu", like=torch.zeros_like):
    tensors = {name: like(value, device=device) for name, value in STATE.items() if isinstance(value, torch.Tensor)}
    into = dict.fromkeys(STATE) | tensors
    dcp.load(into, checkpoint_id=checkpoint, planner=planner, no_dist=True)
    return into


def same(found):
    return all(torch.equal(found[name].cpu(), STATE[name]) for name in (*SIZES, *LARGE))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [1, 5000, parallel_reads.AHEAD_BYTES])
def test_what_was_saved_comes_back(checkpoint, monkeypatch, ahead, device):
    monkeypatch.setattr(parallel_reads, "AHEAD_BYTES", ahead)
    planner = Watched()
    found = load(checkpoint, planner, device)
    assert (found["step"], found["name"]) == (12, "a run")
    assert same(found)
    assert sorted(planner.copied) == sorted((*SIZES, *LARGE))
    assert planner.threads == {threading.main_thread()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("buffers", [1, 3, parallel_reads.BUFFERS])
@pytest.mark.parametrize("piece", [2**20, 2**18 + 1])
def test_large_tensors_are_read_in_pieces(checkpoint, monkeypatch, piece, buffers, device):
    """More pieces than buffers too, and such as end between two elements."""
    monkeypatch.setattr(parallel_reads, "PIECE", piece)
    monkeypatch.setattr(parallel_reads, "BUFFERS", buffers)
    read = []
    usual = parallel_reads.Target.take

    def watched(self, piece, buffer):
        usual(self, piece, buffer)
        read.append((self.item.dest_index.fqn, piece.start, self.memory.device.type))

    monkeypatch.setattr(parallel_reads.Target, "take", watched)
    assert same(load(checkpoint, device=device))
    assert sorted(read) == sorted(
        (name, begin, device) for name in LARGE for begin in range(0, STATE[name].nbytes, piece)
    )


def transposed(value, device):
    return (
        torch.zeros(value.shape[::-1], dtype=value.dtype, device=device).t()
        if value.dim() == 2
        else torch.zeros_like(value)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_target_of_another_layout_or_type_is_filled_all_the_same(checkpoint, device):
    assert same(load(checkpoint, like=transposed, device=device))
    wider = load(checkpoint, like=lambda value, device: torch.zeros_like(value, device=device, dtype=torch.float64))
    assert all(torch.equal(wider[name], STATE[name].double()) for name in LARGE)


def test_what_does_not_lie_in_one_piece_is_read_whole(tmp_path, checkpoint):
    saved = {"turned": torch.randn(700, 900).t(), "part": torch.randn(900, 900)[:, 5:800]}
    dcp.save(saved, checkpoint_id=tmp_path / "turned", no_dist=True)
    into = {name: torch.zeros(value.shape) for name, value in saved.items()}
    dcp.load(into, checkpoint_id=tmp_path / "turned", no_dist=True)
    assert all(torch.equal(into[name], value) for name, value in saved.items())


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


@pytest.mark.parametrize(
    ("name", "offsets", "lengths"),
    [("layer.3", (10, 0), (5, 7)), ("large.odd", (12345, 0), (9000, 101)), ("large.odd", (5, 40), (30000, 30))],
)
def test_a_part_of_a_tensor_is_read(checkpoint, name, offsets, lengths):
    """As ranks do that load in another layout."""
    reader = dcp.FileSystemReader(checkpoint)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    (index,) = [index for index in reader.storage_data if index.fqn == name]
    part = torch.zeros(lengths)

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
        storage_offsets=torch.Size(offsets),
        lengths=torch.Size(lengths),
    )
    reader.read_data(dcp.planner.LoadPlan([item]), Part()).wait()
    (row, column), (rows, columns) = offsets, lengths
    assert torch.equal(part, STATE[name][row : row + rows, column : column + columns])


def test_a_file_that_was_cut_short_is_an_error(checkpoint):
    (file,) = checkpoint.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:9000])
    with pytest.raises(CheckpointException):
        load(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointException, match="No such file"):
        load(checkpoint)
