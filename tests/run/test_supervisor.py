"""megaboa.run.supervisor: whole runs, of a real supervisor and ranks that only pretend to train."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pretended_run import LAST, Run

from megaboa import files
from megaboa.image.runtimes import NO_CONTAINER
from megaboa.paths import RunFolder
from megaboa.records import Code, Image, read_ledger
from megaboa.run import attempt_end, checkpoints, command, identity, ledger, patience, progress, supervisor
from megaboa.run import site as sites
from megaboa.run.call import Interrupted, TrainingFailed
from megaboa.run.inputs import UnusableInputError
from megaboa.scheduler.local import Machine
from megaboa.scheduler.slurm import job_ends
from megaboa.scheduler.slurm.queries import Job


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Run(tmp_path, monkeypatch)


def test_a_run_from_its_first_step_to_its_manifest(run, capsys):
    assert run.train().iteration == LAST
    assert run.attempts == [(0, "completed", None)]
    assert "nothing is trained" not in capsys.readouterr().err
    run.train()
    assert len(run.attempts) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert f"has all its {LAST} steps, so nothing is trained; a changed configuration" in said


def test_the_end_of_a_finished_run_whose_supervisor_was_killed_is_written_by_the_next_call(run):
    told = run.rank.with_name("told")
    run.launch(notify=f'echo "$MEGABOA_STATE" >>{told}')
    run.train()
    run.forget_last_lines(1)
    (checkpoints.folder(run.store.checkpoints, LAST) / checkpoints.DIGESTS).unlink()
    told.unlink()
    assert ledger.open_attempt(run.entries)
    run.train()
    assert run.attempts == [(0, "completed", None)] and "was killed before it could say so" in run.entries[-1].detail
    assert checkpoints.has_digests(run.store.checkpoints, LAST) and told.read_text() == "completed\n"


def test_a_ledger_cut_in_the_middle_blames_no_node_and_spares_the_folders(run, monkeypatch):
    run.misfortune("attempt == 1 and step == 4 and sys.exit('RuntimeError: bad luck')")
    run.launch(actions={"poisoned": "resume"})
    run.train()
    logs = {path: path.read_text() for path in run.store.path.glob("attempts/*/*.log")}
    lines = [json.loads(line) for line in run.store.ledger.read_text().splitlines()]
    begun = lines[1] | {"nodes": ["n1"], "job": "16"}
    run.store.ledger.write_text("".join(json.dumps(line) + "\n" for line in (lines[0], begun)))
    for iteration in (4, 6):
        checkpoints.distrust(run.store.checkpoints, iteration)

    class InAJob(Machine):
        job = Job("17", "RUNNING", nodes="n1")

    monkeypatch.setattr(sites, "here", lambda *asked, **more: InAJob(NO_CONTAINER))
    monkeypatch.setattr(job_ends, "fallen_of", lambda nodes, since: {"n1": "node n1 was booted"})
    run.train()
    lost, done = ledger.ends(run.entries)
    assert (lost.cause, lost.bad_nodes) == ("lost", ()) and "between attempt 1 and 2" in lost.detail
    assert done.attempt == 3 and done.outcome == "completed"
    assert {path: path.read_text() for path in logs} == logs


@pytest.mark.parametrize(("booted", "cause"), [(-60.0, "lost"), (60.0, "node_failure")])
def test_a_node_that_came_up_before_the_last_step_is_not_blamed(run, monkeypatch, booted, cause):
    run.misfortune("step == 2 and time.sleep(0.1)")
    run.train()
    called, begun = run.entries[:2]
    last = files.read_jsonl(run.store.attempt(1).steps)[-1]["time"]
    run.rewrite(called, replace(begun, nodes=("n1",), job="16", time=begun.time - 3600))
    checkpoints.distrust(run.store.checkpoints, LAST)

    class InAJob(Machine):
        job = Job("17", "RUNNING", nodes="n1")

    monkeypatch.setattr(sites, "here", lambda *asked, **more: InAJob(NO_CONTAINER))
    up = last + booted
    monkeypatch.setattr(job_ends, "fallen_of", lambda nodes, since: {"n1": "booted"} if up > since else {})
    run.train()
    assert ledger.ends(run.entries)[0].cause == cause


def test_a_start_names_the_nodes_that_the_job_holds_and_does_not_use(run, monkeypatch):
    class WithAReplaced(Machine):
        def unused(self):
            return ["n2"]

    monkeypatch.setattr(sites, "here", lambda *asked, **more: WithAReplaced(NO_CONTAINER))
    run.train()
    assert ledger.starts(run.entries)[0].unused == ("n2",)


LOADING = """
    if {when}:
        def load_checkpoint(): raise {error}
        load_checkpoint()
