"""megaboa.scheduler.slurm.srun: what srun says, as in SLURM 22.05, and one srun process from start to end."""

import os
import signal
import time

import pytest

from megaboa.scheduler.ranks import Ended
from megaboa.scheduler.slurm.srun import SrunRanks, read_end

ONE_EXITED = """\
srun: error: n1: task 1: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-20T16:28:43 ***
srun: error: n1: task 0: Terminated
srun: error: n2: tasks 2-3: Terminated
srun: Force Terminated StepId=1.0
"""
ONE_KILLED = """\
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=3.0
slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-20T16:28:47 ***
srun: error: n2: task 2: Terminated
srun: error: n1: tasks 0-1: Terminated
srun: Force Terminated StepId=3.0
"""
# The peers of the killed task heard of its end, and told srun of theirs, before it did.
PEERS_WERE_FASTER = """\
srun: error: n2: task 2: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=4.0
srun: error: n2: task 3: Killed
srun: error: n1: tasks 0-1: Exited with exit code 1
srun: Force Terminated StepId=4.0
"""
# Tasks that don't hear SIGTERM are killed after KillWait: the exception of task 1 stays the cause.
DEAF_PEERS = """\
srun: error: n1: task 1: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=5.0
slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-20T16:28:58 ***
srun: error: n1: task 0: Killed
srun: error: n2: tasks 2-3: Killed
"""
SEVERAL_DAEMONS = ONE_EXITED.replace("slurmstepd:", "slurmstepd-n1:")  # a host with more than one
ALL_EXITED = """\
srun: error: n[1-2]: tasks 0-3: Exited with exit code 1
"""
SEGMENTATION_FAULT = """\
srun: error: n1: task 0: Segmentation fault (core dumped)
srun: launch/slurm: _step_signal: Terminating StepId=5.0
slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-20T16:28:55 ***
srun: error: n1: task 1: Terminated
"""
ABORTED = SEGMENTATION_FAULT.replace("Segmentation fault (core dumped)", "Aborted (core dumped)")
# The watchdog of NCCL ends a peer that lost its connection.
PEER_ABORTED = """\
srun: error: n1: task 3: Exited with exit code 1
srun: error: n2: task 4: Aborted
"""
OUT_OF_MEMORY = """\
slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.
srun: error: n2: task 2: Out Of Memory
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-20T16:30:01 ***
srun: error: n1: tasks 0-1: Terminated
"""
STEP_TERMINATED = """\
slurmstepd: error: *** STEP 10.0 ON n1 CANCELLED AT 2026-11-20T16:29:07 ***
srun: error: n2: tasks 2-3: Terminated
srun: launch/slurm: _step_signal: Terminating StepId=10.0
srun: error: n1: tasks 0-1: Terminated
srun: Force Terminated StepId=10.0
"""
STEP_KILLED = """\
srun: error: n1: tasks 0-1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=9.0
srun: error: n2: tasks 2-3: Killed
"""
NODE_FAILURE = """\
srun: error: Node failure on n2
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
slurmstepd: error: *** STEP 13.0 ON n1 CANCELLED AT 2026-11-20T16:29:52 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***
srun: error: n1: tasks 0-1: Terminated
"""
NOT_STARTED = "srun: error: Unable to create step for job 5: More processors requested than permitted\n"


@pytest.mark.parametrize(
    ("code", "log", "rank", "returncode", "node"),
    [
        (143, ONE_EXITED, 1, 1, "n1"),
        (143, SEVERAL_DAEMONS, 1, 1, "n1"),
        (143, ONE_KILLED, 3, -9, "n2"),
        (137, PEERS_WERE_FASTER, 3, -9, "n2"),
        (137, DEAF_PEERS, 1, 1, "n1"),
        (137, PEER_ABORTED, 3, 1, "n1"),
        (1, ALL_EXITED, 0, 1, "n[1-2]"),
        (139, SEGMENTATION_FAULT, 0, -11, "n1"),
        (134, ABORTED, 0, -6, "n1"),
        (143, OUT_OF_MEMORY, 2, 1, "n2"),
        (143, STEP_TERMINATED, 2, -15, "n2"),
        (137, STEP_KILLED, 0, -9, "n1"),
        (143, NODE_FAILURE, 0, -15, "n1"),
        (1, NOT_STARTED, None, 1, None),
        (-9, "", None, -9, None),
    ],
)
def test_who_ended_first_and_how(code, log, rank, returncode, node):
    ended = read_end(code, log)
    assert (ended.rank, ended.returncode, ended.node) == (rank, returncode, node)


