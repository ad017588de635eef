"""megaboa.run.claims with real processes, and with a squeue of our own where a holder is a SLURM job."""

import contextlib
import errno
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from megaboa.files import write_json
from megaboa.records import Holder, plain, read, write
from megaboa.run import claims
from megaboa.scheduler.slurm import queries
from megaboa.scheduler.slurm.queries import Job

ASKS_A_SCHEDULER_SECONDS = claims.POLL_SECONDS  # in the processes that are started here
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
    assert time.monotonic() - before < ASKS_A_SCHEDULER_SECONDS, "no scheduler is asked"


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


def test_who_was_faster_and_has_gone_is_followed(tmp_path, monkeypatch):
    """Somebody takes the next claim between our look at the newest one and our try, and ends at once."""
    link = os.link

    def too_late(source, target):
        if target.stem == "000001":
            write(target, replace(claims.myself(None), pid=1))
            claims._released(target).touch()
        link(source, target)

    monkeypatch.setattr(os, "link", too_late)
    with claims.held(tmp_path, claims.myself(None)) as number:
        assert number == 2
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.slow
def test_of_many_contenders_exactly_one_holds_at_a_time(contend):
    processes = [contend() for _ in range(6)]
    for _ in processes:
        held = []
        deadline = time.monotonic() + 120
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
            assert claims.holder(tmp_path).pid == os.getpid()
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
    me = Holder(pid=42, host="n1")
    assert claims.describe(me) == "process 42 on host n1"
    assert claims.describe(replace(me, job="17")) == "SLURM job 17 (process 42 on host n1)"


