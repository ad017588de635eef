"""megaboa.run.claims with real processes, and with a squeue of our own where a holder is a SLURM job."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megaboa.files import read_json, write_json
from megaboa.launch.slurm import Job
from megaboa.run import claims

HOLD = """
import sys, time
from pathlib import Path
from megaboa.run import claims
def say(holder): print("waits for", holder, flush=True)
with claims.held(Path(sys.argv[1]), claims.myself(None), say) as number:
    print("holds", number, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def contend(tmp_path):
    """Start processes that hold the claim until their standard input closes."""
    begun = []

    def start():
        command = [sys.executable, "-c", HOLD, str(tmp_path / "claims")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def heard(process):
    return process.stdout.readline().strip()


def test_one_holds_the_others_wait_and_say_for_whom(contend):
    first = contend()
    assert heard(first) == "holds 1"
    second, third = contend(), contend()
    for waiting in (second, third):
        assert heard(waiting).startswith(f"waits for process {first.pid} on host ")
    assert second.poll() is None and third.poll() is None
    first.communicate("")  # it ends
    said = {process.pid: heard(process) for process in (second, third) if process is not None}
    holds = [pid for pid, line in said.items() if line == "holds 2"]
    assert len(holds) == 1
    waits = next(line for pid, line in said.items() if pid not in holds)
    assert waits.startswith(f"waits for process {holds[0]} on host ")


def test_a_killed_holders_claim_is_free_at_once(contend):
    first = contend()
    assert heard(first) == "holds 1"
    second = contend()
    heard(second)
    os.kill(first.pid, signal.SIGKILL)
    before = time.monotonic()
    assert heard(second) == "holds 2"
    assert time.monotonic() - before < 2


def test_a_stopped_holder_is_alive(contend):
    first = contend()
    assert heard(first) == "holds 1"
    os.kill(first.pid, signal.SIGSTOP)
    second = contend()
    assert heard(second).startswith("waits for")
    time.sleep(0.5)
    assert second.poll() is None
    os.kill(first.pid, signal.SIGCONT)
    first.communicate("")
    assert heard(second) == "holds 2"


@pytest.mark.slow
def test_of_many_contenders_exactly_one_holds_at_a_time(contend):
    processes = [contend() for _ in range(6)]
    for _ in processes:
        held = []
        deadline = time.monotonic() + 20
        while not held and time.monotonic() < deadline:
            time.sleep(0.3)
            alive = [process for process in processes if process.poll() is None]
            held = [process for process in alive if "holds" in _available(process)]
        assert len(held) == 1
        held[0].kill()
        held[0].wait()


def _available(process):
    os.set_blocking(process.stdout.fileno(), False)
    with contextlib.suppress(TypeError):
        process.said = getattr(process, "said", "") + (process.stdout.read() or "")
    return getattr(process, "said", "")


def test_a_released_claim_is_free_and_keeps_its_number(tmp_path):
    me = claims.myself(None)
    for number in range(1, 9):
        with claims.held(tmp_path, me) as claim:
            assert claim == number == claims.newest(tmp_path)
            assert claims.holder(tmp_path)["pid"] == os.getpid()
        assert claims.holder(tmp_path) is None and claims.newest(tmp_path) == number
    assert len(list(tmp_path.glob("*.json"))) == claims.KEPT
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_claim_is_released_when_its_holder_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), claims.held(tmp_path, claims.myself(None)):
        _ = 1 / 0
    assert claims.holder(tmp_path) is None


def test_nobody_has_claimed(tmp_path):
    assert claims.newest(tmp_path) == 0 and claims.holder(tmp_path) is None


def test_a_holder_is_described():
    me = {"pid": 42, "host": "n1", "job": None}
    assert claims.describe(me) == "process 42 on host n1"
    assert claims.describe({**me, "job": "17"}) == "SLURM job 17 (process 42 on host n1)"
    assert claims.myself(Job("17", "RUNNING", restarts=2)) | {"time": 0} == {
        "host": claims.socket.gethostname(),
        "pid": os.getpid(),
        "job": "17",
        "restarts": 2,
        "time": 0,
    }


# Holders that are SLURM jobs


def job(number, restarts=0, host="n1"):
    return {"host": host, "pid": 1, "job": number, "restarts": restarts, "time": 0.0}


@pytest.fixture
def claimed(tmp_path):
    """A claim of job 17 on another host, whose process nobody here can see."""
    write_json(tmp_path / "claims" / "000003.json", job("17"))
    return tmp_path / "claims"


@pytest.fixture
def squeue(fake_command, tmp_path):
    answer = tmp_path / "answer"
    broken = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    fake_command("squeue", f"[ -e {answer} ] || {{ {broken}; }}; cat {answer}")
    return answer


def attempt(folder, me, seconds=0.5):
    """Try to hold the claim for so long; return its number and whom was waited for."""
    waited, number = [], []

    def hold():
        with contextlib.suppress(StopIteration), claims.held(folder, me, waited.append) as claim:
            number.append(claim)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread, number, waited


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(claims, "POLL_SECONDS", 0.05)


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING", "SUSPENDED"])
def test_a_job_that_may_still_train_is_waited_for(claimed, squeue, state):
    squeue.write_text(f"{state}\n")
    thread, number, waited = attempt(claimed, job("18"))
    assert thread.is_alive() and number == [] and waited == ["SLURM job 17 (process 1 on host n1)"]
    squeue.write_text("COMPLETED\n")
    thread.join(10)
    assert number == [4] and len(waited) == 1


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", ""])
def test_an_ended_jobs_claim_is_taken(claimed, squeue, state):
    squeue.write_text(f"{state}\n")
    thread, number, waited = attempt(claimed, job("18"), seconds=10)
    assert not thread.is_alive() and number == [4] and waited == []


def test_a_forgotten_jobs_claim_is_taken(claimed, fake_command):
    fake_command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    _, number, _ = attempt(claimed, job("18"), seconds=10)
    assert number == [4]


def test_where_slurm_does_not_answer_nobody_takes_over(claimed, squeue):
    thread, number, waited = attempt(claimed, job("18"))
    assert thread.is_alive() and number == [] and len(waited) == 1
    squeue.write_text("")
    thread.join(10)
    assert number == [4]


def test_a_machine_without_slurm_takes_nothing_from_a_job(claimed, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert claims.is_alive(job("17"), claimed / "000003.json", claims.myself(None)) is None


def test_an_earlier_life_of_our_own_job_is_over(claimed, squeue):
    squeue.write_text("RUNNING\n")  # that is us
    _, number, waited = attempt(claimed, job("17", restarts=1), seconds=10)
    assert number == [4] and waited == []


def test_within_one_life_of_a_job_the_process_counts(tmp_path, squeue):
    squeue.write_text("RUNNING\n")
    with claims.held(tmp_path / "claims", job("17")):
        thread, number, waited = attempt(tmp_path / "claims", job("17"))
        assert thread.is_alive() and number == [] and len(waited) == 1
    thread.join(10)
    assert number == [2]
    write_json(tmp_path / "killed" / "000001.json", job("17"))
    assert attempt(tmp_path / "killed", job("17"), seconds=10)[1] == [2]


def test_a_claim_that_vanished_is_free(tmp_path):
    assert claims.is_alive(claims.myself(None), tmp_path / "000001.json") is False


def test_a_claim_says_who_holds_it(tmp_path):
    with claims.held(tmp_path, job("17", restarts=3)):
        assert read_json(tmp_path / "000001.json") == job("17", restarts=3)
