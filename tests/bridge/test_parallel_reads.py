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


@pytest.fixture
def written(monkeypatch):
    """Pieces of tensors as they are written: name, first byte, kind of device."""
    found = []
    usual = parallel_reads.Target.write

    def watched(self, piece, buffer):
        usual(self, piece, buffer)
        found.append((self.item.dest_index.fqn, piece.start, self.memory.device.type))

    monkeypatch.setattr(parallel_reads.Target, "write", watched)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("buffers", [1, 3, parallel_reads.BUFFERS])
@pytest.mark.parametrize("piece", [2**20, 2**18 + 1])
def test_large_tensors_are_read_in_pieces(checkpoint, monkeypatch, written, piece, buffers, device):
    """More pieces than buffers too, and such as end between two elements."""
    monkeypatch.setattr(parallel_reads, "PIECE_BYTES", piece)
    monkeypatch.setattr(parallel_reads, "BUFFERS", buffers)
    assert same(load(checkpoint, device=device))
    pieces = {name: range(0, STATE[name].nbytes, piece) for name in LARGE}
    assert sorted(written) == sorted((name, begin, device) for name in LARGE for begin in pieces[name])


def transposed(value, device):
    if value.dim() < 2:
        return torch.zeros_like(value, device=device)
    return torch.zeros(value.shape[::-1], dtype=value.dtype, device=device).t()


def wider(value, device):
    return torch.zeros_like(value, device=device, dtype=torch.float64)


class Own(torch.Tensor):
    """As weights in FP8 are, whose bytes are not those of their elements."""

    def detach(self):
        return super().detach().as_subclass(Own)


def of_a_class(value, device):
    return torch.zeros_like(value, device=device).as_subclass(Own)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("like", "direct"), [(transposed, ["large.row"]), (wider, []), (of_a_class, [])])
def test_a_target_of_another_layout_type_or_class_is_filled_all_the_same(checkpoint, written, like, direct, device):
    found = load(checkpoint, like=like, device=device)
    assert all(torch.equal(found[name].cpu().to(STATE[name].dtype), STATE[name]) for name in (*SIZES, *LARGE))
    assert {name for name, *_ in written} == set(LARGE)
    assert {name for name, _, kind in written if kind != "cpu"} == (set(direct) if device == "cuda" else set())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_ranks_with_a_gpu_load_tensors_of_the_host_too(checkpoint):
    """As Megatron's optimizer does where its state is to be saved in a form for other layouts."""
    torch.cuda.init()
    assert same(load(checkpoint, device="cpu"))


class Parts(DefaultLoadPlanner):
    """Fills parts of tensors, by name."""

    def __init__(self, into):
        super().__init__()
        self.into, self.committed = into, []

    def resolve_tensor(self, read_item):
        return self.into[read_item.dest_index.fqn]

    def commit_tensor(self, read_item, tensor):
        self.committed.append(read_item.dest_index.fqn)


def load_parts(checkpoint, parts):
    """Of each tensor a part, by offsets and lengths, as ranks do that load in another layout."""
    reader = dcp.FileSystemReader(checkpoint)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    items = []
    for index in reader.storage_data:
        if index.fqn in parts:
            offsets, lengths = (torch.Size(one) for one in parts[index.fqn])
            items.append(
                dcp.planner.ReadItem(
                    type=dcp.planner.LoadItemType.TENSOR,
                    dest_index=index,
                    dest_offsets=torch.Size([0] * len(lengths)),
                    storage_index=index,
                    storage_offsets=offsets,
                    lengths=lengths,
                )
            )
    planner = Parts({name: torch.zeros(lengths) for name, (_, lengths) in parts.items()})
    reader.read_data(dcp.planner.LoadPlan(items), planner).wait()
    assert sorted(planner.committed) == sorted(parts)
    return planner.into


@pytest.mark.parametrize(
    ("name", "offsets", "lengths", "in_pieces"),
    [
        ("layer.3", (10, 0), (5, 7), False),
        ("large.odd", (12345, 0), (9000, 101), True),
        ("large.odd", (5, 40), (30000, 30), False),
        ("large.odd", (5, 40), (0, 30), False),
    ],
)
def test_a_part_of_a_tensor_is_read(checkpoint, written, name, offsets, lengths, in_pieces):
    found = load_parts(checkpoint, {name: (offsets, lengths)})
    (row, column), (rows, columns) = offsets, lengths
    assert torch.equal(found[name], STATE[name][row : row + rows, column : column + columns])
    assert bool(written) == in_pieces


def test_what_is_read_whole_and_waits_is_bounded(tmp_path, checkpoint, monkeypatch):
    """Columns of many tensors: of each, all of it is read."""
    saved = {f"layer.{number}": torch.full((1024, 512), float(number)) for number in range(40)}  # 2 MiB each
    dcp.save(saved, checkpoint_id=tmp_path / "many", no_dist=True)
    monkeypatch.setattr(parallel_reads, "AHEAD_BYTES", 9 * 2**20)
    alive = most = 0
    lock = threading.Lock()

    def counted(change):
        nonlocal alive, most
        with lock:
            alive += change
            most = max(most, alive)

    locate, resolve = parallel_reads._locate_or_read, parallel_reads._resolve

    def watched_read(*arguments):
        counted(1)
        return locate(*arguments)

    def watched_copy(*arguments):
        counted(-1)
        return resolve(*arguments)

    monkeypatch.setattr(parallel_reads, "_locate_or_read", watched_read)
    monkeypatch.setattr(parallel_reads, "_resolve", watched_copy)
    found = load_parts(tmp_path / "many", dict.fromkeys(saved, ((0, 100), (1024, 200))))
    assert all(torch.equal(found[name], value[:, 100:300]) for name, value in saved.items())
    assert alive == 0 and 2 <= most <= 5


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


def test_a_file_that_was_cut_short_is_an_error(checkpoint):
    (file,) = checkpoint.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:9000])
    with pytest.raises(CheckpointException):
        load(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointException, match="No such file"):
        load(checkpoint)


def test_a_file_that_ends_within_a_tensor_is_an_error(tmp_path):
    """It shrank after the tensor was located."""
    (tmp_path / "file").write_bytes(bytes(3000))
    stored = parallel_reads.TensorInFile(
        str(tmp_path / "file"), 1000, torch.empty(2048, dtype=torch.uint8, device="meta")
    )
    with pytest.raises(EOFError, match="file ends 48 bytes too early"):
        parallel_reads.Buffer().read(stored, stored.pieces[0])


def test_an_error_leaves_no_thread(checkpoint, monkeypatch):
    before = threading.active_count()

    def broken(self, tensor, piece):
        raise OSError("the disk is gone")

    monkeypatch.setattr(parallel_reads.Buffer, "read", broken)
    with pytest.raises(CheckpointException, match="the disk is gone"):
        load(checkpoint)
    assert threading.active_count() == before
