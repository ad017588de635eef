"""Nsight Systems around single ranks. All ranks are started in the same way, and each decides whether to wrap itself,
so that any ranks on any nodes can be profiled.

Standard library only.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from megaboa.scheduler import rank_of

PLUGINS = {"efa": "efa_metrics"}  # nsys plugins, by the network whose adapters they sample


class NoNsys(Exception):
    """A rank is to run under nsys, which isn't installed."""


def has_nsys(tool: str) -> bool | None:
    """Whether the nsys that a profile needs is on the PATH; None if it needs none."""
    return shutil.which("nsys") is not None if tool == "nsys" else None


def wrapped(
    command: Sequence[str],
    script: Path,
    ranks: Sequence[int],
    out: Path,
    nsys: Sequence[str],
    network: str | None = None,
) -> list[str]:
    """The command for every rank: `script` runs `command`, on these ranks under `nsys profile` with these arguments."""
    chosen = ",".join(map(str, ranks))
    own = [command[0], str(script), f"--ranks={chosen}", f"--out={out}", *(f"--nsys={argument}" for argument in nsys)]
    return [*own, *([f"--network={network}"] if network else []), "--", *command]


def nsys_arguments(domains: Sequence[str], more: Sequence[str]) -> list[str]:
    """Arguments to capture only the steps that a rank marks, and kernels of graphs individually. Later options take
    precedence."""
    fixed = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--cuda-graph-trace=node"]
    quiet = ["--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
    return [f"--trace={','.join(domains)}", *fixed, *quiet, *more]


def report_name(rank: int, stem: str) -> str:
    """Name of a report, such as `tiny.dp2.node-7.rank-3.nsys-rep`."""
    return f"{stem}.{socket.gethostname()}.rank-{rank}.nsys-rep"


def network_plugin(program: str, network: str | None, given: Sequence[str]) -> list[str]:
    """The plugin that samples a network's adapters, if this nsys has it and the user has not chosen plugins."""
    plugin = PLUGINS.get(network or "")
    if plugin is None or any(argument.startswith("--enable") for argument in given):
        return []
    there = (Path(program).resolve().parent / "plugins" / plugin).is_dir()
    return [f"--enable={plugin}"] if there else []


def rank_command(
    command: Sequence[str], ranks: Sequence[int], out: Path, nsys: Sequence[str], network: str | None = None
) -> list[str]:
    """The command that this rank runs. `out`: folder and prefix for the report."""
    environment = {**os.environ, **rank_of(os.environ)}
    rank = int(environment["RANK"])
    if rank not in ranks:
        return list(command)
    program = shutil.which("nsys")
    if program is None:
        raise NoNsys(
            f"profile.tool is nsys, and rank {rank} on {socket.gethostname()} finds no nsys on its PATH: "
            f"install Nsight Systems in the image, or set profile.tool to pytorch"
        )
    target = out.parent / report_name(rank, out.name)
    first = rank == min(one for one in ranks if one >= rank - int(environment["LOCAL_RANK"]))
    # Adapters belong to the node, so one of its ranks samples them.
    return [
        program,
        "profile",
        *(network_plugin(program, network, nsys) if first else []),
        *nsys,
        f"--output={target}",
        *command,
    ]


def become(command: Sequence[str]) -> None:
    sys.stdout.flush()
    os.execvp(command[0], list(command))
