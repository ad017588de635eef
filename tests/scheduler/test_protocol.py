"""What a scheduler must answer: SLURM does, and another one, which only tests have and a supervisor lives with."""

import inspect
import os
import shutil
import subprocess
import sys
import time
import typing
from pathlib import Path

import fake_scheduler
import pytest
from fake_scheduler import VARIABLE, Tower
from pretended_run import LAST, Run

import megaboa
from megaboa.observe.queue import read_queue
from megaboa.observe.status import run_progress
from megaboa.paths import RunFolder
from megaboa.records import Called
from megaboa.run import claims, ledger, stop
from megaboa.run.call import Requeued
from megaboa.scheduler import local, protocol, registry
from megaboa.scheduler.ranks import FORKED, KEEPER

REPOSITORY = Path(__file__).parents[2]

every_scheduler = pytest.mark.parametrize("scheduler", [*registry.SCHEDULERS, Tower()], ids=lambda one: one.name)


@every_scheduler
def test_a_scheduler_answers_every_question(scheduler):
    assert missing(protocol.Scheduler, scheduler) == []


@every_scheduler
def test_its_place_answers_every_question(scheduler):
    place = place_of(scheduler)
    assert missing(protocol.Place, place) == [], place


def test_this_machine_answers_every_question():
    assert missing(protocol.Place, local.Machine) == []


def place_of(scheduler):
    """The class of its places, which `place` is annotated with."""
    answer = typing.get_type_hints(type(scheduler).place)["return"]
    [place] = [kind for kind in typing.get_args(answer) if kind is not type(None)]
    assert place is not protocol.Place, f"{scheduler.name}: annotate `place` with the class that it returns"
    return place


def test_a_scheduler_is_a_module_and_a_line(tmp_path):
    """Here the module is the one of the tests, whose places inherit this machine: no import contract is broken."""
    library = tmp_path / "megaboa"
    shutil.copytree(Path(megaboa.__file__).parent, library, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(fake_scheduler.__file__, library / "scheduler" / "tower.py")
    registered = library / "scheduler" / "registry.py"
    text, one = registered.read_text(), "(Slurm(),)"
    assert one in text
    line = "from megaboa.scheduler.tower import Tower\n"
    registered.write_text(text.replace(one, "(Slurm(), Tower())").replace("\n\nSCHEDULERS", f"\n{line}\nSCHEDULERS"))
    lint = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    done = subprocess.run(
        [*lint, "--config", REPOSITORY / ".importlinter"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stdout + done.stderr


def test_ranks_of_a_job_are_forked_only_by_their_nodes_keeper(tower):
    here = {FORKED: "cpu"}
    assert registry.may_be_forked(here)
    assert not registry.may_be_forked({**here, VARIABLE: "7"})
    assert registry.may_be_forked({**here, VARIABLE: "7", KEEPER: "1"})
    assert not registry.may_be_forked({FORKED: "0"})


def missing(asked, answers):
    """What is asked for and isn't there, or takes other arguments."""
    questions = {name: value for name, value in vars(asked).items() if not name.startswith("_")}
    methods = {name: value for name, value in questions.items() if inspect.isfunction(value)}
    attributes = asked.__annotations__.keys() if not inspect.isclass(answers) else ()
    return [name for name in attributes if not hasattr(answers, name)] + [
        name for name, question in methods.items() if parameters(getattr(answers, name, None)) != parameters(question)
    ]


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"] if function else None


@pytest.fixture
def tower(monkeypatch):
    tower = Tower()
    monkeypatch.setattr(registry, "SCHEDULERS", (tower,))
    return tower


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "starter", "auto")
    return Run(tmp_path, monkeypatch)


def test_a_run_of_another_scheduler_leaves_a_node_that_fell(run, tower, monkeypatch):
    """Its ranks are processes; a node falls under the first attempt, and the job comes back on the other one."""
    monkeypatch.setenv(VARIABLE, "7")
    tower.run("7")
    run.misfortune("step == 4 and attempt == 1 and os.kill(os.getpid(), signal.SIGKILL)")
    tower.down["east"] = time.time() + 60
    with pytest.raises(Requeued, match="east fell"):
        run.train()
    job = tower.job("7")
    assert (job.restarts, job.waits, job.excluded) == (1, True, "east")
    assert shown(run).state == "queued" and claims.describe(claims.last_holder(run.store.claims)).startswith(
        "Tower job 7 (process"
    )

    tower.run("7")
    assert shown(run).state == "running"
    assert run.train().iteration == LAST
    assert run.attempts == [(0, "failed", "node_failure"), (4, "completed", None)]
    starts = ledger.starts(run.entries)
    assert [(start.job, start.restarts, start.nodes) for start in starts] == [("7", 0, ("east",)), ("7", 1, ("west",))]
    assert len([entry for entry in run.entries if isinstance(entry, Called)]) == 1, "nobody called again"


def test_a_job_of_another_scheduler_that_waits_is_cancelled_by_who_stops_its_run(run, tower, monkeypatch):
    monkeypatch.setenv(VARIABLE, "7")
    tower.run("7")
    tower.down["east"] = time.time() + 60
    run.misfortune("sys.exit('bad luck')")
    with pytest.raises(Requeued):
        run.train()
    assert stop.stop(run.store).said == "Tower job 7 was waiting in the queue, and was cancelled"
    assert tower.job("7").has_ended
    assert stop.stop(run.store).said == "Tower job 7 has ended already"


def test_without_its_job_ranks_start_on_this_machine(run, tower):
    assert run.train().iteration == LAST
    assert ledger.starts(run.entries)[0].job is None


def shown(run):
    """As `megaboa status` has it."""
    return run_progress(RunFolder(run.folder.path), queue=read_queue())
