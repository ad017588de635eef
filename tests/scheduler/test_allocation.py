"""Where ranks start, and what a SLURM job is told."""

import contextlib
import itertools
import json
import os
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megaboa.config.models.resources import Launch
from megaboa.image.runtimes import NO_CONTAINER, Container
from megaboa.records import LaunchSpec, parse
from megaboa.run import site
from megaboa.run.inputs import UnusableInputError
from megaboa.scheduler import local
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.local import Machine
from megaboa.scheduler.ranks import NoPortError, ReservedPort
from megaboa.scheduler.slurm import allocation
from megaboa.scheduler.slurm.allocation import Allocation
from megaboa.scheduler.slurm.queries import Job

LATER = time.time() + 3600
JOB = Job("17", "RUNNING", nodes="n[1-2]", requeue=True, partition="gpu", start=1000.0, end=LATER)
SINCE = 2000.0
SHOWN = "JobId=17 JobState=RUNNING Restarts=0 BatchFlag=1 Requeue=1 NumNodes=2 NodeList=n[1-2] Partition=gpu"


def launch(**start):
    start = Launch().model_dump(mode="json") | start
    return parse(LaunchSpec, {"gpus_per_node": 4, "cpus_per_rank": 3, "start": start}, "a test")


@pytest.fixture
def scontrol(fake_command, tmp_path):
    """Answer with this job and these nodes, and keep what is told."""
    told = tmp_path / "told"

    def install(job=SHOWN, nodes="", requeue=0):
        (tmp_path / "job").write_text(job)
        (tmp_path / "nodes").write_text(nodes)
        script = f"""case "$*" in
"-o show job"*) cat {tmp_path}/job;;
"-o show node"*) cat {tmp_path}/nodes;;
"show hostnames"*) echo n1; echo n2;;
*) echo "$*" >>{told}; exit {requeue};;
esac"""
        fake_command("scontrol", script)
        return told

    return install


# Which site


def test_without_a_job_it_is_this_machine():
    assert isinstance(site.here(launch(), "cpu", {}), Machine)
    assert isinstance(site.here(launch(starter="local"), "cpu", {"SLURM_JOB_ID": "17"}), Machine)


