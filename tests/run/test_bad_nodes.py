"""megaboa.run.bad_nodes: how a run leaves them, which are avoided, and who gives some back for a dead supervisor."""

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megaboa import files
from megaboa.config.models.resources import Launch, Recovery
from megaboa.image.runtimes import NO_CONTAINER
from megaboa.paths import RunFolder
from megaboa.records import LEDGER, events
from megaboa.run import attempt_end, bad_nodes, claims, supervisor
from megaboa.run.call import Call, Interrupted, Requeued, TrainingFailed
from megaboa.run.failures import Failure
from megaboa.run.lives import Signals
from megaboa.run.progress import read_progress
from megaboa.run.watch import Watched
from megaboa.scheduler.ranks import Ended
from megaboa.scheduler.slurm import allocation, queries
from megaboa.store_paths import RunStore

SHOWN = "JobId=17 JobState={} Reason={} Restarts={} BatchFlag=1 Requeue=1 NumNodes=2 NodeList=n[1-2] Partition=gpu"
JOB = queries.parse_job(SHOWN.format("RUNNING", "None", 0) + " ExcNodeList=n7")
N2_IS_DOWN = "NodeName=n1 State=ALLOCATED\nNodeName=n2 State=DOWN* Reason=Not responding [root@2026-11-22T20:03:36]\n"


@pytest.fixture
def call(tmp_path, fake_command):
    """A supervisor's life in job 17, whose attempt has just ended; `show` sets what SLURM says of the job now."""
    folder = RunFolder(tmp_path / "results" / "my" / "runs" / "a")
    start = Launch().model_dump(mode="json")
    launch = {"nodes": 2, "gpus_per_node": 1, "cpus_per_rank": 1, "start": start}
    files.write_json(folder.path / "launch.json", launch | {"recovery": Recovery().model_dump(mode="json")})
    store = RunStore(tmp_path / "store")
    store.path.mkdir()
    files.write_json(store.identity, {"run": {"training": {"train_iters": 20}}})
    for entry in (
        {"event": "call", "job": "17", "restarts": 0, "excluded": ["n7"]},
        {"event": "start", "attempt": 1, "job": "17", "restarts": 0, "resumed_from": 0, "host": "n1", "pid": 1},
        {"event": "end", "attempt": 1, "outcome": "failed", "cause": "node_failure", "bad_nodes": ["n2"]}
        | {"iteration": 0, "action": "requeue", "detail": "node failure"},
    ):
        files.append_line(store.ledger, json.dumps({"time": time.time(), **entry}))
    fake_command("sinfo", "for n in 1 2 3 4 5 6 7; do echo n$n idle; done")
    told = tmp_path / "told"
    (tmp_path / "nodes").write_text(N2_IS_DOWN)
    fake_command(
        "scontrol",
        f"""case "$*" in
"-o show job"*) cat {tmp_path}/job;;
"-o show node"*) cat {tmp_path}/nodes;;
"show hostnames n[1-2]") echo n1; echo n2;;
"show hostnames"*) echo $3;;
*) echo "$*" >>{told};;
esac""",
    )
    found = Call(
        folder, store, allocation.Allocation(JOB, folder.launch, "cpu", NO_CONTAINER), Signals(), 0, lambda text: None
    )
    found.show = lambda *words: (tmp_path / "job").write_text(SHOWN.format(*words))
    found.told = lambda: told.read_text().splitlines() if told.exists() else []
    found.show("RUNNING", "None", 0)
    return found


def test_a_requeue_excludes_the_users_nodes_and_those_that_failed(call):
    with pytest.raises(Requeued):
        bad_nodes.leave(call, "node failure")
    assert call.told() == ["requeue 17", "update JobId=17 ExcNodeList=n2,n7"]


def test_after_exclude_hours_only_the_users_nodes_are_left(call):
    patient = call.folder.launch
    call.folder.__dict__["launch"] = replace(patient, recovery=replace(patient.recovery, exclude_hours=0.0))
    with pytest.raises(Requeued):
        bad_nodes.leave(call, "time limit")
    assert call.told() == ["requeue 17", "update JobId=17 ExcNodeList=n7"]


