"""What a rank does to its process before anything of Megatron is imported, and what the supervisor tells it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaboa.bridge import process
from megaboa.bridge.train import arguments
from megaboa.config.models.resources import Launch
from megaboa.files import write_json
from megaboa.paths import RunFolder
from megaboa.run.command import RANK_SCRIPT, rank_command
from megaboa.run.resume import Beginning
from megaboa.scheduler.ranks import FORKED
from megaboa.store_paths import AttemptFolder, RunStore


def test_the_supervisor_writes_ranges_as_the_rank_reads_them(tmp_path):
    write_json(tmp_path / "run" / "launch.json", {"start": Launch(python="python").model_dump(mode="json")})
    folder, store, attempt = RunFolder(tmp_path / "run"), RunStore(tmp_path / "store"), AttemptFolder(tmp_path / "a")
    command = rank_command(folder, store, attempt, 3, Beginning(10), [[40, 42], [50, 50]])
    assert command[:2] == ["python", str(RANK_SCRIPT)]
    assert "--claim=3" in command and "--resume-from=10" in command
    assert not any(word.startswith("--parent") for word in command)
    without = rank_command(folder, store, attempt, 3, Beginning(10, Path("theirs")), [])
    assert "--parent=theirs" in without
    assert arguments(command[2:]).skip == [40, 41, 42, 50] and arguments(without[2:]).skip == []


PARENT = """
import subprocess, sys
code = "from megaboa.scheduler.local import die_with_parent as die; die(); print('ready', flush=True); import time; "
child = subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell of a parent's death")
def test_a_rank_whose_parent_is_killed_goes_too():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(child)


WRITERS = """
import multiprocessing, sys
import __main__
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
__main__.__file__ = sys.argv[2]  # what a process that is spawned imports
queue = get_write_results_queue(sys.argv[1])
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell of a parent's death")
@pytest.mark.parametrize(("way", "outlives"), [("fork", True), ("spawn", False)])
def test_who_collects_what_writers_say_goes_with_a_killed_rank(way, outlives):
    """Megatron's own queue, as of a rank: by Bridge's default its process lived on, with the memory of the GPU."""
    command = [sys.executable, "-c", WRITERS, way, str(RANK_SCRIPT)]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    (child,) = map(int, rank.stdout.readline().split())
    assert _lives(child)
    rank.kill()
    rank.wait()
    deadline = time.monotonic() + (1 if outlives else 30)
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _lives(child) == outlives
    if outlives:
        os.kill(child, signal.SIGKILL)
    rank.stdin.close()
    rank.stdout.close()


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_failed_leaves_even_if_cleaning_up_hangs():
    code = "import time; from types import SimpleNamespace; from megaboa.bridge import process\n"
    code += "bridge = SimpleNamespace(_cleanup_after_pretrain_failure=lambda state: time.sleep(600))\n"
    code += "process.leave_in_time(bridge, 0.2); bridge._cleanup_after_pretrain_failure(None)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 1


LISTENS = """
import sys
from datetime import timedelta
from pathlib import Path
from torch.distributed import init_process_group, distributed_c10d
from megaboa.bridge import process
from megaboa.scheduler.ranks import ReservedPort, rank_environment
import os
port = ReservedPort()
os.environ |= rank_environment(0, 0, 1, sys.argv[1], port.number)
process.listen_on_loopback()
process.listen_on_loopback()
init_process_group("gloo", timeout=timedelta(seconds=20))
distributed_c10d._get_default_store().set("a", "b")
lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
places = [line[1].split(":") for line in lines if line[3] == "0A"]
print(*(address for address, number in places if int(number, 16) == port.number))
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_ranks_of_one_machine_meet_where_no_other_machine_can_reach():
    done = subprocess.run([sys.executable, "-c", LISTENS, "127.0.0.1"], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0100007F\n", done.stderr
    done = subprocess.run([sys.executable, "-c", LISTENS, "localhost"], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip("0") == "\n", "as in a job, on all interfaces"


def test_a_checkpoints_writer_finishes_what_it_writes():
    code = "import os, signal; from megaboa.bridge import process; process.ignore_stop_signal()\n"
    code += "os.kill(os.getpid(), signal.SIGTERM); print('written')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "written\n"


@pytest.mark.slow
def test_a_save_in_the_foreground_needs_no_other_process():
    """As Megatron's own queue does, in every rank at its first save; what is in it is kept from save to save."""
    code = "import multiprocessing; from megaboa.bridge import process; process.make_fit('cpu')\n"
    code += "from megatron.core.dist_checkpointing.strategies import filesystem_async as writer\n"
    code += "process.save_in_foreground(); queue = writer.get_write_results_queue(); queue.put({0: []})\n"
    code += "assert not multiprocessing.active_children()\n"
    code += "assert writer.get_write_results_queue().get_nowait() == {0: []}; print('written')\n"
    # After a failed pretraining Bridge ends the queue, and must not fail itself.
    code += "from types import SimpleNamespace; from megatron.bridge.training import pretrain as bridge\n"
    code += "bridge._abort_async_checkpoint_worker(SimpleNamespace(_async_calls_queue=None))\n"
    code += "assert writer._results_queue is None; print('ended')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "written\n" in done.stdout and done.stdout.endswith("ended\n"), done.stderr


def test_the_entrypoint_of_a_rank_is_a_writers_too():
    """Writers are spawned: they import the file that started their parent, under another name."""
    code = f"import runpy, signal; runpy.run_path({str(RANK_SCRIPT)!r}, run_name='__mp_main__')\n"
    code += "print(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN


def test_a_child_that_was_forked_for_another_device_begins_again(monkeypatch):
    """On the CPU what needs a GPU is replaced before Megatron is imported, and there it has been imported."""
    monkeypatch.setattr(process, "_forked_for", "cuda")
    monkeypatch.setenv(FORKED, "cuda")
    monkeypatch.setattr(sys, "argv", ["script.py", "--run=r"])

    def begin(program, words):
        raise AssertionError(program, words[-2:], os.environ[FORKED])

    monkeypatch.setattr(os, "execv", begin)
    with pytest.raises(AssertionError) as begun:
        process.prepare("cpu")
    assert begun.value.args == (sys.executable, ["script.py", "--run=r"], "0")


def test_a_process_knows_when_it_was_started():
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import time; from megaboa.bridge import process; print(time.time() - process.started())",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < float(said.stdout) < 60