def test_a_job_without_srun_is_this_machine(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert isinstance(site.here(launch(), "cpu", {"SLURM_JOB_ID": "17"}), Machine)


def test_srun_outside_of_a_job_is_refused_with_a_remedy():
    with pytest.raises(UnusableInputError, match=r"launch\.starter is srun.*sbatch or salloc"):
        site.here(launch(starter="srun"), "cpu", {})


def test_a_job_with_srun_is_an_allocation(scontrol, fake_command):
    scontrol()
    fake_command("srun", "true")
    here = site.here(launch(), "cpu", {"SLURM_JOB_ID": "17"})
    assert isinstance(here, Allocation) and here.job.id == "17" and here.nodes == ["n1", "n2"]


def test_a_job_that_slurm_does_not_know_is_refused_with_a_remedy(fake_command):
    fake_command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    with pytest.raises(UnusableInputError, match=r"no job 17.*launch\.starter to local"):
        site.here(launch(starter="srun"), "cpu", {"SLURM_JOB_ID": "17"})


def test_a_controller_that_is_restarted_is_waited_for_but_not_for_ever(unreachable_slurm, monkeypatch):
    monkeypatch.setattr(allocation, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(UnreachableError):
        site.here(launch(starter="srun"), "cpu", {"SLURM_JOB_ID": "17"})


def test_a_machine_is_never_taken_away():
    machine = Machine(NO_CONTAINER)
    assert len(machine.nodes) == 1 and machine.job is None and machine.deadline() is None
    assert machine.interruption(0) is None and machine.requeue(set()) is False


# The command


@pytest.fixture
def started(scontrol, monkeypatch, tmp_path):
    """What srun would be called with."""
    scontrol()

    def start(device="cuda", container=NO_CONTAINER, **settings):
        seen = []
        monkeypatch.setattr(allocation, "SrunRanks", lambda *arguments, **named: seen.append(arguments))
        logs = tmp_path / "attempts" / "03"
        Allocation(JOB, launch(**settings), device, container).start(["python", "rank.py"], 8, logs, {"A": "1"})
        job, command, name, folder, environment, address, *_ = seen[0]
        assert (job, name, folder, environment, address) == ("17", "attempt-03", logs, {"A": "1"}, "n1")
        return command, logs

    return start


def test_a_task_per_rank(started):
    command, logs = started(tasks="rank")
    assert command[-2:] == ["python", "rank.py"]
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=3", "--gres=gpu:4"} <= set(command)
    assert f"--output={logs}/rank-%t.log" in command
    assert started("cpu")[0][-2:] == ["python", "rank.py"]  # the default on the CPU


@pytest.mark.parametrize(
    "asked",
    [{"cpu_bind": "map_cpu:0,8,16,24"}, {"srun_args": ["--gpus-per-task=1"]}, {"srun_args": ["--gpu-bind=none"]}],
)
def test_who_says_what_a_task_gets_has_a_task_per_rank(started, asked):
    assert started(**asked)[0][-2:] == ["python", "rank.py"]
    assert str(allocation.START_NODE) in started(**asked, tasks="node")[0]


@pytest.mark.parametrize("asked", [{}, {"tasks": "node"}])  # the default on GPUs
def test_a_task_per_node_starts_the_nodes_ranks(started, asked):
    command, logs = started(**asked)
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=12"} <= set(command)
    assert f"--output={logs}/node-%n.log" in command
    assert command[-9:] == [
        "python",
        str(allocation.START_NODE),
        "--ranks=4",
        f"--logs={logs}",
        "--fork=cuda",
        "--bind",
        "--",
        "python",
        "rank.py",
    ]
    assert "--bind" not in started(tasks="node", cpu_bind="verbose,none")[0]
    assert allocation.START_NODE.exists() and site.CHECK_NODE.exists()


def test_the_users_srun_and_its_arguments(started):
    command, _ = started("cpu", srun="/opt/srun", srun_args=["--mpi=none"], cpu_bind="cores")
    assert command[0] == "/opt/srun" and "--cpu-bind=cores" in command and command[-3] == "--mpi=none"
    assert not any(word.startswith("--gpus") for word in command)


PYXIS = Container("pyxis", "/i.sqsh", ["/w:/w:rw"], ["HF_TOKEN"], "/w")
IN_PYXIS = ["--container-image=/i.sqsh", "--container-mounts=/w:/w:rw", "--container-workdir=/w"]
NAMED = {"A", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}


@pytest.mark.parametrize("tasks", ["rank", "node"])
def test_ranks_start_in_the_image(started, tasks, monkeypatch):
    """What goes to srun stands before the image's command: the rank's, or that of the node's starter."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    command, _ = started(container=PYXIS, tasks=tasks)
    begin = command.index(IN_PYXIS[0])
    options = command[begin : command.index("/bin/sh")]
    variables = options.pop(2)
    assert options == [*IN_PYXIS, "--no-container-mount-home", "--no-container-entrypoint"]
    assert set(variables.removeprefix("--container-env=").split(",")) == NAMED
    assert command[begin + len(options) + 5] == "python" and command[-1] == "rank.py"


def test_pyxis_needs_a_job():
    with pytest.raises(
        UnusableInputError, match=r"image\.runtime is pyxis, which is a plugin of srun, and this is not a SLURM job"
    ):
        site.here(launch(starter="local"), "cpu", {}, PYXIS)


def test_apptainer_starts_ranks_without_slurm_too(fake_command, tmp_path):
    """The program of that name writes down what it was called with."""
    fake_command("apptainer", f'echo "$@" >> {tmp_path}/called')
    machine = site.here(launch(), "cpu", {}, Container("apptainer", "/i.sif", ["/w:/w:rw"], [], "/w"))
    local.wait(machine.start(["python3", "rank.py"], 2, tmp_path, {}))
    words = "exec --nv --no-home --pwd /w --bind /w:/w:rw /i.sif /bin/sh -c"
    called = (tmp_path / "called").read_text()
    assert called.count(words) == 2 and called.count("sh python3 rank.py\n") == 2


NODE_LINE = "NodeName={} OS=Linux 6.1 State={} BootTime=1970-01-01T00:00:01 SlurmdStartTime=None{}\n"
N1_IS_DOWN = NODE_LINE.format("n1", "DOWN*", " Reason=Not responding [root@2026-11-20T16:29:52]") + NODE_LINE.format(
    "n2", "IDLE", ""
)
BOTH_ARE_WELL = NODE_LINE.format("n1", "ALLOCATED", "") + NODE_LINE.format("n2", "ALLOCATED", "")


# What became of the job


CANCELLED = SHOWN.replace("RUNNING", "COMPLETING Reason=None")
REQUEUED = SHOWN.replace("Restarts=0", "Restarts=1").replace("RUNNING", "PENDING").replace("n[1-2]", "")


@pytest.mark.parametrize(
    ("job", "nodes", "cause", "bad"),
    [
        (SHOWN, BOTH_ARE_WELL, None, ()),
        (SHOWN, N1_IS_DOWN, None, ()),  # the ranks will say so, or end for another reason
        (REQUEUED, N1_IS_DOWN, "node_failure", ("n1",)),
        (REQUEUED, BOTH_ARE_WELL, "requeued", ()),
        (REQUEUED.replace("PENDING", "COMPLETING Reason=None"), N1_IS_DOWN, "node_failure", ("n1",)),
        (CANCELLED, BOTH_ARE_WELL, "cancelled", ()),
        (CANCELLED, N1_IS_DOWN, "cancelled", ()),  # who cancels a job with a dead node doesn't want it back
        (REQUEUED.replace("PENDING", "CANCELLED"), N1_IS_DOWN, "cancelled", ()),
        (SHOWN.replace("RUNNING", "NODE_FAIL Reason=NodeDown"), N1_IS_DOWN, "node_failure", ("n1",)),
        (SHOWN.replace("RUNNING", "TIMEOUT Reason=TimeLimit"), N1_IS_DOWN, "time_limit", ()),
        ("", N1_IS_DOWN, "node_failure", ("n1",)),
        ("", BOTH_ARE_WELL, None, ()),
    ],
)
def test_an_interruption_is_found_and_its_nodes_named(scontrol, job, nodes, cause, bad):
    scontrol(job, nodes)
    failure = Allocation(JOB, launch(), "cpu", NO_CONTAINER).interruption(time.time())
    assert (failure and failure.cause) == cause
    assert failure is None or nodes == BOTH_ARE_WELL or "node n1 is DOWN* (Not responding)" in failure.evidence
    assert (failure.nodes if failure else ()) == bad


def test_silence_is_no_interruption(scontrol, fake_command):
    scontrol()
    job = Allocation(JOB, launch(), "cpu", NO_CONTAINER)
    fake_command("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert job.interruption(0) is None


# Going back into the queue


def test_a_job_is_requeued_and_kept_away_from_bad_nodes(scontrol):
    told = scontrol()
    assert Allocation(JOB, launch(), "cpu", NO_CONTAINER).requeue({"n2", "n1"})
    assert told.read_text().splitlines() == ["requeue 17", "update JobId=17 ExcNodeList=n1,n2"]


def test_nodes_that_were_excluded_before_come_back(scontrol):
    told = scontrol()
    assert Allocation(replace(JOB, excluded="n3"), launch(), "cpu", NO_CONTAINER).requeue(set())
    assert told.read_text().splitlines() == ["requeue 17", "update JobId=17 ExcNodeList="]


def test_a_requeue_is_tried_again_and_its_refusal_is_told(scontrol, monkeypatch):
    ticks = itertools.count()  # a second for each look at the clock
    clock = SimpleNamespace(monotonic=lambda: next(ticks), time=time.time, sleep=lambda seconds: None)
    monkeypatch.setattr(allocation, "time", clock)
    monkeypatch.setattr(allocation, "PATIENCE_SECONDS", 2.5)
    told = scontrol(requeue=1)
    assert not Allocation(JOB, launch(), "cpu", NO_CONTAINER).requeue({"n1"})
    assert set(told.read_text().splitlines()) == {"requeue 17"}
    assert len(told.read_text().splitlines()) > 1


@pytest.mark.parametrize("job", [CANCELLED, REQUEUED.replace("PENDING", "CANCELLED")])
def test_a_cancelled_job_is_not_put_back(scontrol, job):
    told = scontrol(job, N1_IS_DOWN)
    job = Allocation(JOB, launch(), "cpu", NO_CONTAINER)
    assert not job.requeue({"n1"}) and not told.exists()
    assert job.cancelled() == "SLURM job 17 was cancelled"


def test_a_job_that_slurm_has_put_back_itself_is_only_kept_away_from_nodes(scontrol):
    told = scontrol(REQUEUED)
    assert Allocation(JOB, launch(), "cpu", NO_CONTAINER).requeue({"n1"})
    assert told.read_text().splitlines() == ["update JobId=17 ExcNodeList=n1"]


@pytest.mark.parametrize("job", [replace(JOB, requeue=False), replace(JOB, batch=False)])
def test_what_cannot_be_requeued_is_not_asked_for(scontrol, job):
    told = scontrol()
    assert not Allocation(job, launch(), "cpu", NO_CONTAINER).requeue({"n1"})
    assert not told.exists()


# Wall time


def test_the_end_of_the_wall_time_is_asked_for_now_and_then(scontrol, monkeypatch):
    scontrol(SHOWN + " EndTime=2026-11-20T20:29:01")
    job = Allocation(JOB, launch(), "cpu", NO_CONTAINER)
    assert job.deadline() == JOB.end
    monkeypatch.setattr(allocation, "ASK_AGAIN_SECONDS", -1.0)
    assert job.deadline() == time.mktime((2026, 11, 20, 20, 29, 1, 0, 0, -1))


@pytest.mark.parametrize("ahead", [600, -600])
def test_the_time_is_that_of_the_controllers_clock(scontrol, monkeypatch, fake_command, ahead):
    scontrol()
    job = Allocation(JOB, launch(), "cpu", NO_CONTAINER)
    shown = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - ahead))
    fake_command("scontrol", f"echo 'Configuration data as of {shown}'; echo ClusterName = lab")
    assert job.now() == pytest.approx(time.time() - ahead, abs=30)
    fake_command("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    monkeypatch.setattr(allocation, "ASK_AGAIN_SECONDS", -1.0)
    job.deadline()
    assert job.now() == pytest.approx(time.time() - ahead, abs=30), "as it was when it was asked last"


def test_where_the_controller_does_not_tell_the_time_this_host_s_clock_is_taken(unreachable_slurm):
    assert Allocation(replace(JOB, nodes=""), launch(), "cpu", NO_CONTAINER).now() == pytest.approx(time.time(), abs=30)


def test_a_node_that_was_booted_is_found_by_a_host_whose_clock_is_ahead(scontrol):
    now = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
    scontrol(REQUEUED, f"NodeName=n1 State=IDLE BootTime={now}")
    job, began = Allocation(JOB, launch(), "cpu", NO_CONTAINER), time.time() + 540
    assert job.interruption(began).cause == "requeued"
    job._ahead = 600.0
    assert job.interruption(began).nodes == ("n1",)


def test_the_old_end_holds_where_slurm_does_not_answer(scontrol, monkeypatch, fake_command):
    scontrol()
    job = Allocation(JOB, launch(), "cpu", NO_CONTAINER)
    monkeypatch.setattr(allocation, "ASK_AGAIN_SECONDS", -1.0)
    fake_command("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert job.deadline() == JOB.end


# Spares


@pytest.fixture
def with_spare(fake_command, tmp_path):
    """Job 17 on n1 to n3, of which the run needs two; `show` sets which of them the job has now."""

    def show(nodes, state="RUNNING"):
        (tmp_path / "has").write_text(nodes)
        (tmp_path / "job").write_text(SHOWN.replace("n[1-2]", "HAS").replace("RUNNING", state))

    names = f'case "$3" in HAS) cat {tmp_path}/has;; *) printf "n1\\nn2\\nn3\\n";; esac'
    fake_command(
        "scontrol",
        f"""case "$*" in
"-o show job"*) cat {tmp_path}/job;;
"-o show node n1,n3") ;;
"-o show node"*) echo "NodeName=n2 State=DOWN* Reason=Not responding [root@2026-11-22T20:03:36]";;
"show hostnames"*) {names};;
*) exit 1;;
esac""",
    )
    show("n1 n2 n3")
    spec = replace(launch(), nodes=2, spare_nodes=1)
    place = Allocation(replace(JOB, nodes="n[1-3]"), spec, "cpu", NO_CONTAINER)
    return place, show


def test_a_spare_takes_the_place_of_a_node_in_the_jobs_order(with_spare):
    place, _ = with_spare
    assert (place.nodes, place.spares, place.lost()) == (["n1", "n2"], ["n3"], {})
    assert not place.replace({"n1", "n2"}) and place.nodes == ["n1", "n2"]
    assert place.replace({"n1"}) and (place.nodes, place.spares) == (["n2", "n3"], [])
    assert not place.replace({"n3"})


def test_a_spare_that_the_job_has_lost_is_none(with_spare):
    place, show = with_spare
    show("n1 n2")
    assert place.lost() == {} and not place.replace({"n2"})


@pytest.mark.parametrize(("state", "cause"), [("RUNNING", "node_failure"), ("COMPLETING Reason=None", "cancelled")])
def test_a_job_that_goes_on_without_a_node_has_lost_it(with_spare, state, cause):
    place, show = with_spare
    show("n1 n3", state)
    found = place.interruption(time.time())
    assert found.cause == cause and "node n2 is DOWN* (Not responding)" in found.evidence
    assert found.nodes == (("n2",) if cause == "node_failure" else ())


def test_a_node_that_was_replaced_is_held_until_the_job_has_lost_it(with_spare):
    place, show = with_spare
    assert place.unused() == []
    place.replace({"n2"})
    assert place.unused() == ["n2"]
    show("n1 n3")
    assert place.unused() == []


@pytest.mark.parametrize(
    ("for_good", "cause", "bad"), [(True, "requeued", ()), (False, "node_failure", ("n2",))], ids=["unused", "waits"]
)
def test_a_node_that_was_replaced_and_died_is_not_why_the_job_went_back(with_spare, tmp_path, for_good, cause, bad):
    place, _ = with_spare
    place.replace({"n2"}, for_good)
    (tmp_path / "job").write_text(REQUEUED)
    found = place.interruption(time.time())
    assert (found.cause, found.nodes) == (cause, bad)


def test_a_port_is_reserved_only_where_rank_0_is_on_this_host(with_spare, fake_command, monkeypatch, tmp_path):
    """On another host, as after the first node was replaced, what is taken here may be free."""
    place, _ = with_spare
    fake_command("srun", 'echo "$MASTER_ADDR $MASTER_PORT"')
    monkeypatch.setattr(place, "_keep_guarded", lambda: None)
    held = ReservedPort()
    ports = f"{held.number}-{held.number}"
    place._launch = replace(place._launch, start=replace(place._launch.start, ports=ports))
    with contextlib.closing(held):
        with pytest.raises(NoPortError):
            place.start(["python", "rank.py"], 8, tmp_path, {})
        place.replace({"n1"})
        ranks = place.start(["python", "rank.py"], 8, tmp_path, {})
        ranks.process.wait()
        check = place.start_on_nodes(["python", "check.py"], "health", tmp_path, {})
        check.process.wait()
    assert ranks.log.read_text() == 2 * f"n2 {held.number}\n"


def test_ranks_start_on_the_nodes_that_are_named(with_spare, monkeypatch, tmp_path):
    place, _ = with_spare
    place.replace({"n2"})
    seen = []
    monkeypatch.setattr(allocation, "SrunRanks", lambda *arguments, **named: seen.append(arguments))
    monkeypatch.setattr(place, "_keep_guarded", lambda: None)
    place.start(["python", "rank.py"], 8, tmp_path / "03", {})
    place.start_on_nodes(["python", "check.py"], "health", tmp_path, {})
    assert [{"--nodes=2", "--nodelist=n1,n3"} <= set(command) for _, command, *_ in seen] == [True, True]


def test_the_guard_puts_the_job_back_when_the_supervisors_node_is_down(fake_command, tmp_path):
    """It looks again and again; a node that only doesn't answer for a moment is none that is down."""
    states = "ALLOCATED", "ALLOCATED+NOT_RESPONDING", "ALLOCATED+POWER_DOWN", "DOWN*+REQUEUE"
    (tmp_path / "states").write_text("\n".join(states) + "\n")
    fake_command(
        "scontrol",
        f"""case "$1 $3" in
"-o job") echo "JobId=$4 JobState=RUNNING Reason=None";;
-o*) echo "NodeName=$4 CPUAlloc=2 State=$(head -n1 {tmp_path}/states) ThreadsPerCore=1"; sed -i 1d {tmp_path}/states;;
*) echo "$*" >>{tmp_path}/told;;
esac""",
    )
    inside = {**os.environ, "SLURM_JOB_ID": "17"}
    words = ["sh", "-c", allocation.GUARD, "sh", "n1", "0.01"]
    subprocess.run(words, env=inside, check=True, timeout=20)
    assert (tmp_path / "told").read_text() == "requeue 17\n" and not (tmp_path / "states").read_text()


