"""Bad nodes of a run: health checks before ranks start, exclusion from the job, and release.

The scheduler keeps a job's list of excluded nodes: those that the user excluded, and those that failed during the run.
It may accept changes only while the job waits. A job whose supervisor died can't change its own list, so live processes
do it: Snakemake, `megaboa status` and supervisors of other runs call `revise`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import NoReturn

from megaboa.paths import RunFolder, begun
from megaboa.records import AttemptStart, Called, Cancelled, Event, Left, Unhealthy, read_ledger
from megaboa.run import claims, ledger, node_memory
from megaboa.run import site as sites
from megaboa.run.announce import announcer
from megaboa.run.call import RESUMES, Call, Interrupted, Requeued, TrainingFailed
from megaboa.run.command import rank_environment
from megaboa.run.failures import Failure
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.protocol import Job
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import AttemptFolder, RunStore

LONGEST_SEARCH = 3  # times that a job is requeued because it was given an avoided node again
REVISE_SECONDS = 300.0


def require_claim(call: Call) -> None:
    """Raise Interrupted if another process has claimed the run.

    A supervisor may live on after the scheduler lost its host, and must leave the run to its next holder.
    """
    if claims.newest(call.payload.claims) > call.claim:
        raise Interrupted("another process has claimed the run")


def leave(call: Call, why: str) -> NoReturn:
    """Give up the nodes and requeue the job to run on others."""
    users, avoided = _excluded(call)
    require_claim(call)
    kept_away = f", without {', '.join(sorted(avoided))}" if avoided else ""
    call.say(f"goes back into the queue{kept_away}: {why}")
    if not call.site.requeue(users | avoided):
        if cancelled := call.site.cancelled():
            give_up(call, f"{cancelled}, and is not put back")
        raise TrainingFailed(
            f"run {call.folder.name}: {why}, and {cluster().name} did not put the job back into the queue. {RESUMES}"
        )
    raise Requeued(why)


def heed_signals(call: Call) -> None:
    """Respond to a signal that arrived between two attempts: stop or, if the scheduler ended the job otherwise, requeue
    it."""
    if call.signals.seen:
        if interruption := call.site.interruption(call.began):
            _heed(call, interruption)
        give_up(call, call.signals.first)


def _heed(call: Call, interruption: Failure) -> None:
    if interruption.cause == "cancelled":
        give_up(call, interruption.evidence)
    leave(call, str(interruption))


def give_up(call: Call, evidence: str) -> NoReturn:
    """Stop because of a cancellation while no ranks ran. It is recorded here, as there is no attempt whose end could
    record it."""
    ledger.append(call.payload.ledger, Cancelled(detail=evidence))
    raise Interrupted(evidence)


def leave_too_few_nodes(call: Call) -> None:
    """Requeue the job if a later life of the supervisor finds that it has lost more nodes than it had spares."""
    wanted, left = call.folder.launch.nodes, len(call.site.nodes)
    if call.site.job and call.life > 1 and left < wanted:
        leave(call, f"resources.nodes is {wanted}, and the job has {left} left")


def leave_avoided_nodes(call: Call) -> None:
    """Replace nodes that the job has lost, and nodes that failed under this run but were allocated to it again.

    Spares take their place, if there are enough; otherwise the job is requeued.
    """
    job = call.site.job
    if lost := call.site.lost():
        text = "; ".join(lost.values())
        if not take_spares(call, set(lost)):
            leave(call, text)
    if call.site.spares:
        recent = set(ledger.avoided_nodes(call.entries, time.time(), call.recovery.exclude_hours))
        recent |= {one.node for one in node_memory.here(call.folder) if one.avoided}
        good = [node for node in call.site.spares if node not in recent]
        if again := sorted(recent.intersection(call.site.nodes))[: len(good)]:
            call.site.spares = [*good, *(node for node in call.site.spares if node in recent)]  # taken from the front
            take_spares(call, set(again), for_good=False)
    if job is None or not job.can_requeue or ledger.left_in_a_row(call.entries) >= LONGEST_SEARCH:
        return
    again = _excluded(call)[1].intersection(call.site.nodes)
    if again:
        ledger.append(call.payload.ledger, Left(nodes=tuple(sorted(again))))
        leave(call, f"{', '.join(sorted(again))} failed recently under this run, or under others of this store")


def take_spares(call: Call, bad: Set[str], for_good: bool = True) -> bool:
    """Replace bad nodes by spares of this job; returns False if there are too few.

    `for_good=False`: the nodes were only bad earlier, and become the last spares.
    """
    before = set(call.site.nodes)
    if not call.site.replace(bad, for_good):
        return False
    taken = sorted(set(call.site.nodes) - before)
    call.say(f"{', '.join(taken)} of this job's spares takes the place of {', '.join(sorted(bad & before))}")
    return True


def _excluded(call: Call) -> tuple[set[str], set[str]]:
    """The nodes that the user excluded, and the further ones that the run avoids."""
    job, entries = call.site.job, call.entries
    if job is None:
        return set(), set()
    try:
        users = users_own(entries, job.id, job.excluded)
    except UnreachableError:  # the scheduler's commands may be unavailable
        users = set(filter(None, [job.excluded]))
    return users, avoided(entries, job.partition, call.folder, users)


def require_health(call: Call, target: AttemptFolder) -> None:
    """Check the health of the nodes; requeue the job, or take spares, if one of them is bad."""
    if call.signals.seen or call.healthy:
        return
    began = time.time()
    folder = call.folder
    waiting, call.waiting_check = call.waiting_check, None
    environment = rank_environment(folder)
    device = folder.run.device
    unfit = sites.check_nodes(call.site, folder.launch, device, target.health, environment, waiting)
    problems = unfit.nodes
    call.healthy = True
    if not problems or call.signals.seen:
        return
    if interruption := call.site.interruption(began):  # the scheduler interrupted the check, so no node is to blame
        _heed(call, interruption)
    if 1 < len(problems) == len(call.site.nodes):  # the fault lies between the nodes, so other nodes would not help
        call.say(f"the health check blames no node: {next(iter(problems.values()))[0]}")
        return
    text = "; ".join(f"{node}: {', '.join(found)}" for node, found in sorted(problems.items()))
    call.say(f"unhealthy: {text}")
    ledger.append(call.payload.ledger, Unhealthy(bad_nodes=tuple(sorted(problems)), detail=text))
    node_memory.remember(folder, {node: ", ".join(found) for node, found in problems.items()}, unfit.what)
    if take_spares(call, set(problems)):  # the spares are checked too
        call.healthy = False
        require_health(call, target)
        return
    tried = ledger.failures_in_a_row(call.entries)
    if call.site.job is None or tried > call.recovery.budget:
        raise TrainingFailed(f"run {call.folder.name}: the health check found {text}. {RESUMES}")
    leave(call, f"the health check found {text}")


def excluded_from(job: Job | None) -> list[str]:
    """The nodes that a job is excluded from at present."""
    return sorted(cluster().hostnames(job.excluded)) if job else []


def users_own(entries: Sequence[Event], job: str, excluded: str) -> set[str]:
    """The nodes that the user excluded: the job's list before its first supervisor changed it.

    `excluded`: the job's present list. Older ledgers don't record the first list; then all nodes that were never blamed
    count as the user's.
    """
    first = next((entry for entry in entries if isinstance(entry, Called) and entry.job == job), None)
    if first and first.excluded is not None:
        return set(first.excluded)
    return set(cluster().hostnames(excluded)) - set(ledger.avoided_nodes(entries, time.time(), hours=math.inf))


def avoided(entries: Sequence[Event], partition: str, folder: RunFolder, users: set[str]) -> set[str]:
    """The nodes that a run should avoid at present."""
    recent = ledger.avoided_nodes(entries, time.time(), folder.launch.recovery.exclude_hours)
    ours = {node: blamed for node, blamed in recent.items() if node not in users}
    needed = folder.launch.nodes + folder.launch.spare_nodes
    kept = usable(partition, ours, needed, users)
    remembered = [one for one in node_memory.here(folder) if one.avoided and one.node not in users]
    if not remembered:
        return kept
    try:
        return kept | node_memory.bad(remembered, cluster().usable_nodes(partition) - users, kept, needed)
    except UnreachableError:
        return kept


def usable(partition: str, avoided: Mapping[str, float], needed: int, users: Set[str] = frozenset()) -> set[str]:
    """The nodes to avoid, given the times at which they failed. A bad node is better than waiting forever.

    Nodes that failed longest ago are released first, until the run has one node more than it needs: when the next one
    dies, no process may be left to change the list. Nodes that failed last stay avoided as long as the run has enough
    others.
    """
    if not avoided:
        return set()
    try:
        nodes = cluster().usable_nodes(partition) - users
    except UnreachableError:
        return set(avoided)
    kept, newest = sorted(avoided, key=avoided.__getitem__), max(avoided.values())
    while kept and len(nodes.difference(kept)) < needed + (avoided[kept[0]] < newest):
        kept.pop(0)
    return set(kept)


def reviser(results: Path) -> Callable[[], None]:
    """A function, to be called often, that calls `revise` at intervals.

    Failures are ignored, as it tries again later.
    """
    looked = -REVISE_SECONDS

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked < REVISE_SECONDS or not cluster().is_here():
            return
        looked = time.monotonic()
        with contextlib.suppress(UnreachableError, OSError):
            revise(results)

    return look


def revise_in_background(results: Path) -> None:
    """Call `revise` in a thread while this process lives, so that the process never waits for the scheduler."""
    look = reviser(results)

    def keep_looking() -> None:
        while True:
            look()
            time.sleep(REVISE_SECONDS)

    threading.Thread(target=keep_looking, daemon=True).start()


def revise(results: Path) -> None:
    """Let waiting jobs use nodes again that they need no longer avoid, or can't do without.

    `results`: the folder of all experiments. Unknown jobs, and nodes excluded by users, are left alone.
    """
    waiting = {job.id: job for job in cluster().waiting() if job.excluded}
    for run in begun(results) if waiting else ():
        with contextlib.suppress(Exception):  # a broken file of one run must not stop the others
            _revise_run(run, waiting)


def _revise_run(folder: RunFolder, waiting: Mapping[str, Job]) -> None:
    store = RunStore.of(folder.attempts_link)
    entries = read_ledger(store.ledger)
    last = next((entry.job for entry in reversed(entries) if isinstance(entry, Called | AttemptStart)), None)
    job, holder = waiting.get(last), claims.last_holder(store.claims)
    if job is None or (holder and claims.is_of_other_cluster(holder)):
        return
    now, users = set(cluster().hostnames(job.excluded)), users_own(entries, job.id, job.excluded)
    blamed = set(ledger.avoided_nodes(entries, time.time(), hours=math.inf)) - users
    blamed |= {one.node for one in node_memory.here(folder)} - users
    back = now & (blamed - avoided(entries, job.partition, folder, users))
    if back and cluster().exclude(job.id, now - back):
        announcer(folder)(f"{cluster().name} job {job.id}, which waits, may use {', '.join(sorted(back))} again")
