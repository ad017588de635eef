"""Supervisor of one run, from its files to its manifest: claim, attempts, recovery.

The supervisor runs on the host, outside of the ranks' container, and may be killed at any time: all that it knows is in
the store, and its next life continues from there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megaboa import files
from megaboa.causes import CAUSES
from megaboa.errors import InputError, forbidden
from megaboa.formats import counted
from megaboa.paths import RunFolder
from megaboa.records import (
    AttemptEnd,
    AttemptStart,
    Called,
    GaveUp,
    Identity,
    Kept,
    Outcome,
    Parent,
    Range,
    RanOn,
    TrainRecord,
    line,
    plain,
    read,
    read_ledger,
    write,
)
from megaboa.run import (
    attempt_end,
    bad_nodes,
    checkpoints,
    claims,
    completion,
    ledger,
    node_memory,
    progress,
    recipe_code,
    recovery,
    shared_store,
    trusted_copies,
    unfinished,
    verification,
)
from megaboa.run import site as sites
from megaboa.run.announce import announcer, explain, log_progress, notify
from megaboa.run.bad_nodes import (
    heed_signals,
    leave,
    leave_avoided_nodes,
    leave_too_few_nodes,
    require_claim,
    require_health,
    take_spares,
)
from megaboa.run.call import RESUMES, Call, Interrupted, Requeued, Stopped, TrainingFailed
from megaboa.run.command import changes, rank_command, rank_environment, warm_up
from megaboa.run.command import ran_on as what_runs
from megaboa.run.failures import Failure
from megaboa.run.identity import identity_of, store_of
from megaboa.run.inputs import (
    UnusableInputError,
    check_data,
    check_image,
    check_index,
    check_nodes,
    check_weights,
    removed,
)
from megaboa.run.lives import Signals
from megaboa.run.patience import FULL, STILL_FAILED, lack_of_room, may_pass, patiently
from megaboa.run.resume import Beginning
from megaboa.run.watch import Watch, Watched, leave_out, watch_of
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.ranks import Ranks
from megaboa.store_paths import AttemptFolder, RunStore

GPUS_SECONDS = 60.0  # at a run's end, for reading the last attempt's GPU samples


def train(folder: RunFolder, life: int = 1) -> TrainRecord:
    """Train the run to its last step and write its manifest; every call resumes where the last one left off.

    `life`: above 1 if the keeper has restarted the supervisor.
    """
    try:
        return _train(folder, life)
    except Requeued:  # `leave` has said it
        raise
    except Exception as end:
        if not (isinstance(end, Stopped) and end.noted):
            log_progress(folder, f"stopped: {_reason(folder.name, end)}")
        raise


def _train(folder: RunFolder, life: int) -> TrainRecord:
    _refuse_other_work(folder)
    identity = identity_of(folder)
    payload = store_of(folder, identity)
    say = announcer(folder)
    patiently(lambda: files.make_folder(payload.path), say)
    site = sites.here(folder.launch, folder.run.device, container=sites.container_of(folder.launch, folder.image))

    def waits(holder: str) -> None:
        say(f"is being trained by {holder}; waiting for it")

    def introduce() -> None:
        # A finished run may be a colleague's, and stays as it is.
        files.write_if_changed(payload.identity, files.canonical(plain(identity)), durable=True)
        files.touch(payload.ledger)
        files.link(payload.ledger, folder.attempts_link)

    with contextlib.ExitStack() as held:
        me = claims.myself(site.job)
        claim = patiently(lambda: held.enter_context(claims.held(payload.claims, me, waits)), say)
        signals = held.enter_context(Signals())
        held.callback(site.close)
        patiently(introduce, say)
        call = Call(folder, payload, site, signals, claim, say, life)
        held.callback(call.end_waiting_check)
        if site.job:  # of other runs, whose supervisors may be gone
            bad_nodes.revise_in_background(folder.path.parents[2])
        if completion.finished(folder, payload):
            _close_what_was_left(call)
        else:
            with _told(call):
                _bring_to_its_end(call)
        return _recorded_as_trained(call, identity)


def _refuse_other_work(folder: RunFolder) -> None:
    """Raise TrainingFailed, unless a restart is wanted, where training would start over although work of the run is
    there, or has been lost."""
    if folder.may_restart:
        return
    if left := unfinished.left_by_other_content(folder):
        raise TrainingFailed(unfinished.with_other_content(folder, left))
    if work := unfinished.other_work(folder):
        ways = unfinished.ways(f"--config restart={folder.name}, or megaboa pretrain --restart")
        raise TrainingFailed(f"{unfinished.explain(folder, work)}\n{ways}")
    if gone := unfinished.lost(folder):
        raise TrainingFailed(
            f"run {folder.name} has been trained, and {gone} is gone: put it back, or call with "
            f"--config restart={folder.name} to train it again from {folder.start}"
        )


def _close_what_was_left(call: Call) -> None:
    """Of a run that has all its steps: the job may have ended before the attempt's end was written, or during the
    checksums."""
    folder, payload = call.folder, call.payload
    with _told(call) if ledger.open_attempt(call.entries) else contextlib.nullcontext():
        attempt_end.close_left_open(call)
        verification.record_checksums(call, payload.attempt(payload.newest_attempt))
    call.say(
        f"has all its {progress.last_step(payload)} steps, so nothing is trained; a changed configuration "
        f"trains it again, or the same one if you remove {payload.path} and call with "
        f"--config restart={folder.name}"
    )


def _recorded_as_trained(call: Call, identity: Identity) -> TrainRecord:
    """Write the manifest of a run that has all its steps, unless its files have gone or changed meanwhile."""
    folder, payload = call.folder, call.payload
    if gone := removed(folder):
        raise TrainingFailed(f"run {folder.name}: {gone}")
    if identity_of(RunFolder(folder.path)) != identity:  # a later call has changed the run's files
        raise TrainingFailed(
            f"run {folder.name} was trained as it was submitted ({payload.path}), and has been changed since; "
            f"call again for what it is now"
        )
    manifest = manifest_of(folder, payload, identity)
    patiently(lambda: write(folder.train_manifest, manifest), call.say)
    return manifest


def _bring_to_its_end(call: Call) -> None:
    leave_too_few_nodes(call)
    check_nodes(call.folder, call.site.nodes)
    check_image(call.folder)
    check_data(call.folder)
    check_index(call.folder)
    begins = not checkpoints.latest(call.payload.checkpoints)
    if (begins or call.folder.run.has_adapters) and not call.folder.parent_manifest:
        check_weights(call.folder)
    attempt_end.close_left_open(call)
    if not _is_a_later_life(call):
        job = call.site.job
        try:
            excluded = bad_nodes.excluded_from(job)  # the user's own: the scheduler has not been told anything yet
        except UnreachableError:
            excluded = None
        called = Called(job=job and job.id, restarts=job and job.restarts, excluded=excluded)
        ledger.append(call.payload.ledger, called)
        call.payload.stop.unlink(missing_ok=True)
    with _recorded(call):
        while not completion.finished(call.folder, call.payload):
            heed_signals(call)
            require_claim(call)
            leave_avoided_nodes(call)
            _attempt(call)


@contextlib.contextmanager
def _recorded(call: Call) -> Iterator[None]:
    """Record in the ledger why the run is given up, where the end of an attempt doesn't say it."""
    try:
        yield
    except (Interrupted, Requeued):
        raise
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in FULL
        entry = GaveUp(cause="disk_full" if full else None, detail=_reason(call.folder.name, error))
        # Tried once: on a full disk the ledger's last block may have room, and waiting has not helped.
        with contextlib.suppress(OSError):
            last = next((entry for entry in reversed(call.entries) if isinstance(entry, progress.LIFE)), None)
            if not (isinstance(last, AttemptEnd) and last.action == "stop"):
                files.append_line(call.payload.ledger, line(entry))
        raise