def test_a_supervisor_whose_run_another_has_claimed_puts_no_job_back(call):
    """It may live on after the scheduler lost its host; the job is the next holder's by then."""
    with (
        claims.held(call.payload.claims, claims.myself(None)),
        pytest.raises(Interrupted, match="another process has claimed the run"),
    ):
        bad_nodes.leave(call, "node failure")
    assert call.told() == []


def test_a_job_that_is_given_the_same_node_again_and_again_trains_on_it(call):
    """Else it would wait for ever in a partition that has no other."""
    for _ in range(bad_nodes.LONGEST_SEARCH):
        with pytest.raises(Requeued, match=r"n2 failed recently"):
            bad_nodes.leave_avoided_nodes(call)
    bad_nodes.leave_avoided_nodes(call)
    assert [entry.nodes for entry in call.entries if entry.event == "left"] == [("n2",)] * bad_nodes.LONGEST_SEARCH


def test_a_job_that_was_cancelled_on_the_way_is_not_put_back_and_the_ledger_says_so(call):
    call.show("COMPLETING", "None", 0)
    with pytest.raises(Interrupted, match="SLURM job 17 was cancelled"):
        bad_nodes.leave(call, "node failure: node n2 is DOWN*")
    assert call.told() == []
    last = call.entries[-1]
    assert (last.event, last.detail) == ("cancelled", "SLURM job 17 was cancelled, and is not put back")
    found = read_progress(call.payload.path)
    assert (found.state, found.goes_on, found.detail) == ("interrupted", False, last.detail)
    assert found.event == f"stopped: {last.detail}"


def test_what_can_not_be_put_back_for_another_reason_has_failed(call, monkeypatch):
    monkeypatch.setattr(allocation, "PATIENCE_SECONDS", -1.0)
    call.site.job = replace(JOB, requeue=False)
    with pytest.raises(TrainingFailed, match="SLURM did not put the job back"):
        bad_nodes.leave(call, "node failure")


@pytest.mark.parametrize("reason", ["cancelled", None])  # by scancel's signal, or by what srun says of the dead node
def test_scancel_goes_before_a_dead_node(call, reason):
    call.show("COMPLETING", "None", 0)
    watched = Watched(Ended(returncode=1), reason, "SIGTERM" if reason else "")
    failure = attempt_end.cause_of(call, call.payload.attempt(1), watched, time.time())
    assert failure.cause == "cancelled"
    assert failure.evidence == "SLURM job 17 was cancelled; node n2 is DOWN* (Not responding)"


@pytest.mark.parametrize("job", [("COMPLETING", "None", 1), ("PENDING", "BeginTime", 1)])
def test_where_slurm_put_the_job_back_the_signal_is_its_own(call, job):
    call.show(*job)
    watched = Watched(Ended(returncode=1), "cancelled", "SIGTERM")
    failure = attempt_end.cause_of(call, call.payload.attempt(1), watched, time.time())
    assert failure.cause == "node_failure" and failure.nodes == ("n2",)


@pytest.mark.parametrize(("rank", "node"), [(0, "n1"), (1, "n2")])
def test_a_gpu_that_fails_is_its_nodes_fault_where_one_task_starts_all_ranks_of_a_node(call, rank, node, monkeypatch):
    """srun's words name no rank then, and the rank's own log does."""
    (call.site.job, call.site.nodes) = (JOB, ["n1", "n2"])
    call.show("RUNNING", "None", 0)
    monkeypatch.setattr(call.site, "interruption", lambda since: None)
    target = call.payload.attempt(1)
    target.path.mkdir(parents=True)
    (target.path / f"rank-{rank}.log").write_text(
        f"[rank{rank}]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"
    )
    failure = attempt_end.cause_of(call, target, Watched(Ended(returncode=1, node="n9"), None), time.time())
    assert (failure.cause, failure.rank, failure.nodes) == ("gpu_failure", rank, (node,))


def test_a_signal_between_attempts_is_written_down(call):
    bad_nodes.heed_signals(call)
    call.signals.seen.append("SIGTERM")
    with pytest.raises(Interrupted):
        bad_nodes.heed_signals(call)
    assert call.entries[-1].event == "cancelled" and call.entries[-1].detail == "SIGTERM"
    call.show("COMPLETING", "None", 0)
    with pytest.raises(Interrupted, match="SLURM job 17 was cancelled"):
        bad_nodes.heed_signals(call)
    assert call.told() == []


