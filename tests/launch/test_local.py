"""megaboa.launch.local with real processes."""

import os
import signal
import sys
import time

import pytest

from megaboa.launch import local

SLEEP = "import time; time.sleep(60)"


def start(code, world_size, logs):
    return local.start([sys.executable, "-c", code], world_size, logs)


def test_every_rank_knows_itself_and_writes_its_own_log(tmp_path):
    code = "import os; print(*(os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')))"
    ended = local.wait(start(code, 3, tmp_path))
    assert ended.ok and str(ended) == "every rank ended with 0"
    assert [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(3)] == [f"{r} {r} 3 1\n" for r in range(3)]


def test_ranks_of_one_run_share_a_rendezvous_and_runs_do_not(tmp_path):
    seen = set()
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        local.wait(start("import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])", 2, tmp_path / run))
        logs = {(tmp_path / run / f"rank-{rank}.log").read_text() for rank in range(2)}
        assert len(logs) == 1
        seen |= logs
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("last_words", "said"),
    [("raise SystemExit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "killed by SIGKILL")],
)
def test_a_rank_that_dies_takes_the_others_down_within_seconds(tmp_path, last_words, said):
    code = f"import os, time\nif os.environ['RANK'] == '1': {last_words}\ntime.sleep(60)"
    before = time.monotonic()
    ranks = start(code, 3, tmp_path)
    ended = local.wait(ranks)
    assert ended.rank == 1 and said in str(ended)
    assert time.monotonic() - before < 10
    assert all(rank.poll() is not None for rank in ranks)


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print(child.pid, flush=True); time.sleep(60)"
    )
    ranks = start(code, 1, tmp_path)
    log = tmp_path / "rank-0.log"
    deadline = time.monotonic() + 20
    while not log.read_text().endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.05)
    local.stop(ranks, grace=0.5)
    assert ranks[0].returncode == -signal.SIGKILL
    assert not _alive(int(log.read_text()))


def test_nothing_is_left_when_a_rank_cannot_be_started(tmp_path):
    with pytest.raises(FileNotFoundError):
        local.start(["/no/such/program"], 2, tmp_path)


def _alive(pid):
    for _ in range(50):  # a killed orphan is reaped by init, in a moment
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().split()[2] == "Z":
                return False
        time.sleep(0.1)
    return True
