"""megaboa.scheduler.slurm.queries, on what SLURM 22.05 prints."""

import time

import pytest

from megaboa.run import bad_nodes
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.slurm import queries
from megaboa.scheduler.slurm.srun import srun_command

RUNNING = """\
JobId=9 JobName=sbatch UserId=labuser(2000) GroupId=labuser(2000) MCS_label=N/A Priority=4294901751 Nice=0 \
Account=lab QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 \
ExitCode=0:0 RunTime=00:00:03 TimeLimit=04:00:00 TimeMin=N/A SubmitTime=2026-11-20T16:29:01 \
EligibleTime=2026-11-20T16:29:01 AccrueTime=2026-11-20T16:29:01 StartTime=2026-11-20T16:29:01 \
EndTime=2026-11-20T20:29:01 Deadline=N/A PreemptEligibleTime=2026-11-20T16:29:01 PreemptTime=None SuspendTime=None \
SecsPreSuspend=0 LastSchedEval=2026-11-20T16:29:01 Scheduler=Backfill Partition=gpu AllocNode:Sid=login:435 \
ReqNodeList=(null) ExcNodeList=n3 NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 \
ReqB:S:C:T=0:0:*:* TRES=cpu=4,mem=8000M,node=2,billing=4 Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=* \
MinCPUsNode=2 MinMemoryCPU=2000M MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 \
Licenses=(null) Network=(null) Command=(null) WorkDir=/home/labuser StdErr=/home/labuser/9.out StdIn=/dev/null \
StdOut=/home/labuser/9.out Power= \n"""
# Preempted, and back in the queue: it has no nodes and no PreemptTime.
REQUEUED = """\
JobId=11 JobName=sbatch UserId=labuser(2000) GroupId=labuser(2000) MCS_label=N/A Priority=4294901749 Nice=0 \
Account=(null) QOS=(null) JobState=PENDING Reason=BeginTime Dependency=(null) Requeue=1 Restarts=1 BatchFlag=1 \
Reboot=0 ExitCode=0:0 RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=2026-11-20T16:29:10 \
EligibleTime=2026-11-20T16:29:16 AccrueTime=2026-11-20T16:29:16 StartTime=2026-11-20T16:29:16 EndTime=Unknown \
Deadline=N/A SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-20T16:29:09 Scheduler=Main Partition=low \
AllocNode:Sid=login:525 ReqNodeList=(null) ExcNodeList=(null) NodeList= NumNodes=3-3 NumCPUs=6 NumTasks=6 \
CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=6,mem=12000M,node=3,billing=6 Command=(null) WorkDir=/home/labuser Power= \n"""
NODE = """\
NodeName={name} Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=2.59 AvailableFeatures=(null) \
ActiveFeatures=(null) Gres=gpu:h100:2 NodeAddr=10.77.0.12 NodeHostName={name} Version=22.05.8 \
OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=8000 AllocMem=0 FreeMem=20337 Sockets=1 Boards=1 \
State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=gpu,cpu,low  \
BootTime={boot} SlurmdStartTime={started} LastBusyTime=2026-11-20T16:29:52 \
CfgTRES=cpu=4,mem=8000M,billing=4 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s \
ExtSensorsWatts=0 ExtSensorsTemp=n/s{more}
"""


def node(name="n2", state="IDLE", boot="2026-11-20T12:25:18", started="2026-11-20T16:28:41", more=""):
    return NODE.format(name=name, state=state, boot=boot, started=started, more=more)


def seconds(text):
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def test_a_running_job():
    job = queries.parse_job(RUNNING)
    assert (job.id, job.state, job.restarts, job.nodes) == ("9", "RUNNING", 0, "n[1-2]")
    assert (job.partition, job.excluded) == ("gpu", "n3")
    assert job.requeue and job.batch and not job.preempted
    assert (job.start, job.end) == (seconds("2026-11-20T16:29:01"), seconds("2026-11-20T20:29:01"))


def test_a_job_back_in_the_queue_has_no_nodes_and_no_end():
    job = queries.parse_job(REQUEUED)
    assert (job.state, job.restarts, job.nodes) == ("PENDING", 1, "")
    assert (job.end, job.excluded, job.preempted) == (None, "", False)