"""


def test_a_checkpoint_that_does_not_load_gives_way_to_the_one_before(run):
    run.misfortune("step == 4 and attempt == 1 and os.kill(os.getpid(), signal.SIGKILL)")
    run.launch(budget=0)
    with pytest.raises(TrainingFailed):
        run.train()
    run.misfortune(LOADING.format(when="step is None and begin == 4", error="EOFError"))
    run.launch(budget=5)
    assert run.train().iteration == LAST
    assert run.attempts == [(0, "failed", "killed"), (4, "failed", "damaged_checkpoint"), (2, "completed", None)]
    assert "EOFError (while the checkpoint was read)" in ledger.ends(run.entries)[1].detail


INTERRUPTED = """if (attempt, step) == (1, 5):
        checkpoints.folder(root, 6).mkdir()
        (checkpoints.folder(root, 6) / "half").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 20
    while attempt == 2 and list(root.glob(f"{checkpoints.REMOVED}*")):
        assert time.monotonic() < end
        time.sleep(0.01)"""


def test_what_an_interrupted_save_left_is_deleted_while_ranks_run(run, monkeypatch):
    """The ranks of the second attempt wait for it here."""
    monkeypatch.setattr(checkpoints, "LOOK_SECONDS", 1e9)  # who keeps checkpoints would do it some time
    run.misfortune(INTERRUPTED)
    assert run.train().iteration == LAST
    assert run.attempts == [(0, "failed", "killed"), (4, "completed", None)]


def test_ranks_that_can_load_nothing_stop_the_run_and_lose_no_checkpoint(run):
    run.misfortune("step == 4 and attempt == 1 and os.kill(os.getpid(), signal.SIGKILL)")
    run.launch(budget=0)
    with pytest.raises(TrainingFailed):
        run.train()
    run.misfortune(LOADING.format(when="begin", error="ValueError('an unknown version')"))
    run.launch(budget=5)
    with pytest.raises(TrainingFailed, match="neither checkpoint 4 nor 2 can be loaded"):
        run.train()
    assert [begin for begin, *_ in run.attempts] == [0, 4, 2] and run.entries[-1].action == "stop"
    assert checkpoints.complete_iterations(run.store.checkpoints) == [2, 4]
    run.misfortune("pass")
    run.train()
    assert run.attempts[-1] == (4, "completed", None)


@pytest.fixture
def hiccups(monkeypatch):
    """Every file, folder and link that is made fails for the first time. The paths, without numbers of processes."""
    monkeypatch.setattr(patience, "AGAIN_SECONDS", 0.0)
    failed = []

    def fail_once(path, error):
        name = re.sub(r"\d+\.\d+\.tmp|\d+\.tmp", "tmp", str(path))
        if name not in failed and not name.endswith((".released", "progress.log", "rank.py", "is-there-room.tmp")):
            failed.append(name)
            raise OSError(error, os.strerror(error), name)

    def before(owner, name, is_write, path_of=lambda *given: given[0]):
        real = getattr(owner, name)

        def unlucky(*given, **more):
            if is_write(*given, **more):
                fail_once(path_of(*given), errno.ENOSPC if len(failed) % 2 else errno.ESTALE)
            return real(*given, **more)

        monkeypatch.setattr(owner, name, unlucky)

    def always(*given, **more):
        return True

    before(os, "open", lambda path, flags, *more, **others: flags & (os.O_CREAT | os.O_WRONLY))
    before(Path, "open", lambda path, mode="r", *more, **others: set(mode) & set("wax+"))
    before(os, "mkdir", always)
    before(os, "symlink", always, lambda *given: given[1])
    before(os, "link", always, lambda *given: given[1])
    return failed


def test_every_write_waits_for_the_disk(run, hiccups, monkeypatch):
    run.misfortune("step == 4 and attempt == 1 and os.kill(os.getpid(), signal.SIGKILL)")
    assert run.train().iteration == LAST
    assert run.attempts == [(0, "failed", "killed"), (4, "completed", None)]
    names = {Path(name).name.removeprefix(".") for name in hiccups}
    assert {"attempts.jsonl", "train.json.tmp", "rank-0.log", "end", "digests.json.tmp"} <= names


@pytest.mark.parametrize("reads", ["_has_stopped", "watch_of"])
def test_what_is_read_when_ranks_start_waits_for_the_disk(run, monkeypatch, reads):
    """An exception between the start of the ranks and their watch would leave them without a supervisor."""
    monkeypatch.setattr(patience, "AGAIN_SECONDS", 0.0)
    real, failed = getattr(supervisor, reads), []

    def unlucky(*given):
        if not failed:
            failed.append(reads)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*given)

    monkeypatch.setattr(supervisor, reads, unlucky)
    assert run.train().iteration == LAST and failed == [reads]
    assert run.attempts == [(0, "completed", None)]


NO_INODE = """
if attempt == 1 and step == 4:
        import itertools
        for number in itertools.count():
            (Path({ballast!r}) / str(number)).touch()
