"""workflow/scripts/start_node.py: the ranks of one node, as one task of srun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaboa.records import StandbyOrder, line

WAIT = 120  # for what hangs: a slow machine takes many seconds to start Python
SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "start_node.py"


@pytest.fixture
def start(tmp_path):
    begun = []

    def start(code, *further, ranks=2, node=1, nodes=3):
        here = {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_NNODES": str(nodes)}
        here |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
        command = [
            sys.executable,
            str(SCRIPT),
            f"--ranks={ranks}",
            f"--logs={tmp_path}",
            *further,
            "--",
            sys.executable,
            "-c",
            code,
        ]
        begun.append(subprocess.Popen(command, env=os.environ | here, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def test_the_ranks_of_the_second_node_of_three(start, tmp_path):
    code = "import os; print(*(os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"
    assert start(code).wait(WAIT) == 0
    assert (tmp_path / "rank-2.log").read_text() == "2 0 6 n1\n"
    assert (tmp_path / "rank-3.log").read_text() == "3 1 6 n1\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("given", [0, -1], ids=["of exactly its job's", "of more than its job's"])
def test_ranks_are_bound_to_their_share_of_the_tasks_processors(start, tmp_path, monkeypatch, given):
    here = os.sched_getaffinity(0)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", str(len(here) + given))
    code = "import os; print(*os.sched_getaffinity(0))"
    assert start(code, "--bind").wait(WAIT) == 0
    found = [set(map(int, (tmp_path / f"rank-{rank}.log").read_text().split())) for rank in (2, 3)]
    assert found == [here, here] if given else found[0] | found[1] == here and not found[0] & found[1]


def test_the_task_ends_with_the_code_of_the_rank_that_failed(start):
    process = start("import os, time\nif os.environ['RANK'] == '3': raise SystemExit(5)\ntime.sleep(60)")
    _, said = process.communicate(timeout=WAIT)
    assert process.returncode == 5 and said == "starts ranks 2 to 3\nrank 3 ended with exit code 5\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_the_task_ends_as_the_rank_that_was_killed(start, number):
    process = start(
        f"import os, time\nif os.environ['RANK'] == '2': os.kill(os.getpid(), {number.value})\ntime.sleep(60)"
    )
    _, said = process.communicate(timeout=WAIT)
    assert process.returncode == -number and said == f"starts ranks 2 to 3\nrank 2 was killed by {number.name}\n"


def test_a_signal_to_all_of_the_step_ends_the_ranks_and_the_task_waits_for_them(start, tmp_path):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(0)))\n"
    process = start(code + "import os; print(os.getpid(), flush=True)\nwhile True: time.sleep(0.01)")
    logs = [tmp_path / "rank-2.log", tmp_path / "rank-3.log"]
    deadline = time.monotonic() + WAIT
    while not all(log.exists() and log.read_text() for log in logs) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # the task must have seen that they run
    for pid in (process.pid, *(int(log.read_text()) for log in logs)):
        os.kill(pid, signal.SIGTERM)
    assert process.wait(WAIT) == 0


def test_ranks_that_stand_by_start_when_they_are_told_what(tmp_path):
    """Nothing before; then the order's command, logs and variables count."""
    go, logs = tmp_path / "go", tmp_path / "02"
    go.touch()
    logs.mkdir()
    here = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    words = [sys.executable, str(SCRIPT), "--ranks=2", f"--logs={tmp_path}", f"--wait={go}", "--", "nothing"]
    process = subprocess.Popen(words, env=os.environ | here | {"STEP": "old"}, stderr=subprocess.PIPE)
    try:
        go.write_text('{"command": ["half')  # of what is being written
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        code = "import os; print(os.environ['RANK'], os.environ['STEP'], os.environ['MASTER_PORT'])"
        order = StandbyOrder(command=(sys.executable, "-c", code), logs=str(logs), environment={"STEP": "new"})
        go.write_text(line(order) + "\n")
        assert process.wait(WAIT) == 0
        assert (logs / "rank-1.log").read_text() == "1 new 29500\n" and not (tmp_path / "rank-1.log").exists()
    finally:
        process.kill()
        process.communicate()
