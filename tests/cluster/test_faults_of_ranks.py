"""What can happen to ranks, to their files and to the Snakemake that waits for them: for real, on a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matrix
import pytest
from clone import edit
from faults import AT_ONCE, HIT_AT, NAME, SAVE_INTERVAL, STEPS, Faults
from lab import UID, Lab
from site_clone import SiteClone

from megaboa.paths import RunFolder
from megaboa.run import checkpoints
from megaboa.run.identity import identity_of, store_of
from megaboa.run.watch import ASK_AGAIN_SECONDS
from megaboa.store_paths import RunStore

pytestmark = pytest.mark.slow

PART = "Ranks, files, Snakemake"
COPIED_EVERY = 4
# A layer of 16 GiB.
VAST = (
    f"  vast: {{tokenizer: bpe, config: {{model_type: llama, hidden_size: 64, intermediate_size: {2**25},"
    " num_hidden_layers: 1, num_attention_heads: 4, max_position_embeddings: 128}}\n"
)
RUNS = {
    "quiet": STEPS,
    **dict.fromkeys(
        ("rank", "srun", "save", "stop", "damage", "damage-large", "unread", "driver-term", "driver-kill"),
        f"{STEPS}, {AT_ONCE}",
    ),
    **dict.fromkeys(("copies", "bad-copies"), f"{STEPS}, {AT_ONCE}, checkpoint.local.every: {COPIED_EVERY}"),
    "stand-by": f"{STEPS}, {AT_ONCE}, launch.tasks: node",
    "hang": f"{STEPS}, {AT_ONCE}, recovery.no_progress_minutes: 0.25, resources.spare_nodes: 1",
    "memory": f"{STEPS}, launch.python: limited-python, model: vast",
    "diverges": f"{STEPS}, optimizer.lr: 1.0e+30",
    "disk": f"{STEPS}, recovery.backoff_seconds: 5, recovery.budget: 20",
}
# A Python with an end to its memory: enough for all but a layer of 16 GiB, whose allocation fails for real.
LIMITED_PYTHON = """\
#!{python}
import resource, runpy, sys
import torch
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 4 * 2**30
resource.setrlimit(resource.RLIMIT_AS, (size, size))
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rsplit("/", 1)[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab], small_disk: Path) -> Iterator[Faults]:
    lab = make_lab(memory_mb=32000, shared=[small_disk])
    clone = SiteClone(lab)
    python = clone.path / "limited-python"
    python.write_text(LIMITED_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    found = Faults(lab, clone, {run: values.replace("limited-python", str(python)) for run, values in RUNS.items()})
    config = clone.path / found.config
    edit(config, "models:\n", f"models:\n{VAST}")
    config.write_text(f"{config.read_text()}model: dense\n")
    found.prepare("quiet")
    yield found
    matrix.write(PART, found.rows)


def test_a_rank_is_killed(faults):
    process, start = faults.start_and_wait("rank")
    hit = time.time()
    faults.signal_rank(start["nodes"][1], "KILL")
    faults.finish("rank", process)
    end = faults.ends("rank")[0]
    assert end["cause"] == "killed" and end["action"] == "resume" and "SIGKILL" in end["detail"]
    assert start["nodes"][1] in end["detail"]
    faults.tell_phases("rank", hit)
    faults.record("SIGKILL of one rank", "killed: starts the ranks again in the same allocation", since=hit)


def test_a_rank_is_killed_and_its_hosts_copies_are_gone(faults):
    """Its partner's host has them."""
    process, start = faults.start_and_wait("copies")
    host = start["nodes"][1]
    faults.signal_rank(host, "STOP")  # so that no copy is made while they are removed
    faults.lab.on_node(host, ["rm", "-r", f"/tmp/megaboa-{UID}"], user="root")
    hit = time.time()
    faults.signal_rank(host, "KILL")
    faults.finish("copies", process)
    killed, done = faults.ends("copies")
    assert killed["cause"] == "killed" and faults.clone.starts(NAME, "copies")[1]["resumed_from"] == SAVE_INTERVAL
    # A rank may be hit when a step is done that is to be copied, and before it is.
    assert done["local"] > SAVE_INTERVAL and killed["last_step"] - done["local"] <= COPIED_EVERY
    for each in start["nodes"]:
        faults.lab.on_node(each, ["sh", "-c", f"! ls /tmp/megaboa-{UID}/*"], user="root")
    outcome = "killed: resumes from the partner's copies, which are newer than the checkpoint"
    event = "SIGKILL of one rank, and its host's copies are removed, checkpoint.local.every being 4"
    faults.record(event, outcome, since=hit)


def test_a_rank_is_killed_and_copies_are_damaged(faults):
    """First one host's, of which one is cut and a byte of the other changed; then those of a rank on both."""
    process, start = faults.start_and_wait("bad-copies")
    host = start["nodes"][1]
    faults.signal_rank(host, "STOP")  # so that no copy is made meanwhile
    cut, flipped = faults.newest_copies(host)
    faults.lab.on_node(host, ["truncate", "--size=-1000", cut], user="root")
    faults.flip_byte(host, flipped)
    hit = time.time()
    faults.signal_rank(host, "KILL")
    faults.wait_for_steps("bad-copies", 2, 13)  # 13 to 25: copies of step 24 are newer than checkpoint 20
    again = faults.clone.starts(NAME, "bad-copies")[1]
    faults.signal_rank(again["nodes"][1], "STOP")
    for each in again["nodes"]:
        faults.flip_byte(each, faults.newest_copies(each)[0])
    faults.signal_rank(again["nodes"][1], "KILL")
    faults.finish("bad-copies", process)
    ends, starts = faults.ends("bad-copies"), faults.clone.starts(NAME, "bad-copies")
    assert [end["cause"] for end in ends[:-1]] == ["killed"] * 2, "damage is found before it ends anything"
    assert ends[0]["last_step"] - ends[1]["local"] <= COPIED_EVERY, "the partner's are unchanged"
    assert ends[2].get("local") is None and starts[2]["resumed_from"] == 2 * SAVE_INTERVAL, "the checkpoint"
    said = (faults.store("bad-copies") / "attempts" / "03").glob("rank-*.log")
    assert sum(log.read_text().count("has changed since it was written") for log in said) == 2, "each is tried once"
    outcome = "killed: resumes from the partner's copies, then, where a rank's are damaged on both hosts, a checkpoint"
    event = "SIGKILL of one rank, twice, and copies are cut or a byte is changed"
    faults.record(event, outcome, since=hit)


def test_a_rank_is_killed_while_others_stand_by(faults):
    """The next attempt's ranks are forked by processes that have imported Bridge meanwhile, on each node one."""
    process = faults.start("stand-by")
    hit = faults.kill_parked_rank(faults.park_until_others_stand_by("stand-by"))
    faults.finish("stand-by", process)
    end, attempts = faults.ends("stand-by")[0], faults.store("stand-by") / "attempts"
    assert end["cause"] == "killed" and end["action"] == "resume"
    assert "rank 1 on" in end["detail"] and "SIGKILL" in end["detail"]
    assert faults.was_started_by_what_stood_by("stand-by")
    assert (attempts / "02" / "rank-1.log").exists()
    faults.tell_phases("stand-by", hit)
    outcome = "killed: ranks are forked again in the same allocation"
    faults.record("SIGKILL of one rank, launch.tasks being node", outcome, since=hit)


def test_srun_is_killed(faults):
    """The ranks outlive it, and must not go on beside those of the next attempt."""
    process, start = faults.start_and_wait("srun")
    hit = time.time()
    faults.kill_srun(start["nodes"][0])
    faults.finish("srun", process)
    end, again = faults.ends("srun")[0], faults.clone.starts(NAME, "srun")[1]
    assert end["cause"] == "killed" and "launcher" in end["detail"]
    assert faults.clone.steps(NAME, "srun", 1)[-1]["time"] < again["time"]
    faults.record("SIGKILL of srun", "killed: ends the step, starts the ranks again", since=hit)


def test_a_rank_is_killed_in_the_middle_of_a_save(faults):
    process, start = faults.start_and_wait("save", SAVE_INTERVAL + 1)
    saving = faults.store("save") / "checkpoints" / f"iter_{2 * SAVE_INTERVAL:07d}"
    faults.kill_rank_when_there(start["nodes"][0], saving)
    hit = time.time()
    assert not (saving / "complete.json").exists()
    faults.finish("save", process)
    assert faults.clone.starts(NAME, "save")[1]["resumed_from"] == SAVE_INTERVAL
    faults.record("SIGKILL in the middle of a save", "killed: resumes from the checkpoint before", since=hit)


def test_a_rank_hangs_and_a_spare_takes_over_and_then_another_one_hangs(faults):
    """The first host is replaced at once, in the same job. For the second no spare is left: it is used again, as a host
    on which ranks froze once may be innocent."""
    process, start = faults.start_and_wait("hang")
    (kept, frozen), (spare,) = start["nodes"], start["spares"]
    hit = time.time()
    faults.signal_rank(frozen, "STOP")
    faults.wait_for_steps("hang", 2, HIT_AT)
    faults.signal_rank(spare, "STOP")
    faults.finish("hang", process)
    ends, starts = faults.ends("hang"), faults.clone.starts(NAME, "hang")
    assert [(end["cause"], end["action"]) for end in ends[:-1]] == [("hang", "resume")] * 2
    assert [end["bad_nodes"] for end in ends[:-1]] == [[frozen], [spare]]
    assert [one["nodes"] for one in starts] == [[kept, frozen], [kept, spare], [kept, spare]]
    assert [(one["job"], one["restarts"], one.get("spares", [])) for one in starts[1:]] == [(start["job"], 0, [])] * 2
    for end in ends[:-1]:
        assert "rank 0 waited in" in end["detail"] and "for rank 1, which did not even answer" in end["detail"]
    log = (faults.store("hang") / "attempts" / "01" / "rank-0.log").read_text()
    assert "Current thread" in log and "train.py" in log, "the stacks of the ranks that could still write them"
    troubles = {one.node: one.troubles[-1] for one in faults.remembered("hang")}
    assert (troubles[frozen].what, troubles[frozen].run, troubles[frozen].attempt) == ("hang", f"{NAME}/hang", 1)
    faults.tell_phases("hang", hit)
    outcome = "no progress for 15 s: says who waited for whom in which collective; its rank runs on the spare, in the"
    outcome += " same job; where none is left, the ranks start again on the same hosts"
    faults.record("a rank hangs (SIGSTOP), resources.spare_nodes being 1, and then another one", outcome, since=hit)


def test_a_rank_runs_out_of_memory(faults):
    end = faults.stop("memory")
    assert end["cause"] == "out_of_memory" and end["action"] == "stop", end
    faults.stops("a rank runs out of memory", "out of memory: stops at once and says so")


def test_the_loss_becomes_nan(faults):
    end = faults.stop("diverges")
    assert end["cause"] == "nan" and end["action"] == "stop"
    faults.stops("the loss becomes NaN", "nan: stops at once and says so")


@pytest.mark.parametrize("large", [False, True])
def test_the_newest_checkpoint_is_damaged(faults, large):
    run = "damage-large" if large else "damage"
    process, _ = faults.start_and_wait(run, 2 * SAVE_INTERVAL + 2)
    faults.clone.megaboa("stop", f"{NAME}/{run}")
    newest = faults.stop(run, process)["iteration"]
    folder = faults.store(run) / "checkpoints" / f"iter_{newest:07d}"
    if not (folder / "digests.json").exists():
        pytest.fail("the newest checkpoint has no checksums")
    shard = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as stream:  # in the middle of the tensors: it can be loaded, and is wrong
        stream.seek(shard.stat().st_size // 2)
        stream.write(b"\x00" * 64)
    again, library = time.time(), faults.clone.path / "workflow" / "scripts" / "megaboa" / "run" / "verification.py"
    if large:  # for this library: gigabytes would be read for minutes
        edit(library, "ONE_READER_BYTES = 4 << 30", "ONE_READER_BYTES = 0")
    try:
        faults.finish(run)
    finally:
        if large:
            edit(library, "ONE_READER_BYTES = 0", "ONE_READER_BYTES = 4 << 30")
    distrust = next(entry for entry in faults.clone.ledger(NAME, run) if entry["event"] == "distrust")
    assert distrust["iteration"] == newest and shard.name in distrust["detail"]
    before = (newest - 1) // SAVE_INTERVAL * SAVE_INTERVAL
    begun = [start["resumed_from"] for start in faults.clone.starts(NAME, run)[1:]]
    assert begun == ([newest, before] if large else [before]) and before > 0
    assert "was set aside" in (faults.clone.results(NAME, "logs", "progress.log")).read_text()
    event, outcome = "the newest checkpoint is damaged", "checksums differ: set aside, resumes from the one before"
    if large:
        assert [end["cause"] for end in faults.ends(run)[1:]] == ["damaged_checkpoint", None]
        attempts = RunStore(faults.store(run)).attempts
        assert [one.may_load.read_text() for one in attempts[1:]] == ["", "yes"]
        event = f"{event}, and so large that both hosts read it while ranks start"
    faults.record(event, outcome, jobs=2, since=again)


def test_the_newest_checkpoint_was_saved_badly(faults):
    """Sizes and checksums are those of an empty file: only who loads it notices."""
    process, _ = faults.start_and_wait("unread", 2 * SAVE_INTERVAL + 2)
    faults.clone.megaboa("stop", f"{NAME}/unread")
    newest = faults.stop("unread", process)["iteration"]
    kept = faults.store("unread") / "checkpoints"
    folder = checkpoints.folder(kept, newest)
    max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size).write_bytes(b"")
    for name in (checkpoints.MARKER, checkpoints.DIGESTS):
        (folder / name).unlink()
    checkpoints.mark_complete(kept)
    checkpoints.add_digests(kept, newest)
    assert checkpoints.damage(kept, newest) is None
    again = time.time()
    faults.finish("unread")
    (distrust,) = [entry for entry in faults.clone.ledger(NAME, "unread") if entry["event"] == "distrust"]
    assert distrust["iteration"] == newest and "EOFError" in distrust["detail"] and distrust["unread"]
    assert faults.ends("unread")[1]["cause"] == "damaged_checkpoint"
    starts = faults.clone.starts(NAME, "unread")
    assert [start["resumed_from"] for start in starts[1:]] == [newest, (newest - 1) // SAVE_INTERVAL * SAVE_INTERVAL]
    event = "the newest checkpoint was saved with an empty file, as its checksums say: loading it raises EOFError"
    outcome = "damaged checkpoint: set aside once, resumes from the one before"
    faults.record(event, outcome, jobs=2, since=again)


def test_the_disk_is_full_during_a_save(faults, small_disk):
    """The checkpoints lie on a small file system, which is filled before the second save."""
    folder = RunFolder(faults.clone.results(NAME, "runs", "disk"))
    payload = faults.clone.path / store_of(folder, identity_of(folder)).path
    target = small_disk / "checkpoints"
    for path in (payload, target):
        path.mkdir(parents=True)
    subprocess.run(["chown", "-R", f"{UID}:{UID}", str(target), str(payload.parent)], check=True)
    (payload / "checkpoints").symlink_to(target)
    process, _ = faults.start_and_wait("disk", SAVE_INTERVAL + 1)
    ballast, hit = small_disk / "ballast", time.time()
    with ballast.open("wb") as stream:
        free = os.statvfs(small_disk)
        stream.write(b"\x00" * (free.f_bavail * free.f_frsize - 4096))
    faults.clone.wait(lambda: faults.ends("disk"), 120, "the failure of the save")
    ballast.unlink()
    faults.finish("disk", process)
    end = faults.ends("disk")[0]
    assert end["cause"] == "disk_full" and "No space left" in end["detail"] and end["iteration"] == SAVE_INTERVAL
    faults.record("the disk is full during a save", "disk full: tries again with growing pauses", since=hit)


def test_a_user_stops_one_run_and_the_request_must_be_repeated(faults):
    """SLURM's commands fail where the supervisor tries to pass it on. The file that tells the ranks as well is removed
    while one of them stands still: else they would have ended before the request is repeated."""
    process, start = faults.start_and_wait("stop")
    first = start["nodes"][0]
    faults.signal_rank(first, "STOP")
    faults.lab.break_commands(["squeue", "scancel"], first)
    try:
        said = faults.clone.megaboa("stop", f"{NAME}/stop")
        assert "asked SLURM job" in said
        faults.wait_for_the_word_to_stop("stop")
        time.sleep(ASK_AGAIN_SECONDS + 2)
        assert not faults.has_pending(first, signal.SIGTERM), "nobody has been told"
        RunStore(faults.store("stop")).attempt(1).stop_now.unlink()
    finally:
        faults.lab.mend_commands()
    faults.clone.wait(lambda: faults.has_pending(first, signal.SIGTERM), 120, "the request to save")
    faults.signal_rank(first, "CONT")
    end = faults.stop("stop", process)
    assert end["cause"] == "stopped" and end["iteration"] == end["last_step"] >= HIT_AT
    again = time.time()
    faults.finish("stop")
    assert faults.lost_steps("stop") == 0
    event = "megaboa stop; SLURM's commands fail on the supervisor's host at first, and the file stop-now is lost"
    outcome = "stopped: repeats the request until it succeeds, saves and stops; the next call resumes"
    faults.record(event, outcome, jobs=2, since=again)


def test_snakemake_gets_sigterm(faults):
    process, _ = faults.start_and_wait("driver-term", 5)
    process.send_signal(signal.SIGTERM)
    process.wait(240)
    faults.clone.wait(lambda: faults.ends("driver-term"), 120, "the end of the run")
    faults.finish("driver-term")
    assert [end["outcome"] for end in faults.ends("driver-term")] == ["completed"]
    faults.record("SIGTERM to snakemake, and a new call", "nothing: the job goes on, the new call takes its result")


def test_snakemake_is_killed_and_called_again_while_the_job_lives(faults):
    """A rank stands still meanwhile: however slow this machine is, the second job finds the first one alive."""
    process, start = faults.start_and_wait("driver-kill", 5)
    faults.signal_rank(start["nodes"][0], "STOP")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process = faults.start("driver-kill")
    faults.clone.wait(lambda: len(faults.clone.jobs("driver-kill")) == 2, 120, "the job of the second call")
    faults.signal_rank(start["nodes"][0], "CONT")
    faults.finish("driver-kill", process)
    assert [entry["event"] for entry in faults.clone.ledger(NAME, "driver-kill")] == ["call", "start", "end"]
    assert len(faults.clone.jobs("driver-kill")) == 2, "the second one waited for the first, and found nothing to do"
    outcome = "the new job waits for the old one (afterany) and takes its result"
    faults.record("SIGKILL of snakemake, and a new call", outcome)


def test_the_page_has_these_events(faults):
    matrix.check(PART, faults.rows)
