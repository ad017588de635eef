"""The cluster that other tests use does what a real one does."""

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import REPOSITORY, Lab

from megaboa.scheduler.answers import Size
from megaboa.scheduler.slurm import requests
from megaboa.scheduler.slurm.partitions import GPU_OPTIONS
from megaboa.scheduler.slurm.srun import srun_command

pytestmark = pytest.mark.slow
PYTHON = REPOSITORY / ".venv" / "bin" / "python"


@pytest.fixture(scope="module")
def plain_lab(make_lab: Callable[..., Lab]) -> Lab:
    """A second cluster, up at the same time: one host, no accounting, an eye on memory, --gres alone for GPUs."""
    return make_lab(
        nodes=1, accounting=False, memory_kill=True, extra_conf=["SelectType=select/cons_res", "KillWait=600"]
    )


def submit(lab: Lab, command: str, *options: str) -> str:
    """Submit a job; its standard output goes to <job id>.out."""
    words = ["sbatch", "--parsable", "--output=%j.out", "--open-mode=append", *options, f"--wrap={command}"]
    return lab.run(words).stdout.strip()


def job(lab: Lab, number: str) -> dict[str, str]:
    words = lab.run(["scontrol", "-o", "show", "job", number]).stdout.split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def wait_for(lab: Lab, number: str, state: str, timeout: float = 30) -> None:
    lab.wait(lambda: job(lab, number)["JobState"] == state, timeout, f"{state} of job {number}")


def members(namespaces: set[str]) -> list[int]:
    """The machine's processes in any of these namespaces."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if {str((process / "ns" / kind).readlink()) for kind in ("pid", "mnt")} & namespaces:
                found.append(int(process.name))
        except OSError:  # it has ended, or is a zombie
            continue
    return found


def test_a_job_on_two_hosts(lab: Lab) -> None:
    program = "import os, socket; print(socket.gethostname(), os.getuid(), os.environ['CUDA_VISIBLE_DEVICES'])"
    number = submit(lab, f'srun {PYTHON} -c "{program}"', "--nodes=2", "--gpus-per-node=2")
    wait_for(lab, number, "COMPLETED")
    lines = (lab.home / f"{number}.out").read_text().splitlines()
    assert sorted(lines) == ["n1 2000 0,1", "n2 2000 0,1"]
    state = ["sacct", "-n", "-X", "-P", "-j", number, "-o", "State,Account"]
    lab.wait(lambda: lab.run(state).stdout == "COMPLETED|lab\n", 10, "the job's account")


@pytest.mark.parametrize("option", GPU_OPTIONS)
def test_however_a_job_asks_for_gpus_every_rank_sees_those_of_its_node(lab: Lab, option: str) -> None:
    assert_gpus(lab, option)


def test_a_cluster_that_knows_gres_alone(plain_lab: Lab) -> None:
    assert_gpus(plain_lab, "gres")


def assert_gpus(lab: Lab, option: str) -> None:
    """A job as Snakemake's plugin submits it, and a step of it as ranks are started."""
    asked = requests.resources(
        lambda wildcards: Size(1, 2, 2), gpus=lambda wildcards: 2, profile={"gpu_option": option}
    )
    words = {name: value(None) if callable(value) else value for name, value in asked.items()}
    sizes = [f"--ntasks-per-node={words['tasks_per_node']}", f"--cpus-per-task={words['cpus_per_task']}", "--mem=100"]
    gres = [f"--gres={words['gres']}"] if "gres" in words else []
    step = srun_command(
        ["sh", "-c", "echo $SLURM_PROCID $CUDA_VISIBLE_DEVICES"],
        **{
            "nodes": 1,
            "tasks_per_node": 2,
            "cpus_per_task": 1,
            "gpus_per_node": 2,
            "output": "/dev/stdout",
            "name": "x",
        },
    )
    call = f"env -u SLURM_GPUS_PER_TASK {shlex.join(step)}"  # SrunRanks leaves that out
    number = submit(lab, call, *sizes, *gres, *words["slurm_extra"].split())
    wait_for(lab, number, "COMPLETED")
    assert sorted((lab.home / f"{number}.out").read_text().splitlines()) == ["0 0,1", "1 0,1"]


DEAF = """\
import os, signal, sys, time
sys.path.insert(0, {scripts!r})
from pathlib import Path
from megaboa.scheduler.slurm.srun import SrunRanks, srun_command
task = "[ $SLURM_PROCID = 1 ] && kill -9 $$; trap '' TERM; while :; do sleep 1; done"
command = srun_command(
    ["sh", "-c", task], nodes=1, tasks_per_node=2, cpus_per_task=1, output="/dev/null", name="attempt-01"
)
ranks = SrunRanks(os.environ["SLURM_JOB_ID"], command, "attempt-01", Path.cwd(), dict(os.environ), "localhost")
while (ended := ranks.poll()) is None:
    time.sleep(0.2)
print(ended, flush=True)
"""


def test_a_rank_that_does_not_hear_is_not_waited_for_when_another_has_failed(plain_lab: Lab) -> None:
    """As on a GPU, where it waits in a collective; SLURM would kill it after KillWait."""
    program = DEAF.format(scripts=str(REPOSITORY / "workflow" / "scripts"))
    (plain_lab.home / "deaf.py").write_text(program)
    number = submit(plain_lab, f"{PYTHON} deaf.py", "--ntasks=2", "--mem=200")
    wait_for(plain_lab, number, "COMPLETED", timeout=120)
    assert (plain_lab.home / f"{number}.out").read_text() == "rank 1 on n1 was killed by SIGKILL\n"


