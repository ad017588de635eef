"""megaboa.run.verification: what an attempt begins with is read before its ranks start, once in a life."""

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from pretended_run import LAST, Run

from megaboa.bridge.train import wait_for_word
from megaboa.files import read_json
from megaboa.records import CheckpointShare, read
from megaboa.run import checkpoints, node_memory, patience, verification
from megaboa.run.call import Call, TrainingFailed
from megaboa.run.resume import Beginning

DIES = "step == 4 and attempt == 1 and os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Stopped after step 4, with checkpoints of steps 2 and 4."""
    found = Run(tmp_path, monkeypatch)
    found.misfortune(DIES)
    found.launch(budget=0)
    with pytest.raises(TrainingFailed):
        found.train()
    for iteration in (2, 4):
        checkpoints.add_digests(found.store.checkpoints, iteration)
    found.misfortune("pass")
    found.launch(budget=5)
    return found


@pytest.fixture
def reads(monkeypatch):
    """Which checkpoints have been read as a whole."""
    seen, damage = [], checkpoints.damage

    def noted(folder, iteration, full=True, **how):
        if full:
            seen.append(iteration)
        return damage(folder, iteration, full, **how)

    monkeypatch.setattr(checkpoints, "damage", noted)
    return seen


def flip(run, iteration):
    (path,) = checkpoints.folder(run.store.checkpoints, iteration).glob("*.distcp")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_damaged_checkpoint_is_set_aside_before_ranks_start(run, reads):
    flip(run, 4)
    assert run.train().iteration == LAST
    assert run.attempts[1:] == [(2, "completed", None)] and reads == [4, 2]
    aside = {entry.iteration: entry.detail for entry in run.entries if entry.event == "distrust"}
    assert set(aside) == {4} and "has changed since it was written" in aside[4]


def test_a_checksum_that_can_not_be_read_now_is_read_again(run, monkeypatch):
    """Trouble of the file system is waited out: it says nothing of the checkpoint."""
    damage, troubles = checkpoints.damage, [OSError(errno.ESTALE, "stale") for _ in range(2)]

    def unlucky(folder, iteration, full=True, **how):
        if full and troubles:
            raise troubles.pop()
        return damage(folder, iteration, full, **how)

    monkeypatch.setattr(checkpoints, "damage", unlucky)
    monkeypatch.setattr(patience, "AGAIN_SECONDS", 0.01)
    flip(run, 4)
    assert run.train().iteration == LAST and run.attempts[1:] == [(2, "completed", None)] and not troubles


def test_what_was_saved_in_this_life_is_not_read_again(run, reads):
    """Nor what was read in it."""
    run.misfortune("step == 5 and attempt == 2 and os.kill(os.getpid(), signal.SIGKILL)")
    assert run.train().iteration == LAST
    assert [attempt[0] for attempt in run.attempts[1:]] == [4, 4] and reads == [4], "read by the first of them"


def test_each_node_reads_a_share_of_the_files(run, tmp_path, monkeypatch):
    """As the tasks of a step, whose numbers SLURM says; all shares together are all files."""
    folder = checkpoints.folder(run.store.checkpoints, 4)
    (folder / checkpoints.DIGESTS).unlink()
    for number in range(1, 6):
        (folder / f"__{number}_0.distcp").write_text(f"{number} " * 50 * number)
    checkpoints.add_digests(run.store.checkpoints, 4)
    for node in range(3):
        for name, value in numbered(node):
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        words = [f"--checkpoint={folder}", f"--out={tmp_path}"]
        subprocess.run([sys.executable, verification.READ_CHECKPOINT, *words], check=True)
    said = [read(CheckpointShare, Path(tmp_path, f"{node}.json")).digests for node in range(3)]
    assert [one.keys() & other.keys() for one, other in itertools.combinations(said, 2)] == [set()] * 3
    assert said[0] | said[1] | said[2] == read_json(folder / checkpoints.DIGESTS)


