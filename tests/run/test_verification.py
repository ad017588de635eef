"""megaboa.run.verification: what an attempt begins with is read while its ranks start, and counts only if sound."""

import time
from pathlib import Path

import pytest
from called import called
from pretended_run import LAST, Run

from megaboa.records import CheckpointShare, read
from megaboa.run import checkpoints, verification
from megaboa.run.call import TrainingFailed

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
        done = called("verify-checkpoint", run.store.checkpoints, "--iteration=4", f"--out={tmp_path}")
        assert done.returncode == 0, done.stderr
    said = [read(CheckpointShare, Path(tmp_path, f"{node}.json")).problem for node in range(3)]
    assert sorted(map(bool, said)) == [False, False, True] and str(damaged) in max(filter(None, said))