def test_a_preemption_between_attempts_puts_the_job_back(call):
    call.signals.seen.append("SIGTERM")
    with (call.payload.path.parent / "job").open("a") as job:
        job.write(" PreemptTime=2026-11-22T20:01:08")
    with pytest.raises(Requeued):
        bad_nodes.heed_signals(call)
    assert call.told()[0] == "requeue 17"


def test_a_call_after_a_cancellation_trains_again(call):
    call.signals.seen.append("SIGTERM")
    with pytest.raises(Interrupted):
        bad_nodes.heed_signals(call)
    files.append_line(call.payload.ledger, json.dumps({"event": "call", "job": "18", "time": time.time()}))
    assert read_progress(call.payload.path).state == "running"


# Spares


@pytest.fixture
def spares(call, monkeypatch):
    """The job has a third node."""
    call.folder.__dict__["launch"] = replace(call.folder.launch, spare_nodes=1)
    monkeypatch.setattr(call.site, "_gone_of", lambda nodes: [])
    call.site._all, call.site.nodes, call.site.spares = ["n1", "n2", "n3"], ["n1", "n2"], ["n3"]
    return call


def test_a_node_that_failed_before_is_given_to_us_again_and_waits(spares):
    """n2, as the ledger says; without the spare the job would go back into the queue."""
    bad_nodes.leave_avoided_nodes(spares)
    assert (spares.site.nodes, spares.site.spares, spares.told()) == (["n1", "n3"], ["n2"], [])


def test_a_spare_that_failed_before_is_the_last_one_taken(spares):
    failed = {"event": "end", "attempt": 1, "outcome": "failed", "cause": "node_failure", "bad_nodes": ["n3"]}
    failed |= {"iteration": 0, "action": "requeue", "detail": "node failure", "time": time.time()}
    files.append_line(spares.payload.ledger, json.dumps(failed))
    spares.site._all, spares.site.spares = ["n1", "n2", "n3", "n4"], ["n3", "n4"]
    bad_nodes.leave_avoided_nodes(spares)
    assert (spares.site.nodes, spares.site.spares) == (["n1", "n4"], ["n3", "n2"])


def test_a_node_that_the_job_has_lost_is_replaced_or_the_job_goes_back(spares, monkeypatch):
    launch = spares.folder.launch
    spares.folder.__dict__["launch"] = replace(launch, recovery=replace(launch.recovery, exclude_hours=0.0))
    monkeypatch.setattr(spares.site, "lost", lambda: {"n1": "node n1 is DOWN*"} if "n1" in spares.site.nodes else {})
    bad_nodes.leave_avoided_nodes(spares)
    assert spares.site.nodes == ["n2", "n3"]
    monkeypatch.setattr(spares.site, "lost", lambda: {"n3": "node n3 is DOWN*"})
    with pytest.raises(Requeued, match=r"node n3 is DOWN"):
        bad_nodes.leave_avoided_nodes(spares)


def test_a_later_life_whose_job_has_lost_more_nodes_than_it_had_spares_goes_back(spares):
    bad_nodes.leave_too_few_nodes(spares)
    spares.site.nodes, spares.site.spares = ["n1"], []
    bad_nodes.leave_too_few_nodes(spares)  # its first life: the job has asked for too few
    spares.life = 2
    with pytest.raises(Requeued, match=r"resources\.nodes is 2, and the job has 1 left"):
        bad_nodes.leave_too_few_nodes(spares)


