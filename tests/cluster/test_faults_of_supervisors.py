"""What can happen to the supervisor, and to what it writes: each for real, on a real cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matrix
import pytest
from faults import AT_ONCE, NAME, ONE_HOST, PAGE, SAVE_INTERVAL, STEPS, WAIT, Faults, fill
from lab import Lab
from site_clone import SiteClone

pytestmark = pytest.mark.slow

PART = "Supervisors"
HANG_MINUTES, STILL = 0.25, 20
HALF_A_LINE = 100  # bytes of an attempt's end, which has a few hundred
LAST = "iter_0000060"
RUNS = {
    "quiet": STEPS,
    **dict.fromkeys(("killed", "marker", "end-line", "no-end"), f"{STEPS}, {AT_ONCE}"),
    "still": f"{STEPS}, {AT_ONCE}, recovery.no_progress_minutes: {HANG_MINUTES}",
    "full": f"{STEPS}, recovery.backoff_seconds: 1, recovery.budget: 20",
}


def leave_room(ledger: Path, size: int) -> int:
    """Let so many bytes be left in its last page: what a line needs beyond them is refused by a full disk. Returns how
    long it is now."""
    with ledger.open("a") as lines:
        lines.write(" " * ((-(lines.tell() + 1 + size)) % PAGE) + "\n")
        return lines.tell()


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab], small_disk: Path) -> Iterator[Faults]:
    lab = make_lab(nodes=2, memory_mb=32000, shared=[small_disk])
    found = Faults(lab, SiteClone(lab), RUNS, ONE_HOST)
    found.prepare("quiet")
    yield found
    matrix.write(PART, found.rows)


def test_the_supervisor_stands_still(faults):
    process, start = faults.start_and_wait("still", 5)
    (host,) = start["nodes"]
    faults.signal_supervisor(host, "STOP")
    time.sleep(STILL)  # a rank that did nothing for so long would be a hang
    faults.signal_supervisor(host, "CONT")
    faults.finish("still", process)
    assert [end["outcome"] for end in faults.ends("still")] == ["completed"]
    event = f"SIGSTOP of the supervisor for {STILL} s, recovery.no_progress_minutes being {60 * HANG_MINUTES:.0f} s"
    faults.record(event, "nothing: the ranks go on")


def test_the_supervisor_is_killed(faults):
    process, start = faults.start_and_wait("killed")
    hit = time.time()
    faults.signal_supervisor(start["nodes"][0], "KILL")
    faults.clone.wait(lambda: len(faults.clone.starts(NAME, "killed")) > 1, WAIT, "its next life")
    faults.finish("killed", process)
    end, again = faults.ends("killed")[0], faults.clone.starts(NAME, "killed")[1]
    assert end["attempt"] == 1 and end["outcome"] == "interrupted"
    assert faults.clone.steps(NAME, "killed", 1)[-1]["time"] < again["time"]
    outcome = "its next life, in the same job, closes the attempt and resumes"
    faults.record("SIGKILL of the supervisor alone", outcome, since=hit)


def test_a_rank_is_killed_between_the_last_step_and_the_marker(faults):
    process, start = faults.start_and_wait("marker", 5)
    saving = faults.store("marker") / "checkpoints" / LAST
    faults.kill_rank_when_there(start["nodes"][0], saving)
    hit = time.time()
    assert not (saving / "complete.json").exists() and faults.clone.last_step(NAME, "marker") == 60
    faults.finish("marker", process)
    assert faults.clone.starts(NAME, "marker")[1]["resumed_from"] == 60 - SAVE_INTERVAL
    outcome = "killed: resumes from the checkpoint before"
    faults.record("SIGKILL of a rank between its last step and the checkpoint's marker", outcome, since=hit)


def test_the_supervisor_and_its_keeper_are_killed_while_the_end_is_written_down(faults, small_disk):
    """The disk takes half of the line, which nobody can finish any more."""
    faults.keep_on(small_disk, "no-end")
    process, start = faults.start_and_wait("no-end", 5)
    (host,) = start["nodes"]
    faults.signal_supervisor(host, "STOP")
    marker = faults.store("no-end") / "checkpoints" / LAST / "complete.json"
    ledger = faults.store("no-end") / "attempts.jsonl"
    faults.clone.wait(lambda: marker.exists() and not faults.ranks(host), WAIT, "the end of the ranks")
    size = leave_room(ledger, HALF_A_LINE)
    ballast = fill(small_disk)
    faults.signal_supervisor(host, "CONT")
    faults.clone.wait(lambda: ledger.stat().st_size > size, WAIT, "half a line")
    faults.kill_supervisor(host)
    half = ledger.read_text().splitlines()[-1]
    assert len(half) == HALF_A_LINE and half.startswith("{") and not faults.ends("no-end")
    ballast.unlink()
    faults.job_ends("no-end")
    faults.snakemake_ends(process, code=1)
    assert not faults.ends("no-end")
    faults.finish("no-end")
    (end,) = faults.ends("no-end")
    assert end["outcome"] == "completed" and "was killed before it could say so" in end["detail"]
    assert half in ledger.read_text().splitlines(), "it stays alone"
    assert len(faults.clone.starts(NAME, "no-end")) == 1
    event = "SIGKILL of the supervisor and its keeper while the end is written: a full disk has taken half of its line"
    outcome = "the next call leaves the half line out, closes the attempt, and trains nothing"
    faults.record(event, outcome)


def test_the_disk_is_full_when_the_end_is_written_down(faults, small_disk):
    faults.keep_on(small_disk, "end-line")
    process, start = faults.start_and_wait("end-line", 5)
    (host,) = start["nodes"]
    faults.signal_supervisor(host, "STOP")
    store = faults.store("end-line")
    marker = store / "checkpoints" / LAST / "complete.json"
    faults.clone.wait(lambda: marker.exists() and not faults.ranks(host), WAIT, "the end of the ranks")
    leave_room(store / "attempts.jsonl", 0)
    ballast = fill(small_disk)
    faults.signal_supervisor(host, "CONT")
    time.sleep(10)  # as long as the disk is full; it is tried every 5 s
    assert not faults.ends("end-line") and faults.supervisor(host)
    ballast.unlink()
    faults.finish("end-line", process)
    assert [end["outcome"] for end in faults.ends("end-line")] == ["completed"]
    faults.record(
        "the disk is full when the end is to be written down", "nothing: it is tried again until it is written"
    )


def test_the_store_has_no_byte_left(faults, small_disk):
    """Checkpoints, logs and ledger: nobody can write down what is wrong."""
    faults.keep_on(small_disk, "full")
    process, start = faults.start_and_wait("full", SAVE_INTERVAL + 1)
    (host,) = start["nodes"]
    ballast, hit = fill(small_disk), time.time()
    faults.clone.wait(lambda: not faults.ranks(host), WAIT, "the end of the ranks")
    time.sleep(15)  # as long as the disk is full
    assert faults.supervisor(host), "the supervisor has given up"
    ballast.unlink()
    faults.finish("full", process)
    causes = [end["cause"] for end in faults.ends("full")[:-1]]
    assert causes and set(causes) == {"disk_full"}, causes
    faults.record("no byte is left where the store is", "disk full: tries again until there is room", since=hit)


def test_the_page_has_these_events(faults):
    matrix.check(PART, faults.rows)
