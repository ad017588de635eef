"""One run from its files to its manifest: claim, attempts, recovery.

The supervisor runs on the host, beside srun, and may be killed at any time: all that it knows is in the store, and its
next life goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megaboa import files
from megaboa.causes import Action, Cause
from megaboa.observe import progress
from megaboa.results import AttemptFolder, RunFolder, RunStore
from megaboa.run import checkpoints, claims, failures, ledger, recovery, spikes
from megaboa.run import site as sites
from megaboa.run.announce import Say, announcer, explain, progress_reporter
from megaboa.run.command import rank_command, rank_environment
from megaboa.run.completion import finished, manifest_of
from megaboa.run.failures import Failure
from megaboa.run.identity import identity_of, store_of
from megaboa.run.inputs import check_data, check_image, check_index, check_nodes, check_weights
from megaboa.run.notify import notify
from megaboa.run.resume import Resumption
from megaboa.run.watch import Signals, Watch, Watched

LONGEST_SEARCH = 3  # times that a job is put back because it was given an avoided node again
BYTES_PER_STEP = 1000  # of steps.jsonl, generously
STEPS_BETWEEN_POLLS = 500  # more than can be done while nobody looks
REQUEUE_SECONDS = 20.0  # of the wall time are kept for SLURM to be told
RESUMES = "The next call goes on from the newest complete checkpoint."


class TrainingFailed(Exception):
    """The run has stopped before its last step; the message is what the user reads."""


class Interrupted(Exception):
    """Somebody asked the run to stop."""


class Requeued(Exception):
    """SLURM starts this job again; until then there is nothing to do."""


@dataclass
class _Call:
    """One life of the supervisor."""

    folder: RunFolder
    payload: RunStore
    site: sites.Site
    signals: Signals
    claim: int
    say: Say
    healthy: bool = False  # the nodes were looked at since ranks ran on them
    began: float = field(default_factory=time.time)

    @property
    def recovery(self) -> dict[str, Any]:
        return self.folder.launch["recovery"]

    @property
    def resumption(self) -> Resumption:
        return Resumption(self.folder, self.payload, self.say)

    @property
    def entries(self) -> list[ledger.Entry]:
        return files.read_jsonl(self.payload.ledger)


def train(folder: RunFolder) -> dict[str, Any]:
    """Bring the run to its last step and write its manifest; every call goes on where the last one ended."""
    identity = identity_of(folder)
    payload = store_of(folder, identity)
    payload.path.mkdir(parents=True, exist_ok=True)
    say = announcer(folder)
    site = sites.here(folder.launch, folder.run["device"], container=sites.container_of(folder))

    def waits(holder: str) -> None:
        say(f"is being trained by {holder}; waiting for it")

    with claims.held(payload.claims, claims.myself(site.job), waits) as claim, Signals() as signals:
        files.write_json(payload.identity, identity)
        payload.ledger.touch()
        files.link(payload.ledger, folder.attempts_link)
        call = _Call(folder, payload, site, signals, claim, say)
        if not finished(folder, payload):
            with _told(call):
                _bring_to_its_end(call)
        if identity_of(RunFolder(folder.path)) != identity:  # read anew
            raise TrainingFailed(f"run {folder.name} was changed while it was trained; call again for what it is now")
        manifest = manifest_of(folder, payload, identity)
        files.write_json(folder.train_manifest, manifest)
        return manifest


def _bring_to_its_end(call: _Call) -> None:
    check_nodes(call.folder, call.site.nodes)
    check_image(call.folder)
    check_data(call.folder)
    check_index(call.folder)
    if not checkpoints.latest(call.payload.checkpoints) and not call.folder.parent_manifest:
        check_weights(call.folder)
    _close_what_was_left_open(call)
    if not _is_a_later_life(call):
        job = call.site.job
        ledger.record(call.payload.ledger, "call", job=job and job.id, restarts=job and job.restarts)
        call.payload.stop.unlink(missing_ok=True)
    while not finished(call.folder, call.payload):
        if call.signals.seen:
            raise Interrupted(call.signals.seen[0])
        _require_claim(call)
        _leave_avoided_nodes(call)
        _attempt(call)


def _is_a_later_life(call: _Call) -> bool:
    """Whether SLURM has started this job again, and nobody called."""
    job = call.site.job
    lives = [entry for entry in call.entries if job and entry["event"] in ("call", "start") and entry["job"] == job.id]
    return job is not None and any(life["restarts"] < job.restarts for life in lives)


def _attempt(call: _Call) -> None:
    """Start the ranks once and watch them to their end; return if the next thing to do is to look again."""
    folder, payload = call.folder, call.payload
    number = ledger.next_attempt(payload.ledger)
    target = payload.attempt(number)
    (target.path / "end").mkdir(parents=True, exist_ok=True)
    checkpoints.remove_unfinished(payload.checkpoints)
    if folder.launch["start"]["health_check"]:
        _require_health(call, target)
    beginning = call.resumption.beginning()
    skipped = ledger.skipped_steps(call.entries)
    world_size, job = folder.run["world_size"], call.site.job
    ledger.record_start(
        payload.ledger,
        number,
        beginning.iteration,
        world_size,
        parent=folder.parent_name if beginning.parent else None,
        job=job and job.id,
        restarts=job and job.restarts,
        nodes=call.site.nodes,
        image=folder.image and folder.image["digest"],
        skipped=skipped,
    )
    where = f" on {len(call.site.nodes)} nodes" if len(call.site.nodes) > 1 else ""
    call.say(f"attempt {number}, {world_size} rank(s){where}, from {beginning}")
    started = time.time()
    command = rank_command(folder, payload, target, call.claim, beginning, skipped)
    try:
        ranks = call.site.start(command, world_size, target.path, rank_environment(folder, target))
        call.healthy = False
        watched = _watch(call, target, started).until_ended(ranks)
    except BaseException as error:
        _close(
            call, number, "failed", Failure("crash", f"the supervisor failed: {type(error).__name__}: {error}"), "stop"
        )
        raise
    if finished(folder, payload):
        _close(call, number, "completed", None, None, str(watched.ended))
        call.resumption.prove_newest()
        call.say(progress.describe(progress.read_progress(payload.path)))
        return
    _act(call, number, target, watched, _why(call, target, watched, started))


def _why(call: _Call, target: AttemptFolder, watched: Watched, started: float) -> Failure:
    """What SLURM says goes before what the ranks say: that they ended is often its doing.

    Also before a signal and the end of the wall time: a preemption brings both.
    """
    if watched.reason and watched.reason not in ("cancelled", "time_limit"):
        return Failure(watched.reason, watched.evidence)
    if interruption := call.site.interruption(started):
        return interruption
    if watched.reason:
        return Failure(watched.reason, watched.evidence)
    tails = failures.read_tails(target.logs.items())
    start = ledger.starts(call.entries)[-1]
    parent = start["parent"]
    failure = failures.classify(watched.ended, tails, len(_steps(target)), 0 if parent else start["resumed_from"])
    if failure.cause == "damaged_checkpoint" and parent:  # it is not ours to set aside
        return Failure("config", f"{parent} can't be loaded: {failure.evidence}", failure.rank)
    return failure


def _act(call: _Call, number: int, target: AttemptFolder, watched: Watched, failure: Failure) -> None:
    """Close the attempt, and go on, leave, or stop, as the settings say."""
    end = _end_entry(call, number, failure)
    can_requeue = call.site.job is not None and call.site.job.can_requeue
    decision = recovery.decide([*call.entries, end], failure.cause, call.recovery, can_requeue)
    if failure.cause == "damaged_checkpoint":
        call.resumption.set_aside_unless_proven(ledger.starts(call.entries)[-1]["resumed_from"], failure.evidence)
    if failure.cause == "loss_spike" and decision.action != "stop":
        _leave_out(call, target)
    outcome = (
        "interrupted" if failure.cause in ("cancelled", "stopped", "preempted", "time_limit", "requeued") else "failed"
    )
    shown = Failure("poisoned", f"{decision.why}: {failure.evidence}", failure.rank) if decision.poisoned else failure
    _close(call, number, outcome, shown, decision.action)
    if decision.action == "resume":
        call.say(f"attempt {number} ended at step {end['last_step'] or end['iteration']}: {failure}")
        _pause(call, decision.pause)
        _require_health(call, target)
    elif decision.action == "requeue":
        _leave(call, str(failure))
    elif failure.cause in ("cancelled", "stopped"):
        if failure.cause == "stopped":  # nobody is in a hurry
            call.resumption.prove_newest()
        raise Interrupted(failure.evidence)
    else:
        text = explain(call.folder, target, watched.ended, f"{failure}; {decision.why}", RESUMES, failure.rank)
        raise TrainingFailed(text)


def _require_claim(call: _Call) -> None:
    """A host that SLURM has lost sight of may live on: its supervisor must leave the run to its next holder."""
    if claims.newest(call.payload.claims) > call.claim:
        raise Interrupted("the run was given to somebody else")


def _leave(call: _Call, why: str) -> None:
    """Give the nodes back, and be started on others."""
    launch = call.folder.launch
    avoided = ledger.avoided_nodes(call.entries, time.time(), call.recovery["exclude_hours"])
    if avoided and call.site.job:
        avoided = sites.usable(call.site.job.partition, avoided, launch["nodes"])
    _require_claim(call)
    kept_away = f", without {', '.join(sorted(avoided))}" if avoided else ""
    call.say(f"goes back into the queue{kept_away}: {why}")
    if not call.site.requeue(avoided):
        raise TrainingFailed(
            f"run {call.folder.name}: {why}, and SLURM did not put the job back into the queue. {RESUMES}"
        )
    raise Requeued(why)


def _leave_avoided_nodes(call: _Call) -> None:
    """SLURM may give us a node again that failed under this run."""
    job = call.site.job
    if job is None or not job.can_requeue or ledger.left_in_a_row(call.entries) >= LONGEST_SEARCH:
        return
    avoided = ledger.avoided_nodes(call.entries, time.time(), call.recovery["exclude_hours"])
    again = avoided.intersection(call.site.nodes)
    if again and sites.usable(job.partition, avoided, call.folder.launch["nodes"]):
        ledger.record(call.payload.ledger, "left", nodes=sorted(again))
        _leave(call, f"{', '.join(sorted(again))} failed under this run not long ago")


def _require_health(call: _Call, target: AttemptFolder) -> None:
    """Look at the nodes; a bad one sends the job to others."""
    if call.signals.seen or call.healthy:
        return
    began = time.time()
    problems = call.site.check(target.health, rank_environment(call.folder))
    call.healthy = True
    if not problems or call.signals.seen:
        return
    if interruption := call.site.interruption(began):  # then the check was ended, and no node is to blame
        if interruption.cause == "cancelled":
            raise Interrupted(interruption.evidence)
        _leave(call, str(interruption))
    if 1 < len(problems) == len(call.site.nodes):  # the network between them, and other nodes would not be better
        call.say(f"every node fails the health check, so that none is blamed: {next(iter(problems.values()))[0]}")
        return
    text = "; ".join(f"{node}: {', '.join(found)}" for node, found in sorted(problems.items()))
    call.say(f"unhealthy: {text}")
    ledger.record(call.payload.ledger, "unhealthy", bad_nodes=sorted(problems), detail=text)
    tried = ledger.failures_in_a_row(call.entries)
    if call.site.job is None or tried > call.recovery["budget"]:
        raise TrainingFailed(f"run {call.folder.name}: the health check found {text}. {RESUMES}")
    _leave(call, f"the health check found {text}")


def _close_what_was_left_open(call: _Call) -> None:
    """An earlier life was killed before it could write its end; say what SLURM knows of that."""
    start = ledger.open_attempt(call.entries)
    if start is None:
        return
    failure = Failure("lost", f"the supervisor (process {start['pid']} on host {start['host']}) was killed")
    job = call.site.job
    if job and start.get("nodes"):
        bad = sites.fallen_of(start["nodes"], start["time"])
        if bad:
            failure = Failure("node_failure", "; ".join(bad.values()), nodes=tuple(bad))
        elif start.get("job") == job.id:
            failure = Failure("requeued", "the job was put back into the queue")
    _close(call, start["attempt"], "interrupted", failure, "resume")


def _close(
    call: _Call, number: int, outcome: ledger.Outcome, failure: Failure | None, action: Action | None, detail: str = ""
) -> None:
    end = _end_entry(call, number, failure)
    ledger.record_end(
        call.payload.ledger,
        number,
        outcome,
        end["iteration"],
        str(failure) if failure else detail,
        cause=failure.cause if failure else None,
        action=action,
        bad_nodes=end["bad_nodes"],
        first_step=end["first_step"],
        last_step=end["last_step"],
        rank=failure.rank if failure else None,
    )


def _end_entry(call: _Call, number: int, failure: Failure | None) -> ledger.Entry:
    steps = _steps(call.payload.attempt(number))
    return {
        "event": "end",
        "time": time.time(),
        "attempt": number,
        "outcome": "failed",
        "cause": failure.cause if failure else None,
        "bad_nodes": list(failure.nodes) if failure else [],
        "first_step": steps[0]["step"] if steps else None,
        "last_step": steps[-1]["step"] if steps else None,
        "iteration": checkpoints.latest(call.payload.checkpoints),
    }


def _watch(call: _Call, target: AttemptFolder, started: float) -> Watch:
    report = progress_reporter(call.payload, call.say)
    keep = checkpoints.keeper(call.payload.checkpoints, call.resumption.verifies, **call.resumption.retention)

    def silence() -> tuple[float, float]:
        if not progress.has_steps(target):
            return time.time() - started, 60 * call.recovery["start_minutes"]
        return time.time() - target.steps.stat().st_mtime, 60 * call.recovery["no_progress_minutes"]

    def each_poll() -> None:
        report()
        keep()

    return Watch(
        call.signals,
        silence,
        lambda reason: _patience(call, reason),
        lambda: _reason_to_stop(call, target),
        each_poll,
    )


def _reason_to_stop(call: _Call, target: AttemptFolder) -> tuple[Any, str] | None:
    if call.payload.stop.exists():
        return "stopped", "the user asked for it"
    if spike := _spike(call, target):
        return "loss_spike", f"the loss of steps {spike[0]} to {spike[1]} is far above what it was"
    end = call.site.deadline()
    if end is None:
        return None
    job = call.site.job
    left, wall_time = end - time.time(), end - (job.start if job and job.start else call.began)
    if left > wall_time / 2:  # no lead is longer, and files need not be read
        return None
    save = None if _saves_in_background(call) else progress.slowest_save(call.payload)
    if left > recovery.lead_seconds(save, progress.seconds_per_step(target), wall_time):
        return None
    measured = f"a save took {save:.0f} s at most" if save is not None else "no save has been measured yet"
    return "time_limit", f"{max(left, 0):.0f} s of the wall time are left, {measured}"


def _saves_in_background(call: _Call) -> bool:
    """As the ranks found it: by default it depends on what is installed where they run."""
    return call.payload.found.exists() and bool(files.read_json(call.payload.found).get("async_save"))


def _patience(call: _Call, reason: Cause) -> float:
    """Seconds that ranks are given to save: at the end of the wall time all that is left of it."""
    end = call.site.deadline()
    if reason != "time_limit" or end is None:
        return call.recovery["stop_seconds"]
    return max(end - time.time() - REQUEUE_SECONDS, 0.0)


def _spike(call: _Call, target: AttemptFolder) -> tuple[int, int] | None:
    settings = call.recovery["loss_spike"]
    if not settings:
        return None
    size = BYTES_PER_STEP * (settings["window"] + settings["patience"] + STEPS_BETWEEN_POLLS)
    recent = [event for event in progress.read_tail(target.steps, size) if event["event"] == "step"]
    return spikes.find(recent, settings)


def _leave_out(call: _Call, target: AttemptFolder) -> None:
    """Go back to the checkpoint before a spike, and leave its batches out from now on."""
    found = _spike(call, target)
    if found is None:
        return
    ledger.record(call.payload.ledger, "skip", steps=list(found))
    for iteration in checkpoints.complete_iterations(call.payload.checkpoints):
        if iteration >= found[0]:
            call.resumption.set_aside(iteration, f"a loss spike began at step {found[0]}")
    call.say(f"leaves out the batches of steps {found[0]} to {found[1]}")


def _steps(target: AttemptFolder) -> list[dict[str, Any]]:
    return [event for event in files.read_jsonl(target.steps) if event["event"] == "step"]


@contextlib.contextmanager
def _told(call: _Call) -> Iterator[None]:
    """The user hears of the run's end, and of a failure that nobody but them can mend."""
    try:
        yield
    except (Interrupted, Requeued):
        raise
    except Exception as failure:
        _tell_the_end(call, "failed", str(failure))
        raise
    _tell_the_end(call, "completed", "")


def _tell_the_end(call: _Call, state: str, detail: str) -> None:
    folder = call.folder
    facts = {"run": folder.name, "experiment": folder.experiment, "state": state, "detail": detail}
    if problem := notify(call.recovery["notify"], **facts):
        call.say(problem)


def _pause(call: _Call, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not call.signals.seen:
        time.sleep(0.2)