# What stands by


class Waiting:
    """In place of a step that waits."""

    def __init__(self, job, command, name, logs, environment, *more):
        self.command, self.name, self.logs, self.log, self.ended = command, name, logs, logs / "srun.log", None
        self.process, self.killed = self, False

    def poll(self):
        return self.ended

    @property
    def sound(self):
        return self.ended is None

    def kill(self):
        self.killed = True


@pytest.fixture
def two_nodes(scontrol, monkeypatch):
    scontrol()
    monkeypatch.setattr(allocation, "SrunRanks", Waiting)
    return Allocation(JOB, launch(tasks="node"), "cpu", NO_CONTAINER)


def test_the_next_attempt_is_told_to_what_stands_by(two_nodes, tmp_path):
    first, second = tmp_path / "01", tmp_path / "02"
    second.mkdir()
    two_nodes.start(["python", "rank.py", "--attempt=1"], 8, first, {})
    for _ in range(2):  # once is enough
        two_nodes.stand_by(["python", "rank.py"], 8, first / "standby", {"A": "1"})
    ranks = two_nodes.start(["python", "rank.py", "--attempt=2"], 8, second, {"A": "2"})
    assert ranks.name == "standby-01" and f"--wait={first / 'standby' / 'go'}" in ranks.command
    order = json.loads((first / "standby" / "go").read_text())
    assert (order["command"], order["environment"]) == (["python", "rank.py", "--attempt=2"], {"A": "2"})
    assert order["logs"] == str(second) and (second / "srun.log").is_symlink()
    assert two_nodes.start(["python", "rank.py"], 8, tmp_path / "03", {}).name == "attempt-03", "it is used once"