# Whatever the file is.
MISREADS = """
import runpy, sys
from megaboa.run import checkpoints
checkpoints.file_digest = lambda path: "0" * 64
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Tasks:
    """A process for each of three nodes, in place of a step of SLURM's; `dead` ones write nothing, and one with `bad`
    memory what isn't there."""

    def __init__(self, command, dead, bad=None):
        words = {node: command if node != dead else ["false"] for node in range(3)}
        if bad is not None:
            words[bad] = [sys.executable, "-c", MISREADS, *command[1:]]
        numbers = {node: {f"SLURM_{name}": str(value) for name, value in numbered(node)} for node in words}
        self.processes = [subprocess.Popen(words[node], env={**os.environ, **numbers[node]}) for node in words]

    def poll(self):
        return "ended" if all(process.poll() is not None for process in self.processes) else None

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


def numbered(node):
    return {"PROCID": node, "LOCALID": 0, "NTASKS": 3, "NODEID": node, "NNODES": 3}.items()


def on_three_nodes(run, monkeypatch, dead=None, bad=None):
    """A life of the supervisor in a job of three nodes, and the names of the steps that it starts."""
    monkeypatch.setattr(verification, "ONE_READER_BYTES", 0)
    monkeypatch.setattr(verification, "rank_environment", lambda folder: {})
    started = []

    def start_on_nodes(command, name, logs, environment):
        started.append(name)
        return Tasks(command, dead, bad)

    site = SimpleNamespace(job="17", nodes=["n1", "n2", "n3"], start_on_nodes=start_on_nodes)
    return Call(run.folder, run.store, site, SimpleNamespace(seen=[]), 0, print), started


@pytest.mark.parametrize(("dead", "damaged"), [(None, False), (None, True), (1, True), (1, False)])
def test_a_large_checkpoint_is_read_by_all_nodes_and_what_one_leaves_out_is_read_here(run, monkeypatch, dead, damaged):
    if damaged:
        flip(run, 4)
    call, started = on_three_nodes(run, monkeypatch, dead)
    problem = verification.damage(call, call.resumption.beginning(), run.store.attempt(2))
    assert bool(problem) is damaged and started == ["verify-02"] * (1 + damaged), "what differs is read twice"
    assert call.sound == (set() if damaged else {4})
    assert verification.damage(call, call.resumption.beginning(), run.store.attempt(3)) == problem
    assert len(started) == 1 + 3 * damaged, "what is known to be sound is not read again"


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_start_meanwhile_and_wait_for_the_word(run, monkeypatch, damaged, nodes):
    """Here a thread in place of ranks."""
    if damaged:
        flip(run, 4)
    call, started = on_three_nodes(run, monkeypatch)
    seen = threading.Event()
    if nodes == 1:
        call.site.nodes = ["n1"]
        read = checkpoints.read_here
        monkeypatch.setattr(checkpoints, "read_here", lambda *given: seen.wait() and read(*given))
    target, beginning = run.store.attempt(2), call.resumption.beginning()
    target.path.mkdir(parents=True)
    assert verification.takes_long(call, beginning)
    reading = verification.Reading(call, beginning, target)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(wait_for_word, target.may_load)
        assert reading.problem() is None and not target.may_load.read_text(), "the nodes have only begun"
        seen.set()
        while reading.goes_on:
            assert not waits.done()
            time.sleep(0.1)
        found = reading.problem()
        assert bool(target.may_load.read_text()) is not damaged
        target.may_load.write_text("for the thread, which would wait for ever")
    assert reading.problem() is None, "it is said once"
    assert started == ["verify-02"] * (1 + damaged) * (nodes > 1)
    if damaged:
        assert found[0] == "damaged_checkpoint" and "has changed since it was written" in found[1]
        assert call.resumption.beginning() == Beginning(2)
    else:
        assert found is None and not verification.takes_long(call, beginning), "what was read is not read again"


def test_ranks_that_end_leave_nobody_reading(run, tmp_path, monkeypatch):
    call, _ = on_three_nodes(run, monkeypatch)
    target = run.store.attempt(2)
    target.path.mkdir(parents=True)
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(verification, "READ_CHECKPOINT", slow)
    reading = verification.Reading(call, call.resumption.beginning(), target)
    began = time.monotonic()
    reading.leave()
    assert not reading.goes_on and time.monotonic() - began < verification.LEAVE_SECONDS
    assert call.sound == set()


