"""What a supervisor does with an image in a SLURM job, told as JSON; the test that calls it looks at that.

Arguments: the image, and `killed` for one that is killed before it can remove anything.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from megaboa.config.models.resources import Launch
from megaboa.image.runtimes import Container
from megaboa.records import LaunchSpec, parse
from megaboa.run import failures, site
from megaboa.scheduler import local
from megaboa.scheduler.slurm import allocation, queries

SHOWN = ("PATH", "LANG", "MASTER_PORT", "HOME")
RANK = "python3 -c 'pass'; env -0 > $0-$SLURM_PROCID"


def containers():
    return sorted(set(subprocess.run(["srun", "enroot", "list"], capture_output=True, text=True).stdout.split()))


def main(image, *words):
    os.environ |= {"LANG": "de_DE.UTF-8", "MASTER_PORT": "not this one"}
    start = Launch().model_dump(mode="json")
    launch = parse(LaunchSpec, {"gpus_per_node": 1, "cpus_per_rank": 1, "start": start}, "a test")
    job = queries.show_job(os.environ["SLURM_JOB_ID"])
    here = Path.cwd()
    place = allocation.Allocation(job, launch, "cpu", Container("pyxis", image, [f"{here}:{here}:rw"], [], "/"))
    told = {"before": containers()}
    told["failed"] = site.share_image(place, here / "image", lambda: False)
    told["shared"] = containers()
    logs = here / "ranks"
    logs.mkdir(exist_ok=True)
    ranks = place.start(["/bin/sh", "-c", RANK, str(here / "env")], 2, logs, {"A": "b c"})
    told["port"], ended = str(ranks.port.number), local.wait(ranks)
    paths = [(rank, logs / f"rank-{rank}.log") for rank in range(2)] + [(None, logs / "srun.log")]
    told["cause"] = None if ended.ok else str(failures.classify(ended, failures.Tails(paths), 0))
    for rank in range(2) if ended.ok else ():
        text = (here / f"env-{rank}").read_text()
        told[f"rank-{rank}"] = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    if not words:
        place.remove_image()
        told["after"] = containers()
    (here / "told.json").write_text(json.dumps(told))
    if words:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
