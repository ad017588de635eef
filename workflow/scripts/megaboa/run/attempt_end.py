"""The end of an attempt: its cause, and its line in the ledger."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

from megaboa.causes import CAUSES, Action
from megaboa.records import AttemptEnd, Outcome, Step, read_steps
from megaboa.run import (
    checkpoints,
    completion,
    failures,
    flight,
    inputs,
    ledger,
    node_memory,
    shared_store,
    stragglers,
    trusted_copies,
)
from megaboa.run.call import Call
from megaboa.run.failures import Failure
from megaboa.run.patience import full, lack_of_room
from megaboa.run.watch import Watched
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import AttemptFolder

# What megatron-core says of a full disk before and after the system's own words.
_FAILED_SAVE = re.compile(r"^.*encountered an error: (?=\[Errno)|; (?:Traceback|RuntimeError: Worker failure).*$")


def cause_of(call: Call, target: AttemptFolder, watched: Watched, started: float) -> Failure:
    """Why an attempt ended that didn't complete the run.

    On a full disk ranks can't write that it is full, so the supervisor tries to write.
    """
    failure = _why(call, target, watched, started)
    if failure.cause == "config" and (gone := inputs.removed(call.folder)):
        return Failure(failure.cause, gone, failure.rank)
    if denied := failures.denied(failure):
        return denied
    if CAUSES[failure.cause].may_lack_evidence and (said := full(target.path)):
        failure = Failure("disk_full", f"{said}; {failure.evidence}", failure.rank)
    return _of_the_disk(call, failure) if failure.cause == "disk_full" else failure


def _of_the_disk(call: Call, failure: Failure) -> Failure:
    """A full disk without what it has led to in a save, and with the room that is missing."""
    said = _FAILED_SAVE.sub("", failure.evidence)
    with contextlib.suppress(OSError):
        if lack := lack_of_room(call.payload):
            said = f"{lack} ({said})"
    return replace(failure, evidence=said)


def _why(call: Call, target: AttemptFolder, watched: Watched, started: float) -> Failure:
    """The cause of an attempt's end. The scheduler's account precedes the ranks', whose end it has often caused.

    It also precedes a signal and the end of the wall time, because a preemption brings both.
    """
    if watched.reason == stragglers.CAUSE and (slow := stragglers.to_replace(call, target)):
        return slow
    if watched.reason and watched.reason not in ("cancelled", "time_limit"):
        return _who_was_waited_for(call, target, Failure(watched.reason, watched.evidence))
    if interruption := call.site.interruption(started):
        return interruption
    if watched.reason:
        return Failure(watched.reason, watched.evidence)
    tails = failures.tails_of(target)
    start = ledger.starts(call.entries)[-1]
    begun = trusted_copies.beginning(target) or (0 if start.parent else start.resumed_from)
    failure = failures.classify(watched.ended, tails, len(_steps(target)), begun)
    if failure.cause == "damaged_checkpoint" and start.parent:  # a parent's checkpoint isn't ours to set aside
        return Failure("config", f"{start.parent} can't be loaded: {failure.evidence}", failure.rank)
    if failure.cause == "gpu_failure" and watched.ended.rank is None and failure.rank is not None and call.site.job:
        # With one task per node the scheduler names no rank, but the rank's own log does.
        return replace(failure, nodes=(_node_of(call, failure.rank),))
    return _who_was_waited_for(call, target, failure)


def _node_of(call: Call, rank: int) -> str:
    return call.site.nodes[rank // call.folder.launch.gpus_per_node]


def _who_was_waited_for(call: Call, target: AttemptFolder, failure: Failure) -> Failure:
    """Add to a hang, or a time-out of a collective, which ranks were waited for and, if these are to blame, their
    nodes."""
    if failure.cause not in ("hang", "transient"):
        return failure
    size = call.folder.run.world_size
    verdict = None
    with contextlib.suppress(Exception):  # other versions of torch may write other dumps
        verdict = flight.judge(flight.read(target.flight, size), size)
    if verdict is None:
        return failure
    nodes = [_node_of(call, rank) for rank in verdict.ranks]
    where = f"; on {', '.join(dict.fromkeys(nodes))}" if nodes and call.site.job else ""
    first = verdict.ranks[0] if verdict.ranks else failure.rank
    blamed = flight.blamed(verdict, nodes, len(call.site.nodes)) if call.site.job else ()
    return Failure(failure.cause, f"{failure.evidence}; {verdict}{where}", first, blamed)


def close_left_open(call: Call) -> None:
    """Record the end of an attempt whose supervisor was killed before it could, with the scheduler's knowledge."""
    start = ledger.open_attempt(call.entries)
    if start is None:
        return
    killed = f"the supervisor (process {start.pid} on host {start.host}) was killed"
    if completion.finished(call.folder, call.payload):
        close(call, start.attempt, "completed", None, None, f"every step was done; {killed} before it could say so")
        return
    failure = Failure("lost", killed)
    job, newest = call.site.job, call.payload.newest_attempt
    if job and (start.job, start.restarts) == (job.id, job.restarts):
        call.site.end_left_over(call.payload.attempt(start.attempt).path)
    if newest > start.attempt:  # later attempts followed, so the nodes' present state says nothing about it
        failure = Failure("lost", f"the ledger has lost its lines between attempt {start.attempt} and {newest}")
    elif job and start.nodes:
        # A node that was rebooted before the last step has nothing to do with the end.
        steps = _steps(call.payload.attempt(start.attempt))
        bad = cluster().fallen(start.nodes, max(start.time, steps[-1].time if steps else 0.0))
        if bad:
            failure = Failure("node_failure", "; ".join(bad.values()), nodes=tuple(bad))
        elif start.job == job.id and start.restarts != job.restarts:
            failure = Failure("requeued", "the job was put back into the queue")
    close(call, start.attempt, "interrupted", failure, "resume")
    call.say(f"attempt {start.attempt} ended: {failure}")
    call.patiently(lambda: trusted_copies.reconsider(call.payload, ledger.ends(call.entries)))


def close(
    call: Call, number: int, outcome: Outcome, failure: Failure | None, action: Action | None, detail: str = ""
) -> None:
    end = end_of(call, number, outcome, failure)
    if failure and failure.nodes:
        what = failure.cause if CAUSES[failure.cause].node else "hang"
        start = ledger.starts(call.entries)[-1]
        mine = [node for node in failure.nodes if node in (*start.nodes, *start.spares)]  # a log may name any node
        node_memory.remember(call.folder, dict.fromkeys(mine, failure.evidence), what, number)
    shared_store.give(call.payload, call.payload.attempt(number))
    ledger.append(call.payload.ledger, replace(end, action=action, detail=str(failure) if failure else detail))


def end_of(call: Call, number: int, outcome: Outcome, failure: Failure | None) -> AttemptEnd:
    target = call.payload.attempt(number)
    steps, local = _steps(target), trusted_copies.beginning(target)
    begun = next((start.resumed_from for start in ledger.starts(call.entries) if start.attempt == number), 0)
    return AttemptEnd(
        attempt=number,
        outcome=outcome,
        cause=failure.cause if failure else None,
        rank=failure.rank if failure else None,
        bad_nodes=tuple(failure.nodes) if failure else (),
        first_step=steps[0].step if steps else None,
        last_step=steps[-1].step if steps else None,
        iteration=checkpoints.latest(call.payload.checkpoints),
        local=local,
        repeated=max(ledger.last_step(call.entries, before=number) - (local or begun), 0),
    )


def _steps(target: AttemptFolder) -> list[Step]:
    return [event for event in read_steps(target.steps) if isinstance(event, Step)]