def test_a_spare_takes_the_place_of_a_node_that_the_health_check_refuses_and_is_looked_at_too(spares, monkeypatch):
    looked, told = [], []
    monkeypatch.setattr(bad_nodes.node_memory, "remember", lambda _, nodes, what: told.append((nodes, what)))

    def check_nodes(place, *_):
        looked.append(list(place.nodes))
        return bad_nodes.sites.Unfit({"n1": ["50 TFLOP/s"]} if "n1" in place.nodes else {}, "slow")

    monkeypatch.setattr(bad_nodes.sites, "check_nodes", check_nodes)
    monkeypatch.setattr(bad_nodes, "rank_environment", lambda folder: {})
    spares.folder.__dict__["run"] = SimpleNamespace(device="cpu")
    bad_nodes.require_health(spares, spares.payload.attempt(1))
    assert looked == [["n1", "n2"], ["n2", "n3"]] and spares.told() == []
    assert (spares.entries[-1].event, spares.entries[-1].bad_nodes) == ("unhealthy", ("n1",))
    assert told == [({"n1": "50 TFLOP/s"}, "slow")]


@pytest.mark.parametrize(("nodes", "blamed"), [(["n1"], True), (["n1", "n2"], False)])
def test_the_only_node_is_blamed_but_several_only_if_one_is_sound(call, monkeypatch, nodes, blamed):
    """What ails all of several lies between them; of one it is the node's own fault."""
    call.site.nodes, call.site._all = nodes, nodes
    unfit = bad_nodes.sites.Unfit({node: ["no GPU"] for node in nodes}, "gone")
    monkeypatch.setattr(bad_nodes.sites, "check_nodes", lambda *_: unfit)
    monkeypatch.setattr(bad_nodes, "rank_environment", lambda folder: {})
    call.folder.__dict__["run"] = SimpleNamespace(device="cpu")
    before = len(call.entries)
    if blamed:
        with pytest.raises(Requeued):
            bad_nodes.require_health(call, call.payload.attempt(1))
    else:
        bad_nodes.require_health(call, call.payload.attempt(1))
    refusals = [entry.bad_nodes for entry in call.entries[before:] if entry.event == "unhealthy"]
    assert refusals == ([("n1",)] if blamed else [])


def test_a_bad_node_takes_one_spare_and_no_more(spares):
    spares.site._all, spares.site.spares = ["n1", "n2", "n3", "n4", "n5"], ["n3", "n4", "n5"]
    assert bad_nodes.take_spares(spares, {"n1"})
    assert (spares.site.nodes, spares.site.spares) == (["n2", "n3"], ["n4", "n5"])


def acted(call, *nodes):
    """After a node's failure, of which srun or SLURM has named these."""
    failure = Failure("node_failure", "node failure", nodes=nodes)
    supervisor._act(call, 1, call.payload.attempt(1), Watched(Ended(returncode=1), None), failure)


def test_without_a_spare_a_dead_node_sends_the_job_back(call):
    with pytest.raises(Requeued):
        acted(call, "n2")
    with pytest.raises(Requeued):
        acted(call, "n[2-3]")  # as srun writes several: of these none is known


def test_with_a_spare_the_run_goes_on_at_once(spares):
    acted(spares, "n2")
    assert (spares.site.nodes, spares.told(), spares.healthy) == (["n1", "n3"], [], True)
    assert (spares.entries[-1].action, spares.entries[-1].bad_nodes) == ("resume", ("n2",))
    with pytest.raises(Requeued):
        acted(spares, "n3")


# Which nodes a job is kept away from

HOUR = 3600.0


class Cluster:
    """A partition, the jobs of ours that wait in it, and what SLURM was told."""

    def __init__(self, path, fake_command):
        self.path, self.told = path, path / "told"
        fake_command("sinfo", f"cat {path}/nodes")
        fake_command("squeue", f"echo >>{path}/asked; cat {path}/queue")
        hostnames = "echo $3 | tr , '\\n'"
        fake_command("scontrol", f'case "$1" in show) {hostnames};; *) echo "$@" >>{self.told};; esac')
        self.nodes(n1="idle", n2="idle", n3="idle")
        self.queue()

    def nodes(self, **states):
        files.write_text(self.path / "nodes", "".join(f"{name} {state}\n" for name, state in states.items()))

    def queue(self, *jobs):
        files.write_text(self.path / "queue", "".join(f"{job}|gpu|{excluded}\n" for job, excluded in jobs))

    @property
    def excluded(self):
        """What ExcNodeList was set to, by job."""
        lines = self.told.read_text().splitlines() if self.told.exists() else []
        return {line.split()[1].split("=")[1]: line.split("ExcNodeList=")[1] for line in lines}

    def run(self, name, *entries, nodes=1):
        folder = RunFolder(self.path / "results" / "my" / "runs" / name)
        store = RunStore(self.path / "store" / name)
        files.write_json(folder.path / "launch.json", {"nodes": nodes, "recovery": Recovery().model_dump(mode="json")})
        store.path.mkdir(parents=True, exist_ok=True)
        for entry in entries:
            files.append_line(store.ledger, json.dumps(entry))
        files.link(store.ledger, folder.attempts_link)
        return folder

    def revise(self):
        bad_nodes.revise(self.path / "results")


