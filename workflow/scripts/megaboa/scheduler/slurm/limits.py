"""Limits of a partition: the size of its nodes, and what it lets a job have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaboa.formats import counted
from megaboa.scheduler.answers import Excess, Request
from megaboa.scheduler.slurm import queries

_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")
ELSEWHERE = "resources.partition"
CORES = "resources.cpus_per_rank times gpus_per_node"
MEMORY = "resources.mem_mb_per_rank times gpus_per_node"


@dataclass(frozen=True)
class Largest:
    """The most that any node of a partition has."""

    cores: int
    mem_mb: int
    gpus: int


@dataclass(frozen=True)
class Limits:
    """`nodes`: 0 if they come and go. `most_...`: a job's limits, or None; cores and memory are those of a node."""

    name: str
    nodes: int = 0
    largest: Largest | None = None  # None unless all nodes are known
    most_cores: int | None = None
    most_mem_mb: int | None = None
    most_nodes: int | None = None
    most_seconds: int | None = None


def excesses(asked: Sequence[Request]) -> list[list[Excess]]:
    known = read()
    return [of_request(one, known) for one in asked]


def read() -> dict[str, Limits]:
    """All partitions, also those that are hidden from this user: he may be allowed to name one."""
    nodes = queries.query(["sinfo", "--noheader", "--exact", "--format=%R|%D|%c|%m|%G"]) or ""
    return parse(queries.show_partitions(), nodes)


def parse(rules: str, nodes: str) -> dict[str, Limits]:
    """From scontrol's line for each partition, and sinfo's for each kind of node in it.

    sinfo leaves out cloud nodes that are powered down (without `PrivateData=cloud`), which SLURM starts for a job:
    scontrol counts them too, but says nothing about their size.
    """
    rows = [line.split("|", 4) for line in nodes.splitlines() if line.count("|") >= 4]
    kinds = [(name, *map(int, numbers), gres) for name, *numbers, gres in rows if all(map(str.isdigit, numbers))]
    found = {}
    for line in rules.splitlines():
        field = queries.fields(line)
        if name := field.get("PartitionName"):
            own = [kind for kind in kinds if kind[0] == name]
            listed = sum(count for _, count, *_ in own)
            nodes = max(_number(field.get("TotalNodes")) or 0, listed)
            largest = _largest([kind[2:] for kind in own]) if own and listed == nodes else None
            most_cores = _number(field.get("MaxCPUsPerNode"))
            found[name] = Limits(
                name,
                nodes=nodes,
                largest=largest,
                most_cores=most_cores,
                most_mem_mb=_most_memory(field, most_cores or (largest and largest.cores)),
                most_nodes=_number(field.get("MaxNodes")),
                most_seconds=_seconds(field.get("MaxTime", "")),
            )
    return found


def _largest(kinds: Sequence[tuple[int, int, str]]) -> Largest:
    cores, memory, gres = zip(*kinds, strict=True)
    gpus = (sum(queries.gpus_in(one).values()) for one in gres)
    return Largest(max(cores), max(memory), max(gpus))


def _most_memory(field: Mapping[str, str], cores: int | None) -> int | None:
    """A limit for each processor is one for the node's, as SLURM gives a job more of them for its memory."""
    if (whole := _number(field.get("MaxMemPerNode"))) is not None:
        return whole
    each = _number(field.get("MaxMemPerCPU"))
    return each * cores if each is not None and cores else None


def of_request(asked: Request, known: Mapping[str, Limits]) -> list[Excess]:
    """A request that names several partitions is granted by any of them. Of another cluster nothing is known here."""
    names = [name for name in (asked.where.partition or "").split(",") if name]
    if asked.where.cluster or not names or not known:  # not names: the default partition
        return []
    if unknown := [name for name in names if name not in known]:
        there = f"SLURM has {', '.join(sorted(known))}"
        remedy = "take one of these, or correct it in the profile"
        # A job_submit plugin may replace the name.
        return [Excess(ELSEWHERE, ", ".join(unknown), there, remedy, certain=False)]
    found = [list(_of_partition(asked, known[name])) for name in names]
    return min(found, key=lambda each: (any(one.certain for one in each), len(each)))


def _of_partition(asked: Request, there: Limits) -> Iterator[Excess]:
    other = f"lower it, or take another partition ({ELSEWHERE})"
    name = f"partition {there.name}"
    if there.nodes and asked.nodes > there.nodes:
        yield Excess("resources.nodes", _nodes(asked), f"{name} has {counted(there.nodes, 'node')}", other)
    has = there.largest
    for key, wanted, most, limit, unit in (
        (CORES, asked.cores, has and has.cores, there.most_cores, "processors"),
        (MEMORY, asked.mem_mb, has and has.mem_mb, there.most_mem_mb, "MB"),
        ("resources.gpus_per_node", asked.gpus, has and has.gpus, None, "GPUs"),
    ):
        if most is not None and wanted > most:
            yield Excess(key, str(wanted), f"no node of {name} has more than {most} {unit}", other)
        elif limit is not None and wanted > limit:
            allowed = f"{name} lets a job have {limit} {unit} on a node"
            yield Excess(key, str(wanted), allowed, other, certain=False)
    if there.most_nodes is not None and there.nodes >= asked.nodes > there.most_nodes:
        limit = f"{name} lets a job have {there.most_nodes}, unless a QOS says otherwise"
        yield Excess("resources.nodes", _nodes(asked), limit, other, certain=False)
    if there.most_seconds is not None and asked.seconds > there.most_seconds:
        most = _runtime(there.most_seconds)
        limit = f"{name} allows {most}, unless a QOS says otherwise"
        remedy = f"set it to {most}, as a run continues in further jobs, or take another partition ({ELSEWHERE})"
        yield Excess("resources.runtime", _runtime(asked.seconds), limit, remedy, certain=False)


def _nodes(asked: Request) -> str:
    return f"{asked.nodes - asked.spares}, with {asked.spares} spare_nodes" if asked.spares else str(asked.nodes)


def _runtime(seconds: int) -> str:
    """As `resources.runtime` takes it."""
    return f"{seconds // 3600}h" if seconds % 3600 == 0 else f"{seconds // 60}m"


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None  # not UNLIMITED


def _seconds(text: str) -> int | None:
    if (found := _TIME.fullmatch(text)) is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