def test_a_job_that_is_about_to_be_preempted():
    assert queries.parse_job(RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-20T16:31:00")).preempted


# As SLURM 22.05 showed jobs of two hosts on the cluster of the tests. Until it is all over, the state is COMPLETING.
@pytest.mark.parametrize(
    ("shown", "timed_out", "lost_node"),
    [
        ("JobState=COMPLETING Reason=None", False, False),  # scancel; a host of it was dead
        ("JobState=COMPLETING Reason=TimeLimit", True, False),  # the limit was shortened below what it had run
        ("JobState=TIMEOUT Reason=TimeLimit", True, False),  # the same, 10 s later
        ("JobState=COMPLETING Reason=NodeDown", False, True),  # a host died, and it may not be requeued
        ("JobState=NODE_FAIL Reason=NodeDown", False, True),  # the same, 10 s later
    ],
)
def test_why_a_job_ends(shown, timed_out, lost_node):
    job = queries.parse_job(RUNNING.replace("JobState=RUNNING Reason=None", shown))
    assert (job.timed_out, job.lost_node) == (timed_out, lost_node)


def test_what_cannot_be_requeued():
    assert not queries.parse_job(RUNNING.replace("Requeue=1", "Requeue=0")).requeue
    assert not queries.parse_job(RUNNING.replace("BatchFlag=1", "BatchFlag=0")).batch  # salloc


def test_reasons_with_spaces_are_read_to_their_end():
    text = (
        node("n1")
        + node("n2", "DOWN+NOT_RESPONDING", more=" Reason=Not responding [root@2026-11-20T16:29:52]")
        + node("n3", "IDLE+DRAIN", more=" Reason=bad GPU 3: fell off [root@2026-11-20T16:29:22] Comment=a=b")
        + node("n4", "DOWN", more=" Reason=gone")
    )
    found = queries.parse_nodes(text)
    assert [(one.name, one.reason) for one in found] == [
        ("n1", ""),
        ("n2", "Not responding"),
        ("n3", "bad GPU 3: fell off"),
        ("n4", "gone"),
    ]


@pytest.mark.parametrize(
    ("state", "bad"),
    [
        ("IDLE", False),
        ("ALLOCATED", False),
        ("MIXED+PLANNED", False),
        ("COMPLETING", False),
        ("DOWN+NOT_RESPONDING", True),
        ("ALLOCATED*", True),
        ("IDLE+DRAIN", False),  # what runs there may end in peace
        ("ALLOCATED+DRAIN", False),
        ("FAILING", True),
        ("UNKNOWN", True),
        ("IDLE+POWERED_DOWN", True),
    ],
)
def test_nodes_under_which_ranks_are_gone(state, bad):
    assert queries.parse_nodes(node(state=state))[0].down is bad


def test_when_a_node_was_booted_and_its_slurmd_started():
    (found,) = queries.parse_nodes(node())
    assert found.started == seconds("2026-11-20T16:28:41") and found.booted == seconds("2026-11-20T12:25:18")
    (silent,) = queries.parse_nodes(node(started="None", boot="None"))
    assert silent.started is None and silent.booted is None


def test_lines_that_are_no_nodes():
    assert queries.parse_nodes("") == queries.parse_nodes("Node n9 not found\n") == []


# Asking


def test_an_unknown_job_is_no_answer_of_a_broken_controller(fake_command):
    said = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    fake_command("scontrol", said)
    fake_command("squeue", said)
    assert queries.show_job("9999") is None
    assert queries.is_alive("9999") is None


def test_from_silence_nothing_is_concluded(unreachable_slurm):
    for ask in (queries.show_job, queries.is_alive, queries.show_nodes, queries.hostnames, queries.usable_nodes):
        with pytest.raises(UnreachableError, match="Unable to contact slurm controller"):
            ask("1")
    for tell in (queries.requeue, queries.cancel):
        assert tell("1") is False


def test_a_program_that_is_not_there_or_takes_for_ever_is_silence(fake_command, monkeypatch):
    monkeypatch.setattr(queries, "QUERY_SECONDS", 0.2)
    fake_command("scontrol", "exec sleep 30")
    with pytest.raises(UnreachableError, match="timed out"):
        queries.show_job("1")
    assert queries.requeue("1") is False
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnreachableError, match="No such file"):
        queries.show_job("1")
    assert not queries.available()