@pytest.fixture
def cluster(tmp_path, fake_command):
    return Cluster(tmp_path, fake_command)


def called(job="17", excluded=()):
    return {"event": "call", "job": job, "restarts": 0, "excluded": list(excluded), "time": 0.0}


def start(attempt, job="17"):
    return {"event": "start", "attempt": attempt, "job": job, "restarts": attempt - 1, "time": 0.0}


def death(attempt, *nodes, ago=0.1 * HOUR):
    """The end of an attempt whose nodes died so many seconds ago."""
    end = {"event": "end", "attempt": attempt, "cause": "node_failure", "bad_nodes": list(nodes)}
    return end | {"iteration": 0, "outcome": "failed", "time": time.time() - ago}


TWO_DIED = [called(), start(1), death(1, "n1", ago=HOUR), start(2), death(2, "n2"), start(3)]


def test_the_users_list_is_that_of_the_jobs_first_start(cluster):
    entries = events(LEDGER, [called("16", ["n7"]), called("17", ["n3", "n1"]), start(1), death(1, "n1")])
    assert bad_nodes.users_own(entries, "17", "n1,n2,n3") == {"n1", "n3"}


def test_where_an_older_ledger_does_not_say_it_what_was_never_blamed_is_the_users(cluster):
    old = {key: value for key, value in called().items() if key != "excluded"}
    entries = events(LEDGER, [old, start(1), death(1, "n1")])
    assert bad_nodes.users_own(entries, "17", "n1,n3") == {"n3"}
    assert bad_nodes.users_own([], "17", "") == set()


def test_the_users_own_nodes_are_no_others(cluster):
    folder = cluster.run("a")
    entries = events(LEDGER, TWO_DIED)
    assert bad_nodes.avoided(entries, "gpu", folder, set()) == {"n2"}
    assert bad_nodes.avoided(entries, "gpu", folder, {"n2"}) == {"n1"}


def test_a_stranded_job_gets_back_the_nodes_that_recovered(cluster):
    """Of three hosts two died and came back; the third, the supervisor's, died and stays away."""
    cluster.run("a", *TWO_DIED)
    cluster.queue(("17", "n1,n2"))
    cluster.nodes(n1="idle", n2="idle", n3="down*")
    cluster.revise()
    assert cluster.excluded == {"17": "n2"}, "n1, which died first, is left for it"
    log = (cluster.path / "results" / "my" / "logs" / "progress.log").read_text()
    assert "SLURM job 17, which waits, may use n1 again" in log


def test_a_job_that_needs_all_that_is_left_gets_it(cluster):
    cluster.run("a", called(), start(1), death(1, "n1"), start(2), nodes=2)
    cluster.queue(("17", "n1"))
    cluster.revise()
    assert cluster.excluded == {}, "n2 and n3 are enough"
    cluster.nodes(n1="idle", n2="idle", n3="down*")
    cluster.revise()
    assert cluster.excluded == {"17": ""}


def test_after_exclude_hours_a_node_comes_back_and_what_the_user_excluded_stays(cluster):
    cluster.nodes(**{f"n{number}": "idle" for number in range(1, 9)})
    cluster.run(
        "a", called(excluded=["n5"]), start(1), death(1, "n1", ago=25 * HOUR), start(2), death(2, "n2"), start(3)
    )
    cluster.queue(("17", "n1,n2,n5,n6"))
    cluster.revise()
    assert cluster.excluded == {"17": "n2,n5,n6"}, "who has excluded n6 since, wants that"