def _reason(run: str, end: Exception) -> str:
    """Why a run stopped, in one line, by the exception that ended its supervisor."""
    match end:
        case PermissionError():
            return forbidden(end)
        case OSError() if may_pass(end):
            return f"{end}: {STILL_FAILED}"
        case Stopped() | InputError() | UnreachableError():
            return str(end).partition("\n")[0].removeprefix(f"run {run}: ")
        case _:
            return f"{type(end).__name__}: {end}".partition("\n")[0]


def _is_a_later_life(call: Call) -> bool:
    """Whether the keeper or the scheduler has restarted the supervisor, without a new call."""
    if call.life > 1:
        return True
    job = call.site.job
    lives = [entry for entry in call.entries if isinstance(entry, Called | AttemptStart) and entry.job]
    return job is not None and any(life.job == job.id and (life.restarts or 0) < job.restarts for life in lives)


def _attempt(call: Call) -> None:
    """Start the ranks once and watch them to their end. Returns if the run is finished, or if another attempt may
    follow."""
    folder, payload = call.folder, call.payload
    call.patiently(lambda: recipe_code.check(folder))
    call.patiently(lambda: shared_store.take(payload, own_index=not folder.index))
    call.patiently(lambda: checkpoints.hide_unfinished(payload.checkpoints))
    call.patiently(lambda: _require_room(call))
    number = ledger.next_attempt(payload)
    target = payload.attempt(number)
    call.patiently(lambda: files.make_folder(target.ends))
    threading.Thread(target=checkpoints.delete_retired, args=[payload.checkpoints]).start()  # joined at exit
    _share_image(call, target)
    took = Stopwatch()
    ran_on = call.patiently(lambda: what_runs(folder, payload))
    environment = rank_environment(folder, target, ran_on.environment)
    took.note("environment")
    if not call.site.job:
        warm_up(folder, environment)
    if folder.launch.start.health_check:
        call.patiently(lambda: require_health(call, target))
        took.note("health_check")
    beginning, reading = _sound_beginning(call, target)
    took.note("checkpoint")
    skipped = ledger.skipped_steps(call.entries)
    call.patiently(lambda: files.write_json(target.asked, folder.documents))
    _record_start(call, number, beginning, skipped, ran_on, took)
    started = time.time()
    arguments = (folder, payload, target, call.claim, beginning, skipped, bool(reading))
    command = call.patiently(lambda: rank_command(*arguments))
    stand_by = functools.partial(_stand_by, call, target, command[:2], environment)

    def start_ranks() -> tuple[Watch, Ranks]:
        watch = watch_of(call, target, stand_by, reading)
        ranks = call.site.start(command, folder.run.world_size, target.path, environment)
        shared_store.give(payload, target)  # their logs
        return watch, ranks

    try:
        # A stopped attempt was examined when it stopped.
        call.patiently(lambda: _has_stopped(call, number - 1) or _look_at_gpus_of(call, number - 1))
        watch, ranks = call.patiently(start_ranks)  # nothing may fail from here on: only the watch ends the ranks
        call.healthy = False
        watched = watch.until_ended(ranks)
    except BaseException as error:
        cause = "disk_full" if isinstance(error, OSError) and error.errno in FULL else "crash"
        failure = Failure(cause, f"the supervisor failed: {type(error).__name__}: {error}")
        attempt_end.close(call, number, "failed", failure, "stop")
        raise
    finally:
        if reading:
            reading.leave()
    require_claim(call)  # if the scheduler lost sight of this host, the run's next holder writes the end
    if completion.finished(folder, payload):
        attempt_end.close(call, number, "completed", None, None, str(watched.ended))
        _look_at_gpus_of(call, number, GPUS_SECONDS)
        verification.record_checksums(call, target)
        call.say(progress.describe(progress.read_progress(payload.path)))
        return
    _act(call, number, target, watched, attempt_end.cause_of(call, target, watched, started))


