"""Nodes that a run is better off without: looked at, avoided, given back."""

from __future__ import annotations

import time
from typing import NoReturn

from megaboa.launch import slurm
from megaboa.paths import AttemptFolder
from megaboa.records import Cancelled, Left, Unhealthy
from megaboa.run import claims, exclusions, ledger
from megaboa.run.call import RESUMES, Call, Interrupted, Requeued, TrainingFailed
from megaboa.run.command import rank_environment
from megaboa.run.failures import Failure

LONGEST_SEARCH = 3  # times that a job is put back because it was given an avoided node again


def require_claim(call: Call) -> None:
    """A host that SLURM has lost sight of may live on: its supervisor must leave the run to its next holder."""
    if claims.newest(call.payload.claims) > call.claim:
        raise Interrupted("the run was given to somebody else")


def leave(call: Call, why: str) -> NoReturn:
    """Give the nodes back, and be started on others."""
    users, avoided = _excluded(call)
    require_claim(call)
    kept_away = f", without {', '.join(sorted(avoided))}" if avoided else ""
    call.say(f"goes back into the queue{kept_away}: {why}")
    if not call.site.requeue(users | avoided):
        if cancelled := call.site.cancelled():
            give_up(call, f"{cancelled}, and is not put back")
        raise TrainingFailed(
            f"run {call.folder.name}: {why}, and SLURM did not put the job back into the queue. {RESUMES}"
        )
    raise Requeued(why)


def heed_signals(call: Call) -> None:
    """Between two attempts: somebody wants us to end, and SLURM may know why."""
    if call.signals.seen:
        if interruption := call.site.interruption(call.began):
            _heed(call, interruption)
        give_up(call, f"the supervisor got {call.signals.seen[0]}")


def _heed(call: Call, interruption: Failure) -> None:
    if interruption.cause == "cancelled":
        give_up(call, interruption.evidence)
    leave(call, str(interruption))


def give_up(call: Call, evidence: str) -> NoReturn:
    """Somebody has cancelled while no ranks ran: no attempt's end will say so."""
    ledger.append(call.payload.ledger, Cancelled(detail=evidence))
    raise Interrupted(evidence)


def leave_avoided_nodes(call: Call) -> None:
    """SLURM may give us a node again that failed under this run."""
    job = call.site.job
    if job is None or not job.can_requeue or ledger.left_in_a_row(call.entries) >= LONGEST_SEARCH:
        return
    again = _excluded(call)[1].intersection(call.site.nodes)
    if again:
        ledger.append(call.payload.ledger, Left(nodes=tuple(sorted(again))))
        leave(call, f"{', '.join(sorted(again))} failed under this run not long ago")


def _excluded(call: Call) -> tuple[set[str], set[str]]:
    """The nodes that the user excluded, and those that the run avoids beside them."""
    job, entries = call.site.job, call.entries
    if job is None:
        return set(), set()
    try:
        users = exclusions.users_own(entries, job.id, job.excluded)
    except slurm.SlurmUnreachableError:  # which is not asked for that: `scontrol` itself is away
        users = set(filter(None, [job.excluded]))
    return users, exclusions.avoided(entries, job.partition, call.folder, users)


def require_health(call: Call, target: AttemptFolder) -> None:
    """Look at the nodes; a bad one sends the job to others."""
    if call.signals.seen or call.healthy:
        return
    began = time.time()
    problems = call.site.check(target.health, rank_environment(call.folder))
    call.healthy = True
    if not problems or call.signals.seen:
        return
    if interruption := call.site.interruption(began):  # then the check was ended, and no node is to blame
        _heed(call, interruption)
    if 1 < len(problems) == len(call.site.nodes):  # the network between them, and other nodes would not be better
        call.say(f"the health check blames no node: {next(iter(problems.values()))[0]}")
        return
    text = "; ".join(f"{node}: {', '.join(found)}" for node, found in sorted(problems.items()))
    call.say(f"unhealthy: {text}")
    ledger.append(call.payload.ledger, Unhealthy(bad_nodes=tuple(sorted(problems)), detail=text))
    tried = ledger.failures_in_a_row(call.entries)
    if call.site.job is None or tried > call.recovery.budget:
        raise TrainingFailed(f"run {call.folder.name}: the health check found {text}. {RESUMES}")
    leave(call, f"the health check found {text}")
