"""Unpacked images that the steps of a job share: their names on the nodes, and how old ones are removed.

srun's plugin keeps a named container after its step and, unless the site has set `container_scope=job`, even after the
job. A killed supervisor removes nothing, so the next job on the node does. A killed step may leave an incomplete image
that looks complete; random names keep others from using it.
"""

from __future__ import annotations

import secrets

from megaboa.scheduler.slurm import queries

_RANDOM_BYTES = 4
# Arguments: a pattern, and the lives of jobs whose images stay. Other clusters' images may be there too.
REMOVE = """
command -v enroot > /dev/null || exit 0
pattern=$1; shift
enroot list | while read -r name; do
  case $name in $pattern) ;; *) continue ;; esac
  life=${name%-*}; life=${life##*-}
  case " $* " in *" $life "*) continue ;; esac
  enroot remove --force "$name"
done
"""


def new_name(job: queries.Job) -> str:
    return f"megaboa-{queries.cluster()}-{job.id}.{job.restarts}-{secrets.token_hex(_RANDOM_BYTES)}"


def named(name: str) -> str:
    """A pattern for the plugin's container names: it adds a prefix, and with `container_scope=job` the job's number."""
    return f"pyxis*_{name}"


def of_jobs_gone(cluster: str) -> str:
    return named(f"megaboa-{cluster}-[0-9]*")  # the digit, because a cluster's name may be a prefix of another's