"""


def test_a_run_that_gives_up_on_a_full_disk_says_so_in_its_ledger(run, tmp_path, monkeypatch):
    """No file can be made, and the lines of a ledger fit into its last block."""
    disk = tmp_path / "store"
    disk.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=200", "tmpfs", disk], check=True)
    except subprocess.CalledProcessError:
        pytest.skip("this user can't mount a file system")
    try:
        (ballast := disk / "ballast").mkdir()
        monkeypatch.setattr(patience, "AGAIN_SECONDS", 0.1)
        monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.5)
        run.misfortune(NO_INODE.strip().format(ballast=str(ballast)))
        with pytest.raises(OSError, match="No space left on device"):
            run.train()
        gave_up = run.entries[-1]
        assert (gave_up.event, gave_up.cause, ledger.ends(run.entries)[-1].action) == ("gave_up", "disk_full", "resume")
        assert "No space left on device" in gave_up.detail and gave_up.detail.endswith(patience.STILL_FAILED)
        shown = progress.read_progress(run.store.path)
        assert (shown.state, shown.goes_on, shown.event) == ("failed", False, f"stopped: {gave_up.detail}")
        assert logged(run)[-1] == f"stopped: {gave_up.detail}"
        shutil.rmtree(ballast)
        run.misfortune("pass")
        assert run.train().iteration == LAST
        assert run.attempts == [(0, "failed", "disk_full"), (4, "completed", None)]
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def logged(run):
    """The lines of the progress log, without times and the run's name."""
    return [line.split(None, 2)[2] for line in run.folder.progress_log.read_text().splitlines()]


FULL_MEMORY = "sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB')"


@pytest.mark.parametrize(
    ("misfortune", "stop", "reason"),
    [
        (f"step == 3 and {FULL_MEMORY}", TrainingFailed, "stopped at step 3: out of memory: torch.OutOfMemoryError"),
        (
            "step == 3 and (os.kill(os.getppid(), signal.SIGTERM), time.sleep(60))",
            Interrupted,
            "stopped at step 3: cancelled: SIGTERM",
        ),
        (
            "step == 3 and ((Path(given.store) / 'stop').touch(), time.sleep(60))",
            Interrupted,
            "stopped at step 3: stopped: by `megaboa stop`",
        ),
        ("step == 3 and os.kill(os.getpid(), signal.SIGKILL)", TrainingFailed, "stopped at step 3: killed: "),
    ],
)
def test_the_progress_log_says_why_a_run_has_stopped(run, misfortune, stop, reason):
    run.misfortune(misfortune)
    run.launch(budget=0)
    with pytest.raises(stop):
        run.train()
    (said,) = (line for line in logged(run) if line.startswith("stopped"))
    end = ledger.ends(run.entries)[-1]
    assert said.startswith(reason) and end.action == "stop" and end.detail in said


def test_the_progress_log_says_why_a_run_was_not_even_started(run):
    launch = files.read_json(run.folder.file("launch"))
    files.write_json(run.folder.file("launch"), {**launch, "nodes": 2})
    with pytest.raises(UnusableInputError):
        run.train()
    assert logged(run)[-1].startswith("stopped: resources.nodes is 2, but here is 1")