def test_a_claim_names_user_and_cluster(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    mine = claims.myself(Job("17", "RUNNING", restarts=2))
    assert plain(mine) | {"time": 0, "machine": ""} == {
        "host": claims.socket.gethostname(),
        "machine": "",
        "pid": os.getpid(),
        "user": pwd.getpwuid(os.geteuid()).pw_name,
        "job": "17",
        "restarts": 2,
        "cluster": "beta",
        "time": 0,
    }
    assert claims.describe(mine) == f"SLURM job 17 (process {os.getpid()} on host {mine.host})"
    theirs = replace(mine, user="anna", cluster="alpha", host="n1", pid=42)
    assert claims.describe(theirs) == "SLURM job 17 of user anna on cluster alpha (process 42 on host n1)"
    assert claims.describe(replace(theirs, job=None)) == "process 42 on host n1 of user anna"


# Holders that are SLURM jobs


def job(number, restarts=0, host="n1"):
    return Holder(host=host, pid=1, job=number, restarts=restarts, time=0.0)


@pytest.fixture
def claimed(tmp_path):
    """A claim of job 17 on another host, whose process nobody here can see."""
    write(tmp_path / "claims" / "000003.json", job("17"))
    return tmp_path / "claims"


# The job that is asked about, as squeue answers with it.
OF_JOB = 'for word in "$@"; do case $word in --jobs=*) job=${word#--jobs=};; esac; done;'


@pytest.fixture
def squeue(fake_command, tmp_path):
    answer = tmp_path / "answer"
    broken = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    fake_command("squeue", f'[ -e {answer} ] || {{ {broken}; }}; {OF_JOB} sed "/./!d; s/^/$job /" {answer}')
    return answer


def attempt(folder, me):
    """Try to hold the claim until that has succeeded, or somebody is waited for; return its number and who that is."""
    waited, number = [], []

    def hold():
        with contextlib.suppress(StopIteration), claims.held(folder, me, waited.append) as claim:
            number.append(claim)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while thread.is_alive() and not waited and time.monotonic() < deadline:
        time.sleep(0.02)
    return thread, number, waited


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(claims, "POLL_SECONDS", 0.05)


@pytest.fixture(autouse=True)
def fresh_cluster():
    queries.cluster.cache_clear()
    yield
    queries.cluster.cache_clear()


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING", "SUSPENDED"])
def test_a_job_that_may_still_train_is_waited_for(claimed, squeue, state):
    squeue.write_text(f"{state}\n")
    thread, number, waited = attempt(claimed, job("18"))
    assert thread.is_alive() and number == [] and waited == ["SLURM job 17 (process 1 on host n1)"]
    squeue.write_text("COMPLETED\n")
    thread.join(60)
    assert number == [4] and len(waited) == 1


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", ""])
def test_an_ended_jobs_claim_is_taken(claimed, squeue, state):
    squeue.write_text(f"{state}\n")
    thread, number, waited = attempt(claimed, job("18"))
    assert not thread.is_alive() and number == [4] and waited == []


def test_a_forgotten_jobs_claim_is_taken(claimed, fake_command):
    fake_command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    _, number, _ = attempt(claimed, job("18"))
    assert number == [4]


def test_where_slurm_does_not_answer_nobody_takes_over(claimed, squeue):
    thread, number, waited = attempt(claimed, job("18"))
    assert thread.is_alive() and number == [] and len(waited) == 1
    squeue.write_text("")
    thread.join(60)
    assert number == [4]


def test_a_machine_without_slurm_takes_nothing_from_a_job(claimed, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    thread, number, (waited,) = attempt(claimed, claims.myself(None))
    assert thread.is_alive() and number == []
    released = claimed / "000003.released"
    assert waited.endswith(f"(SLURM doesn't answer here; if it is gone, release the run: touch {released})")
    released.touch()
    thread.join(60)
    assert number == [4]


# Jobs that SLURM may hide from us, or know nothing of


def write_claim(folder, **who):
    write_json(folder / "000003.json", {**plain(job("17")), **who})


def test_silence_about_another_users_job_is_not_its_end(claimed, squeue):
    """PrivateData=jobs: squeue says nothing of it, whether it runs or has ended."""
    write_claim(claimed, user="anna")
    squeue.write_text("")
    thread, number, (waited,) = attempt(claimed, job("18"))
    assert thread.is_alive() and number == []
    assert waited.startswith("SLURM job 17 of user anna (process 1 on host n1) (SLURM doesn't show it to user ")
    assert waited.endswith(f"release the run: touch {claimed / '000003.released'})")
    squeue.write_text("COMPLETED\n")  # where SLURM does tell, it is believed
    thread.join(60)
    assert number == [4]


def test_of_an_older_claim_the_files_owner_is_the_user(claimed, squeue, monkeypatch):
    squeue.write_text("")
    monkeypatch.setattr(claims.os, "geteuid", lambda: 4242)
    thread, number, (waited,) = attempt(claimed, job("18"))
    owner = pwd.getpwuid((claimed / "000003.json").stat().st_uid).pw_name
    assert thread.is_alive() and number == [] and waited.startswith(f"SLURM job 17 of user {owner} ")
    (claimed / "000003.released").touch()
    thread.join(60)


@pytest.fixture
def on_beta(fake_command):
    fake_command(
        "scontrol", "echo 'Configuration data as of 2026-11-22T12:00:00'; echo 'ClusterName             = beta'"
    )


def test_a_job_of_another_cluster_is_not_asked_about_here(claimed, squeue, on_beta):
    """Its number is that of some other job here, or of none."""
    write_claim(claimed, cluster="alpha")
    for answer in ("", "COMPLETED\n"):
        squeue.write_text(answer)
        thread, number, (waited,) = attempt(claimed, job("18"))
        assert thread.is_alive() and number == []
        assert waited.startswith("SLURM job 17 on cluster alpha (process 1 on host n1) (it can't be queried from")
        assert "which is cluster beta; if it is gone, release the run: touch " in waited
    (claimed / "000003.released").touch()
    thread.join(60)


def test_a_job_of_this_cluster_is_asked_about(claimed, squeue, on_beta):
    write_claim(claimed, cluster="beta")
    squeue.write_text("")
    assert attempt(claimed, job("18"))[1] == [4]


def test_a_job_of_our_number_on_another_cluster_is_no_earlier_life_of_ours(claimed, squeue, on_beta):
    write_claim(claimed, cluster="alpha")
    squeue.write_text("")
    thread, number, _ = attempt(claimed, replace(job("17", restarts=1), cluster="beta"))
    assert thread.is_alive() and number == []
    (claimed / "000003.released").touch()
    thread.join(60)


@pytest.mark.parametrize("variable", ["SQUEUE_PARTITION", "SQUEUE_ACCOUNT", "SQUEUE_QOS", "SQUEUE_USERS"])
def test_the_users_defaults_for_squeue_hide_no_job(claimed, fake_command, monkeypatch, variable):
    """As squeue does: with one of these it says nothing of the jobs of others."""
    fake_command("squeue", f'[ -n "${variable}" ] || {{ {OF_JOB} echo $job RUNNING; }}')
    monkeypatch.setenv(variable, "other")
    assert claims.judge(job("17"), claimed / "000003.json", job("18")).alive is True


# Locks that can't be had


def without_locks(monkeypatch, code):
    def flock(stream, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(claims.fcntl, "flock", flock)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSYS, "Function not implemented; mount the store's file system with locks (Lustre: option `flock`)"),
        (errno.ENOLCK, "No locks available; mount the store's file system with locks"),
        (errno.EACCES, "Permission denied; that needs write permission for "),
    ],
)
def test_a_lock_that_can_not_be_tried_frees_nothing(tmp_path, monkeypatch, code, remedy):
    folder = tmp_path / "claims"
    write(folder / "000001.json", replace(claims.myself(None), host="n9", machine="another one", pid=1))
    without_locks(monkeypatch, code)
    thread, number, (waited,) = attempt(folder, claims.myself(None))
    assert thread.is_alive() and number == []
    assert waited.startswith("process 1 on host n9 (its lock can't be tried: ") and remedy in waited
    assert waited.endswith(f"touch {folder / '000001.released'})")
    (folder / "000001.released").touch()
    thread.join(60)
    assert number == [2]


