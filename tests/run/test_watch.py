"""megaboa.run.watch with real ranks."""

import errno
import os
import signal
import sys
import time
from dataclasses import replace

import pytest

from megaboa.run import watch
from megaboa.run.lives import Signals
from megaboa.run.watch import Watch
from megaboa.scheduler import local
from megaboa.scheduler.ranks import Ended

# Ranks that end when they are asked to, or don't hear; the stacks of both can be had.
BEGIN = "import os, signal, sys, time; from megaboa.bridge import flight; flight.on_signal()\n"
# Handlers don't print, as they may come in the middle of a print. There is no long sleep, as a signal that comes just
# before it would be handled after it.
SAVES = BEGIN + "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved\\n'), sys.exit(0)))\n"
DEAF = BEGIN + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SLEEP = "def all_reduce():\n    print('ready', flush=True)\n    while True: time.sleep(0.01)\nall_reduce()\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watch, "STACKS_SECONDS", 0.3)


@pytest.fixture
def start(tmp_path):
    begun = []

    def start(code, world_size=2):
        begun.append(local.start([sys.executable, "-c", code], world_size, tmp_path, {}))
        logs = [tmp_path / f"rank-{rank}.log" for rank in range(world_size)]
        deadline = time.monotonic() + 120
        while SLEEP in code and not all("ready" in log.read_text() for log in logs):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return begun[-1]

    yield start
    for ranks in begun:
        ranks.kill()


def watching(signals=None, silence=lambda: (0.0, 60.0), stop=10.0, stop_now=lambda: None, each=lambda: None):
    return Watch(signals or Signals(), silence, lambda reason: stop, stop_now, each)


def silent_since_now(limit=0.3):
    began = time.monotonic()
    return lambda: (time.monotonic() - began, limit)


def returncodes(ranks):
    return [process.returncode for process in ranks.processes]


def at_call(number, action):
    """An action for one of many calls."""
    calls = []

    def call():
        calls.append(None)
        if len(calls) == number:
            action()

    return call


def test_ranks_that_end_by_themselves_need_no_reason(start):
    watched = watching().until_ended(start("pass"))
    assert watched.ended.ok and watched.reason is None