@pytest.mark.parametrize("fails", [True, False])
def test_results_that_are_removed_while_a_run_trains_are_named(run, fails):
    """Removed when the ranks start, which need them, or later."""
    results, asked = run.folder.path.parents[1], run.folder.documents
    remove = f"__import__('shutil').rmtree({str(results)!r})"
    when = "step is None" if fails else "step == 3"
    run.misfortune(f"{when} and ({remove}, {{}}[1] if {fails} else None)")
    with pytest.raises(TrainingFailed) as stopped:
        supervisor.train(RunFolder(run.folder.path, asked))
    assert f"{run.folder.file('run')} was removed while the run was submitted or trained" in str(stopped.value)
    assert "Call again: the results are made again, and the run resumes" in str(stopped.value)
    assert "run.json was removed while" in logged(run)[-1]
    for name, document in asked.items():
        files.write_json(run.folder.file(name), document)
    run.misfortune("pass")
    assert run.train().iteration == LAST
    assert run.attempts == [(0, "failed", "config")] * fails + [(0, "completed", None)]


def test_a_file_system_that_does_not_come_back_ends_the_wait(monkeypatch):
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    said = []
    monkeypatch.setattr(patience, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(OSError, match="No space left"):
        patience.patiently(fail, said.append)
    assert len(said) == 1 and "No space left on device" in said[0]
    with pytest.raises(FileNotFoundError):
        patience.patiently(lambda: Path("/nowhere/at/all").read_text(), said.append)
    assert len(said) == 1


SAVE_FAILED = "ERROR:core:Local worker 0 encountered an error: [Errno 28] No space left on device"


def test_after_a_full_disk_nothing_is_trained_before_a_checkpoint_fits(run, monkeypatch):
    free = iter([100, 100, 100])
    monkeypatch.setattr(patience.shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free, 1 << 40)))
    monkeypatch.setattr(patience, "AGAIN_SECONDS", 0.0)
    run.misfortune(f"attempt == 1 and step == 3 and sys.exit({SAVE_FAILED!r})")
    assert run.train().iteration == LAST
    assert run.attempts == [(0, "failed", "disk_full"), (2, "completed", None)]
    lack = "100 B free, a checkpoint needs 210 B"
    assert f"attempt 1 ended at step 3: disk full: {lack} ([Errno 28] No space left on device)" in logged(run)
    waits = f"waits for the file system, for 10 minutes at most: [Errno 28] No space left on device: {lack}"
    assert logged(run).count(waits) == 1


def test_after_a_full_disk_the_end_is_recorded_before_what_saves_left_is_deleted(run, monkeypatch):
    def left():
        return list(run.store.checkpoints.glob("*iter_0000009*"))

    def close(*given):
        found.append([path.name for path in left()])
        real(*given)

    found, real = [], attempt_end.close
    monkeypatch.setattr(attempt_end, "close", close)
    monkeypatch.setattr(patience.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 if left() else 1 << 40))
    cut_off = f"checkpoints.folder(root, 9).mkdir() or sys.exit({SAVE_FAILED!r})"
    run.misfortune(f"attempt == 1 and step == 3 and ({cut_off})")
    assert run.train().iteration == LAST
    assert found == [["iter_0000009"], []] and "waits for the file system" not in str(logged(run))


