"""Scripts whose work is done in a child of a process that has imported Bridge, as the workflow starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import cuda_stand_in

from megaboa.bridge import handover, zygote_protocol
from megaboa.scheduler import local
from megaboa.scheduler.ranks import FORKED

pytestmark = pytest.mark.slow
SCRIPTS = Path(handover.__file__).parents[2]
ASK = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from megaboa.bridge import handover
if __name__ == "__main__":
    handover.to_zygote()
"""


class Script:
    """A script of our own that hands over, and then does what the test wants."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "script.py"
        self.environment = {**os.environ, FORKED: "cpu", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def start(self, work: str, *words: str, **options: object) -> subprocess.Popen:
        self.path.write_text(ASK + "".join(f"    {line}\n" for line in work.splitlines()))
        command, environment = [sys.executable, "script.py", *words], self.environment | options.pop("env", {})
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    def run(self, work: str, *words: str, given: str = "", **options: object) -> tuple[int, str, str]:
        process = self.start(work, *words, stdin=subprocess.PIPE, **options)
        out, err = process.communicate(given, timeout=180)
        return process.returncode, out, err

    def sleeping(self, before: str = "") -> tuple[subprocess.Popen, list[int]]:
        """One that runs, and the processes it has told of: itself, and a helper of its own."""
        helper = "helper = subprocess.Popen(['sleep', '600']); print(os.getpid(), helper.pid, flush=True)"
        sleeps = "while True: time.sleep(0.01)"
        process = self.start(f"import os, subprocess, signal, sys, time\n{before}\n{helper}\n{sleeps}")
        pids = [int(word) for word in process.stdout.readline().split()]
        # Tests signal the parent of what a zygote has forked. That of a script that imports for itself is this process.
        if not pids or parent_of(pids[0]) == os.getpid():
            process.kill()
            raise AssertionError(f"no zygote has forked the script: {process.communicate()[1]}")
        return process, pids


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return Script(tmp_path_factory.mktemp("zygote"))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()


def gone(pids: list[int], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists() and state_of(pid) != "Z"]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return not alive


def open_files(pid: int) -> list[str]:
    try:
        return [path.name for path in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        return []


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def test_a_child_has_what_the_script_was_started_with(script):
    work = (
        "import json, os, random, numpy, torch\n"
        "here = {'ready': 'megatron.bridge' in sys.modules, 'parent': os.getppid(), 'folder': os.getcwd()}\n"
        "here |= {'words': sys.argv, 'mask': os.umask(0), 'mine': os.environ['MEGABOA_MINE']}\n"
        "here |= {'read': sys.stdin.read(), 'processors': sorted(os.sched_getaffinity(0))}\n"
        "here |= {'threads': torch.get_num_threads(), 'gpus': os.environ['CUDA_VISIBLE_DEVICES']}\n"
        "here |= {'random': [random.random(), float(numpy.random.rand())], 'torch': float(torch.rand(1))}\n"
        "print(json.dumps(here)); print('and this', file=sys.stderr); sys.exit(7)"
    )
    found = []
    for mine in "ab":
        code, out, err = script.run(
            work,
            "--x",
            mine,
            given=f"text {mine}",
            env={"MEGABOA_MINE": mine, "OMP_NUM_THREADS": "2"},
            preexec_fn=restrict,
        )
        found.append(json.loads(out))
        assert (code, err) == (7, "and this\n")
        assert found[-1]["words"] == ["script.py", "--x", mine] and found[-1]["folder"] == str(script.folder)
        assert found[-1]["mine"] == mine and found[-1]["read"] == f"text {mine}"
        assert found[-1]["mask"] == 0o027 and found[-1]["processors"] == [min(os.sched_getaffinity(0))]
        assert found[-1]["ready"] and found[-1]["threads"] == 2
    first, second = found
    assert first["parent"] == second["parent"] and "megaboa.bridge.zygote" in command_of(first["parent"])
    assert first["gpus"] == ""  # as the CPU backend has it
    assert not set(first["random"]) & set(second["random"])  # of generators that a new process seeds by chance
    assert first["torch"] == second["torch"]  # of one that it doesn't


def restrict() -> None:
    os.umask(0o027)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_an_error_ends_the_script_with_its_traceback(script):
    code, out, err = script.run("raise KeyError('missing')")
    assert code == 1 and out == "" and err.endswith("KeyError: 'missing'\n")


def test_what_a_script_spawns_imports_the_script_again(script):
    work = (
        "import multiprocessing\n"
        "manager = multiprocessing.get_context('spawn').Manager()\n"
        "queue = manager.Queue(); queue.put(3); print(queue.get())"
    )
    assert script.run(work) == (0, "3\n", "")


def test_a_folder_is_run_as_python_runs_it(script):
    """As `megaboa` is: from the first line of its __main__, which what it spawns doesn't run again."""
    folder = script.folder / "program"
    folder.mkdir()
    work = (
        "import multiprocessing",
        "manager = multiprocessing.get_context('spawn').Manager()",
        "queue = manager.Queue(); queue.put(3)",
        "print(queue.get(), sys.path[0], sys.argv, 'megatron.bridge' in sys.modules)",
    )
    (folder / "__main__.py").write_text(
        "print('begun', flush=True)\n" + ASK + "".join(f"    {line}\n" for line in work)
    )
    command = [sys.executable, "program", "--x"]
    done = subprocess.run(command, cwd=script.folder, env=script.environment, capture_output=True, text=True)
    assert done.stdout == f"begun\nbegun\n3 {SCRIPTS} ['program', '--x'] True\n", done.stderr


