"""megaboa.run.watch: the reasons to stop ranks, by what their files say: wall time, silence, a loss spike."""

import json
import os
import time
import types
from dataclasses import replace

import pytest

from megaboa import records
from megaboa.config.models.resources import Launch, Recovery
from megaboa.files import write_json
from megaboa.records import AttemptEnd, LossSpike, Step, parse, plain
from megaboa.run import checkpoints, watch
from megaboa.run.resume import Resumption
from megaboa.scheduler.slurm.queries import Job
from megaboa.store_paths import AttemptFolder, RunStore

WALL_TIME = 14_400.0


class Run:
    """Steps of a second each, a save every ten steps, whose checkpoints are complete some seconds later."""

    def __init__(self, path, background):
        self.store, self.now = RunStore(path), time.time()
        write_json(self.store.found, {"async_save": background})
        self.entries, self.recovery = [], parse(records.Recovery, Recovery().model_dump(mode="json"), "a test")

    def attempt(self, number, first, last, saves=()):
        events = [
            {"event": "step", "step": step, "time": self.now + step, "seconds": 1.0} for step in range(first, last)
        ]
        events += [{"event": "save", "step": step, "time": self.now + step, "seconds": 0.1} for step in saves]
        steps = self.store.attempt(number).steps
        steps.parent.mkdir(parents=True, exist_ok=True)
        steps.write_text("".join(json.dumps(event) + "\n" for event in events))

    def checkpoint(self, step, took):
        folder = checkpoints.folder(self.store.checkpoints, step)
        folder.mkdir(parents=True)
        (folder / checkpoints.LAST_WRITTEN).touch()
        checkpoints.mark_complete(self.store.checkpoints)
        marker = folder / checkpoints.MARKER
        assert json.loads(marker.read_text())["time"] == pytest.approx(time.time(), abs=60)
        write_json(marker, json.loads(marker.read_text()) | {"time": self.now + step + took})

    def asked(self, left):
        """Whether ranks are asked to save when so many seconds of the wall time are left, and why."""
        end = time.time() + left
        site = types.SimpleNamespace(
            deadline=lambda: end, now=time.time, job=Job("17", "RUNNING", start=end - WALL_TIME)
        )
        facts = {"payload": self.store, "recovery": self.recovery, "entries": self.entries}
        reason = watch._reason_to_stop(types.SimpleNamespace(site=site, **facts), self.store.attempt(1))
        return reason[1] if reason else None


@pytest.fixture(params=[True, False], ids=["background", "foreground"])
def run(request, tmp_path):
    return Run(tmp_path, request.param)


@pytest.fixture
def background(tmp_path):
    return Run(tmp_path, True)


def test_before_anything_is_measured_and_after_links_without_their_save(run):
    run.attempt(1, 1, 30)
    assert not run.asked(left=310.0) and "no save has been measured yet" in run.asked(left=290.0)
    run.entries = [AttemptEnd(attempt=1, cause="time_limit", iteration=10, last_step=25)]
    assert not run.asked(left=610.0) and run.asked(left=590.0)


def test_a_save_in_the_background_takes_until_its_checkpoint_is_complete(background):
    background.attempt(1, 1, 30, saves=(10, 20))
    for step, took in ((10, 400.0), (20, 100.0)):
        background.checkpoint(step, took)
    assert not background.asked(left=2.5 * 400 + 40)
    assert "a save took 400 s at most" in background.asked(left=2.5 * 400 + 20)


def test_a_step_that_was_done_again_was_saved_by_the_later_attempt(background):
    background.attempt(1, 1, 30)
    background.now += 5000
    background.attempt(2, 5, 30)
    background.checkpoint(10, 60.0)
    assert not background.asked(left=200.0) and "a save took 60 s at most" in background.asked(left=170.0)


def test_a_checkpoint_from_before_times_were_written_down_is_no_measurement(background):
    background.attempt(1, 1, 30)
    background.checkpoint(10, 60.0)
    marker = checkpoints.folder(background.store.checkpoints, 10) / checkpoints.MARKER
    write_json(marker, {"iteration": 10, "files": {"and": 1, "another": 2, "size": 3}})
    assert "no save has been measured yet" in background.asked(left=290.0)


def test_the_user_can_say_how_long_before(run):
    run.attempt(1, 1, 30)
    run.recovery = replace(run.recovery, lead_minutes=20.0)
    assert not run.asked(left=1210.0) and run.asked(left=1190.0)
    older = plain(run.recovery)
    del older["lead_minutes"]  # a run that was planned before there was such a key
    run.recovery = parse(records.Recovery, older, "a test")
    assert not run.asked(left=310.0)


def test_a_hang_is_told_by_a_watch_of_ones_own(run, monkeypatch):
    """Whatever the clocks of the file server and of the hosts show."""
    run.recovery = replace(run.recovery, no_progress_minutes=5.0, start_minutes=60.0)
    resumption = Resumption(types.SimpleNamespace(launch=records.LaunchSpec()), run.store, print)
    site = types.SimpleNamespace(job=None)
    folder = types.SimpleNamespace(run=types.SimpleNamespace(device="cpu"), launch=launched())
    facts = {"payload": run.store, "recovery": run.recovery, "resumption": resumption, "site": site, "folder": folder}
    began, target = time.monotonic(), run.store.attempt(1)
    target.path.mkdir(parents=True)
    silence = watch.watch_of(types.SimpleNamespace(signals=None, say=print, **facts), target).silence

    def after(minutes):
        monkeypatch.setattr(time, "monotonic", lambda: began + 60 * minutes)
        return silence()

    assert after(50) == (pytest.approx(3000, abs=30), 3600)
    run.attempt(1, 1, 3)
    for clock in (time.time() - 600, time.time() + 600):
        os.utime(target.steps, (clock, clock))
        assert after(51) == (0.0, 300)
        assert after(54) == (pytest.approx(180.0), 300)
    assert after(57) == (pytest.approx(360.0), 300)


