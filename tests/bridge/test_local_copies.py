"""megaboa.bridge.local_copies: where copies lie, what is refused, and which copies a rank takes; the tests of the CPU
backend train with them."""

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import distributed

from megaboa import files
from megaboa.bridge import local_copies
from megaboa.bridge.local_copies import NONE, LocalCopies
from megaboa.errors import InputError
from megaboa.records import LocalPart, read, write
from megaboa.store_paths import RunStore

OLDER, NEWER = 4, 6


def config(ckpt_format="torch_dist", peft=None, optimizer="adam", save="checkpoints", exit_interval=None):
    return SimpleNamespace(
        checkpoint=SimpleNamespace(ckpt_format=ckpt_format, save=save),
        peft=peft,
        optimizer=SimpleNamespace(optimizer=optimizer),
        train=SimpleNamespace(exit_interval=exit_interval, exit_duration_in_mins=None),
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"exit_interval": 100}, "train.exit_interval and train.exit_duration_in_mins end a run without a checkpoint"),
        ({"ckpt_format": "fsdp_dtensor"}, "checkpoints in the format fsdp_dtensor"),
        ({"peft": "lora"}, "adapters are resumed from checkpoints alone"),
        ({"optimizer": "dist_muon"}, "the optimizer dist_muon keeps its state in files of its own"),
        ({"save": None}, "a run that saves no checkpoint has nothing to fall back on"),
    ],
)
def test_what_a_recipe_brings_and_no_copy_holds_is_refused(given, said):
    local_copies.refuse(config())
    with pytest.raises(InputError, match=said):
        local_copies.refuse(config(**given))


def test_copies_of_another_store_name_or_host_lie_elsewhere(tmp_path):
    one, other = (RunStore(tmp_path / store / "e" / "r" / "id") for store in ("one", "other"))
    places = {local_copies.place(tmp_path, store, name) for store in (one, other) for name in ("a", "b")}
    assert len(places) == 4
    assert all(path.name == local_copies.socket.gethostname() for path in places)


def test_a_folder_that_is_missing_or_of_another_user_ends_the_start_with_a_sentence(tmp_path, monkeypatch):
    store = RunStore(tmp_path / "e" / "r" / "id")
    with pytest.raises(InputError, match="isn't a folder on"):
        local_copies.place(tmp_path / "missing", store, "a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"megaboa-{local_copies.os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="belongs to another user"):
        local_copies.place(tmp_path, store, "a")


class State:
    """As Megatron-Core's, without tensors."""

    def __init__(self, step):
        self.step = step

    def copy_tensors_to_cpu(self):
        pass

    def restore_tensor_device(self, non_blocking):
        pass


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """A function that attaches the only rank of a run to its copies; `tried`: the steps that it began to read."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def attach():
        tried = []

        def begins(step):
            tried.append(step)
            assert len(tried) < 5, "the same choice again and again"

        found = LocalCopies(tmp_path / "n0", 1, 1, 0, 1, False, begins)
        found.tried = tried
        return found

    yield attach
    distributed.destroy_process_group()


@pytest.fixture
def two(copies):
    """Copies of two steps; and where those of the newer one are."""
    made = copies()
    for step in (OLDER, NEWER):
        data = local_copies.io.BytesIO()
        local_copies.torch.save(State(step), data)
        assert made._keep(0, step, data.getbuffer())
    return Path(made.local_ckpt_dir) / f"iter_{NEWER:07d}"


def cut(folder):
    with (folder / "0.pt").open("r+b") as part:
        part.truncate(part.seek(0, os.SEEK_END) // 2)


def flip(folder):
    data = (folder / "0.pt").read_bytes()
    (folder / "0.pt").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def record(**changed):
    """One digit of it is another one."""

    def change(folder):
        write(folder / "0.json", replace(read(LocalPart, folder / "0.json"), **changed))

    return change


def move(folder):
    """The part, and what its record says: of a rank that this run doesn't have."""
    record(rank=1)(folder)
    for name in ("pt", "json"):
        (folder / f"0.{name}").rename(folder / f"1.{name}")


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize(
    ("damage", "tried", "said"),
    [
        (cut, [OLDER], 0),
        (flip, [NEWER, OLDER], 1),
        (record(iteration=NEWER + 2), [OLDER], 1),
        (record(iteration=OLDER), [OLDER], 1),
        (record(rank=1), [OLDER], 1),
        (record(world_size=3), [OLDER], 0),
        (record(bytes=7), [OLDER], 0),
        (record(sha256="0" * 64), [NEWER, OLDER], 1),
        (move, [OLDER], 0),
    ],
)
def test_a_damaged_copy_is_tried_once_at_most_and_the_one_before_it_taken(
    two, copies, monkeypatch, capsys, renames, damage, tried, said
):
    """Also where nothing can be renamed."""
    damage(two)
    if not renames:
        monkeypatch.setattr(Path, "replace", lambda *given: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
    again = copies()
    assert again.find_latest() == OLDER and again.tried == tried
    assert again.load()[0].step == OLDER
    assert capsys.readouterr().err.count("WARNING") == said


def test_without_a_sound_copy_there_is_none(two, copies):
    for folder in (two, two.with_name(f"iter_{OLDER:07d}")):
        record(iteration=NEWER + 2)(folder)
    again = copies()
    assert again.find_latest() == NONE and again.tried == [NONE]


def test_a_full_folder_costs_the_copy_and_nothing_else(two, copies, monkeypatch, capsys):
    write_bytes = files.write_bytes

    def full(path, data, durable=True):
        if path.suffix == ".json":  # there was room for the part alone
            raise OSError(errno.ENOSPC, "No space left on device")
        write_bytes(path, data, durable)

    monkeypatch.setattr(files, "write_bytes", full)
    copies().save(State(8), 8)
    said = capsys.readouterr().err
    assert "No space left on device" in said and "WARNING: no copies of step 8 on the nodes" in said
    monkeypatch.setattr(files, "write_bytes", write_bytes)
    assert copies().find_latest() == NEWER


@pytest.mark.filterwarnings("ignore:.*fork")  # the child only writes files
@pytest.mark.parametrize("written", [0, 1])
def test_a_copy_whose_writer_was_killed_is_not_taken(two, copies, written):
    """While it wrote the part, or the record."""
    made, left = copies(), [written]
    if (child := os.fork()) == 0:
        rename = Path.replace

        def dies(path, target):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return rename(path, target)

        Path.replace = dies
        made._keep(0, 8, memoryview(b"half of it"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left_over = sorted(path.suffix for path in two.with_name(f"iter_{8:07d}").iterdir())
    assert left_over == [".pt", ".tmp"][1 - written :]
    assert made.find_latest() == NEWER