def test_a_signal_is_passed_on(script):
    process, pids = script.sleeping("signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 5
    assert gone(pids)


def test_a_script_ends_by_the_signal_that_ended_its_child(script):
    process, pids = script.sleeping()
    assert "script.py" in command_of(pids[0]) and "script.py" not in command_of(process.pid)
    os.kill(pids[0], signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    assert gone(pids)


def test_with_the_script_goes_all_that_was_done_for_it(script):
    process, pids = script.sleeping()
    process.kill()
    process.wait()
    assert gone(pids)


def test_a_script_that_is_killed_together_with_its_child_harms_no_other(script):
    (first, pids), (second, others) = script.sleeping(), script.sleeping()
    with stopped(parent_of(pids[0])):  # it hears of both ends at once
        os.kill(pids[0], signal.SIGKILL)
        first.kill()
        first.wait()
    assert gone(pids)
    assert second.poll() is None and not gone(others, seconds=0.5)
    second.kill()
    second.wait()
    assert gone(others)


def test_what_nobody_waits_for_is_not_done(script):
    process, pids = script.sleeping()
    mark = script.folder / "mark"
    with stopped(parent_of(pids[0])):  # as if it still imported
        asker = script.start(f"open({str(mark)!r}, 'w')")
        while "MEGABOA" not in Path(f"/proc/{asker.pid}/environ").read_text() or not connected(asker.pid):
            time.sleep(0.02)
        asker.kill()
        asker.wait()
    assert script.run("print('served')")[1] == "served\n"  # after it
    assert not mark.exists()
    process.kill()
    process.wait()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """All later tests would wait for a zygote that a failed one had left like this."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def connected(pid: int) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a file that it has closed since
            if "socket:" in str(link.readlink()):
                return True
    return False


def test_signals_are_ignored_as_they_are_by_who_asks(script):
    work = "import signal; print(*(signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGINT, signal.SIGHUP)))"
    for ignored in (False, True, False):

        def begin(action: signal.Handlers = signal.SIG_IGN if ignored else signal.SIG_DFL) -> None:
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, action)

        assert script.run(work, preexec_fn=begin)[1] == f"{ignored} {ignored}\n"


def test_ranks_are_gone_when_they_are_said_to_be(script):
    work = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\n"
    work += "time.sleep(600)"
    script.path.write_text(ASK + "".join(f"    {line}\n" for line in work.splitlines()))
    ranks = local.start([sys.executable, str(script.path)], 2, script.folder, script.environment)
    logs = [script.folder / f"rank-{rank}.log" for rank in range(2)]
    while not all(log.exists() and log.read_text().endswith("\n") for log in logs):
        assert ranks.poll() is None
        time.sleep(0.02)
    pids = [int(log.read_text()) for log in logs]
    assert {parent_of(pid) for pid in pids} != {os.getpid()}
    ranks.end(grace=0.5)
    assert [open_files(pid) for pid in pids] == [
        [],
        [],
    ]  # none can write any more, though the kernel may still clean up
    assert gone(pids)


def test_a_killed_zygote_takes_its_children_with_it(script):
    process, pids = script.sleeping()
    os.kill(parent_of(pids[0]), signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    assert gone(pids[:1])
    os.kill(pids[1], signal.SIGKILL)  # nobody is left who knows of what the child had started


def test_without_a_zygote_a_script_works_for_itself(script):
    work = "import os; print(os.getppid(), 'torch' in sys.modules)"
    assert script.run(work, env={FORKED: "0"})[1] == f"{os.getpid()} False\n"
    assert script.run(work, env={"SLURM_JOB_ID": "1"})[1] == f"{os.getpid()} False\n"
    # One that can't import is no obstacle.
    started = time.monotonic()
    assert script.run(work, env={"PYTHONPATH": str(broken(script.folder))})[1] == f"{os.getpid()} False\n"
    assert time.monotonic() - started < zygote_protocol.START_SECONDS / 2


def broken(folder: Path) -> Path:
    """A folder of modules whose torch can't be imported."""
    (folder / "modules").mkdir()
    (folder / "modules" / "torch.py").write_text("raise ImportError('no torch')\n")
    return folder / "modules"


def test_the_next_one_is_asked_where_one_ends_just_then(script):
    """As it does when a file that it has imported is changed."""
    modules = script.folder / "changed"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text("")
    parents = []
    for moment in (1, 2):
        os.utime(modules / "sitecustomize.py", (moment, moment))
        parents.append(int(script.run("import os; print(os.getppid())", env={"PYTHONPATH": str(modules)})[1]))
    assert len({*parents, os.getpid()}) == 3
    os.kill(parents[1], signal.SIGKILL)  # nobody else asks it


def test_one_that_cannot_be_forked_says_why_and_goes_on_saying_it(script):
    """An import has started a thread; on a GPU one may have opened CUDA."""
    modules = script.folder / "with-a-thread"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'megaboa.bridge.zygote' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    )
    for _ in range(2):
        code, out, err = script.run("print('torch' in sys.modules)", env={"PYTHONPATH": str(modules)})
        assert (code, out) == (0, "False\n")
        assert "imports for itself: threads were started by an import (" in err
    ours = f"PYTHONPATH={modules}".encode()
    refusing = [one for one in Path("/proc").glob("[0-9]*") if ours in environment_of(one)]
    assert len(refusing) == 1, "nobody starts another one"
    os.kill(int(refusing[0].name), signal.SIGKILL)


def test_imports_are_told_of_gpus_by_another_process(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import torch
from megaboa.bridge import zygote
by_cuda = torch.cuda.is_available
with zygote._without_opening_cuda("cuda"):
    print(torch.cuda.is_available(), torch.cuda.device_count())
    print(*(torch.cuda.get_device_capability(device) for device in (None, 1, "cuda:1", torch.device("cuda"))))
print(torch.cuda.is_available is by_cuda)
"""
    callers = tmp_path / "callers"
    environment = {**os.environ, **cuda_stand_in(tmp_path), "CUDA_CALLERS": str(callers)}
    asks = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert asks.communicate()[0].splitlines() == ["True 2", "(9, 0) (8, 0) (8, 0) (9, 0)", "True"]
    (caller,) = callers.read_text().split()
    assert int(caller) != asks.pid


def environment_of(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
