"""megaboa.scheduler.local with real processes."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from megaboa.scheduler import local
from megaboa.scheduler.local import LocalRanks
from megaboa.scheduler.ranks import threads_environment

SLEEP = "import time; time.sleep(60)"


def start(code, world_size, logs):
    return local.start([sys.executable, "-c", code], world_size, logs, threads_environment(1))


def returncodes(ranks):
    return [process.returncode for process in ranks.processes]


def wait_for_line(log, timeout=120):
    deadline = time.monotonic() + timeout
    while not log.read_text().endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.02)
    return log.read_text()


def test_every_rank_knows_itself_and_writes_its_own_log(tmp_path):
    code = "import os; print(*(os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')))"
    ended = local.wait(start(code, 3, tmp_path))
    assert ended.ok and str(ended) == "every rank ended with 0"
    assert [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(3)] == [f"{r} {r} 3 1\n" for r in range(3)]


def test_the_ranks_of_one_node_of_several_have_their_numbers_among_all(tmp_path):
    code = "import os; print(*(os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"
    here = {**os.environ, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    ranks = LocalRanks([sys.executable, "-c", code], 6, tmp_path, here, first=4, count=2)
    assert local.wait(ranks).ok
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "rank-4.log": "4 0 6 n1\n",
        "rank-5.log": "5 1 6 n1\n",
    }


def test_a_failed_rank_of_another_node_is_named_by_its_number_among_all(tmp_path):
    code = "import os; raise SystemExit(7 if os.environ['LOCAL_RANK'] == '1' else 0)"
    here = {**os.environ, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    ended = local.wait(LocalRanks([sys.executable, "-c", code], 6, tmp_path, here, first=4, count=2))
    assert (ended.rank, ended.returncode) == (5, 7)


def test_ranks_of_one_run_share_a_rendezvous_and_runs_do_not(tmp_path):
    seen = set()
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        local.wait(start("import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])", 2, tmp_path / run))
        logs = {(tmp_path / run / f"rank-{rank}.log").read_text() for rank in range(2)}
        assert len(logs) == 1
        seen |= logs
    assert len(seen) == 2


def test_the_port_is_held_as_long_as_ranks_live_and_no_longer(tmp_path):
    ranks = start(SLEEP, 1, tmp_path)
    address = (local.ADDRESS, ranks.port.number)
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
    finally:
        ranks.kill()
    with socket.socket() as other:
        other.bind(address)


@pytest.mark.parametrize(
    ("last_words", "said"),
    [("raise SystemExit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "killed by SIGKILL")],
)
def test_a_rank_that_dies_takes_the_others_down_within_seconds(tmp_path, last_words, said):
    code = f"import os, time\nif os.environ['RANK'] == '1': {last_words}\ntime.sleep(60)"
    ranks = start(code, 3, tmp_path)
    ranks.processes[1].wait()
    before = time.monotonic()
    ended = local.wait(ranks)
    assert ended.rank == 1 and said in str(ended)
    assert time.monotonic() - before < 10
    assert None not in returncodes(ranks)


def test_of_ranks_that_failed_together_the_one_that_was_killed_is_to_blame(tmp_path):
    code = "import os\nif os.environ['RANK'] == '2': os.kill(os.getpid(), 9)\nraise SystemExit(1)"
    ranks = start(code, 3, tmp_path)
    for process in ranks.processes:
        process.wait()
    ended = ranks.poll()
    assert (ended.rank, ended.returncode) == (2, -signal.SIGKILL)


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print(child.pid, flush=True); time.sleep(60)"
    )
    ranks = start(code, 1, tmp_path)
    child = int(wait_for_line(tmp_path / "rank-0.log"))
    ranks.end(grace=0.5)
    assert returncodes(ranks) == [-signal.SIGKILL]
    assert not _alive(child)


def test_ranks_that_are_asked_can_end_well(tmp_path):
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('ready', flush=True)\n"
    )
    ranks = start(code + "while True: time.sleep(0.01)", 2, tmp_path)  # a signal just before a pause would be lost
    for rank in range(2):
        wait_for_line(tmp_path / f"rank-{rank}.log")
    assert ranks.poll() is None
    ranks.ask()
    assert local.wait(ranks).ok


def test_ranks_write_their_stacks_and_go_on(tmp_path):
    code = "import time; from megaboa.bridge import flight; flight.on_signal()\n"
    code += "def waits_for_its_peers():\n    print('ready', flush=True)\n    time.sleep(600)\nwaits_for_its_peers()"
    ranks = start(code, 1, tmp_path)
    log = tmp_path / "rank-0.log"
    wait_for_line(log)
    try:
        ranks.dump()
        deadline = time.monotonic() + 60
        while "waits_for_its_peers" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "waits_for_its_peers" in log.read_text() and ranks.poll() is None
    finally:
        ranks.kill()


def test_a_stopped_rank_is_killed_at_once(tmp_path):
    ranks = start(SLEEP, 1, tmp_path)
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    before = time.monotonic()
    ranks.kill()
    assert returncodes(ranks) == [-signal.SIGKILL] and time.monotonic() - before < 1


def test_nothing_is_left_when_a_rank_cannot_be_started(tmp_path):
    with pytest.raises(FileNotFoundError):
        local.start(["/no/such/program"], 2, tmp_path, {})


def _alive(pid):
    for _ in range(50):  # a killed orphan is reaped by init, in a moment
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True