def test_jobs_of_others_and_running_ones_are_left_alone(cluster):
    cluster.run("a", *TWO_DIED)
    cluster.run("b", called("18"), start(1, "18"), death(1, "n1"), called("19"))
    (cluster.path / "results" / "my" / "runs" / "broken").mkdir(parents=True)
    files.write_text(cluster.path / "results" / "my" / "runs" / "broken" / "attempts.jsonl", "{}\n")
    cluster.nodes(n1="idle", n2="idle", n3="down*")
    cluster.queue(("18", "n1"), ("21", "n1,n2"), ("17", ""))
    cluster.revise()
    assert cluster.excluded == {}


def test_a_job_of_this_number_on_another_cluster_is_another(cluster, monkeypatch):
    folder = cluster.run("a", *TWO_DIED)
    monkeypatch.setattr(queries, "cluster", lambda: "beta")
    claim = {"host": "n1", "pid": 1, "job": "17", "restarts": 2, "cluster": "alpha", "time": 0.0}
    files.write_json(RunStore(folder.attempts_link.resolve().parent).claims / "000003.json", claim)
    cluster.queue(("17", "n1,n2"))
    cluster.revise()
    assert cluster.excluded == {}


def test_slurm_is_asked_now_and_then_and_its_silence_harms_nobody(cluster, monkeypatch, unreachable_slurm_later):
    look = bad_nodes.reviser(cluster.path / "results")
    look()
    look()
    assert (cluster.path / "asked").read_text() == "\n"
    monkeypatch.setattr(bad_nodes, "REVISE_SECONDS", -1.0)
    look()
    assert (cluster.path / "asked").read_text() == "\n\n"
    unreachable_slurm_later()
    look()


@pytest.fixture
def unreachable_slurm_later(fake_command):
    return lambda: fake_command("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")


@pytest.mark.parametrize(
    ("failed", "needed", "users", "avoided"),
    [
        ({}, 3, set(), set()),
        ({"n1": 1}, 2, set(), {"n1"}),  # n2 and n3 are left
        ({"n1": 1}, 3, set(), set()),
        ({"n4": 1}, 2, set(), {"n4"}),  # it is down anyway, and a node is left over
        ({"n4": 1}, 3, set(), {"n4"}),
        ({"n1": 1, "n2": 2}, 1, set(), {"n2"}),  # with both avoided, the death of n3 would leave none
        ({"n2": 1, "n1": 2}, 1, set(), {"n1"}),
        ({"n1": 2, "n2": 2}, 1, set(), {"n1", "n2"}),  # both died at once: n3 is the only one that is known to be well
        ({"n1": 1, "n2": 2, "n3": 3}, 2, set(), {"n3"}),
        ({"n1": 1, "n2": 2, "n3": 3}, 3, set(), set()),
        ({"n1": 1}, 2, {"n2"}, set()),  # a node that the user excluded is left for nobody
        ({"n1": 1}, 1, {"n2"}, {"n1"}),
    ],
)
def test_of_nodes_that_failed_so_many_are_avoided_that_one_more_death_strands_nobody(
    fake_command, failed, needed, users, avoided
):
    fake_command("sinfo", "printf 'n1 idle\\nn2 allocated\\nn3 mixed\\nn4 down*\\nn5 drained\\n'")
    assert bad_nodes.usable("gpu", failed, needed, users) == avoided


def test_where_nodes_can_not_be_asked_about_all_that_failed_are_avoided(unreachable_slurm):
    assert bad_nodes.usable("gpu", {"n1": 1.0}, 2) == {"n1"}


def test_while_snakemake_waits_for_its_jobs_it_looks_at_the_nodes_that_they_avoid(tmp_path, fake_command, monkeypatch):
    fake_command("squeue", "true")
    seen, enough = [], threading.Event()

    def revise(results):
        seen.append(results)
        if len(seen) > 2:
            monkeypatch.setattr(bad_nodes, "REVISE_SECONDS", 3600.0)
            enough.set()

    monkeypatch.setattr(bad_nodes, "REVISE_SECONDS", 0.01)
    monkeypatch.setattr(bad_nodes, "revise", revise)
    bad_nodes.revise_in_background(tmp_path / "results")
    assert enough.wait(60) and set(seen) == {tmp_path / "results"}