@pytest.mark.parametrize(
    ("states", "alive"),
    [
        ("RUNNING", True),
        ("PENDING", True),
        ("COMPLETING", True),
        ("COMPLETED", False),
        ("NODE_FAIL", False),
        ("", None),
    ],
)
def test_a_job_is_alive_as_long_as_it_may_run(fake_command, states, alive):
    fake_command("squeue", f"echo 7 {states}" if states else "true")
    assert queries.is_alive("7") is alive


def test_an_answer_that_is_not_understood_is_no_end(fake_command):
    fake_command("squeue", "echo RUNNING")
    with pytest.raises(UnreachableError, match="squeue: RUNNING: the job's number and state were asked for"):
        queries.is_alive("7")


def test_a_job_as_scontrol_shows_it(fake_command, tmp_path):
    (tmp_path / "job").write_text(RUNNING)
    fake_command("scontrol", f'[ "$*" = "-o show job 9" ] && cat {tmp_path}/job')
    assert queries.show_job("9") == queries.parse_job(RUNNING)


def test_of_an_array_the_jobs_own_record_counts(fake_command, tmp_path):
    """Its number is that of its last task, too."""
    tasks = [RUNNING.replace("JobId=9 ", f"JobId={job} ArrayJobId=9 ") for job in ("10", "11", "9")]
    (tmp_path / "jobs").write_text("".join(tasks))
    fake_command("scontrol", f"cat {tmp_path}/jobs")
    assert [queries.show_job(job).id for job in ("9", "10")] == ["9", "10"]
    fake_command("squeue", "printf '10 RUNNING\\n9 COMPLETED\\n'")
    assert (queries.is_alive("9"), queries.is_alive("10"), queries.is_alive("11")) == (False, True, None)


@pytest.fixture
def stopped(fake_command, tmp_path, monkeypatch):
    """A controller that answers nothing for a while; returns the number of questions so far."""
    monkeypatch.setattr(queries, "_policy", queries._QueryPolicy())
    monkeypatch.setattr(queries, "SLOW_SECONDS", 0.2)
    # Supervisors of other tests have left threads in this process that ask about nodes, now and then.
    monkeypatch.setattr(bad_nodes, "revise", lambda results: None)
    for name in ("squeue", "scontrol", "sacctmgr"):
        fake_command(name, f"echo >>{tmp_path}/asked; sleep 0.4; echo 'Unable to contact slurm controller' >&2; exit 1")
    return lambda: (tmp_path / "asked").read_text().count("\n")


def ask_thrice(words):
    for _ in range(3):
        with pytest.raises(UnreachableError, match="Unable to contact"):
            queries.query([words])


def test_a_process_that_only_looks_asks_a_silent_controller_once_and_says_so_early(stopped, capfd):
    queries.ask_once()
    ask_thrice("squeue")
    with pytest.raises(UnreachableError, match="squeue: Unable to contact"):
        queries.query(["scontrol"])
    assert stopped() == 1 and capfd.readouterr().err == "SLURM has not answered for 0.2 s (squeue); waiting for it\n"
    queries._policy.silent = (queries._policy.silent[0] - queries.SILENT_SECONDS, "")
    ask_thrice("squeue")
    assert stopped() == 2, "after a while it may answer again"


def test_the_accountings_silence_is_not_the_controllers(stopped):
    queries.ask_once()
    ask_thrice("sacctmgr")
    assert stopped() == 3
    ask_thrice("squeue")
    assert stopped() == 4


def test_a_supervisor_asks_a_silent_controller_again(stopped, capfd):
    ask_thrice("squeue")
    assert stopped() == 3 and capfd.readouterr().err == ""
    queries.announce_silence()
    ask_thrice("squeue")
    assert stopped() == 6 and capfd.readouterr().err.count("SLURM has not answered") == 3


def test_no_nodes_are_not_asked_for(unreachable_slurm):
    assert queries.show_nodes("") == queries.hostnames("") == []


def test_nodes_that_a_job_could_get(fake_command):
    fake_command("sinfo", "printf 'n1 idle\\nn2 down*\\nn3 drained\\nn4 allocated\\nn5 idle*\\nn6 mixed\\n'")
    assert queries.usable_nodes("gpu") == {"n1", "n4", "n6"}