@pytest.mark.parametrize("why", ["ended", "other nodes", "no space"])
def test_what_stands_by_in_vain_is_ended(two_nodes, tmp_path, monkeypatch, why):
    two_nodes.stand_by(["python", "rank.py"], 8, tmp_path / "01" / "standby", {})
    waiting = two_nodes._standby.ranks
    if why == "ended":
        waiting.ended = 1
    elif why == "other nodes":
        two_nodes.nodes = ["n1", "n3"]
    else:
        (tmp_path / "01" / "standby" / "go").unlink()
        (tmp_path / "01" / "standby" / "go").mkdir()
        with pytest.raises(OSError):
            two_nodes.start(["python", "rank.py"], 8, tmp_path, {})
    assert two_nodes.start(["python", "rank.py"], 8, tmp_path / "02", {}).name == "attempt-02" and waiting.killed


@pytest.mark.parametrize(
    ("megabytes", "asked", "stands_by"),
    [
        (None, {}, True),
        ("0", {}, True),
        ("16000", {}, False),  # four ranks, each with what a rank is given by default
        ("18600", {}, True),
        ("16000", {"tasks": "node"}, True),
    ],
)
def test_by_default_only_who_has_memory_to_spare_stands_by(
    scontrol, monkeypatch, tmp_path, megabytes, asked, stands_by
):
    scontrol()
    monkeypatch.setattr(allocation, "SrunRanks", Waiting)
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    if megabytes:
        monkeypatch.setenv("SLURM_MEM_PER_NODE", megabytes)
    place = Allocation(JOB, launch(**asked), "cuda", NO_CONTAINER)
    place.stand_by(["python", "rank.py"], 8, tmp_path / "01" / "standby", {})
    assert place.stands_by is stands_by


