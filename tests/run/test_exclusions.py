"""megaboa.run.exclusions: which nodes a job is kept away from, and who gives them back when its supervisor is dead."""

import json
import time

import pytest

from megaboa import files
from megaboa.config.models.resources import Recovery
from megaboa.launch import slurm
from megaboa.paths import RunFolder, RunStore
from megaboa.records import LEDGER, events
from megaboa.run import exclusions

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
        exclusions.revise(self.path / "results")


@pytest.fixture
def cluster(tmp_path, fake_command):
    return Cluster(tmp_path, fake_command)


def call(job="17", excluded=()):
    return {"event": "call", "job": job, "restarts": 0, "excluded": list(excluded), "time": 0.0}


def start(attempt, job="17"):
    return {"event": "start", "attempt": attempt, "job": job, "restarts": attempt - 1, "time": 0.0}


def death(attempt, *nodes, ago=0.1 * HOUR):
    """The end of an attempt whose nodes died so many seconds ago."""
    end = {"event": "end", "attempt": attempt, "cause": "node_failure", "bad_nodes": list(nodes)}
    return end | {"iteration": 0, "outcome": "failed", "time": time.time() - ago}


TWO_DIED = [call(), start(1), death(1, "n1", ago=HOUR), start(2), death(2, "n2"), start(3)]


def test_the_users_list_is_that_of_the_jobs_first_start(cluster):
    entries = events(LEDGER, [call("16", ["n7"]), call("17", ["n3", "n1"]), start(1), death(1, "n1")])
    assert exclusions.users_own(entries, "17", "n1,n2,n3") == {"n1", "n3"}


def test_where_an_older_ledger_does_not_say_it_what_was_never_blamed_is_the_users(cluster):
    old = {key: value for key, value in call().items() if key != "excluded"}
    entries = events(LEDGER, [old, start(1), death(1, "n1")])
    assert exclusions.users_own(entries, "17", "n1,n3") == {"n3"}
    assert exclusions.users_own([], "17", "") == set()


def test_the_users_own_nodes_are_no_others(cluster):
    folder = cluster.run("a")
    entries = events(LEDGER, TWO_DIED)
    assert exclusions.avoided(entries, "gpu", folder, set()) == {"n2"}
    assert exclusions.avoided(entries, "gpu", folder, {"n2"}) == {"n1"}


def test_a_stranded_job_gets_back_the_nodes_that_recovered(cluster):
    """Of three hosts two died and came back; the third, the supervisor's, died and stays away."""
    cluster.run("a", *TWO_DIED)
    cluster.queue(("17", "n1,n2"))
    cluster.nodes(n1="idle", n2="idle", n3="down*")
    cluster.revise()
    assert cluster.excluded == {"17": "n2"}, "n1, which died first, is left for it"
    log = (cluster.path / "results" / "my" / "logs" / "progress.log").read_text()
    assert "SLURM job 17, which waits, may have n1 again" in log


def test_a_job_that_needs_all_that_is_left_gets_it(cluster):
    cluster.run("a", call(), start(1), death(1, "n1"), start(2), nodes=2)
    cluster.queue(("17", "n1"))
    cluster.revise()
    assert cluster.excluded == {}, "n2 and n3 are enough"
    cluster.nodes(n1="idle", n2="idle", n3="down*")
    cluster.revise()
    assert cluster.excluded == {"17": ""}


def test_after_exclude_hours_a_node_comes_back_and_what_the_user_excluded_stays(cluster):
    cluster.nodes(**{f"n{number}": "idle" for number in range(1, 9)})
    cluster.run("a", call(excluded=["n5"]), start(1), death(1, "n1", ago=25 * HOUR), start(2), death(2, "n2"), start(3))
    cluster.queue(("17", "n1,n2,n5,n6"))
    cluster.revise()
    assert cluster.excluded == {"17": "n2,n5,n6"}, "who has excluded n6 since, wants that"


def test_jobs_of_others_and_running_ones_are_left_alone(cluster):
    cluster.run("a", *TWO_DIED)
    cluster.run("b", call("18"), start(1, "18"), death(1, "n1"), call("19"))
    (cluster.path / "results" / "my" / "runs" / "broken").mkdir(parents=True)
    files.write_text(cluster.path / "results" / "my" / "runs" / "broken" / "attempts.jsonl", "{}\n")
    cluster.nodes(n1="idle", n2="idle", n3="down*")
    cluster.queue(("18", "n1"), ("21", "n1,n2"), ("17", ""))
    cluster.revise()
    assert cluster.excluded == {}


def test_a_job_of_this_number_on_another_cluster_is_another(cluster, monkeypatch):
    folder = cluster.run("a", *TWO_DIED)
    monkeypatch.setattr(slurm, "cluster", lambda: "beta")
    claim = {"host": "n1", "pid": 1, "job": "17", "restarts": 2, "cluster": "alpha", "time": 0.0}
    files.write_json(RunStore(folder.attempts_link.resolve().parent).claims / "000003.json", claim)
    cluster.queue(("17", "n1,n2"))
    cluster.revise()
    assert cluster.excluded == {}


def test_slurm_is_asked_now_and_then_and_its_silence_harms_nobody(cluster, monkeypatch, unreachable_slurm_later):
    look = exclusions.reviser(cluster.path / "results")
    look()
    look()
    assert (cluster.path / "asked").read_text() == "\n"
    monkeypatch.setattr(exclusions, "REVISE_SECONDS", -1.0)
    look()
    assert (cluster.path / "asked").read_text() == "\n\n"
    unreachable_slurm_later()
    look()


@pytest.fixture
def unreachable_slurm_later(fake_command):
    return lambda: fake_command("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