def test_without_locks_a_process_of_this_machine_is_known_by_its_number(contend, tmp_path, monkeypatch):
    holder = contend()
    assert heard(holder) == "holds 1"
    without_locks(monkeypatch, errno.ENOSYS)
    thread, number, waited = attempt(tmp_path / "claims", claims.myself(None))
    assert thread.is_alive() and number == [] and len(waited) == 1
    holder.kill()
    holder.wait()
    thread.join(60)
    assert number == [2]


def test_a_claim_that_can_not_be_read_frees_nothing(claimed, squeue):
    squeue.write_text("")
    (claimed / "000003.json").write_text('{"host": "n')
    thread, number, (waited,) = attempt(claimed, job("18"))
    assert thread.is_alive() and number == [] and waited.startswith("somebody (its claim can't be read")
    (claimed / "000003.released").touch()
    thread.join(60)
    assert number == [4]


def test_an_earlier_life_of_our_own_job_is_over(claimed, squeue):
    squeue.write_text("RUNNING\n")  # that is us
    _, number, waited = attempt(claimed, job("17", restarts=1))
    assert number == [4] and waited == []


def test_within_one_life_of_a_job_the_process_counts(tmp_path, squeue):
    squeue.write_text("RUNNING\n")
    with claims.held(tmp_path / "claims", job("17")):
        thread, number, waited = attempt(tmp_path / "claims", job("17"))
        assert thread.is_alive() and number == [] and len(waited) == 1
    thread.join(60)
    assert number == [2]
    write(tmp_path / "killed" / "000001.json", job("17"))
    assert attempt(tmp_path / "killed", job("17"))[1] == [2]


def test_a_claim_that_vanished_is_free(tmp_path):
    assert claims.judge(claims.myself(None), tmp_path / "000001.json").alive is False


def test_a_claim_says_who_holds_it(tmp_path):
    with claims.held(tmp_path, job("17", restarts=3)):
        assert read(Holder, tmp_path / "000001.json") == job("17", restarts=3)