def _require_room(call: Call) -> None:
    """After a full disk: raise OSError while a checkpoint doesn't fit, as what is trained then is lost.

    What interrupted saves have left, which is hidden, is deleted first.
    """
    heed_signals(call)
    before = ledger.ends(call.entries)
    if not before or before[-1].cause != "disk_full":
        return
    checkpoints.delete_retired(call.payload.checkpoints)
    if lack := lack_of_room(call.payload):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {lack}")


def _record_start(
    call: Call, number: int, beginning: Beginning, skipped: Sequence[Range], ran_on: RanOn, took: Stopwatch
) -> None:
    """Write the attempt's first entry into the ledger, and say where it starts, and what has changed around it."""
    folder, site = call.folder, call.site
    before, job = ledger.starts(call.entries), site.job
    if before and (changed := changes(before[-1].ran_on, ran_on, call.payload)):
        call.say(f"WARNING: attempt {number} runs in a different environment from the previous one: {changed}")
    start = AttemptStart(
        attempt=number,
        host=socket.gethostname(),
        pid=os.getpid(),
        job=job and job.id,
        restarts=job and job.restarts,
        nodes=tuple(site.nodes),
        spares=tuple(site.spares),
        unused=tuple(site.unused()),
        world_size=folder.run.world_size,
        resumed_from=beginning.iteration,
        parent=folder.parent_name if beginning.parent else None,
        skipped=tuple(skipped),
        image=folder.image and folder.image.digest,
        ran_on=ran_on,
        before=took.seconds,
    )
    ledger.append(call.payload.ledger, start)
    where = f" on {len(site.nodes)} nodes" if len(site.nodes) > 1 else ""
    call.say(f"attempt {number}, {counted(start.world_size, 'rank')}{where}, from {beginning}")