def test_a_failed_rank_is_an_end_without_a_reason_of_ours(start):
    watched = watching().until_ended(start("import os; raise SystemExit(int(os.environ['RANK']) * 3)"))
    assert (watched.ended.rank, watched.ended.returncode, watched.reason) == (1, 3, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_asks_the_ranks_to_save_and_waits_for_them(start, tmp_path, number):
    ranks = start(SAVES + SLEEP)
    with Signals() as signals:
        kill = at_call(3, lambda: os.kill(os.getpid(), number))
        watched = watching(signals, each=kill).until_ended(ranks)
    assert watched.ended.ok and watched.reason == "cancelled" and signal.Signals(number).name in watched.evidence
    assert all("saved" in (tmp_path / f"rank-{rank}.log").read_text() for rank in range(2))


def test_a_second_signal_means_now(start):
    ranks = start(DEAF + SLEEP)
    before = time.monotonic()
    with Signals() as signals:
        kill = at_call(3, lambda: os.kill(os.getpid(), signal.SIGINT))
        again = at_call(10, lambda: os.kill(os.getpid(), signal.SIGINT))
        watched = watching(signals, stop=60, each=lambda: (kill(), again())).until_ended(ranks)
    assert watched.reason == "cancelled" and watched.ended == Ended(returncode=-signal.SIGKILL)
    assert returncodes(ranks) == [-signal.SIGKILL] * 2 and time.monotonic() - before < 10


def test_ranks_that_do_not_hear_are_killed_after_their_time(start):
    ranks = start(DEAF + SLEEP)
    before = time.monotonic()
    watched = watching(stop=0.5, stop_now=lambda: ("time_limit", "120 s are left")).until_ended(ranks)
    took = time.monotonic() - before
    assert (watched.reason, watched.evidence) == ("time_limit", "120 s are left") and watched.ended.killed
    assert returncodes(ranks) == [-signal.SIGKILL] * 2 and 0.5 <= took < 5


@pytest.mark.parametrize("cause", ["stopped", "time_limit", "preempted"])
def test_a_reason_to_stop_lets_the_ranks_save(start, tmp_path, cause):
    ranks = start(SAVES + SLEEP, world_size=1)
    watched = watching(stop_now=lambda: (cause, "because")).until_ended(ranks)
    assert watched.ended.ok and (watched.reason, watched.evidence) == (cause, "because")
    assert "saved" in (tmp_path / "rank-0.log").read_text()


class Unheard:
    """Ranks whom nobody can tell anything at first: slurmctld doesn't answer."""

    def __init__(self, ranks, tries):
        self.poll, self.kill, self.dump = ranks.poll, ranks.kill, ranks.dump
        self.asked, self._ranks, self._tries = 0, ranks, tries

    def ask(self):
        self.asked += 1
        return self.asked > self._tries and self._ranks.ask()


def test_ranks_are_asked_until_they_have_been_told_and_then_no_more(start, tmp_path, monkeypatch):
    monkeypatch.setattr("megaboa.run.watch.ASK_AGAIN_SECONDS", 0.1)
    ranks = Unheard(start(SAVES + SLEEP), tries=3)
    watched = watching(stop_now=lambda: ("time_limit", "120 s are left")).until_ended(ranks)
    assert watched.ended.ok and ranks.asked == 4
    assert all("saved" in (tmp_path / f"rank-{rank}.log").read_text() for rank in range(2))


def test_whom_no_signal_reaches_finds_word_on_the_disk(start, tmp_path):
    code = f"{BEGIN}\nwhile not os.path.exists({str(tmp_path / 'stop-now')!r}): time.sleep(0.02)\nprint('saved')\n"
    ranks, disk_is_full = Unheard(start(code), tries=10_000), iter([OSError(errno.ENOSPC, "No space left on device")])

    def leave_word():
        for error in disk_is_full:
            raise error
        (tmp_path / "stop-now").touch()

    watch = watching(stop=60.0, stop_now=lambda: ("time_limit", "120 s are left"))
    watched = replace(watch, leave_word=leave_word).until_ended(ranks)
    assert watched.ended.ok
    assert all("saved" in (tmp_path / f"rank-{rank}.log").read_text() for rank in range(2))


def test_a_full_disk_while_ranks_save_does_not_end_them(start, tmp_path):
    def fail():
        if stopping:
            raise OSError(errno.ENOSPC, "No space left on device")

    stopping = []
    ranks = start(SAVES.replace("print(", "time.sleep(0.5), print(") + SLEEP)
    stop_now = lambda: stopping.append(None) or ("stopped", "because")  # noqa: E731
    watched = watching(stop_now=stop_now, each=fail).until_ended(ranks)
    assert watched.ended.ok and (tmp_path / "rank-1.log").read_text().endswith("saved\n")


def test_after_a_loss_spike_nothing_is_saved(start, tmp_path):
    ranks = start(SAVES + SLEEP)
    watched = watching(stop_now=lambda: ("loss_spike", "steps 40 to 45")).until_ended(ranks)
    assert watched.reason == "loss_spike" and returncodes(ranks) == [-signal.SIGKILL] * 2
    assert "saved" not in (tmp_path / "rank-0.log").read_text()


def test_ranks_that_do_nothing_leave_their_stacks_and_are_killed(start, tmp_path):
    ranks = start(SAVES + SLEEP)
    watched = watching(silence=silent_since_now()).until_ended(ranks)
    assert watched.reason == "hang" and "no step was done for" in watched.evidence
    assert returncodes(ranks) == [-signal.SIGKILL] * 2
    for rank in range(2):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert "most recent call first" in log and "in all_reduce" in log and "saved" not in log


def test_a_rank_that_is_stopped_hangs_the_others_and_goes_with_them(start, tmp_path):
    ranks = start(SAVES + SLEEP)
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    watched = watching(silence=silent_since_now()).until_ended(ranks)
    assert watched.reason == "hang" and returncodes(ranks) == [-signal.SIGKILL] * 2
    assert "in all_reduce" not in (tmp_path / "rank-0.log").read_text()
    assert "in all_reduce" in (tmp_path / "rank-1.log").read_text()


def test_progress_is_no_hang(start):
    ranks = start(f"{BEGIN}time.sleep(1)")
    watched = watching(silence=lambda: (0.2, 0.3)).until_ended(ranks)
    assert watched.ended.ok and watched.reason is None


def test_a_watcher_that_fails_leaves_no_ranks(start):
    def fail():
        raise RuntimeError("disk")

    ranks = start(DEAF + SLEEP)
    with pytest.raises(RuntimeError, match="disk"):
        watching(each=fail).until_ended(ranks)
    assert returncodes(ranks) == [-signal.SIGKILL] * 2


def test_signals_are_facts_inside_and_what_they_were_outside():
    before = [signal.getsignal(number) for number in Signals.numbers]
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.seen == ["SIGHUP", "SIGTERM"] and signals.first == "SIGHUP"
    assert Signals(["SIGINT", "SIGTERM"]).first == "Ctrl-C (SIGINT)"
    assert [signal.getsignal(number) for number in Signals.numbers] == before
