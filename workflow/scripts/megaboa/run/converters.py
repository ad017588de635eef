"""Ranks for a conversion or a measurement, started where ranks of training are started, and in the same way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megaboa import conversion
from megaboa.errors import InputError
from megaboa.formats import counted
from megaboa.launch import networks
from megaboa.records import ConversionSpec, Image, LaunchSpec
from megaboa.run import failures, gpus, site
from megaboa.scheduler import local
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.ranks import FORKED, Ended, layered, threads_environment
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import AttemptFolder

SENTENCE = re.compile(r"^error: ", re.MULTILINE)  # start of a rank's own error message


def run(wanted: ConversionSpec, image: Image | None, words: Sequence[str], logs: Path) -> str:
    """Run a command with these words on every rank and return the ranks' output; raises InputError if a rank fails.

    `wanted`: the plan's specification of the conversion; `image`: the image's manifest.
    """
    layout = conversion.layout(**wanted.layout)
    launch = LaunchSpec(
        nodes=wanted.nodes,
        gpus_per_node=wanted.gpus_per_node,
        cpus_per_rank=wanted.cpus_per_rank,
        start=wanted.start,
        image=wanted.image,
    )
    words = [*words, *conversion.arguments(layout)]
    return to_the_end(launch, wanted.device, image, layout.world_size or 1, words, logs, "conversion.nodes")


def to_the_end(
    launch: LaunchSpec,
    device: str,
    image: Image | None,
    count: int,
    words: Sequence[str],
    logs: Path,
    key: str = "resources.nodes",
) -> str:
    """Run the ranks' Python with `words` to the end. `key`: the setting to name if there are too few nodes."""
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    try:
        place = site.here(launch, device, container=site.container_of(launch, image))
    except UnreachableError as error:
        raise InputError(str(error)) from None
    if len(place.nodes) < launch.nodes:
        where = "this job has" if place.job else "here is"
        raise InputError(
            f"{key} is {launch.nodes}, and {where} {len(place.nodes)}: call "
            f"`snakemake --profile {cluster().profile}`, or set it to 1"
        )
    if device == "cuda" and not place.job:
        _need_gpus(count)
    with site.image_shared(place, logs / "image"):
        try:
            environment = environment_of(launch, device)
            if place.job:  # the process that a node's ranks are forked from can only train
                environment[FORKED] = "0"
            ranks = place.start([site.python_of(launch), *words], count, logs, environment)
        except FileNotFoundError as error:
            raise InputError(f"the ranks can't be started: there is no {error.filename} here") from None
        try:
            ended = local.wait(ranks)
        except BaseException:
            ranks.kill()
            raise
    if not ended.ok:
        raise InputError(_why(ended, AttemptFolder(logs)))
    return "".join(path.read_text(errors="replace") for path in sorted(logs.glob("rank-*.log")))


def _need_gpus(ranks: int) -> None:
    """Check that this machine has enough GPUs; in a job the scheduler has. If the driver doesn't answer, the ranks will
    say so."""
    try:
        found = gpus.count(gpus.query(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return
    if found < ranks:
        raise InputError(
            f"the layout has {ranks} ranks, and this machine has {counted(found, 'GPU')}: make it smaller "
            f"(`models.<name>.conversion` for a conversion), or call `snakemake --profile {cluster().profile}`"
        )


def environment_of(launch: LaunchSpec, device: str) -> dict[str, str]:
    """The variables that every rank has in addition to ours, as in training."""
    start = launch.start
    own = {
        **threads_environment(launch.cpus_per_rank),
        "PYTHONUNBUFFERED": "1",
        **(launch.image.variables if launch.image else {}),
    }
    preset = networks.environment(start.network) if device == "cuda" or start.network else {}
    return layered(own, preset, start.environment)


def _why(ended: Ended, folder: AttemptFolder) -> str:
    """The cause of a failure in one sentence.

    A rank with an error message of its own is the cause: its peers lose their connections to it, and may be the first
    to end. The output before that message, such as the checks of a proof, is printed.
    """
    tails = failures.tails_of(folder)
    for rank in sorted(rank for rank in tails if rank is not None):
        if found := list(SENTENCE.finditer(tails[rank])):
            print(tails[rank][: found[-1].start()], end="")
            return tails[rank][found[-1].end() :].strip()
    failure = failures.classify(ended, tails, steps=0)
    who = str(ended) if failure.rank == ended.rank else f"rank {failure.rank} failed"
    why = "" if failure.evidence == who else f": {failure.evidence}"
    log = folder.logs.get(failure.rank)
    return f"{who}{why}; see {log if log and log.exists() else folder.path}"