def test_while_no_checkpoint_fits_neither_this_call_nor_the_next_one_trains(run, monkeypatch):
    monkeypatch.setattr(patience.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    monkeypatch.setattr(patience, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.1)
    run.misfortune(f"attempt == 1 and step == 3 and sys.exit({SAVE_FAILED!r})")
    for _ in range(2):
        with pytest.raises(OSError, match="100 B free, a checkpoint needs 210 B"):
            run.train()
        assert run.attempts == [(0, "failed", "disk_full")]
        assert (run.entries[-1].event, run.entries[-1].cause) == ("gave_up", "disk_full")


def test_a_pause_is_announced_with_its_reason(run):
    run.launch(backoff_seconds=0.6)
    run.misfortune(f"attempt < 3 and step == 3 and sys.exit({SAVE_FAILED!r})")
    assert run.train().iteration == LAST
    said = "ended at step 3: disk full: [Errno 28] No space left on device"
    assert [line for line in logged(run) if "ended" in line] == [
        f"attempt 1 {said}",
        f"attempt 2 {said}; trying again in 1 s",
    ]


def test_what_a_full_disk_does_to_a_save_is_no_reason(run, monkeypatch):
    monkeypatch.setattr(attempt_end, "full", lambda folder: "[Errno 28] No space left on device")
    run.misfortune("attempt == 1 and step == 3 and sys.exit('RuntimeError: Worker failure: An error is caught')")
    run.train()
    assert ledger.ends(run.entries)[0].detail == "disk full: [Errno 28] No space left on device"


def test_ranks_that_cannot_write_why_they_failed_failed_for_want_of_room(run, monkeypatch):
    real = files.write_bytes

    def write_bytes(path, data, durable=True):
        if len(data) >= patience.PROBE_BYTES:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(path, data, durable)

    monkeypatch.setattr(files, "write_bytes", write_bytes)
    run.misfortune("attempt == 1 and step == 2 and sys.exit(1)")
    run.train()
    assert run.attempts == [(0, "failed", "disk_full"), (2, "completed", None)]
    assert "Disk quota exceeded" in ledger.ends(run.entries)[0].detail


def test_where_there_is_room_the_disk_is_not_to_blame(run):
    run.misfortune("attempt == 1 and step == 2 and sys.exit(1)")
    run.train()
    assert run.attempts[0] == (0, "failed", "crash")
    assert not list(run.store.path.glob("attempts/*/is-there-room*"))


def test_a_supervisor_that_is_killed_alone_goes_on_by_itself(run):
    """In the middle of step 4, with a rank that doesn't end by itself."""
    run.misfortune("attempt == 1 and step == 4 and time.sleep(600)")
    run.launch(notify="true")
    again = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
from megaboa.paths import RunFolder
from megaboa.run import command, lives, supervisor

command.RANK_SCRIPT = Path({str(run.rank)!r})
sys.exit(lives.kept(lambda life: bool(supervisor.train(RunFolder(Path({str(run.folder.path)!r})), life=life)) - 1))
"""
    process = subprocess.Popen([sys.executable, "-c", again], start_new_session=True)
    try:
        while not (run.store.ledger.exists() and 4 in checkpoints.complete_iterations(run.store.checkpoints)):
            assert process.poll() is None
            time.sleep(0.05)
        first = ledger.starts(run.entries)[0]
        os.kill(first.pid, signal.SIGKILL)
        assert process.wait(timeout=300) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert run.attempts == [(0, "interrupted", "lost"), (4, "completed", None)]
    assert [entry.event for entry in run.entries].count("call") == 1, "nobody called again"
    assert ledger.starts(run.entries)[1].pid != first.pid != process.pid


def test_a_request_to_stop_outlives_a_killed_supervisor(run):
    run.misfortune("attempt == 1 and step == 4 and sys.exit(1)")
    run.launch(budget=0)
    with pytest.raises(TrainingFailed):
        run.train()
    run.misfortune("time.sleep(600)")
    run.store.stop.touch()
    with pytest.raises(Interrupted):
        supervisor.train(RunFolder(run.folder.path), life=2)
    assert run.attempts[-1] == (4, "interrupted", "stopped")


def test_the_step_of_a_killed_supervisor_is_ended_before_the_next_begins(run, monkeypatch):
    run.train()
    called, begun = run.entries[:2]
    run.rewrite(called, replace(begun, job="17", restarts=0))
    checkpoints.distrust(run.store.checkpoints, LAST)

    class InAJob(Machine):
        job = Job("17", "RUNNING", nodes="n1")

        def end_left_over(self, logs):
            ended.append((logs, len(run.entries)))

    ended = []
    monkeypatch.setattr(sites, "here", lambda *asked, **more: InAJob(NO_CONTAINER))
    supervisor.train(RunFolder(run.folder.path), life=2)
    assert ended == [(run.store.attempt(1).path, 2)]


@pytest.mark.parametrize(("step", "said"), [(1, "the next call starts again from step 0"), (4, "from the newest")])
def test_who_stops_says_where_the_next_call_begins(run, step, said):
    run.misfortune(f"step == {step} and sys.exit('Unexpected result nan')")
    with pytest.raises(TrainingFailed, match=said):
        run.train()


@pytest.mark.parametrize(("step", "interval", "advised"), [(None, None, False), (1, None, True), (1, 2, False)])
def test_an_interval_is_advised_where_none_is_set_and_steps_were_lost(run, step, interval, advised):
    launch = run.folder.path / "launch.json"
    files.write_json(launch, {**files.read_json(launch), "checkpoint": {"save_interval": interval}})
    run.misfortune(f"step == {step} and sys.exit('Unexpected result nan')")
    with pytest.raises(TrainingFailed) as failed:
        run.train()
    assert "he next call starts again from step 0." in str(failed.value)
    assert ("Set checkpoint.save_interval" in str(failed.value)) is advised
    assert ("No checkpoint was complete" in str(failed.value)) is (step is not None)


def test_an_attempt_that_runs_on_something_else_says_so(run, monkeypatch, capsys):
    run.misfortune("step == 4 and attempt == 1 and os.kill(os.getpid(), signal.SIGKILL)")
    run.launch(budget=0)
    with pytest.raises(TrainingFailed):
        run.train()
    first = ledger.starts(run.entries)[0].ran_on
    packages = files.read_json(run.store.environment(first.environment))["packages"]
    assert packages["pytest"] == pytest.__version__ and first.bridge == packages.get("megatron-bridge")
    assert first.code.digest
    assert "runs on something else" not in capsys.readouterr().err
    # Somebody installs a package between the attempts, where only the ranks' Python finds it.
    package = run.rank.parent / "site" / "tangled_yarn-1.2.dist-info"
    files.write_bytes(package / "METADATA", b"Metadata-Version: 2.1\nName: tangled_yarn\nVersion: 1.2\n")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{os.environ['PYTHONPATH']}")
    run.train()
    said = capsys.readouterr().err
    assert "attempt 2 runs in a different environment from the previous one: tangled-yarn none -> 1.2" in said
    assert [list(kind.attempts) for kind in ledger.ran_on(run.entries)] == [[1], [2]]


def test_changed_code_is_told_and_the_same_twice_is_one_kind(run, monkeypatch, capsys):
    codes = iter([Code(commit="a" * 40, changed=False, digest="1")] * 2 + [Code(digest="23")])
    monkeypatch.setattr(command, "_code", lambda: next(codes))
    run.misfortune("attempt < 3 and step == 2 * attempt and os.kill(os.getpid(), signal.SIGKILL)")
    run.train()
    said = capsys.readouterr().err
    assert "attempt 3 runs in a different environment from the previous one: code aaaaaaaaaaaa -> 23" in said
    assert [list(kind.attempts) for kind in ledger.ran_on(run.entries)] == [[1, 2], [3]]


def test_a_python_that_cannot_be_asked_stops_nothing_by_itself(run):
    found = command.ran_on(RunFolder(run.folder.path), run.store)
    assert found.environment
    run.launch()
    launch = files.read_json(run.folder.path / "launch.json")
    launch["start"]["python"] = "/nowhere/python"
    files.write_json(run.folder.path / "launch.json", launch)
    found = command.ran_on(RunFolder(run.folder.path), run.store)
    assert found.environment is None and found.bridge is None and found.code.digest


def test_of_an_image_its_manifest_knows(run):
    folder = RunFolder(run.folder.path)
    packages = {"megatron-bridge": "0.6.2"}
    image = Image(runtime="apptainer", digest="sha256:1", python="3.12.1", packages=packages, path="/i.sif")
    folder.__dict__["image"] = image
    found = command.ran_on(folder, run.store)
    assert found.bridge == "0.6.2"
    known = files.read_json(run.store.environment(found.environment))
    assert known == {"image": "sha256:1", "python": "3.12.1", "packages": packages}


EDITED = """
if attempt == 1 and step == 3:
    path = Path(given.run) / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seed": 2}))
    sys.exit("RuntimeError: bad luck")
"""


def test_a_run_that_is_edited_while_it_trains_is_trained_as_it_was_submitted(run):
    submitted = RunFolder(run.folder.path, run.folder.documents)
    store = identity.store_of(submitted, identity.identity_of(submitted))
    run.misfortune(EDITED.strip().replace("\n", "\n    "))
    with pytest.raises(TrainingFailed, match=r"was trained as it was submitted .*, and has been changed since"):
        supervisor.train(submitted)
    ends = ledger.ends(read_ledger(store.ledger))
    assert [(end.outcome, end.iteration) for end in ends] == [("failed", 2), ("completed", LAST)]
    assert all(files.read_json(store.attempt(number).asked)["run"] == submitted.document("run") for number in (1, 2))
    assert not run.folder.train_manifest.exists(), "that is of what the run is now"
    run.misfortune("pass")
    run.train()
    assert run.store.path != store.path and run.attempts == [(0, "completed", None)]


GIVEN_AWAY = """
if step == 3:
    (Path(given.store) / "claims" / "000002.json").write_text("{}")
    sys.exit("RuntimeError: the connection is lost")
"""


def test_the_end_of_an_attempt_is_not_written_by_who_has_lost_the_run(run):
    """SLURM had lost sight of the host, and its supervisor lives: the run's next holder has closed the attempt."""
    run.misfortune(GIVEN_AWAY.strip().replace("\n", "\n    "))
    with pytest.raises(Interrupted, match="another process has claimed the run"):
        run.train()
    assert len(ledger.starts(run.entries)) == 1 and not run.attempts
