"""Unpacked images that the steps of a job share: their names on the nodes, and how they are removed.

srun's plugin keeps a container that has a name when its step ends, and unless the site has set `container_scope=job`
when the job ends too. A killed supervisor removes nothing: the next job that comes to the node does.
"""

from __future__ import annotations

import secrets

from megaboa.scheduler.slurm import queries

# A step that was killed may have left half an image, which looks like a whole one: nobody takes it by its name.
_RANDOM_BYTES = 4
# Arguments: a pattern, and the jobs' lives whose images stay. Other clusters' images may lie there too.
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


def name(job: queries.Job) -> str:
    return f"megaboa-{queries.cluster()}-{job.id}.{job.restarts}-{secrets.token_hex(_RANDOM_BYTES)}"


def of(name: str) -> str:
    """As the plugin has put its own words before a name; with `container_scope=job` the job's number too."""
    return f"pyxis*_{name}"


def of_jobs_gone(cluster: str) -> str:
    return of(f"megaboa-{cluster}-[0-9]*")  # a cluster's name may begin with another's