# Loss spikes

SETTINGS = LossSpike(factor=2.0, window=10, patience=3, limit=3)


def steps(losses, first=1):
    return [Step(step=number, loss=loss) for number, loss in enumerate(losses, start=first)]


CALM = [3.0, 3.1, 2.9, 3.0, 3.2, 2.8, 3.0, 3.1, 2.9, 3.0]


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([*CALM, 7.0, 8.0, 9.0], (11, 13)),
        ([*CALM, 7.0, float("inf"), 9.0], (11, 13)),
        ([*CALM, 7.0, 8.0], None),  # not yet
        ([*CALM, 7.0, 3.0, 9.0], None),  # one calm step between
        ([*CALM, 7.0, 8.0, 9.0, 3.0], (11, 13)),  # over before somebody looked
        ([*CALM, 7.0, 8.0, 9.0, 3.0, *CALM, 9.0, 9.0, 9.0], (11, 13)),  # the first of two
        ([*CALM, 7.0, 8.0, 9.0, 9.0], (11, 14)),
        ([*CALM, 6.0, 6.0, 6.0], None),  # twice the median is no spike, more is
        ([*CALM, 6.01, 6.01, 6.01], (11, 13)),
        ([*CALM, 7.0, float("nan"), 9.0], None),  # has a cause of its own
        ([*CALM[1:], 7.0, 8.0, 9.0], None),  # too few steps to compare with
        ([], None),
    ],
)
def test_a_spike_is_several_high_losses_in_a_row(losses, found):
    assert watch.find_spike(steps(losses), SETTINGS) == found


def test_only_the_window_before_it_is_compared():
    assert watch.find_spike(steps([100.0] * 50 + CALM + [7.0, 8.0, 9.0]), SETTINGS) == (61, 63)
    # Seven times as high, but slowly.
    assert watch.find_spike(steps([1.04**step for step in range(50)]), SETTINGS) is None


def test_steps_without_a_loss_are_left_out():
    events = steps([*CALM, 7.0, 8.0, 9.0])
    events.insert(11, Step(step=99))
    assert watch.find_spike(events, SETTINGS) == (11, 13)


def test_steps_keep_their_numbers_after_a_resumption():
    assert watch.find_spike(steps([*CALM, 7.0, 8.0, 9.0], first=501), SETTINGS) == (511, 513)


def launched(**start):
    return records.LaunchSpec(
        nodes=2, gpus_per_node=2, start=parse(records.Start, Launch().model_dump() | start, "a test")
    )


def test_a_node_on_which_nccl_takes_another_network_ends_the_attempt(tmp_path):
    said, target = [], AttemptFolder(tmp_path / "01")
    folder = types.SimpleNamespace(
        run=types.SimpleNamespace(device="cuda", world_size=4), launch=launched(network="efa")
    )
    target.path.mkdir()
    call = types.SimpleNamespace(folder=folder, say=said.append)

    def taken(names, number=1):
        now = AttemptFolder(target.path.with_name(f"{number:02d}"))
        now.path.mkdir(exist_ok=True)
        for rank, name in names.items():
            now.log(rank).write_text(f"n:1:1 [0] NCCL INFO Using network {name}\n")
        return watch.TakenNetwork(call, now).problem()

    assert taken({0: "Libfabric", 1: "Socket"}) is None and not said, "rank 1 is another GPU of the first node"
    assert taken({2: "Libfabric"}) is None and "NCCL takes the network Libfabric" in said[0]
    cause, evidence = taken({2: "Socket"})
    assert cause == "wrong_network" and "launch.network is efa, and NCCL takes Socket on the node of rank 2" in evidence
    assert taken({2: "Socket"}, number=2), "the first one ended before its first step"
    target.steps.write_text(json.dumps(plain(Step(step=1, loss=1.0))) + "\n")
    assert taken({2: "Socket"}, number=3) is None


def test_a_network_that_nccl_does_not_name_is_not_looked_for_for_ever(tmp_path, monkeypatch):
    """A site may have NCCL write elsewhere."""
    monkeypatch.delenv("NCCL_DEBUG_SUBSYS", raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/tmp/nccl.%h")
    said, target = [], AttemptFolder(tmp_path / "01")
    folder = types.SimpleNamespace(
        run=types.SimpleNamespace(device="cuda", world_size=4), launch=launched(network="efa")
    )
    target.path.mkdir()
    taken = watch.TakenNetwork(types.SimpleNamespace(folder=folder, say=said.append), target)
    for rank in (0, 2):
        target.log(rank).write_text("no word of it\n")
    monkeypatch.setattr(watch, "UNNAMED_SECONDS", 0.0)
    assert taken.problem() is None and not said, "NCCL names it before the first step, which may take an hour"
    target.steps.write_text(json.dumps(plain(Step(step=1, loss=1.0))) + "\n")
    assert taken.problem() is None and taken.problem() is None
    [warning] = said
    assert "launch.network: efa could not be checked" in warning
    assert warning.endswith("hasn't said which network it takes: this site or launch.environment sets NCCL_DEBUG_FILE")
    target.log(0).unlink()
    target.log(0).mkdir()
    assert taken.problem() is None and len(said) == 1, "no log is read any more"
