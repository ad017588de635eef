"""megaboa.store: payload folders by identity."""

import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest
from ordinary_user import as_ordinary_user

from megaboa import store
from megaboa.calls import lock
from megaboa.errors import InputError


def test_folder_is_readable_and_changes_with_the_identity(tmp_path):
    one = store.folder(tmp_path, "corpora", "wiki", {"tokenizer": "a"})
    assert one.parent == tmp_path / "corpora" / "wiki" and len(one.name) == 12
    assert one != store.folder(tmp_path, "corpora", "wiki", {"tokenizer": "b"})


def test_a_store_in_which_this_user_cannot_write_is_found(tmp_path):
    assert store.closed(tmp_path / "new" / "store") is None
    (tmp_path / "store" / "runs").mkdir(parents=True)
    (tmp_path / "store").chmod(0o777)
    (tmp_path / "store" / "runs").chmod(0o555)
    with as_ordinary_user(tmp_path):
        assert store.closed(tmp_path / "store") == tmp_path / "store" / "runs"
        assert store.closed(tmp_path / "store" / "runs" / "new") == tmp_path / "store" / "runs"


def test_a_payload_without_its_main_part_is_made_again(tmp_path):
    final = tmp_path / "models" / "m" / "abc"
    final.mkdir(parents=True)
    (final / "facts.json").write_text("{}")
    with store.building(final) as partial:
        assert partial is None
    with store.building(final, part="hf") as partial:
        (partial / "hf").mkdir()
    assert [path.name for path in final.iterdir()] == ["hf"]


def test_a_payload_that_is_gone_is_named_with_its_manifest(tmp_path):
    store.require(tmp_path, "m.json")
    with pytest.raises(InputError, match=r"hf is gone: remove results/e/m.json, and call again"):
        store.require(tmp_path / "hf", "results/e/m.json")


def test_a_place_that_can_be_no_store_is_found(tmp_path):
    assert store.obstacle(tmp_path) is None and store.obstacle(tmp_path / "new" / "store") is None
    (tmp_path / "file").touch()
    (tmp_path / "dead").symlink_to("/nowhere/x")
    (tmp_path / "link").symlink_to(tmp_path)
    assert store.obstacle(tmp_path / "link" / "store") is None
    for path in ("file", "file/store"):
        assert store.obstacle(tmp_path / path) == f"{tmp_path / 'file'} is a file"
    assert store.obstacle(tmp_path / "dead") == f"{tmp_path / 'dead'} is a link to /nowhere/x, which isn't there"
    assert store.obstacle("/proc/x") == "/proc belongs to the kernel, and takes no files"


def test_a_payload_is_there_whole_or_not_at_all(tmp_path):
    final = tmp_path / "corpora" / "wiki" / "abc"
    with pytest.raises(RuntimeError), store.building(final) as partial:
        (partial / "half").write_text("x")
        raise RuntimeError
    assert not final.exists()
    with store.building(final) as partial:
        assert not list(partial.iterdir())
        (partial / "whole").write_text("x")
    with store.building(final) as partial:
        assert partial is None
    assert (final / "whole").exists()


@pytest.mark.parametrize("locks", [lambda path: store.locked(path / "lock").__enter__(), lock.claim_experiment])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, locks):
    def flock(stream, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        (InputError, SystemExit), match=r"lock: can't be locked \(.*\); mount .* \(Lustre: option `flock`\)"
    ):
        locks(tmp_path)


def test_in_an_archive_a_look_needs_no_lock_and_a_call_is_refused(tmp_path):
    (tmp_path / "results" / "my").mkdir(parents=True)
    for folder in (tmp_path / "results" / "my", tmp_path / "results"):
        folder.chmod(0o555)
    with as_ordinary_user(tmp_path):
        assert lock.claim_experiment(tmp_path / "results" / "my", looks=True) is False
        assert not lock.is_elsewhere()
        with pytest.raises(InputError, match="results/my: Permission denied: this call writes there: give this user"):
            lock.claim_experiment(tmp_path / "results" / "my")
        with pytest.raises(InputError, match=r"/results: Permission denied: this .*\. It belongs to user "):
            lock.claim_experiment(tmp_path / "results" / "another")


def test_nobody_is_told_to_open_the_folder_of_the_results_with_its_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    with as_ordinary_user(tmp_path), pytest.raises(InputError) as refused:
        lock.claim_experiment("results/my")
    said = f"{tmp_path}: Permission denied: this call writes there: give this user the right to it, or call in a copy; "
    assert str(refused.value) == f"{said}`snakemake -n` and `megaboa status` only read"


BUILDER = """
import sys, time; sys.path.insert(0, "workflow/scripts")
from pathlib import Path
from megaboa import store
with store.building(Path(sys.argv[1])) as partial:
    if partial is None:
        print("found")
    else:
        (partial / "file").write_text("x")
        print("building", flush=True)
        time.sleep(float(sys.argv[2]))
"""


def builder(final, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(final), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def test_two_builders_of_one_payload_wait_for_each_other(tmp_path):
    first = builder(tmp_path / "payload", 1)
    assert first.stdout.readline() == "building\n"
    second = builder(tmp_path / "payload", 0)
    assert second.communicate(timeout=120)[0] == "found\n"
    assert first.wait() == 0


def test_what_a_killed_builder_left_is_built_again(tmp_path):
    killed = builder(tmp_path / "payload", 60)
    killed.stdout.readline()
    killed.kill()
    killed.wait()
    assert not (tmp_path / "payload").exists()
    assert builder(tmp_path / "payload", 0).communicate(timeout=120)[0] == "building\n"
    assert (tmp_path / "payload" / "file").exists()


def test_who_waits_hears_who_holds_the_lock(tmp_path):
    holder = builder(tmp_path / "payload", 600)
    holder.stdout.readline()
    heard = []

    def hear(who):
        heard.append(who)
        holder.kill()

    with store.locked(tmp_path / ".payload.lock", on_wait=hear):
        assert heard == [f"process {holder.pid} on host {socket.gethostname()}"]
    holder.wait()


def test_a_lock_that_names_a_process_which_has_ended_is_held_by_somebody_else(tmp_path, capsys):
    ended = subprocess.Popen(["true"])
    ended.wait()
    path, here = tmp_path / "lock", socket.gethostname()
    with path.open("a+") as held:
        assert store.try_lock(held)
        for said, shown in (
            ("", "another process"),
            (f"snakemake, process {os.getpid()} on host {here}", f"snakemake, process {os.getpid()} on host {here}"),
            (f"process {ended.pid} on host elsewhere", f"process {ended.pid} on host elsewhere"),
            (
                f"process {ended.pid} on host {here}",
                f"another process (process {ended.pid} on host {here}, which the lock names, no longer runs here; "
                f"`fuser -v {path}` shows who holds it)",
            ),
        ):
            path.write_text(said)
            with path.open("a+") as stream:
                assert not store.try_lock(stream)
                assert store.holder(stream) == shown


def test_the_lock_of_an_experiment_says_so_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lock, "_holder", [])
    ended = subprocess.Popen(["true"])
    ended.wait()
    path = tmp_path / "my" / ".lock"
    path.parent.mkdir()
    path.write_text(f"snakemake, process {ended.pid} on host {socket.gethostname()}")
    with path.open("a+") as held:
        assert store.try_lock(held)
        assert lock.claim_experiment(tmp_path / "my") is False
    assert f"process {ended.pid} on host" in lock._holder[0] and "no longer runs here" in lock._holder[0]
