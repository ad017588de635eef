"""megaboa.run.verification: what an attempt begins with is read while its ranks start, and counts only if sound."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from pretended_run import LAST, Run

from megaboa.records import CheckpointShare, read
from megaboa.run import checkpoints, verification
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
    """Which checkpoints have been read as a whole; `slow` makes that last longer than the ranks' start."""
    seen, damage = [], checkpoints.damage

    def noted(folder, iteration, full=True, share=(0, 1)):
        if full:
            seen.append(iteration)
            time.sleep(noted.seconds)
        return damage(folder, iteration, full, share)

    def slow(seconds):
        noted.seconds = seconds
        monkeypatch.setattr(verification, "QUICK_SECONDS", 0.0)

    noted.seconds, seen_and = 0.0, (seen, slow)
    monkeypatch.setattr(checkpoints, "damage", noted)
    return seen_and


def flip(run, iteration):
    (path,) = checkpoints.folder(run.store.checkpoints, iteration).glob("*.distcp")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_small_checkpoint_is_read_before_ranks_start(run, reads):
    flip(run, 4)
    assert run.train().iteration == LAST
    assert run.attempts[1:] == [(2, "completed", None)] and reads[0] == [4, 2]


def test_ranks_that_began_with_a_damaged_checkpoint_begin_again_with_the_one_before(run, reads):
    """They have even saved since: that is set aside too."""
    flip(run, 4)
    reads[1](1.0)
    run.misfortune("step and step == 6 and attempt == 2 and time.sleep(60)")
    assert run.train().iteration == LAST
    assert run.attempts[1:] == [(4, "failed", "damaged_checkpoint"), (2, "completed", None)]
    aside = {entry.iteration: entry.detail for entry in run.entries if entry.event == "distrust"}
    assert set(aside) == {4, 6} and "it comes from checkpoint 4: " in aside[6]
    assert "has changed since it was written" in aside[4]


def test_a_run_that_was_done_before_its_beginning_was_read_is_done_again(run, reads):
    flip(run, 4)
    reads[1](2.0)
    assert run.train().iteration == LAST
    assert run.attempts[1:] == [(4, "failed", "damaged_checkpoint"), (2, "completed", None)]


def test_a_sound_one_is_read_while_ranks_train(run, reads):
    reads[1](1.0)
    assert run.train().iteration == LAST and run.attempts[1:] == [(4, "completed", None)]
    assert reads[0] == [4]


def test_what_was_saved_in_this_life_is_not_read_again(run, reads):
    """Nor what was read in it."""
    run.misfortune("step == 5 and attempt == 2 and os.kill(os.getpid(), signal.SIGKILL)")
    assert run.train().iteration == LAST
    assert [attempt[0] for attempt in run.attempts[1:]] == [4, 4] and reads[0] == [4], "read by the first of them"


def test_each_node_reads_a_share_of_the_files(run, tmp_path, monkeypatch):
    """As the tasks of a step, whose numbers SLURM says; all shares together are all files."""
    folder = checkpoints.folder(run.store.checkpoints, 4)
    (folder / checkpoints.DIGESTS).unlink()
    for number in range(1, 6):
        (folder / f"__{number}_0.distcp").write_text(f"{number} " * 50 * number)
    checkpoints.add_digests(run.store.checkpoints, 4)
    damaged = folder / "__3_0.distcp"
    damaged.write_text(damaged.read_text().replace("3", "4"))
    for node in range(3):
        for name, value in {"PROCID": node, "LOCALID": 0, "NTASKS": 3, "NODEID": node, "NNODES": 3}.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        words = [f"--checkpoints={run.store.checkpoints}", "--iteration=4", f"--out={tmp_path}"]
        subprocess.run([sys.executable, verification.CHECK_CHECKPOINT, *words], check=True)
    said = [read(CheckpointShare, Path(tmp_path, f"{node}.json")).problem for node in range(3)]
    assert sorted(map(bool, said)) == [False, False, True] and str(damaged) in max(filter(None, said))


class Tasks:
    """A process for each of three nodes, in place of a step of SLURM's; `dead` ones write nothing."""

    def __init__(self, command, dead):
        words = {node: command if node != dead else ["false"] for node in range(3)}
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


@pytest.mark.parametrize(("dead", "damaged"), [(None, False), (None, True), (1, True), (1, False)])
def test_a_large_checkpoint_is_read_by_all_nodes_and_what_one_leaves_out_is_read_here(run, monkeypatch, dead, damaged):
    monkeypatch.setattr(verification, "ONE_READER_BYTES", 0)
    monkeypatch.setattr(verification, "rank_environment", lambda folder: {})
    if damaged:
        flip(run, 4)
    started = []

    def start_on_nodes(command, name, logs, environment):
        started.append(name)
        return Tasks(command, dead)

    site = SimpleNamespace(job="17", nodes=["n1", "n2", "n3"], start_on_nodes=start_on_nodes)
    call = Call(run.folder, run.store, site, None, 0, print)
    reading = verification.begin(call, call.resumption.beginning(), run.store.attempt(2))
    assert bool(reading.wait(60)) is damaged and reading.over and started == ["verify-02"]
    assert call.sound == (set() if damaged else {4})
    assert verification.begin(call, call.resumption.beginning(), run.store.attempt(3)).wait(60) == reading.problem
    assert len(started) == 1 + damaged, "what is known to be sound is not read again"


def test_a_parents_checkpoint_is_read_though_its_weights_alone_are_taken_at_step_0(run, reads):
    seen, _ = reads
    flip(run, 4)
    folder = SimpleNamespace(run=SimpleNamespace(parent=SimpleNamespace(iteration=4)))
    site, resumption = SimpleNamespace(job=None, nodes=["n1"]), SimpleNamespace(verifies=True)
    call = SimpleNamespace(folder=folder, payload=None, resumption=resumption, site=site, sound=set())
    reading = verification.begin(call, Beginning(0, run.store.checkpoints), run.store.attempt(2))
    assert "changed" in reading.wait(60) and seen == [4]