def test_one_node_with_bad_memory_sets_no_checkpoint_aside(run, monkeypatch):
    """What it has read is read by the next node; it is told of, and remembered."""
    call, started = on_three_nodes(run, monkeypatch, bad=0)
    said, troubles = [], []
    call.say = said.append
    monkeypatch.setattr(node_memory, "remember", lambda folder, *trouble: troubles.append(trouble))
    assert verification.damage(call, call.resumption.beginning(), run.store.attempt(2)) is None
    assert started == ["verify-02"] * 2 and call.sound == {4}
    ((nodes, what, attempt),) = troubles
    assert len(said) == 1 and "n1 read __0_0.distcp of checkpoint 4 wrongly" in said[0]
    assert list(nodes) == ["n1"] and what == "unhealthy" and attempt == 2
    flip(run, 2)
    problem = verification.damage(call, Beginning(2), run.store.attempt(3))
    assert "has changed since it was written" in problem and len(said) == 1


@pytest.mark.parametrize(("wrong", "sound"), [(1, True), (2, False)])
def test_what_one_host_has_read_wrongly_it_reads_again(run, monkeypatch, capsys, wrong, sound):
    """Only if it differs twice the checkpoint is set aside."""
    seen, file_digest = Counter(), checkpoints.file_digest

    def misread(path):
        if path.suffix == ".distcp" and path.parent.name.endswith("4"):
            seen[path] += 1
            if seen[path] <= wrong:
                return "0" * 64
        return file_digest(path)

    monkeypatch.setattr(checkpoints, "file_digest", misread)
    assert run.train().iteration == LAST
    assert run.attempts[1:] == [(4 if sound else 2, "completed", None)]
    assert ("distrust" in {entry.event for entry in run.entries}) is not sound
    assert ("a second reading was right" in capsys.readouterr().err) is sound


@pytest.mark.parametrize("dead", [None, 1])
def test_checksums_at_the_end_are_recorded_by_all_nodes(run, monkeypatch, dead):
    for iteration in (2, 4):
        (checkpoints.folder(run.store.checkpoints, iteration) / checkpoints.DIGESTS).unlink()
    call, started = on_three_nodes(run, monkeypatch, dead)
    verification.record_checksums(call, run.store.attempt(1))
    assert started == ["verify-01"] * 2
    assert all(checkpoints.has_digests(run.store.checkpoints, iteration) for iteration in (2, 4))
    assert checkpoints.damage(run.store.checkpoints, 4) is None
    flip(run, 4)
    assert "has changed since it was written" in checkpoints.damage(run.store.checkpoints, 4)


# Ctrl-C


@pytest.fixture
def interrupted(run):
    """A call whose run was interrupted; its last checkpoint has no checksums yet."""
    (checkpoints.folder(run.store.checkpoints, 4) / checkpoints.DIGESTS).unlink()
    return SimpleNamespace(
        payload=run.store,
        resumption=SimpleNamespace(verifies=True),
        signals=SimpleNamespace(seen=["SIGINT"]),
        site=SimpleNamespace(job=None),
        say=print,
    )


def test_the_last_checkpoint_of_an_interrupted_run_has_checksums(run, interrupted):
    verification.record_last_checksums(interrupted)
    assert checkpoints.has_digests(run.store.checkpoints, 4)
    flip(run, 4)
    assert run.train().iteration == LAST
    assert {entry.iteration for entry in run.entries if entry.event == "distrust"} == {4}


def test_whoever_presses_ctrl_c_again_waits_for_no_checksums(run, interrupted, monkeypatch):
    reading, done = threading.Event(), threading.Event()

    def slow(path):
        reading.set()
        done.wait(60)
        return "1"

    monkeypatch.setattr(checkpoints, "file_digest", slow)
    waiting = threading.Thread(target=verification.record_last_checksums, args=(interrupted,))
    waiting.start()
    assert reading.wait(60)
    interrupted.signals.seen.append("SIGINT")
    waiting.join(60)
    assert not waiting.is_alive() and not checkpoints.has_digests(run.store.checkpoints, 4)
    done.set()


def test_a_job_that_is_cancelled_has_no_time_for_checksums(run, interrupted):
    interrupted.site.job = "17"
    verification.record_last_checksums(interrupted)
    assert not checkpoints.has_digests(run.store.checkpoints, 4)
