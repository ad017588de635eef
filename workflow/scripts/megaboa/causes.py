"""Why an attempt ended, and what is done about it by default. Standard library only."""

from __future__ import annotations

from typing import Literal, get_args

Cause = Literal[
    "node_failure",  # a node died, or doesn't answer
    "gpu_failure",  # a GPU or its memory is broken
    "preempted",  # a job with a higher priority takes the nodes
    "time_limit",  # the job's wall time is used up
    "requeued",  # the administrator, or SLURM itself, has put the job back into the queue
    "cancelled",  # scancel, or Ctrl-C in Snakemake
    "stopped",  # the user asked for an orderly stop
    "transient",  # connections, time-outs, file systems
    "killed",  # a rank was killed by a signal and nobody knows why
    "crash",  # anything else
    "hang",  # ranks live, but no step is done
    "disk_full",
    "damaged_checkpoint",
    "loss_spike",
    "out_of_memory",
    "config",  # refused before the first step
    "import_error",
    "nan",
    "data",  # a corpus that can't be read
    "poisoned",  # the same step failed twice
    "lost",  # the supervisor itself was killed, and nothing says why
]

Action = Literal["stop", "resume", "requeue"]
ACTIONS = get_args(Action)

# resume: start the ranks again in this allocation. requeue: give the nodes back and wait for others.
DEFAULT_ACTIONS: dict[Cause, Action] = {
    "node_failure": "requeue",
    "gpu_failure": "requeue",
    "preempted": "requeue",
    "time_limit": "requeue",
    "requeued": "requeue",
    "cancelled": "stop",
    "stopped": "stop",
    "transient": "resume",
    "killed": "resume",
    "crash": "resume",
    "hang": "resume",
    "disk_full": "resume",
    "damaged_checkpoint": "resume",
    "loss_spike": "resume",
    "out_of_memory": "stop",
    "config": "stop",
    "import_error": "stop",
    "nan": "stop",
    "data": "stop",
    "poisoned": "stop",
    "lost": "resume",
}

# Nobody's failure: these don't use up the budget.
FREE: frozenset[Cause] = frozenset({"node_failure", "preempted", "time_limit", "requeued", "lost"})
# The same step failing twice for one of these is no accident.
REPEATABLE: frozenset[Cause] = frozenset({"crash", "killed", "hang"})
# The node is to blame.
NODE_CAUSES: frozenset[Cause] = frozenset({"node_failure", "gpu_failure"})