def test_an_end_with_0_is_well_whatever_was_said():
    assert read_end(0, "srun: warning: can't honor --ntasks-per-node\n") == Ended()


def test_the_launchers_errors_are_kept():
    said = read_end(143, "some rank's output\n" + SEVERAL_DAEMONS).said.splitlines()
    assert len(said) == 4 and said[0] == "srun: error: n1: task 1: Exited with exit code 1"
    assert said[1].startswith("slurmstepd-n1: error: *** STEP 1.0")
    assert len(read_end(1, ALL_EXITED * 1000).said.splitlines()) == 20


@pytest.fixture
def start(tmp_path, fake_command):
    begun = []
    fake_command("squeue", "true")  # no steps

    def start(script, tasks_are_ranks=True, **environment):
        words = ["sh", "-c", script]
        ranks = SrunRanks("17", words, "attempt-01", tmp_path, environment, "n1", tasks_are_ranks)
        begun.append(ranks)
        return ranks

    yield start
    for ranks in begun:
        if ranks.process.poll() is None:
            os.killpg(ranks.process.pid, signal.SIGKILL)
        ranks.process.wait()
        ranks.port.close()


def wait(ranks, timeout=60):
    deadline = time.monotonic() + timeout
    while (ended := ranks.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return ended


def test_the_ranks_know_where_rank_0_is_and_nothing_of_the_jobs_own_options(start, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    monkeypatch.setenv("SRUN_DEBUG", "3")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setenv("SLURM_TRES_PER_TASK", "cpu=4,gres/gpu=1")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    options = "$SBATCH_PARTITION$SRUN_DEBUG$SLURM_GPUS_PER_TASK$SLURM_TRES_PER_TASK"
    ranks = start(f'echo "$MASTER_ADDR $MASTER_PORT $MINE $SLURM_JOB_ID [{options}]"', MINE="yes")
    assert wait(ranks) == Ended()
    assert ranks.log.read_text() == f"n1 {ranks.port.number} yes 17 []\n"


def test_how_it_ended_is_read_from_its_log(start):
    ended = wait(start("echo 'srun: error: n2: task 3: Killed' >&2; exit 137"))
    assert (ended.rank, ended.returncode, ended.node) == (3, -9, "n2")


@pytest.mark.parametrize(
    "said, rank",
    [
        ("warning: rank 3 was slow\nrank 5 was killed by SIGKILL\n", 5),
        ("rank 5 ended with exit code 7\n", 5),
        ("nothing of ranks\n", None),
        (None, None),  # a log that can't be seen yet
    ],
)
def test_a_nodes_only_task_says_which_of_its_ranks_failed(start, tmp_path, said, rank):
    if said:
        (tmp_path / "node-1.log").write_text(said)
    ended = wait(start("echo 'srun: error: n2: task 1: Killed' >&2; exit 137", tasks_are_ranks=False))
    assert (ended.rank, ended.returncode, ended.node) == (rank, -9, "n2")


def test_ranks_that_outlive_their_srun_are_ended_before_it_counts_as_ended(start, tmp_path, fake_command):
    fake_command("squeue", f"[ -e {tmp_path}/ended ] || echo '17.0 attempt-01'")
    fake_command("scancel", f'echo "$@" >>{tmp_path}/sent; touch {tmp_path}/ended')
    ranks = start("sleep 60")
    ranks.process.kill()
    assert wait(ranks) == Ended(returncode=-signal.SIGKILL)
    assert (tmp_path / "sent").read_text().splitlines() == ["--signal=KILL 17.0"]


def test_ranks_that_wait_for_one_that_failed_are_ended(start, tmp_path, fake_command, monkeypatch):
    """After last words, and again where the controller does not answer. The exception stays the cause."""
    monkeypatch.setattr("megaboa.scheduler.slurm.srun.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("megaboa.scheduler.slurm.srun.LAST_WORDS_SECONDS", 0.2)
    fake_command("squeue", f"[ -e {tmp_path}/ended ] || echo '17.0 attempt-01'")
    twice = f'[ "$(wc -l <{tmp_path}/sent)" -lt 2 ] || touch {tmp_path}/ended'
    fake_command("scancel", f'echo "$@" >>{tmp_path}/sent; {twice}')
    wait_here = f"while ! [ -e {tmp_path}/ended ]; do sleep 0.05; done"
    failed, killed = ("srun: error: n2: task 3: Exited with exit code 1", "srun: error: n1: task 0: Killed")
    ended = wait(start(f"echo '{failed}'; {wait_here}; echo '{killed}'; exit 137"))
    assert (ended.rank, ended.returncode, ended.node) == (3, 1, "n2")
    assert (tmp_path / "sent").read_text().splitlines() == ["--signal=KILL 17.0"] * 2


def test_signals_go_to_the_step_by_its_name(start, tmp_path, fake_command):
    fake_command("squeue", f"echo \"$@\" >{tmp_path}/asked; echo '17.0 attempt-00'; echo '17.2 attempt-01'")
    fake_command("scancel", f'echo "$@" >>{tmp_path}/sent')
    ranks = start("sleep 60")
    ranks.ask()
    ranks.dump()
    assert "--jobs=17" in (tmp_path / "asked").read_text()
    assert (tmp_path / "sent").read_text().splitlines() == ["--signal=TERM 17.2", "--signal=USR2 17.2"]


def test_whether_the_ranks_were_told_is_known(start, tmp_path, fake_command):
    ranks = start("sleep 60")
    assert not ranks.ask(), "no such step"
    fake_command("squeue", "echo '17.2 attempt-01'")
    fake_command("scancel", f"[ -e {tmp_path}/again ] && exit 0; touch {tmp_path}/again; exit 1")
    assert not ranks.ask(), "slurmctld timed out"
    assert ranks.ask()


def test_where_slurm_does_not_answer_srun_ends_its_step_itself(start, unreachable_slurm, monkeypatch):
    monkeypatch.setattr("megaboa.scheduler.slurm.srun.GONE_SECONDS", 4.0)
    ranks = start("sleep 60")
    before = time.monotonic()
    ranks.kill()
    assert ranks.process.returncode == -signal.SIGTERM and time.monotonic() - before < 5
    assert ranks.poll().killed


def test_a_step_that_slurm_ends_is_left_to_it(start, tmp_path, fake_command, monkeypatch):
    """Ranks have KillWait to save; and a second signal would meet slurmd at it."""
    monkeypatch.setattr("megaboa.scheduler.slurm.srun.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("megaboa.scheduler.slurm.srun.LAST_WORDS_SECONDS", 0.05)
    fake_command("scancel", f'echo "$@" >>{tmp_path}/sent')
    fake_command("squeue", "echo '17.0 attempt-01'")
    cancelled = "slurmstepd: error: *** STEP 17.0 ON n1 CANCELLED AT 2026-11-20T16:29:07 ***"
    ranks = start(f"echo '{cancelled}'; echo 'srun: error: n2: task 2: Terminated'; sleep 60")
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert ranks.poll() is None
    assert not (tmp_path / "sent").exists()


def test_a_step_that_has_lost_a_task_is_not_sound(start, tmp_path):
    lost = tmp_path / "lost"
    ranks = start(f"until [ -e {lost} ]; do sleep 0.02; done; echo 'srun: error: n2: task 1: Killed'; sleep 600")
    assert ranks.sound
    lost.touch()
    deadline = time.monotonic() + 60
    while ranks.sound and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not ranks.sound and ranks.process.poll() is None


def test_where_slurm_does_not_answer_srun_ends_those_that_wait_for_one_that_failed(
    start, unreachable_slurm, monkeypatch
):
    monkeypatch.setattr("megaboa.scheduler.slurm.srun.LAST_WORDS_SECONDS", 0.2)
    monkeypatch.setattr("megaboa.scheduler.slurm.srun.GONE_SECONDS", 0.5)
    ended = wait(start("echo 'srun: error: n2: task 3: Killed'; sleep 60"), timeout=30)
    assert (ended.rank, ended.returncode, ended.node) == (3, -9, "n2")


def test_an_srun_that_does_not_end_is_killed(start, unreachable_slurm, monkeypatch, tmp_path):
    monkeypatch.setattr("megaboa.scheduler.slurm.srun.GONE_SECONDS", 0.5)
    ranks = start("trap '' TERM; echo deaf; while :; do sleep 0.1; done")
    while not ranks.log.read_text():
        time.sleep(0.02)
    ranks.kill()
    assert ranks.process.returncode == -signal.SIGKILL


def test_killing_what_has_ended_asks_nobody(start, tmp_path, fake_command):
    fake_command("squeue", f"touch {tmp_path}/asked")
    ranks = start("true")
    wait(ranks)
    ranks.kill()
    assert not (tmp_path / "asked").exists()