def _stand_by(call: Call, target: AttemptFolder, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Prepare the next attempt's ranks and health check, if the place supports that."""
    folder = call.folder
    call.site.stand_by(command, folder.run.world_size, target.standby, environment)
    if call.site.stands_by and not call.waiting_check:
        given = (folder.launch, folder.run.device, target.next_health, rank_environment(folder))
        call.waiting_check = sites.prepare_check(call.site, *given)


def _has_stopped(call: Call, number: int) -> bool:
    return any(end.attempt == number and end.action == "stop" for end in ledger.ends(call.entries))


def _look_at_gpus_of(call: Call, number: int, patience: float = 0.0) -> None:
    """Remember GPU troubles from the samples of an ended attempt.

    Reading many nodes' files takes time, hence a thread.
    """
    start = next((start for start in ledger.starts(call.entries) if start.attempt == number), None)
    if start and call.site.job:
        given = (call.folder, number, call.payload.attempt(number), start.nodes)
        reader = threading.Thread(target=node_memory.remember_gpus, args=given, daemon=True)
        reader.start()
        reader.join(patience)


def _sound_beginning(call: Call, target: AttemptFolder) -> tuple[Beginning, verification.Reading | None]:
    """Where the attempt starts: from a sound checkpoint, or from one that is verified while ranks start.

    A damaged checkpoint of the parent is an error.
    """
    while True:
        beginning = call.patiently(call.resumption.beginning)
        if verification.takes_long(call, beginning):
            return beginning, call.patiently(lambda: verification.Reading(call, beginning, target))  # noqa: B023
        problem = call.patiently(lambda: verification.damage(call, beginning, target))  # noqa: B023
        if problem is None:
            return beginning, None
        if beginning.parent:
            raise UnusableInputError(call.resumption.parent_is_damaged(problem))
        call.resumption.set_aside(beginning.iteration, problem)


def _share_image(call: Call, target: AttemptFolder) -> None:
    """Unpack the image once for all steps of this life, before the health check, whose time limit doesn't cover
    unpacking."""
    if call.unpacked:
        return
    call.unpacked = True
    began = time.monotonic()
    failed = call.patiently(lambda: sites.share_image(call.site, target.image, lambda: call.signals.seen))
    heed_signals(call)
    if failed:
        call.say(f"WARNING: the image could not be unpacked once for all steps, so each does it for itself: {failed}")
    elif target.image.exists():
        call.say(f"the image was unpacked on {len(call.site.nodes)} node(s) in {time.monotonic() - began:.0f} s")


class Stopwatch:
    """Measures the seconds of consecutive activities."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def note(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 3), now


def _act(call: Call, number: int, target: AttemptFolder, watched: Watched, failure: Failure) -> None:
    """Close the attempt, then resume, requeue or stop, as the settings say."""
    end = attempt_end.end_of(call, number, "failed", failure)
    can_requeue = call.site.job is not None and call.site.job.can_requeue
    bad = set(failure.nodes)
    replaceable = bool(bad) and bad.issubset(call.site.nodes) and len(bad) <= len(call.site.spares)
    decision = recovery.decide([*call.entries, end], failure.cause, call.recovery, can_requeue, replaceable)
    call.patiently(lambda: trusted_copies.reconsider(call.payload, [*ledger.ends(call.entries), end]))
    if failure.cause == "damaged_checkpoint" and end.local is None:
        begun = ledger.starts(call.entries)[-1].resumed_from
        if blameless := call.patiently(lambda: call.resumption.could_not_load(begun, failure.evidence)):
            decision = recovery.Decision("stop", blameless)
    if failure.cause == "loss_spike" and decision.action != "stop":
        leave_out(call, target)
    outcome: Outcome = "interrupted" if CAUSES[failure.cause].interrupts else "failed"
    shown = Failure("poisoned", f"{decision.why}: {failure.evidence}", failure.rank) if decision.poisoned else failure
    attempt_end.close(call, number, outcome, shown, decision.action)
    where = f"at step {end.last_step or end.iteration}"
    if decision.action == "resume":
        again = f"; trying again in {decision.pause:.0f} s" if decision.pause else ""
        call.say(f"attempt {number} ended {where}: {failure}{again}")
        _pause(call, decision.pause)
        if replaceable:  # also after a hang, where the node may be innocent: a spare costs nothing
            if not take_spares(call, bad):  # a spare has failed too
                leave(call, str(failure))
            # The other nodes did nothing wrong. A spare is checked like a new job's nodes, if the health check is on.
            call.healthy = not call.folder.launch.start.health_check
        call.patiently(lambda: require_health(call, target))
    elif decision.action == "requeue":
        leave(call, str(failure))
    elif failure.cause in ("cancelled", "stopped"):
        log_progress(call.folder, f"stopped {where}: {failure}")  # at once: a scheduler may soon kill the supervisor
        if failure.cause == "stopped":  # there is no deadline
            verification.record_checksums(call, target)
        else:
            verification.record_last_checksums(call)
        raise Interrupted(failure.evidence, noted=True)
    else:
        _look_at_gpus_of(call, number, GPUS_SECONDS)
        why = f"{failure}; {decision.why}"
        log_progress(call.folder, f"stopped {where}: {why}")
        text = explain(call.folder, target, watched.ended, why, _next(call), failure.rank)
        raise TrainingFailed(text, noted=True)


def _next(call: Call) -> str:
    """A sentence about what the next call will do."""
    if checkpoints.latest(call.payload.checkpoints):
        return RESUMES
    start = f"next call starts again from {call.folder.start}."
    if not any(end.last_step for end in ledger.ends(call.entries)):  # no step was lost
        return f"The {start}"
    advice = "" if call.folder.launch.checkpoint.get("save_interval") else " Set checkpoint.save_interval."
    return f"No checkpoint was complete: the {start}{advice}"


def manifest_of(folder: RunFolder, payload: RunStore, identity: Identity) -> TrainRecord:
    kept = checkpoints.sizes(payload.checkpoints)
    iteration, last = max(kept, default=0), progress.last_step(payload)
    return TrainRecord(
        run=folder.name,
        identity=identity.digest,
        store=str(payload.path),
        train_iters=last,
        iteration=iteration or last,
        checkpoint=str(checkpoints.folder(payload.checkpoints, iteration)) if iteration else None,
        checkpoints=tuple(Kept(iteration=step, bytes=size) for step, size in kept.items()),
        bytes=sum(kept.values()),
        parent=_parent(folder),
        world_size=folder.run.world_size,
        skipped=tuple(ledger.skipped_steps(read_ledger(payload.ledger))),
    )


def _parent(folder: RunFolder) -> Parent | None:
    """The checkpoint that the run continued from, with the identity of its run."""
    if folder.parent_manifest is None:
        return None
    return replace(folder.run.parent, identity=read(TrainRecord, folder.parent_manifest).identity)


@contextlib.contextmanager
def _told(call: Call) -> Iterator[None]:
    """Notify the user of the run's end, and of failures that only they can fix."""
    try:
        yield
    except (Interrupted, Requeued):
        raise
    except Exception as failure:
        _tell_the_end(call, "failed", str(failure))
        raise
    _tell_the_end(call, "completed", "")


def _tell_the_end(call: Call, state: str, detail: str) -> None:
    folder = call.folder
    facts = {"run": folder.name, "experiment": folder.experiment, "state": state, "detail": detail}
    if problem := notify(call.recovery.notify, **facts):
        call.say(problem)


def _pause(call: Call, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not call.signals.seen:
        time.sleep(0.2)