def test_a_task_per_rank_has_nothing_that_stands_by(scontrol, tmp_path):
    scontrol()
    place = Allocation(JOB, launch(), "cpu", NO_CONTAINER)
    place.stand_by(["python", "rank.py"], 8, tmp_path / "01" / "standby", {})
    assert place._standby is None and not (tmp_path / "01").exists()


def test_pyxis_has_nothing_that_stands_by(two_nodes, tmp_path):
    """Its step would run inside the ranks' container, which has the same name."""
    pyxis = replace(NO_CONTAINER, runtime="pyxis")
    place = Allocation(JOB, launch(tasks="node"), "cpu", pyxis)
    place.stand_by(["python", "rank.py"], 8, tmp_path / "01" / "standby", {})
    assert not place.stands_by and not (tmp_path / "01").exists()


def test_ranks_start_under_a_guard(two_nodes, tmp_path, monkeypatch):
    """Else nobody would put the job back if the supervisor's node died with them."""
    order = []
    monkeypatch.setattr(two_nodes, "_keep_guarded", lambda: order.append("guard"))
    monkeypatch.setattr(allocation, "SrunRanks", lambda *given: order.append("ranks"))
    two_nodes.start(["python", "rank.py"], 8, tmp_path / "01", {})
    assert order == ["guard", "ranks"]
