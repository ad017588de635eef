import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from megaboa.errors import InputError
from megaboa.files import read_json, write_json, write_text
from megaboa.run import checkpoints
from megaboa.store_paths import RunStore


def save(root, iteration, complete=True):
    checkpoints.folder(root, iteration).mkdir(parents=True)
    if complete:
        (checkpoints.folder(root, iteration) / checkpoints.LAST_WRITTEN).touch()
        checkpoints.mark_complete(root)


def test_only_marked_checkpoints_count(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    save(tmp_path, 30, complete=False)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    assert checkpoints.complete_iterations(tmp_path) == [10, 20]
    assert checkpoints.latest(tmp_path) == 20


def test_a_save_in_the_background_is_marked_when_it_is_over_and_no_folder_is_invented(tmp_path):
    save(tmp_path, 100, complete=False)
    checkpoints.mark_complete(tmp_path)
    assert checkpoints.latest(tmp_path) == 0
    (checkpoints.folder(tmp_path, 100) / checkpoints.LAST_WRITTEN).touch()
    checkpoints.mark_complete(tmp_path)
    assert checkpoints.complete_iterations(tmp_path) == [100]


def test_nothing_saved_yet(tmp_path):
    assert checkpoints.latest(tmp_path / "missing") == 0
    assert checkpoints.hide_unfinished(tmp_path / "missing") == []


def test_iterations_of_any_length(tmp_path):
    save(tmp_path, 9_999_999)
    save(tmp_path, 12_345_678)
    assert checkpoints.latest(tmp_path) == 12_345_678


def test_unfinished_saves_are_removed_and_nothing_else(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "notes").mkdir()
    for _ in range(3):  # before anybody has deleted the files of those before
        save(tmp_path, 20, complete=False)
        assert checkpoints.hide_unfinished(tmp_path) == [checkpoints.folder(tmp_path, 20)]
    assert len(list(tmp_path.iterdir())) == 5 and checkpoints.complete_iterations(tmp_path) == [10]
    checkpoints.delete_retired(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "notes"]


# Checksums


def save_tensors(root, iteration):
    folder = checkpoints.folder(root, iteration)
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", "tokenizer/vocab.json", checkpoints.LAST_WRITTEN):
        (folder / name).write_text(f"{iteration} {name} " * 100)
    checkpoints.mark_complete(root)
    return folder


def test_a_checkpoint_is_as_it_was_written(tmp_path):
    folder = save_tensors(tmp_path, 10)
    assert checkpoints.damage(tmp_path, 10) is None  # nothing is known yet
    checkpoints.add_digests(tmp_path, 10)
    assert checkpoints.damage(tmp_path, 10) is None
    known = read_json(folder / checkpoints.DIGESTS)
    assert sorted(known) == ["__0_0.distcp", "__1_0.distcp", checkpoints.LAST_WRITTEN, "tokenizer/vocab.json"]


def change(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (change, "has changed since it was written"),
        (truncate, "has changed since it was written: it has {less} bytes, and had {size}"),
        (empty, "has changed since it was written: it has 0 bytes, and had {size}"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["__1_0.distcp", "tokenizer/vocab.json"])
def test_damage_is_found_and_named(tmp_path, harm, said, name):
    folder = save_tensors(tmp_path, 10)
    checkpoints.add_digests(tmp_path, 10)
    size = (folder / name).stat().st_size
    harm(folder / name)
    assert checkpoints.damage(tmp_path, 10) == f"{folder / name} " + said.format(size=size, less=size - 1)


def test_files_that_came_later_are_no_damage(tmp_path):
    folder = save_tensors(tmp_path, 10)
    checkpoints.add_digests(tmp_path, 10)
    (folder / "notes.txt").write_text("mine")
    assert checkpoints.damage(tmp_path, 10) is None


def test_checksums_are_written_once_so_that_damage_is_not_taken_for_content(tmp_path):
    folder = save_tensors(tmp_path, 10)
    checkpoints.add_digests(tmp_path, 10)
    change(folder / "__0_0.distcp")
    checkpoints.add_digests(tmp_path, 10)
    assert checkpoints.damage(tmp_path, 10) == f"{folder / '__0_0.distcp'} has changed since it was written"


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_counts(tmp_path):
    save_tensors(tmp_path, 10)
    folder = save_tensors(tmp_path, 20)
    aside = checkpoints.distrust(tmp_path, 20)
    assert not folder.exists() and (aside / "__0_0.distcp").exists() and aside.parent == tmp_path
    assert checkpoints.complete_iterations(tmp_path) == [10]
    assert checkpoints.hide_unfinished(tmp_path) == [] and aside.exists()


def test_a_checkpoint_can_be_damaged_again(tmp_path):
    for content in ("first", "second"):
        (save_tensors(tmp_path, 20) / "__0_0.distcp").write_text(content)
        aside = checkpoints.distrust(tmp_path, 20)
        assert (aside / "__0_0.distcp").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged_iter_0000020", "damaged_iter_0000020-2"]
    shutil.rmtree(tmp_path / "damaged_iter_0000020")
    save_tensors(tmp_path, 20)
    assert checkpoints.distrust(tmp_path, 20).name == "damaged_iter_0000020", "the first name that is free"


def test_all_that_came_too_fast_are_read_later(tmp_path):
    for iteration in (10, 20, 30):
        save_tensors(tmp_path, iteration)
    checkpoints.add_digests(tmp_path, 30)
    checkpoints.add_all_digests(tmp_path)
    assert all(checkpoints.has_digests(tmp_path, iteration) for iteration in (10, 20, 30))


def test_what_was_removed_does_not_come_back_for_its_checksums(tmp_path):
    save_tensors(tmp_path, 10)
    checkpoints.distrust(tmp_path, 10)
    checkpoints.add_digests(tmp_path, 10)
    assert not checkpoints.folder(tmp_path, 10).exists()


def test_checksums_that_can_not_be_read_are_damage(tmp_path):
    folder = save_tensors(tmp_path, 10)
    checkpoints.add_digests(tmp_path, 10)
    (folder / checkpoints.DIGESTS).write_text("{")
    assert "digests.json can't be read" in checkpoints.damage(tmp_path, 10)


# Sizes


@pytest.mark.parametrize("harm", [truncate, empty, lambda path: path.unlink()])
def test_sizes_are_compared_where_checksums_are_not(tmp_path, harm):
    folder = save_tensors(tmp_path, 10)
    assert checkpoints.damage(tmp_path, 10, full=False) is None
    harm(folder / "__1_0.distcp")
    assert str(folder / "__1_0.distcp") in checkpoints.damage(tmp_path, 10, full=False)


def test_only_checksums_tell_a_flipped_bit(tmp_path):
    folder = save_tensors(tmp_path, 10)
    checkpoints.add_digests(tmp_path, 10)
    change(folder / "__0_0.distcp")
    assert checkpoints.damage(tmp_path, 10, full=False) is None
    assert "has changed" in checkpoints.damage(tmp_path, 10)


def test_the_marker_has_the_size_of_every_file_and_the_store_their_sum(tmp_path):
    folder = save_tensors(tmp_path, 10)
    known = read_json(folder / checkpoints.MARKER)["files"]
    assert known == {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*.*")
        if path.name != checkpoints.MARKER
    }
    save_tensors(tmp_path, 20)
    save(tmp_path, 30, complete=False)
    checkpoints.add_digests(tmp_path, 10)  # no part of what was saved
    assert list(checkpoints.sizes(tmp_path)) == [10, 20]
    assert checkpoints.sizes(tmp_path)[10] == sum(known.values())


def test_a_marker_from_before_sizes_were_written_down(tmp_path):
    folder = save_tensors(tmp_path, 10)
    size = sum(read_json(folder / checkpoints.MARKER)["files"].values())
    write_json(folder / checkpoints.MARKER, {"iteration": 10})
    assert checkpoints.sizes(tmp_path) == {10: size}
    empty(folder / "__0_0.distcp")
    assert checkpoints.damage(tmp_path, 10) is None


def test_a_damaged_marker_says_nothing_and_checksums_are_compared_instead(tmp_path):
    folder = save_tensors(tmp_path, 10)
    (folder / checkpoints.MARKER).write_text("{")
    assert checkpoints.damage(tmp_path, 10, full=False).endswith(
        "complete.json can't be read, so nothing is known of its files"
    )
    checkpoints.add_digests(tmp_path, 10)
    assert checkpoints.damage(tmp_path, 10, full=False) is None
    change(folder / "__0_0.distcp")
    assert "has changed" in checkpoints.damage(tmp_path, 10, full=False)


# What is kept


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expected"),
    [
        (None, None, [10, 20, 30, 40, 50, 55]),
        (1, None, [55]),
        (2, None, [50, 55]),
        (1, 20, [20, 40, 55]),
        (2, 25, [50, 55]),
        (9, 7, [10, 20, 30, 40, 50, 55]),
    ],
)
def test_the_newest_and_every_so_many_are_kept(tmp_path, keep_last, keep_every, expected):
    saved = [10, 20, 30, 40, 50, 55]
    assert checkpoints.kept(saved, keep_last, keep_every) == expected
    for iteration in saved:
        save_tensors(tmp_path, iteration)
    checkpoints.add_digests(tmp_path, 55)
    gone = checkpoints.retire(tmp_path, keep_last, keep_every)
    assert checkpoints.complete_iterations(tmp_path) == expected and sorted({*gone, *expected}) == saved
    checkpoints.delete_retired(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"iter_{number:07d}" for number in expected]


def test_nothing_is_removed_for_the_sake_of_a_damaged_or_an_unfinished_one(tmp_path):
    save_tensors(tmp_path, 10)
    empty(save_tensors(tmp_path, 20) / "__0_0.distcp")
    save(tmp_path, 30, complete=False)
    assert checkpoints.retire(tmp_path, 1, None, verified=False) == []
    assert checkpoints.complete_iterations(tmp_path) == [10, 20]
    assert checkpoints.folder(tmp_path, 30).exists()


def test_what_has_not_been_read_again_replaces_nothing(tmp_path):
    for iteration in (10, 20, 30, 40):
        save_tensors(tmp_path, iteration)
    assert checkpoints.retire(tmp_path, 1, None) == []
    checkpoints.add_digests(tmp_path, 20)
    assert checkpoints.retire(tmp_path, 1, None) == [10], "however many were saved since"
    checkpoints.add_digests(tmp_path, 40)
    assert checkpoints.retire(tmp_path, 1, None) == [20, 30]


def test_the_older_ones_go_when_the_newest_has_its_checksums(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "LOOK_SECONDS", 0.0)
    for iteration in (10, 20, 30):
        save_tensors(tmp_path, iteration)
    save(tmp_path, 40, complete=False)
    look = checkpoints.keeper(tmp_path, verify=True, keep_last=1)
    look()
    assert checkpoints.folder(tmp_path, 10).exists()
    deadline = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        look()
    assert checkpoints.has_digests(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000030", "iter_0000040"]


def test_complete_checkpoints_are_not_shared_again(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "LOOK_SECONDS", 0.0)
    for iteration in (10, 20):
        save(tmp_path, iteration)
    save(tmp_path, 30, complete=False)
    shared = []
    monkeypatch.setattr(checkpoints, "share", shared.append)
    checkpoints.keeper(tmp_path, verify=False)()
    assert shared == [checkpoints.folder(tmp_path, 30)]


REMOVING = """
import os, sys
from pathlib import Path
from megaboa.run import checkpoints
for line in sys.stdin:
    root = Path(line.strip())
    if not (pid := os.fork()):
        print(os.getpid(), flush=True)
        checkpoints.retire(root, 1, None, verified=False)
        checkpoints.delete_retired(root)
        os._exit(0)
    sys.stdin.readline()
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


def test_who_is_killed_while_removing_leaves_nothing_that_looks_complete(tmp_path):
    chance = random.Random(7)
    halfway = 0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", REMOVING], **pipes) as process:
        for number in range(20):
            root = tmp_path / str(number)
            for iteration in (10, 20, 30):
                folder = checkpoints.folder(root, iteration)
                folder.mkdir(parents=True)
                for shard in range(150):
                    os.close(os.open(f"{folder}/__{shard}_0.distcp", os.O_CREAT | os.O_WRONLY))
                (folder / checkpoints.LAST_WRITTEN).touch()
            checkpoints.mark_complete(root)
            process.stdin.write(f"{root}\n")
            remover = int(process.stdout.readline())
            time.sleep(chance.uniform(0, 0.01))
            os.kill(remover, signal.SIGKILL)
            process.stdin.write("\n")
            assert process.stdout.readline() == "ended\n"
            left = checkpoints.complete_iterations(root)
            assert 30 in left and all(checkpoints.damage(root, iteration) is None for iteration in left)
            halfway += len(list(root.iterdir())) > 1
            checkpoints.hide_unfinished(root)
            checkpoints.delete_retired(root)
            assert [path.name for path in root.iterdir() if path.name.startswith(checkpoints.REMOVED)] == []
    assert halfway, "no kill came in time"


# What is exported


@pytest.fixture
def store(tmp_path):
    """Checkpoints 10, 20, 30 (40 is unfinished); evaluated at 10, 20 and 40, and at 20 in two attempts."""
    for iteration in (10, 20, 30, 40):
        folder = tmp_path / "checkpoints" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "weights.distcp").write_text("weights")
        if iteration < 40:
            (folder / checkpoints.MARKER).write_text("{}")
    evaluated(tmp_path, 1, {10: 3.0, 20: 1.0})
    evaluated(tmp_path, 2, {20: 3.5, 40: 0.5})
    return RunStore(tmp_path)


def evaluated(path, attempt, losses):
    lines = [{"event": "eval", "step": step, "losses": {"lm loss": loss}} for step, loss in losses.items()]
    text = "".join(json.dumps(line) + "\n" for line in [{"event": "step", "step": 1}, *lines])
    write_text(path / "attempts" / f"{attempt:02d}" / "steps.jsonl", text)


def test_of_a_step_evaluated_twice_the_last_counts(store):
    assert checkpoints.evaluations(store)[20].losses["lm loss"] == 3.5


def test_a_damaged_checkpoint_is_not_exported(store):
    checkpoints.add_digests(store.checkpoints, 20)
    checkpoints.add_digests(store.checkpoints, 30)
    checkpoints.require_sound("r", store, 30)
    damaged = checkpoints.folder(store.checkpoints, 30) / "weights.distcp"
    damaged.write_text("weightz")
    with pytest.raises(InputError, match=r"checkpoint 30 is damaged: .*has changed.*export.checkpoint: 20"):
        checkpoints.require_sound("r", store, 30)
    damaged.unlink()
    with pytest.raises(InputError, match=r"weights.distcp is missing"):
        checkpoints.require_sound("r", store, 30)