def test_the_newest_step_of_a_name_counts(fake_command):
    fake_command("squeue", "printf '9.2 attempt-02\\n9.batch batch\\n9.0 attempt-01\\n9.3 attempt-02\\n'")
    assert queries.step_of("9", "attempt-02") == "9.3"
    assert queries.step_of("9", "attempt-01") == "9.0"
    assert queries.step_of("9", "attempt-0") is None


def test_what_slurm_is_told(fake_command, tmp_path):
    for name in ("scontrol", "scancel"):
        fake_command(name, f'echo {name} "$@" >>{tmp_path}/told')
    assert queries.requeue("9") and queries.exclude("9", {"n3", "n2"}) and queries.cancel("9")
    assert queries.signal_step("9.0", "TERM")
    assert (tmp_path / "told").read_text().splitlines() == [
        "scontrol requeue 9",
        "scontrol update JobId=9 ExcNodeList=n2,n3",
        "scancel 9",
        "scancel --signal=TERM 9.0",
    ]


@pytest.mark.parametrize(
    "ask", [lambda: queries.query(["squeue"]), lambda: queries.cancel("9"), lambda: queries.exclude("9", [])]
)
def test_users_defaults_for_slurms_commands_are_not_ours(fake_command, tmp_path, monkeypatch, ask):
    for name in ("squeue", "scontrol", "scancel"):
        fake_command(name, f"env >{tmp_path}/env")
    names = ["SQUEUE_PARTITION", "SCANCEL_INTERACTIVE", "SINFO_FORMAT", "SCONTROL_FEDERATION", "SACCT_LOCAL"]
    for name in names:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_CONF", "/etc/ours.conf")
    ask()
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert not set(names) & set(seen)
    assert {"SQUEUE_ALL", "SINFO_ALL", "SCONTROL_ALL"} <= set(seen), "jobs in hidden partitions are no secret"
    assert (seen["SLURM_TIME_FORMAT"], seen["SLURM_CONF"]) == ("standard", "/etc/ours.conf")


def test_a_job_asks_the_cluster_that_it_runs_on(fake_command, tmp_path, monkeypatch):
    fake_command("squeue", "echo ${SLURM_CLUSTERS:-here}")
    monkeypatch.setenv("SLURM_CLUSTERS", "alpha")
    assert queries.query(["squeue"]) == "alpha\n"
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    assert queries.query(["squeue"]) == "here\n"


def test_snakemakes_executor_inherits_no_defaults_of_the_user(monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "gpu")
    queries.forget_users_defaults()
    assert "SQUEUE_PARTITION" not in queries.os.environ and "PATH" in queries.os.environ


def test_the_clusters_name_is_asked_for_once(fake_command, tmp_path, monkeypatch):
    queries.cluster.cache_clear()
    fake_command("scontrol", f"echo >>{tmp_path}/asked; echo 'ClusterName             = beta'")
    for name in ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert queries.cluster() == queries.cluster() == "beta" and (tmp_path / "asked").read_text() == "\n"
    queries.cluster.cache_clear()
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")
    assert queries.cluster() == "alpha"
    queries.cluster.cache_clear()


# srun


def srun(**options):
    given = {"nodes": 2, "tasks_per_node": 4, "cpus_per_task": 3, "output": "/s/rank-%t.log", "name": "attempt-01"}
    return srun_command(["python", "rank.py", "--x"], **given | options)


def test_srun_is_told_every_count_and_leaves_the_others_to_us_when_one_fails():
    command = srun()
    assert command[0] == "srun" and command[-3:] == ["python", "rank.py", "--x"]
    assert {
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--cpus-per-task=3",
        "--distribution=block",
        "--kill-on-bad-exit=0",
        "--overlap",
        "--output=/s/rank-%t.log",
        "--job-name=attempt-01",
    } <= set(command)
    assert not any(word.startswith(("--gpus", "--cpu-bind")) for word in command)


def test_sruns_further_arguments_come_before_the_command():
    command = srun(
        srun="/opt/srun", gpus_per_node=4, cpu_bind="cores", further=["--container-image=/x.sqsh", "--mpi=none"]
    )
    assert command[0] == "/opt/srun" and {"--gres=gpu:4", "--cpu-bind=cores"} <= set(command)
    assert command[-5:] == ["--container-image=/x.sqsh", "--mpi=none", "python", "rank.py", "--x"]
