"""What SLURM says about the end of a job and of its nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megaboa.causes import Failure
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.slurm import queries


def fallen(nodes: Sequence[queries.Node], since: float) -> list[queries.Node]:
    """Nodes that are down, or were booted after the given time."""
    return [node for node in nodes if node.down or (node.booted or 0) > since]


def fallen_of(names: Sequence[str], since: float) -> dict[str, str]:
    """Fallen nodes, out of those whose supervisor is gone, each with SLURM's description.

    If none has fallen, a restarted slurmd also counts. By itself it doesn't, because its upgrade harms no job.
    """
    try:
        nodes = queries.show_nodes(",".join(names))
        bad = fallen(nodes, since) or [node for node in nodes if (node.started or 0) > since]
        return {node.name: why([node]) for node in bad}
    except UnreachableError:
        return {}


def interruption(then: queries.Job, now: queries.Job) -> Failure | None:
    if is_cancelled(then, now):
        return Failure("cancelled", f"SLURM job {now.id} was cancelled")
    if now.preempted and not then.preempted:
        return Failure("preempted", "a job with a higher priority takes the nodes")
    if now.out_of_memory:
        return Failure("out_of_memory", f"SLURM ended job {now.id}, as it used more of its nodes' memory than it has")
    if now.restarts > then.restarts:
        return Failure("requeued", "the job was put back into the queue")
    if now.timed_out:  # whatever the end was when we last asked: it can be moved into the past
        return Failure("time_limit", "the job's wall time was used up")
    return Failure("node_failure", "SLURM ended the job, as it lost a node") if now.lost_node else None


def is_cancelled(then: queries.Job, now: queries.Job) -> bool:
    """Whether the job was cancelled. SLURM has a reason for jobs that it ends itself, but none for cancelled ones.

    A requeued job has one more restart from the first moment; if it is cancelled after that, its state is CANCELLED.
    """
    if now.is_ending:
        by_slurm = now.timed_out or now.lost_node or now.out_of_memory or now.preempted
        return not (by_slurm or now.restarts > then.restarts)
    return now.state == "CANCELLED"


def why(nodes: Sequence[queries.Node]) -> str:
    return "; ".join(what_happened(node) for node in nodes)


def what_happened(node: queries.Node) -> str:
    if not node.down and node.started:
        return f"node {node.name} was started again at {time.strftime('%H:%M:%S', time.localtime(node.started))}"
    return f"node {node.name} is {node.state}" + (f" ({node.reason})" if node.reason else "")