def test_the_repository_s_python_has_torch(lab: Lab) -> None:
    program = "import torch; print(torch.ones(3).sum().item())"
    assert lab.on_node("n1", [PYTHON, "-c", program], timeout=600).stdout == "3.0\n"


def test_a_host_s_processes_and_temporary_files_are_its_own(lab: Lab) -> None:
    lab.on_node("n1", ["touch", "/tmp/note"])
    assert lab.on_node("n2", ["ls", "/tmp/note"], check=False).returncode != 0
    sleep = lab.popen(["sleep", "1000"], host="n1")
    lab.wait(lambda: "sleep 1000" in lab.on_node("n1", ["ps", "-eo", "args"]).stdout, 5, "the process")
    assert "sleep 1000" not in lab.on_node("n2", ["ps", "-eo", "args"]).stdout
    sleep.send_signal(signal.SIGTERM)
    assert sleep.wait(5) == -signal.SIGTERM


def test_a_command_that_takes_too_long_ends(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run(["sh", "-c", "sleep 1001; true"], timeout=0.5)
    assert "sleep 1001" not in lab.run(["ps", "-eo", "args"]).stdout


def test_broken_commands_are_broken_on_the_login_host_only(lab: Lab) -> None:
    lab.break_commands(["squeue", "sacct"])
    try:
        failed = lab.run(["squeue"], check=False)
        assert (failed.returncode, lab.run(["sinfo"]).returncode) == (1, 0)
        assert failed.stderr.startswith("slurm_load_jobs error: Unable to contact slurm controller")
        assert lab.on_node("n1", ["squeue"]).returncode == 0
    finally:
        lab.mend_commands()
    assert lab.run(["squeue"]).returncode == lab.run(["sacct"]).returncode == 0


def test_services_restart(lab: Lab) -> None:
    lab.stop_accounting()
    assert lab.run(["sacct"], check=False).returncode != 0
    lab.restart_controller()
    number = submit(lab, "true")
    wait_for(lab, number, "COMPLETED")
    lab.start_accounting()
    lab.wait(
        lambda: number in lab.run(["sacct", "-n", "-X", "-o", "JobID"]).stdout.split(), 30, "the accounts to catch up"
    )


def test_a_crashed_host(lab: Lab) -> None:
    lost = submit(lab, "sleep 1000", "--nodelist=n2", "--no-requeue")
    again = submit(lab, 'echo $SLURM_RESTART_COUNT; [ -n "$SLURM_RESTART_COUNT" ] || sleep 1000', "--nodelist=n2")
    for number in (lost, again):
        wait_for(lab, number, "RUNNING")
    lab.crash("n2")
    wait_for(lab, lost, "NODE_FAIL", 60)
    assert (job(lab, again)["JobState"], job(lab, again)["Restarts"]) == ("PENDING", "1")
    assert lab.state("n2") == "down*"
    lab.boot("n2")
    wait_for(lab, again, "COMPLETED", 60)
    lab.wait_idle()


def test_a_host_without_network(lab: Lab) -> None:
    lab.isolate("n3")
    assert lab.on_node("n3", ["ping", "-c1", "-W1", "login"], user="root", check=False).returncode != 0
    lab.wait(lambda: lab.state("n3") == "down*", 60, "n3 to be given up")
    lab.reconnect("n3")
    lab.wait_idle()


def test_without_accounting(plain_lab: Lab) -> None:
    number = submit(plain_lab, "true")
    wait_for(plain_lab, number, "COMPLETED")
    assert plain_lab.run(["sacct"], check=False).returncode != 0


def test_a_job_that_takes_too_much_memory(plain_lab: Lab) -> None:
    program = "import time; block = bytearray(400_000_000); time.sleep(60)"
    number = submit(plain_lab, f'{PYTHON} -c "{program}"', "--mem=100")
    wait_for(plain_lab, number, "FAILED")
    assert "exceeded memory limit" in (plain_lab.home / f"{number}.out").read_text()


def test_a_job_out_of_memory(plain_lab: Lab) -> None:
    number = submit(plain_lab, "sleep 1000")
    wait_for(plain_lab, number, "RUNNING")
    plain_lab.out_of_memory(number)
    wait_for(plain_lab, number, "OUT_OF_MEMORY")
    assert job(plain_lab, number)["ExitCode"] == "0:125"


@pytest.mark.parametrize("end", ["stop", "SIGKILL"])
def test_nothing_is_left(end: str, tmp_path: Path, plain_lab: Lab) -> None:
    """Neither after a stop nor after the death of the process that started the lab."""
    owner = """
        import os, sys, tempfile
        from pathlib import Path
        from lab import Lab
        with Lab(Path(sys.argv[1]), nodes=1, accounting=False) as lab:
            lab.popen(["setsid", "--fork", "sleep", "1002"], host="n1")
            lab.run(["sbatch", "--output=/dev/null", "--wrap=sleep 1003"])
            lab.wait(lambda: "sleep 1003" in lab.on_node("n1", ["ps", "-eo", "args"]).stdout, 20, "the job")
            places = [f"/proc/{host.pid}/ns/{kind}" for host in lab._hosts.values() for kind in ("pid", "mnt")]
            print(*{os.readlink(place) for place in places}, flush=True)
            sys.stdin.readline()
    """
    words = [sys.executable, "-c", textwrap.dedent(owner), tmp_path / "lab"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as process:
        ours = {str(Path("/proc/self/ns", kind).readlink()) for kind in ("pid", "mnt")}
        namespaces = set(process.stdout.readline().split()) - ours
        assert len(members(namespaces)) > 5
        process.send_signal(signal.SIGKILL) if end == "SIGKILL" else process.stdin.write("\n")
    deadline = time.monotonic() + 60
    while left := members(namespaces):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
